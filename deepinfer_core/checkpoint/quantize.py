"""Encoders of the release's weight formats, for making checkpoints. Decoding belongs to the kernels.

Every scale is the smallest power of two that brings its block into the range of the code, stored as the byte exponent + 127.
Source: storage formats of the release (model notes, section 2.6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer_core.backend.types import QuantTensor
from deepinfer_core.checkpoint.structure import BLOCK

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, 0.5, 1, 1.5, 2, 3, 4, 6


def encode_fp8_blocks(values: Tensor) -> QuantTensor:
    """float32 [rows, columns] as e4m3 with one scale for each 32x32 block (sizes rounded up)."""
    rows, columns = values.shape
    blocks = pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    exponents = _exponents(blocks.abs().amax(dim=(1, 3)), E4M3_MAX)
    scaled = blocks * _inverse(exponents)[:, None, :, None]
    weight = scaled.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    return QuantTensor(weight.contiguous(), _scale_bytes(exponents))


def encode_fp8_rows(values: Tensor) -> QuantTensor:
    """float32 [rows, columns] as e4m3 with one scale for each row and 32 columns (Engram tables)."""
    groups = values.unflatten(1, (-1, BLOCK))
    exponents = _exponents(groups.abs().amax(dim=2), E4M3_MAX)
    weight = (groups * _inverse(exponents)[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    return QuantTensor(weight, _scale_bytes(exponents))


def encode_fp4_rows(values: Tensor) -> QuantTensor:
    """float32 [rows, columns] as packed e2m1 (int8 [rows, columns/2], low nibble first) with one scale for each row and 32 columns.

    Values half-way between two codes go to the smaller magnitude.
    """
    groups = values.unflatten(1, (-1, BLOCK))
    exponents = _exponents(groups.abs().amax(dim=2), E2M1_MAX)
    scaled = (groups * _inverse(exponents)[:, :, None]).flatten(1)
    magnitudes, codes = scaled.abs(), torch.signbit(scaled).to(torch.uint8) << 3
    for midpoint in E2M1_MIDPOINTS:  # seven comparisons are twice as fast as torch.bucketize
        codes += magnitudes > midpoint
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return QuantTensor(packed.view(torch.int8), _scale_bytes(exponents))


def _exponents(largest: Tensor, limit: float) -> Tensor:
    """The smallest exponent e with largest <= limit * 2**e, clamped to what a scale byte holds."""
    mantissa, exponent = torch.frexp(largest)
    limit_mantissa, limit_exponent = math.frexp(limit)
    exponent = exponent - limit_exponent + (mantissa > limit_mantissa)
    return torch.where(largest > 0, exponent, 0).clamp(-127, 127)


def _inverse(exponents: Tensor) -> Tensor:
    """2**-e in float32, exact."""
    return _scale_bytes(-exponents).float()


def _scale_bytes(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
