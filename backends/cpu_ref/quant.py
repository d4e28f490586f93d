"""Quantised formats in plain PyTorch: rounding to a grid, bytes of an entry, and back.

Every decoded value is exact in float32 and in bfloat16, so "quantise, store, load" and "fake-quantise" give the same numbers.
Sources of the rules: DeepSeek's reference inference code for V4.1-Flash and DeepInfer 0.1.0 (see NOTICE).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.scalars import scalar
from deepinfer_core.backend.formats import CacheFormat

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4  # smallest block maximum of an FP8 activation block
_EXPONENT = 0x7F800000  # exponent bits of a float32
FP4_INDEX_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_AMAX_FLOOR = 6.0 * 2.0**-9

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TABLE = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES))
_E2M1_PAIRS = torch.stack((_E2M1_TABLE.repeat(16), _E2M1_TABLE.repeat_interleave(16)), 1)  # values of a byte: low nibble, high nibble
# Magnitudes above which the next code is nearer. Ties go to the even code: 0.25 stays at 0, 0.75 rises to 1, and so on.
_E2M1_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_E2M1_BOUNDS[1::2] = torch.nextafter(_E2M1_BOUNDS[1::2], torch.zeros(3))


def split_last(x: Tensor, size: int) -> Tensor:
    """x [..., d] as [..., d/size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)  # Tensor.unflatten is a Python function, and slower


def power_of_two_at_least(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for float32 x that is positive and normal: adds a full mantissa, keeps the exponent."""
    return x.view(torch.int32).add(scalar(0x7FFFFF)).bitwise_and_(scalar(_EXPONENT)).view(torch.float32)


def _blocks(x: Tensor, size: int, floor: float) -> tuple[Tensor, Tensor]:
    """(x [..., d] seen as [..., d/size, size], largest magnitude of each block, at least `floor`: [..., d/size, 1])."""
    blocks = split_last(x, size)
    return blocks, blocks.abs().amax(-1, True).clamp_min_(floor)


def _fp8_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(amax / 448)). As 448 = 1.75 * 2^8: the power of two of `amax`, one more if its mantissa exceeds 1.75, eight less."""
    return amax.view(torch.int32).add(scalar(0x1FFFFF - (8 << 23))).bitwise_and_(scalar(_EXPONENT)).view(torch.float32)


def fp8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values divided by their scale [..., d/32, 32], scales [..., d/32, 1]) of float32 x [..., d] by the FP8 activation rule."""
    blocks, amax = _blocks(x, 32, FP8_AMAX_FLOOR)
    scale = _fp8_scale(amax)
    return blocks / scale, scale


def _round_mantissa(x: Tensor, bits: int, smallest: Tensor) -> Tensor:
    """float32 x rounded to `bits` bits after the leading one, ties to even; below the power of two `smallest` to its spacing.

    Adding and subtracting a number of 1.5 * 2^n, n large enough, lets the addition round. For |x| < 2^100.
    """
    power = torch.maximum(x.view(torch.int32).bitwise_and(scalar(_EXPONENT)).view(torch.float32), smallest)
    offset = power.mul_(scalar(1.5 * 2.0 ** (23 - bits)))
    return (x + offset).sub_(offset)


def fake_fp8(x: Tensor) -> Tensor:
    """x [..., d] float32 on the FP8 grid: e4m3 values times a power of two per 32. Zeros are positive."""
    blocks, amax = _blocks(x, 32, FP8_AMAX_FLOOR)
    # Casts to float8 and back give the same, element by element, in ten times the time.
    return _round_mantissa(blocks, 3, _fp8_scale(amax).mul_(scalar(2.0**-6))).view(x.shape)


def e2m1_codes(x: Tensor) -> Tensor:
    """Codes 0..15 of float32 x rounded to the nearest e2m1 value, saturating at 6, ties to the even code. uint8, same shape."""
    magnitude = torch.bucketize(x.abs(), _E2M1_BOUNDS.to(x.device), out_int32=True)
    return magnitude.add_(torch.signbit(x), alpha=8).to(dtype=torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of e2m1 codes 0..15 (any integer dtype)."""
    return _E2M1_TABLE.to(codes.device)[codes.int()]


def fp4_index_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [..., d/32, 32], scales [..., d/32, 1]) of float32 x: power-of-two scales, rule of index queries and keys."""
    blocks, amax = _blocks(x, 32, FP4_INDEX_AMAX_FLOOR)
    scale = power_of_two_at_least(amax.mul_(scalar(1.0 / E2M1_MAX)))
    return e2m1_codes(blocks / scale), scale


def fp4_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [..., d/16, 16], scales [..., d/16, 1] e4m3) of float32 x: rule of compressed entries."""
    blocks, amax = _blocks(x, 16, FP4_AMAX_FLOOR)
    scale = amax.div_(scalar(E2M1_MAX)).clamp_max_(E4M3_MAX).to(dtype=torch.float8_e4m3fn)
    return e2m1_codes((blocks / scale.float()).clamp_(-E2M1_MAX, E2M1_MAX)), scale


def fake_fp4_index(x: Tensor) -> Tensor:
    """x [..., d] float32 on the grid of index queries and keys. Zeros are positive."""
    blocks, amax = _blocks(x, 32, FP4_INDEX_AMAX_FLOOR)
    return _round_mantissa(blocks, 1, power_of_two_at_least(amax.mul_(scalar(1.0 / E2M1_MAX)))).view(x.shape)


def fake_fp4(x: Tensor) -> Tensor:
    """x [..., d] float32 on the grid of compressed entries."""
    codes, scale = fp4_blocks(x)
    return (e2m1_values(codes) * scale.float()).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes [..., d] uint8 -> bytes [..., d/2]: even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_pairs(data: Tensor) -> Tensor:
    """float32 [..., d] of packed e2m1 codes [..., d/2] (uint8 or int8)."""
    return torch.embedding(_E2M1_PAIRS.to(data.device), data.view(torch.uint8).int()).flatten(-2)


def e8m0_bytes(scale: Tensor) -> Tensor:
    """Exponent bytes of float32 powers of two: 2^(byte - 127). uint8."""
    return scale.view(torch.int32).bitwise_right_shift(scalar(23)).to(dtype=torch.uint8)


def e8m0_values(data: Tensor) -> Tensor:
    """float32 powers of two of exponent bytes (uint8 or float8_e8m0fnu). Byte 0 is the subnormal 2^-127."""
    bits = data.view(torch.uint8).int().bitwise_left_shift_(scalar(23))
    return bits.clamp_min_(0x400000).view(torch.float32)


def encode(values: Tensor, fmt: CacheFormat) -> tuple[Tensor, Tensor]:
    """(data [..., data bytes], scales [..., scale bytes]) uint8 of float32 entries [..., dim] in cache format `fmt`."""
    none = values.new_empty((*values.shape[:-1], 0), dtype=torch.uint8)
    if fmt is CacheFormat.FP8:
        q, scale = fp8_blocks(values)
        return q.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2), e8m0_bytes(scale).flatten(-2)
    if fmt is CacheFormat.FP4:
        codes, scale = fp4_blocks(values)
        return pack_nibbles(codes.flatten(-2)), scale.view(torch.uint8).flatten(-2)
    if fmt is CacheFormat.FP4_INDEX:
        codes, scale = fp4_index_blocks(values)
        return pack_nibbles(codes.flatten(-2)), e8m0_bytes(scale).flatten(-2)
    if fmt is CacheFormat.BF16:
        return values.bfloat16().view(torch.uint8), none
    return values.contiguous().view(torch.uint8), none


def decode(data: Tensor, scales: Tensor, fmt: CacheFormat) -> Tensor:
    """float32 entries [..., dim] of data and scales [..., bytes] uint8. Inverse of `encode` on values that lie on the grid."""
    if fmt is CacheFormat.FP8:
        return split_last(data.view(torch.float8_e4m3fn).float(), 32).mul_(e8m0_values(scales).unsqueeze(-1)).flatten(-2)
    if fmt is CacheFormat.FP4:
        scale = scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)
        return split_last(e2m1_pairs(data), 16).mul_(scale).flatten(-2)
    if fmt is CacheFormat.FP4_INDEX:
        return split_last(e2m1_pairs(data), 32).mul_(e8m0_values(scales).unsqueeze(-1)).flatten(-2)
    if fmt is CacheFormat.BF16:
        return data.contiguous().view(torch.bfloat16).float()
    return data.contiguous().view(torch.float32)


def decode_weight(weight: Tensor, scale: Tensor | None) -> Tensor:
    """float32 [out, in] of a checkpoint weight: bf16 or float32; e4m3 with 32x32 or row-wise scales; e2m1 pairs with row-wise scales."""
    if scale is None:
        return weight.float()
    scales = e8m0_values(scale)
    values = weight.float() if weight.dtype == torch.float8_e4m3fn else e2m1_pairs(weight)
    rows, columns = values.shape
    if scales.shape[0] != rows:
        scales = scales.repeat_interleave(32, 0)[:rows]
    return values * scales.repeat_interleave(32, 1)[:, :columns]
