"""Every CANN operator this backend calls, one function each: the only module that names `torch.ops.npu`.

The arguments that never vary are fixed here, with the reason. CANN refuses empty tensors in many of these operators, so each function
answers zero rows itself. `docs/ascend.md` lists the operators with their constraints and with what was verified.
Source of names, types and defaults: schemas and notes of the torch-npu 2.13.0 wheel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_backends.ascend950 import codes

FP8_FLOOR = 1e-4
"""Smallest block maximum of an fp8 activation block (DeepSeek reference inference code)."""

_TO_NEAREST = "rint"
_BLOCK = 32


class Mx(NamedTuple):
    """Values with one power-of-two scale per 32, as CANN lays them out."""

    values: Tensor  # e4m3 [..., k], or uint8 [..., k/2] of e2m1 pairs (even index in the low nibble)
    scales: Tensor  # uint8 [..., ceil(k/64), 2]: exponent bytes of blocks 2j and 2j+1 side by side; an odd count is padded


class Routed(NamedTuple):
    """Rows in expert order. Rows past the sum of `counts` are undefined."""

    rows: Mx  # [T*K, ...]
    place: Tensor  # int32 [T*K]: row of choice j of token t at t*K + j; -1 where the expert is not active
    counts: Tensor  # int64 [E]


# ------------------------------------------------------------------ norms and quantisation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 norm of float32 x [..., d], weight [d] float32.

    float32 in and out: whether the bf16 form rounds before the product with the weight is undocumented.
    """
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0] if x.numel() else torch.empty_like(x)


def quantize_fp8(x: Tensor) -> Mx:
    """e4m3 with the model's scale rule. x [..., k] bf16 or float32, k a multiple of 32.

    scale_alg 1 rounds the exponent of amax/448 up; the default 0 truncates it and saturates.
    """
    if not x.numel():
        return Mx(x.new_empty(x.shape, dtype=torch.float8_e4m3fn), _no_scales(x))
    values, scales = torch.ops.npu.npu_dynamic_mx_quant(
        x, axis=-1, round_mode=_TO_NEAREST, dst_type=codes.FP8, block_size=_BLOCK, scale_alg=1, max_low_bound=FP8_FLOOR
    )
    return Mx(values, scales)


def quantize_fp4(x: Tensor) -> Mx:
    """e2m1 with the model's scale rule for index queries and keys: exponent of amax/6 rounded up (scale_alg 2)."""
    if not x.numel():
        return Mx(x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8), _no_scales(x))
    values, scales = torch.ops.npu.npu_dynamic_mx_quant(
        x, axis=-1, round_mode=_TO_NEAREST, dst_type=codes.FP4, block_size=_BLOCK, scale_alg=2
    )
    return Mx(values, scales)


def dequantize(x: Mx) -> Tensor:
    """The values of x as bf16 [..., k]: exact for both formats."""
    is_fp4 = x.values.dtype is torch.uint8
    if not x.values.numel():
        return x.values.new_empty((*x.values.shape[:-1], x.values.shape[-1] * (2 if is_fp4 else 1)), dtype=torch.bfloat16)
    source = codes.FP4 if is_fp4 else codes.FP8
    return torch.ops.npu.npu_anti_mx_quant(x.values, x.scales, axis=-1, dst_type=codes.BF16, src_type=source)


def _no_scales(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], -(-x.shape[-1] // 64), 2), dtype=torch.uint8)


# ------------------------------------------------------------------ linears


def linear_fp8(x: Mx, weight: Tensor, scale: Tensor) -> Tensor:
    """bf16 [T, n] = x [T, k] times weight e4m3 [n, k] transposed; scale uint8 [ceil(k/64), n, 2]; float32 accumulation."""
    if not x.values.shape[0]:
        return x.values.new_empty((0, weight.shape[0]), dtype=torch.bfloat16)
    return torch.ops.npu.npu_quant_matmul(
        x.values,
        weight.t(),
        scale,
        pertoken_scale=x.scales,
        scale_dtype=codes.SCALE,
        pertoken_scale_dtype=codes.SCALE,
        group_sizes=[1, 1, _BLOCK],
        output_dtype=codes.BF16,
    )


def linear_grouped(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 [T, g, n]: x [T, g, k] bf16 times weight [g, k, n] bf16, group by group."""
    if not x.shape[0]:
        return x.new_empty((0, weight.shape[0], weight.shape[2]))
    return torch.ops.npu.npu_transpose_batchmatmul(x, weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])


# ------------------------------------------------------------------ experts


def route(x: Mx, ids: Tensor, experts: int) -> Routed:
    """Copies row t of x to each of its experts ids [T, K] int32, in expert order. Ids outside 0 .. experts-1 must be `experts`."""
    rows, place, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
        x.values,
        ids,
        scale=x.scales.view(torch.float8_e8m0fnu),
        active_num=ids.numel(),
        expert_num=experts + 1,  # one more than there are: the id of a choice that is dropped
        expert_tokens_num_type=1,  # counts
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    return Routed(Mx(rows, scales.view(torch.uint8)), place, counts)


def experts_fp4(x: Mx, weight: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """bf16 [R, n]: rows of x in expert order times fp4 weights [E, k/2, n], scale uint8 [E, k/64, n, 2], counts int64 [E].

    The weight's scale is `antiquant_scale`, not `scale`, and the type of x is left out: the operator takes it from the tensor.
    """
    return torch.ops.npu.npu_grouped_matmul(
        [x.values],
        [weight],
        antiquant_scale=[scale],
        per_token_scale=[x.scales],
        per_token_scale_dtype=codes.SCALE,
        weight_dtype=codes.FP4,
        **_groups(counts),
    )[0]


def experts_fp8(x: Mx, weight: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """bf16 [R, n]: rows of x in expert order times e4m3 weights [E, k, n], scale uint8 [E, ceil(k/64), n, 2], counts int64 [E]."""
    return torch.ops.npu.npu_grouped_matmul(
        [x.values],
        [weight],
        scale=[scale],
        scale_dtype=codes.SCALE,
        per_token_scale=[x.scales],
        per_token_scale_dtype=codes.SCALE,
        **_groups(counts),
    )[0]


def experts_bf16(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """bf16 [R, n]: bf16 rows in expert order times bf16 weights [E, k, n]."""
    return torch.ops.npu.npu_grouped_matmul([x], [weight], **_groups(counts))[0]


def _groups(counts: Tensor) -> dict[str, object]:
    """Arguments of a grouped product whose rows (dim 0) are split by plain counts (type 1; type 0 would be running sums)."""
    return {"split_item": 2, "group_type": 0, "group_list": counts, "group_list_type": 1, "output_dtype": codes.BF16}


def clipped_swiglu(x: Tensor, limit: float) -> Tensor:
    """float32 [R, f]: silu(min(gate, limit)) * clamp(up, -limit, limit) of x [R, 2f] float32, gate half first.

    float32, because a bf16 result would be rounded before the routing weight is applied. The operator's defaults (alpha 1.702, bias 1,
    interleaved halves) belong to another model.
    """
    if not x.shape[0]:
        return x.new_empty((0, x.shape[1] // 2))
    return torch.ops.npu.npu_clipped_swiglu(x, dim=-1, alpha=1.0, limit=limit, bias=0.0, interleaved=False)


# ------------------------------------------------------------------ hyper-connections


def mhc_coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [T, m], post [T, m], logits of comb [T, m, m]) float32 of streams [T, m, D] bf16.

    The operator's first result is the collapse with this sub-layer's own `pre`; the released model uses the previous one's, so it is
    ignored. `pre` exists only with out_flag 1. inner_precise 0 is float32 (1 would be HF32).
    """
    _, post, logits, _, _, pre = torch.ops.npu.npu_mhc_pre(
        streams, fn, scale, base, norm_eps=norm_eps, hc_eps=hc_eps, out_flag=1, inner_precise=0
    )
    return pre, post, logits


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Almost doubly stochastic matrices of logits [T, m, m] float32, m in 4, 6, 8. Only the first of three results is defined."""
    return torch.ops.npu.npu_mhc_sinkhorn(logits, eps=eps, num_iters=iterations, out_flag=0)[0]


def mhc_post(streams: Tensor, comb: Tensor, y: Tensor, post: Tensor) -> Tensor:
    """bf16 [T, m, D]: comb transposed times streams, plus post times y. The first index of comb is the old stream."""
    return torch.ops.npu.npu_mhc_post(streams, comb, y, post)


# ------------------------------------------------------------------ attention


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """float32 x [T, N, rd] rotated in interleaved pairs; cos, sin [T, rd] float32 with each angle twice in a row."""
    if not x.numel():
        return torch.empty_like(x)
    return torch.ops.npu.npu_rotary_mul(x[None], cos[None, :, None], sin[None, :, None], "interleave")[0]


def scatter_rows(table: Tensor, rows: Tensor, updates: Tensor) -> None:
    """Writes updates [T, w] to rows [T] int64 of table [N, w] (int8 or float32). Equal rows must carry equal updates."""
    if rows.shape[0]:
        torch.ops.npu.npu_scatter_nd_update_(table, rows[:, None], updates)


def sparse_attention(query: Tensor, keys: Tensor, index: Tensor, sink: Tensor, scale: float) -> Tensor:
    """bf16 [T, H, hd]: attention of query [T, H, hd] over rows index [T, n] int32 of keys [T, s, hd], both key and value.

    index holds valid rows first, then -1, at least one valid. Keys of a row have no order, so no mask (sparse_mode 0). The operator
    wants separate rotary parts; this model's vector contains them, so the separate ones are zero and add nothing.
    """
    rows, _, _ = query.shape
    rope = 64
    key = keys[:, :, None]
    return torch.ops.npu.npu_sparse_flash_attention(
        query[:, None],
        key,
        key,
        index[:, None, None],
        scale,
        query_rope=query.new_zeros((rows, 1, query.shape[1], rope)),
        key_rope=keys.new_zeros((rows, keys.shape[1], 1, rope)),
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="BSND",
        sparse_mode=0,
        attention_mode=2,
        sinks=sink,
    )[0][:, 0]


def lightning_indexer(query: Tensor, keys: Tensor, head_weights: Tensor, lengths: Tensor, table: Tensor, count: int) -> Tensor:
    """int32 [T, count]: entries of highest score among the first lengths [T] (>= 1) of each row's pages; any order, -1 after the last.

    query [T, heads, d] bf16, keys [pages, n, d] bf16, head_weights [T, heads] bf16, table [T, pages of a row] int32. Every row is a
    sequence of its own with its own length: a causal mask (sparse_mode 3) would count positions, not groups of tokens.
    """
    running = torch.arange(1, query.shape[0] + 1, dtype=torch.int32, device=query.device)
    return torch.ops.npu.npu_lightning_indexer(
        query,
        keys[:, :, None],
        head_weights,
        actual_seq_lengths_query=running,  # running sums, in this layout
        actual_seq_lengths_key=lengths,  # plain lengths, in this layout
        block_table=table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=count,
        sparse_mode=0,
    )[0][:, 0]
