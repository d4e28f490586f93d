"""Device functions shared by the kernels: byte formats, rounding rules and rotations.

Vectors that are quantised to nibbles or rotated in pairs are held as two tensors, their even and their odd elements: a pair is then
one lane, a byte of two e2m1 codes is `even | odd << 4`, and a rotation needs no shuffle.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(exponent_byte):
    """float32 2^(byte - 127) of an integer tensor; byte 0 is the subnormal 2^-127."""
    bits = exponent_byte.to(tl.int32) << 23
    return tl.where(bits == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def fp8_exponent(amax):
    """Exponent byte of the FP8 scale of a block with magnitude `amax` (float32): 2^ceil(log2(max(amax, 1e-4) / 448)).

    448 = 1.75 * 2^8, so the exponent of amax/448 follows from amax's exponent and whether its mantissa exceeds 0.75.
    """
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    return (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def fp4_exponent(amax):
    """Exponent byte of the FP4 index scale: 2^ceil(log2(max(amax, 6*2^-126) / 6)); 6 = 1.5 * 2^2."""
    bits = tl.maximum(amax, 7.052966104933725e-38).to(tl.int32, bitcast=True)
    return (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)


@triton.jit
def fp8_round(x, exponent):
    """float32 x on the e4m3 grid of scale 2^(exponent - 127): e4m3 values (not multiplied back)."""
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(x * inverse, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def e2m1_code(x, scale):
    """Codes 0..15 of float32 x / scale: nearest e2m1 value, saturating, ties to the even code. Comparisons with multiples of the scale
    are exact, so no division is needed."""
    a = tl.abs(x)
    code = (a > 0.25 * scale).to(tl.int32) + (a >= 0.75 * scale).to(tl.int32) + (a > 1.25 * scale).to(tl.int32)
    code += (a >= 1.75 * scale).to(tl.int32) + (a > 2.5 * scale).to(tl.int32) + (a >= 3.5 * scale).to(tl.int32)
    code += (a > 5.0 * scale).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """float32 value of e2m1 codes 0..15 (int32). From 1.0 on, the magnitude bits are the low exponent bits and the first mantissa bit."""
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def rotated(even, odd, cos, sin):
    """The rotation (a, b) -> (a cos - b sin, a sin + b cos), rounded to bfloat16, as float32."""
    return (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32), (even * sin + odd * cos).to(tl.bfloat16).to(tl.float32)


@triton.jit
def rope_angles(table, position, pair, first, RD: tl.constexpr):
    """(cos, sin) of each pair number; pairs before `first` do not turn. table: float32 rows of RD/2 cosines and RD/2 sines."""
    turns = (pair >= first) & (pair - first < RD // 2)
    at = table + position * RD + (pair - first)
    return tl.load(at, mask=turns, other=1.0), tl.load(at + RD // 2, mask=turns, other=0.0)


@triton.jit
def turned(x, table, position, SIGN: tl.constexpr, DIM: tl.constexpr, RD: tl.constexpr):
    """bfloat16 [n, D]: float32 vectors x with their last RD of DIM columns rotated (SIGN -1: rotated back), rounded once."""
    n: tl.constexpr = x.shape[0]
    pairs: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, pairs)
    turns = (pair * 2 >= DIM - RD) & (pair * 2 < DIM)
    angle = table + position * RD + pair - (DIM - RD) // 2
    cos = tl.load(angle, mask=turns, other=1.0)[None, :]
    sin = tl.load(angle + RD // 2, mask=turns, other=0.0)[None, :] * SIGN
    even, odd = tl.split(tl.reshape(x, (n, pairs, 2)))
    both = tl.join((even * cos - odd * sin).to(tl.bfloat16), (even * sin + odd * cos).to(tl.bfloat16))
    return tl.reshape(both, (n, 2 * pairs))


@triton.jit
def bf16(x):
    """float32 x rounded to bfloat16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)
