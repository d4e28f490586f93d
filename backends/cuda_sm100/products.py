"""The inner loop of every weight product: one tile of a weight in any format times a tile of activations.

Products are computed transposed, outputs x rows: the weight is then the operand that tensor cores take from registers, so it is decoded
there and never written back, and few rows (decode) waste nothing. Every output element is summed over its inputs in ascending order in
tiles of 128, whatever the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_backends.cuda_sm100.launch import INTERPRETED
from deepinfer_core.backend.formats import WeightFormat

BF16, FP8, FP4 = 0, 1, 2
FORMAT_CODE = {WeightFormat.BF16: BF16, WeightFormat.FP8_B32: FP8, WeightFormat.FP4_G32: FP4}

_ASSEMBLY = tl.constexpr(not INTERPRETED)
_E2M1 = tl.constexpr("e2m1")
_E4M3 = tl.constexpr("e4m3")


def _nibble_assembly() -> str:
    """Two words of packed e2m1 -> eight pairs of bfloat16 bits (see weights.packed_words). Pair i holds part i of both words."""
    lines = [".reg .b32 lo, hi, t, u;", "prmt.b32 lo, $8, $9, 0x5410;", "prmt.b32 hi, $8, $9, 0x7632;"]
    for out, word in ((0, "lo"), (4, "hi")):
        lines += [
            f"and.b32 ${out}, {word}, 0x81C081C0;",
            f"shl.b32 t, {word}, 3;", f"and.b32 ${out + 1}, t, 0x81C081C0;",
            f"shl.b32 t, {word}, 6;", f"and.b32 ${out + 2}, t, 0x81C081C0;",
            f"shl.b32 t, {word}, 1;", "and.b32 t, t, 0x80008000;",
            f"shr.u32 u, {word}, 5;", "lop3.b32 t, u, 0x01000100, t, 0xEA;",
            f"shr.u32 u, {word}, 4;", f"lop3.b32 ${out + 3}, u, 0x00C000C0, t, 0xEA;",
        ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


def _byte_assembly() -> str:
    """Two words of packed e4m3 -> four pairs of bfloat16 bits."""
    lines = [".reg .b32 lo, hi, t, u;", "prmt.b32 lo, $4, $5, 0x5410;", "prmt.b32 hi, $4, $5, 0x7632;"]
    for out, word in ((0, "lo"), (2, "hi")):
        lines += [
            f"and.b32 ${out}, {word}, 0x87F087F0;",
            f"shl.b32 t, {word}, 4;", "and.b32 t, t, 0x80F080F0;",
            f"shr.u32 u, {word}, 4;", f"lop3.b32 ${out + 1}, u, 0x07000700, t, 0xEA;",
        ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


def _pair_assembly() -> str:
    """Four bytes of two e2m1 codes -> bfloat16 values of their low nibbles ($0, $1), then of their high nibbles ($2, $3).

    Sign and magnitude bits are put where bfloat16 wants them; the tiny numbers that they are there become values by a factor 2^126.
    """
    lines = [".reg .b32 a, t, u, unit;", "mov.b32 unit, 0x7E807E80;"]
    for half, selector in ((0, "0x4140"), (1, "0x4342")):
        lines += [
            f"prmt.b32 a, $4, 0, {selector};",
            "shl.b32 t, a, 12;", "and.b32 t, t, 0x80008000;",
            "shl.b32 u, a, 6;", "lop3.b32 u, u, 0x01C001C0, t, 0xEA;",
            f"mul.rn.bf16x2 ${half}, u, unit;",
            "shl.b32 t, a, 8;", "and.b32 t, t, 0x80008000;",
            "shl.b32 u, a, 2;", "lop3.b32 u, u, 0x01C001C0, t, 0xEA;",
            f"mul.rn.bf16x2 ${2 + half}, u, unit;",
        ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


_NIBBLES = tl.constexpr(_nibble_assembly())
_BYTES = tl.constexpr(_byte_assembly())
PAIR_ASSEMBLY = tl.constexpr(_pair_assembly())


@triton.jit
def _as_bf16(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decoded_nibbles(word):
    """Eight bfloat16 tensors of int32 `word`: part i of the tile, without the factor 2^126."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(_NIBBLES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [word], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
    low, high = word & 0xFFFF, (word >> 16) & 0xFFFF
    return (
        _as_bf16(low & 0x81C0),
        _as_bf16((low << 3) & 0x81C0),
        _as_bf16((low << 6) & 0x81C0),
        _as_bf16(((low << 1) & 0x8000) | ((low >> 5) & 0x100) | ((low >> 4) & 0xC0)),
        _as_bf16(high & 0x81C0),
        _as_bf16((high << 3) & 0x81C0),
        _as_bf16((high << 6) & 0x81C0),
        _as_bf16(((high << 1) & 0x8000) | ((high >> 5) & 0x100) | ((high >> 4) & 0xC0)),
    )


@triton.jit
def decoded_bytes(word):
    """Four bfloat16 tensors of int32 `word`, without the factor 2^120."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(_BYTES, "=r,=r,=r,=r,r,r", [word], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2)
    low, high = word & 0xFFFF, (word >> 16) & 0xFFFF
    return (
        _as_bf16(low & 0x87F0),
        _as_bf16(((low << 4) & 0x80F0) | ((low >> 4) & 0x700)),
        _as_bf16(high & 0x87F0),
        _as_bf16(((high << 4) & 0x80F0) | ((high >> 4) & 0x700)),
    )


@triton.jit
def decoded_pairs(byte):
    """(even, odd) bfloat16 values of uint8 bytes of two e2m1 codes, low nibble even."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(PAIR_ASSEMBLY, "=r,=r,=r,=r,r", [byte], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    code = byte.to(tl.int32)
    unit = tl.full((1,), 8.507059173023462e37, tl.bfloat16)  # 2^126
    return _as_bf16(((code & 8) << 12) | ((code & 7) << 6)) * unit, _as_bf16(((code & 128) << 8) | ((code & 112) << 2)) * unit


@triton.jit
def bf16_product(a, b):
    """a * b of bfloat16 tensors of one shape, two products in an instruction."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)
    return a * b


@triton.jit
def scale_factor(word, group: tl.constexpr):
    """bfloat16 2^(byte `group` of word - 127)."""
    return _as_bf16(((word >> (8 * group)) & 255) << 7)


@triton.jit
def tile_product(
    acc, weight, scales, tile, n, outputs, x, x_scales, x_mask, inputs,
    FORMAT: tl.constexpr, PACKED: tl.constexpr, X_SCALED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """acc [N, R] += weight tile [N, 128] @ x tile [128, R], accumulated in float32.

    n [N]: output rows; weight, scales: start of the matrix; x: pointers to the activation rows [R]; x_scales: pointers to their scale
    rows; EVEN: inputs is a multiple of 128.
    """
    if PACKED:
        return _packed_product(acc, weight, scales, tile, n, outputs, x, x_mask, inputs, FORMAT, EVEN)
    elif FORMAT == 0:  # noqa: RET505 - both are compile-time branches
        k = tile * 128 + tl.arange(0, 128)
        mask = x_mask[None, :] if EVEN else x_mask[None, :] & (k < inputs)[:, None]
        at = weight + n[:, None] * inputs + k[None, :]
        w = tl.load(at) if EVEN else tl.load(at, mask=(k < inputs)[None, :], other=0.0)
        values = tl.load(x[None, :] + k[:, None], mask=mask, other=0.0)
        if X_SCALED:
            group = tile * 4 + tl.arange(0, 4)
            exponent = tl.load(x_scales[None, :] + group[:, None], mask=x_mask[None, :] & (group * 32 < inputs)[:, None], other=127)
            factor = _as_bf16(exponent.to(tl.int32) << 7)[:, None, :]
            values = values.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
            values = tl.reshape(tl.reshape(values, (4, 32, values.shape[1])) * factor, values.shape)
        return tl.dot(w, values, acc)
    else:
        return _scaled_product(acc, weight, scales, n, x, x_scales, x_mask, tile * 128, inputs, FORMAT, X_SCALED, EVEN)


@triton.jit
def _packed_product(acc, weight, scales, tile, n, outputs, x, x_mask, inputs, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """SM90: the tile's words are decoded part by part in registers, each part multiplied with its inputs."""
    parts: tl.constexpr = 8 if FORMAT == 2 else 4
    width: tl.constexpr = 128 // parts
    j = tl.arange(0, width)
    word = tl.load(weight + (tile * outputs + n)[:, None] * width + j[None, :])
    if FORMAT == 2:
        exponents = tl.load(scales + tile * outputs + n)
        decoded = decoded_nibbles(word)
    else:
        exponents = tl.load(scales + tile * tl.cdiv(outputs, 32) + n // 32)
        decoded = decoded_bytes(word)
    for i in tl.static_range(parts):
        k = tile * 128 + i * width + j
        mask = x_mask[None, :] if EVEN else x_mask[None, :] & (k < inputs)[:, None]
        values = tl.load(x[None, :] + k[:, None], mask=mask, other=0.0)
        factor = tl.broadcast_to(scale_factor(exponents, i * width // 32)[:, None], decoded[i].shape)
        acc = tl.dot(bf16_product(decoded[i], factor), values, acc)
    return acc


@triton.jit
def _scaled_product(
    acc, weight, scales, n, x, x_scales, x_mask, k0, inputs, FORMAT: tl.constexpr, X_SCALED: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """SM100: the tile as a block-scaled product of the checkpoint's bytes; an unquantised x is multiplied with decoded weights."""
    width: tl.constexpr = 64 if FORMAT == 2 else 128  # bytes of a row of the tile
    c = tl.arange(0, width)
    k = k0 + tl.arange(0, 128)
    g = k0 // 32 + tl.arange(0, 4)
    groups = inputs // 32
    row_bytes = inputs // 2 if FORMAT == 2 else inputs
    at = weight + n[:, None] * row_bytes + (k0 * width // 128 + c)[None, :]
    scale_row = n if FORMAT == 2 else n // 32
    scale_at = scales + scale_row[:, None] * groups + g[None, :]
    if EVEN:
        w = tl.load(at)
        w_scale = tl.load(scale_at)
        values = tl.load(x[None, :] + k[:, None], mask=x_mask[None, :], other=0.0)
    else:
        w = tl.load(at, mask=(k0 * width // 128 + c < row_bytes)[None, :], other=0)
        w_scale = tl.load(scale_at, mask=(g < groups)[None, :], other=127)
        values = tl.load(x[None, :] + k[:, None], mask=x_mask[None, :] & (k < inputs)[:, None], other=0.0)
    if X_SCALED:
        x_scale = tl.load(x_scales[:, None] + g[None, :], mask=x_mask[:, None] & (g < groups)[None, :], other=127)
        if FORMAT == 2:
            acc = tl.dot_scaled(w, w_scale, _E2M1, values, x_scale, _E4M3, acc)
        else:
            acc = tl.dot_scaled(w, w_scale, _E4M3, values, x_scale, _E4M3, acc)
    else:
        tl.static_assert(FORMAT == 1, "an unquantised activation meets bf16 or e4m3 weights only")
        factor = (w_scale.to(tl.int32) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        decoded = w.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        decoded = tl.reshape(tl.reshape(decoded, (w.shape[0], 4, 32)) * factor[:, :, None], (w.shape[0], 128))
        acc = tl.dot(decoded, values, acc)
    return acc
