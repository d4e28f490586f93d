"""Integers by which CANN names data types and memory formats (torch-npu 2.13.0, `torch_npu.float8_e4m3fn` and friends)."""

from typing import Final

FP8: Final = 292  # e4m3fn
SCALE: Final = 293  # e8m0fnu
FP4: Final = 296  # e2m1, two per byte
F32: Final = 6
BF16: Final = 15

NZ: Final = 29  # FRACTAL_NZ: the tiled layout of the cube unit's weights
