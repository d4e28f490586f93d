"""Number grids and cache formats in float64, written from their definitions; independent of every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import QuantTensor

BLOCK = {CacheFormat.FP8: 32, CacheFormat.FP4: 16, CacheFormat.FP4_INDEX: 32}
"""Values that share one scale."""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def to_precision(x: Tensor, bits: int, lowest_exponent: int, largest: float = float("inf")) -> Tensor:
    """float64 x rounded to `bits` significant bits, ties to even, subnormal below 2^lowest_exponent, saturated at `largest`."""
    exponent = torch.frexp(x).exponent.double() - 1
    step = torch.exp2(exponent.clamp_min(lowest_exponent) - (bits - 1))
    return ((x / step).round() * step).clamp(-largest, largest)


def bfloat16(x: Tensor) -> Tensor:
    """float64 x rounded to bfloat16 values."""
    return to_precision(x, 8, -126)


def e4m3(x: Tensor) -> Tensor:
    """float64 x rounded to e4m3 values, saturated at 448."""
    return to_precision(x, 4, -6, 448.0)


def e2m1(x: Tensor) -> Tensor:
    """float64 x rounded to e2m1 values, saturated at 6. Rounding half to even steps is rounding half to the even code."""
    return to_precision(x, 2, 0, 6.0)


def scale(amax: Tensor, fmt: CacheFormat) -> Tensor:
    """The scale of a block whose largest magnitude is `amax`."""
    if fmt is CacheFormat.FP8:
        return _power_of_two_at_least(amax.clamp_min(1e-4) / 448.0)
    if fmt is CacheFormat.FP4_INDEX:
        return _power_of_two_at_least(amax.clamp_min(6.0 * 2.0**-126) / 6.0)
    return e4m3((amax.clamp_min(6.0 * 2.0**-9) / 6.0).clamp_max(448.0))


def to_grid(blocks: Tensor, scales: Tensor, fmt: CacheFormat) -> Tensor:
    """Values of `blocks` rounded to multiples that the scale can express."""
    rounding = e4m3 if fmt is CacheFormat.FP8 else e2m1
    return rounding(blocks / scales) * scales


def _power_of_two_at_least(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.exp2(exponent.double() - (mantissa == 0.5).double())


def encode(values: Tensor, fmt: CacheFormat) -> tuple[Tensor, Tensor]:
    """(data bytes, scale bytes), both uint8 [..., n], of float64 entries [..., dim] under the rule of `fmt`."""
    if fmt in (CacheFormat.BF16, CacheFormat.F32):
        data = values.to(torch.bfloat16 if fmt is CacheFormat.BF16 else torch.float32).contiguous().view(torch.uint8)
        return data, data[..., :0]
    blocks = values.unflatten(-1, (-1, BLOCK[fmt]))
    scales = scale(blocks.abs().amax(-1, keepdim=True), fmt)
    q = (to_grid(blocks, scales, fmt) / scales).flatten(-2)
    if fmt is CacheFormat.FP4:
        scale_bytes = scales[..., 0].float().to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        scale_bytes = (torch.frexp(scales[..., 0]).exponent + 126).to(torch.uint8)
    if fmt is CacheFormat.FP8:
        return q.float().to(torch.float8_e4m3fn).view(torch.uint8), scale_bytes
    codes = torch.bucketize(q.abs(), _E2M1).to(torch.uint8) | (torch.signbit(q).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale_bytes


def decode(data: Tensor, scales: Tensor, fmt: CacheFormat) -> Tensor:
    """float64 entries [..., dim] of bytes."""
    if fmt is CacheFormat.BF16:
        return data.contiguous().view(torch.bfloat16).double()
    if fmt is CacheFormat.F32:
        return data.contiguous().view(torch.float32).double()
    values = data.contiguous().view(torch.float8_e4m3fn).double() if fmt is CacheFormat.FP8 else nibbles(data)
    factors = scales.contiguous().view(torch.float8_e4m3fn).double() if fmt is CacheFormat.FP4 else e8m0(scales)
    return (values.unflatten(-1, (-1, BLOCK[fmt])) * factors[..., None]).flatten(-2)


def nibbles(data: Tensor) -> Tensor:
    """float64 e2m1 values [..., 2n] of packed bytes [..., n], low nibble first."""
    data = data.view(torch.uint8)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return _E2M1[(codes & 7).long()] * (1.0 - 2.0 * (codes >> 3))


def e8m0(data: Tensor) -> Tensor:
    """float64 powers of two of exponent bytes; 255 is NaN."""
    exponent = data.view(torch.uint8).double()
    return torch.where(exponent == 255, torch.nan, torch.exp2(exponent - 127))


def weight(part: QuantTensor) -> Tensor:
    """float64 [out, in] of a weight as the checkpoint stores it."""
    stored, scales = part
    if scales is None:
        return stored.double()
    values = stored.double() if stored.dtype == torch.float8_e4m3fn else nibbles(stored)
    factors = e8m0(scales)
    if factors.shape[0] != values.shape[0]:
        factors = factors.repeat_interleave(32, 0)[: values.shape[0]]
    return values * factors.repeat_interleave(32, 1)[:, : values.shape[1]]
