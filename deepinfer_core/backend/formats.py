"""Storage formats of caches and of checkpoint weights, by name and by size.

A format says how one *entry* (one cached vector) lies in memory: its data and the scales of its groups. It never says who
decodes it: `deepinfer_backends.cpu_ref.quant` holds the reference encoders and decoders.
"""

from __future__ import annotations

from enum import StrEnum


class CacheFormat(StrEnum):
    """How one cached vector of `dim` values is stored. Quantised data comes first, its scales after it."""

    FP8 = "fp8"  # e4m3, one power-of-two (UE8M0) scale byte per 32 values
    FP4 = "fp4"  # e2m1, two per byte, low nibble first; one e4m3 scale byte per 16 values
    FP4_INDEX = "fp4_index"  # e2m1, two per byte; one power-of-two (UE8M0) scale byte per 32 values
    BF16 = "bf16"
    F32 = "f32"

    def data_bytes(self, dim: int) -> int:
        """Bytes of the values of one entry of `dim` values, scales not counted."""
        return {
            CacheFormat.FP8: dim,
            CacheFormat.FP4: dim // 2,
            CacheFormat.FP4_INDEX: dim // 2,
            CacheFormat.BF16: 2 * dim,
            CacheFormat.F32: 4 * dim,
        }[self]

    def scale_bytes(self, dim: int) -> int:
        """Bytes of the scales of one entry of `dim` values."""
        group = {CacheFormat.FP8: 32, CacheFormat.FP4: 16, CacheFormat.FP4_INDEX: 32}.get(self)
        return dim // group if group else 0

    def entry_bytes(self, dim: int) -> int:
        """Bytes of one entry: data and scales, no padding."""
        return self.data_bytes(dim) + self.scale_bytes(dim)


class WeightFormat(StrEnum):
    """How a linear weight of a checkpoint is stored, as in the release format (model notes, section 2.6)."""

    BF16 = "bf16"
    FP8_B32 = "fp8_b32"  # e4m3 with one UE8M0 scale per 32x32 block
    FP4_G32 = "fp4_g32"  # e2m1 pairs with one UE8M0 scale per row and 32 inputs (experts)
    FP8_G32 = "fp8_g32"  # e4m3 with one UE8M0 scale per row and 32 channels (Engram tables)


class Numerics(StrEnum):
    """Which arithmetic a `Kernels` object computes."""

    RELEASE = "release"  # every rounding point of the released model: bf16 activations, quantised linears and caches
    IDEAL = "ideal"  # the same graph in float32 with every rounding and fake quantisation the identity
