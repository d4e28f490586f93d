"""MX (block-scaled) formats: `npu_dynamic_mx_quant`, `npu_anti_mx_quant` and the products of MX operands.

Source: notes of the torch-npu 2.13.0 wheel on these operators, and the OCP microscaling formats they refer to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.emulation.support import (
    BYTE_NAN,
    OperatorError,
    expect,
    expect_contiguous,
    expect_not_empty,
    poisoned,
    random_bytes,
    require,
)

E4M3, E8M0, E2M1 = 292, 293, 296
_E4M3_TORCH = 24  # torch's own number of the same type
_FLOATS = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_INPUTS = {torch.float16, torch.bfloat16, torch.float32}
_SCALES = {torch.uint8, torch.float8_e8m0fnu}
_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_DIM = 65535
BLOCK = 32


def dynamic_mx_quant(
    x: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = E2M1,
    block_size: int = BLOCK,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Values divided by the power-of-two scale of their block of 32, and the scales in pairs."""
    op = "npu_dynamic_mx_quant"
    is_fp8 = dst_type in (E4M3, _E4M3_TORCH)
    expect(op, "input", x, _INPUTS)
    expect_not_empty(op, input=x)
    require(is_fp8 or dst_type == E2M1, op, f"dst_type {dst_type} is not emulated (e4m3 292, e2m1 296)")
    require(axis in (-1, x.dim() - 1) and block_size == BLOCK and round_mode == "rint", op, "emulated: last axis, blocks of 32, 'rint'")
    require(scale_alg in ((0, 1) if is_fp8 else (0, 2)), op, f"scale_alg {scale_alg} is not supported for dst_type {dst_type}")
    require(max_low_bound == 0 or (scale_alg == 1 and max_low_bound > 0), op, "max_low_bound must be 0 unless scale_alg is 1")
    require(dst_type_max in (0.0, 6.0), op, "emulated: dst_type_max 0 or 6")
    require(is_fp8 or x.shape[-1] % 2 == 0, op, f"the last dim must be even for e2m1, it is {x.shape[-1]}")
    require(x.dtype is not torch.float32 or x.shape[-1] >= BLOCK, op, "a float32 input needs at least 32 values along the axis")

    blocks = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    if scale_alg == 0:
        exponent = torch.frexp(amax).exponent - 1 - (8 if is_fp8 else 2)
    else:
        mantissa, exponent = torch.frexp(amax.clamp_min(max_low_bound) / (448.0 if is_fp8 else 6.0))
        exponent = exponent - (mantissa == 0.5).int()  # frexp's mantissa lies in [0.5, 1): 0.5 is an exact power of two
    stored = (exponent + 127).clamp(0, 254).to(torch.uint8)
    if not max_low_bound:
        stored = torch.where(amax == 0, random_bytes(*amax.shape), stored)  # nothing is said about a block of zeros
    scaled = (blocks / torch.exp2(stored.double() - 127)[..., None]).flatten(-2)[..., : x.shape[-1]]
    values = scaled.clamp(-448, 448).float().to(torch.float8_e4m3fn) if is_fp8 else pack(nearest_codes(scaled))
    return values, pairs(stored, BYTE_NAN)


def anti_mx_quant(x: Tensor, mxscale: Tensor, *, axis: int | None = -1, dst_type: int | None = 15, src_type: int | None = E4M3) -> Tensor:
    """Values times the scale of their block."""
    op = "npu_anti_mx_quant"
    is_fp8 = src_type in (E4M3, _E4M3_TORCH)
    expect(op, "x", x, {torch.float8_e4m3fn} if is_fp8 else {torch.uint8})
    require(is_fp8 or src_type == E2M1, op, f"src_type {src_type} is not emulated")
    require(axis in (-1, x.dim() - 1), op, "emulated: last axis")
    require(dst_type in _FLOATS, op, f"dst_type {dst_type} is not a floating-point code (5, 6, 15)")
    expect_not_empty(op, x=x)
    expect_contiguous(op, x=x, mxscale=mxscale)
    values = x.float() if is_fp8 else unpack(x)
    return decode(op, "mxscale", values, mxscale).to(_FLOATS[dst_type or 0])


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """MXFP8 times MXFP8, float32 accumulation."""
    op = "npu_quant_matmul"
    require(offset is None and bias is None and y_scale is None, op, "offset, bias and y_scale are not emulated")
    require(x1_dtype is None and x2_dtype is None, op, "x1_dtype and x2_dtype are for types that torch lacks")
    require(scale_dtype == E8M0 and pertoken_scale_dtype == E8M0, op, "MX scales need scale_dtype and pertoken_scale_dtype 293 (e8m0)")
    require(list(group_sizes or ()) in ([1, 1, BLOCK], [0, 0, BLOCK]), op, f"group_sizes {group_sizes}, expected [1, 1, 32]")
    require(output_dtype in _FLOATS, op, f"output_dtype {output_dtype}, expected 5, 6 or 15")
    expect(op, "x1", x1, {torch.float8_e4m3fn}, (None, None))
    k = x1.shape[1]
    expect(op, "x2", x2, {torch.float8_e4m3fn}, (k, None))
    n = x2.shape[1]
    expect_not_empty(op, x1=x1, x2=x2)
    expect_contiguous(op, x1=x1)
    require(x2.is_contiguous() or x2.t().is_contiguous(), op, "x2 must be contiguous or the transposed view of a contiguous tensor")
    require(max(k, n) <= _LARGEST_DIM, op, f"k {k} and n {n} must be at most {_LARGEST_DIM}")
    require(pertoken_scale is not None, op, "MX needs pertoken_scale")
    expect(op, "scale", scale, _SCALES, (-(-k // 64), n, 2))
    assert pertoken_scale is not None
    left = decode(op, "pertoken_scale", x1.float(), pertoken_scale)
    right = decode(op, "scale", x2.t().float(), scale.transpose(0, 1))
    return (left @ right.t()).to(_FLOATS[output_dtype or 0])


def decode(op: str, name: str, values: Tensor, scales: Tensor) -> Tensor:
    """float32 values [..., k] times their scales [..., ceil(k/64), 2]."""
    k = values.shape[-1]
    expect(op, name, scales, _SCALES, (*values.shape[:-1], -(-k // 64), 2))
    stored = scales.view(torch.uint8).flatten(-2)[..., : -(-k // BLOCK)]
    factors = torch.where(stored == BYTE_NAN, torch.nan, torch.exp2(stored.double() - 127)).float()
    return values * factors.repeat_interleave(BLOCK, -1)[..., :k]


def pairs(scales: Tensor, filler: int) -> Tensor:
    """[..., b] -> [..., ceil(b/2), 2]."""
    return torch.nn.functional.pad(scales, (0, scales.shape[-1] % 2), value=filler).unflatten(-1, (-1, 2))


def nearest_codes(x: Tensor) -> Tensor:
    """e2m1 codes of x: nearest value, ties to the even code, saturating. Written as a search, not as arithmetic."""
    distance = (x.abs().clamp_max(6.0)[..., None] - _GRID.to(x.dtype)).abs()
    ties = distance == distance.amin(-1, keepdim=True)
    even_first = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # rank of a code among those at equal distance
    code = torch.where(ties, even_first, 99).argmin(-1)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the even index in the low nibble. Not documented in the wheel; torch's fp4 pairs are laid out so."""
    return codes[..., ::2] + 16 * codes[..., 1::2]


def unpack(data: Tensor) -> Tensor:
    """float32 values of e2m1 pairs [..., k/2] -> [..., k]."""
    codes = torch.stack((data % 16, data // 16), -1).flatten(-2).int()
    return torch.where(codes >= 8, -_GRID[codes % 8], _GRID[codes % 8])


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Rows in group order times the weight of their group. Rows past the last group are undefined."""
    op = "npu_grouped_matmul"
    absent = (bias, offset, antiquant_offset, activation_input, activation_quant_scale, activation_quant_offset, tuning_config, x_dtype)
    require(all(value is None for value in absent) and not act_type, op, "bias, offsets, activations, tuning and x_dtype are not emulated")
    require(len(x) == 1 and len(weight) == 1 and split_item in (2, 3) and group_type == 0, op, "emulated: one x, one weight, rows grouped")
    rows, k = x[0].shape
    groups, _, n = weight[0].shape
    expect_contiguous(op, x=x[0])
    expect_not_empty(op, x=x[0], weight=weight[0])
    ends = _group_ends(op, group_list, group_list_type, groups, rows)
    left, right = _operands(
        op, x[0], weight[0], scale, antiquant_scale, per_token_scale, (scale_dtype, per_token_scale_dtype, weight_dtype)
    )
    require(right.shape == (groups, n, k), op, f"weight {tuple(weight[0].shape)} does not fit x with k = {k}")
    require(output_dtype in _FLOATS, op, f"output_dtype {output_dtype}, expected 5, 6 or 15")
    out = poisoned((rows, n), _FLOATS[output_dtype or 0])
    for group, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        out[first:last] = (left[first:last] @ right[group].t()).to(out.dtype)
    return [out]


def _group_ends(op: str, group_list: Tensor | None, kind: int | None, groups: int, rows: int) -> list[int]:
    if group_list is None:
        raise OperatorError(f"{op}: group_list is needed")
    expect(op, "group_list", group_list, {torch.int64}, (groups,))
    require(groups <= 1024, op, f"{groups} groups, at most 1024")
    require(kind in (0, 1), op, f"group_list_type {kind}, expected 0 (running sums) or 1 (counts)")
    ends = (group_list.cumsum(0) if kind == 1 else group_list).tolist()
    ordered = all(a <= b for a, b in zip([0, *ends], ends, strict=False))
    require(ordered and ends[-1] <= rows, op, f"group_list {group_list.tolist()} of type {kind} does not split {rows} rows in order")
    return ends


def _operands(
    op: str,
    x: Tensor,
    weight: Tensor,
    scale: list[Tensor] | None,
    antiquant_scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    types: tuple[int | None, int | None, int | None],
) -> tuple[Tensor, Tensor]:
    """Decoded x [R, k] and weight [E, n, k], float32."""
    scale_type, token_type, weight_type = types
    stored = weight.transpose(1, 2)
    require(stored.is_contiguous(), op, "the weight must be the transposed view of a contiguous [E, n, k]")
    if x.dtype is torch.bfloat16:
        expect(op, "weight", weight, {torch.bfloat16})
        require(all(part is None for part in (scale, antiquant_scale, per_token_scale)), op, "bf16 operands have no scales")
        return x.float(), stored.float()
    expect(op, "x", x, {torch.float8_e4m3fn})
    require(per_token_scale is not None and token_type == E8M0, op, "MX rows need per_token_scale of type 293 (e8m0)")
    assert per_token_scale is not None
    left = decode(op, "per_token_scale", x.float(), per_token_scale[0])
    if weight.dtype is torch.uint8:
        require(weight_type == E2M1, op, f"packed weights need weight_dtype 296 (e2m1), got {weight_type}")
        require(antiquant_scale is not None and scale is None, op, "the scale of an fp4 weight goes to antiquant_scale")
        require(x.shape[1] % 64 == 0, op, f"k must be a multiple of 64 for fp4 weights, it is {x.shape[1]}")
        values, scales = unpack(stored), antiquant_scale
    else:
        require(antiquant_scale is None and scale is not None and scale_type == E8M0, op, "fp8 weights need scale of type 293 (e8m0)")
        values, scales = stored.float(), scale
    assert scales is not None
    require(scales[0].transpose(1, 2).is_contiguous(), op, "the weight scale must be the transposed view of a contiguous [E, n, k/64, 2]")
    return left, decode(op, "weight scale", values, scales[0].transpose(1, 2))
