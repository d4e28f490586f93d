"""Sparse attention over window keys and selected entries, read from their byte formats.

A program handles all heads of one row and a share of its keys (so that few rows still fill the device); shares are merged by their
log-sum-exp. Vectors are held as even and odd elements: rotations and e2m1 bytes then need no shuffles, and a product over the whole
vector is the sum of two. On SM100 they are put side by side for the products: two accumulators would not fit its tensor memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.caches import FORMATS, EntryLayout
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import rope_angles, rotated
from deepinfer_backends.cuda_sm100.prefill import expands, prefill_attention
from deepinfer_backends.cuda_sm100.products import decoded_pairs
from deepinfer_core.backend.types import Rope, SelectedEntries, WindowKeys

_KEYS = 32  # keys of one block: two blocks in flight, their decoded copy and the query fill the shared memory of a multiprocessor
_MOST_SPLITS = 32
_PROGRAMS = 132  # multiprocessors of an H200; one program fills one


@triton.jit
def _exponent_factor(byte):
    return (byte.to(tl.int32) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _fp8_keys(data, scales, inside, HD: tl.constexpr, P: tl.constexpr, dim, K: tl.constexpr):
    """(even, odd) bfloat16 [K, P] of K FP8 entries at data and scales; zeros where not inside."""
    pair, group, two = tl.arange(0, P), tl.arange(0, P // 16), tl.arange(0, 2)
    at = data[:, None, None] + pair[None, :, None] * 2 + two[None, None, :]
    byte = tl.load(at, mask=inside[:, None, None] & (pair < dim // 2)[None, :, None], other=0)
    scale = tl.load(scales[:, None] + group[None, :], mask=inside[:, None] & (group * 16 < dim // 2)[None, :], other=0)
    factor = _exponent_factor(scale)[:, :, None]
    even, odd = tl.split(byte.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16))
    even = tl.reshape(tl.reshape(even, (K, P // 16, 16)) * factor, (K, P))
    odd = tl.reshape(tl.reshape(odd, (K, P // 16, 16)) * factor, (K, P))
    return even, odd


@triton.jit
def _fp4_keys(data, scales, inside, P: tl.constexpr, dim, K: tl.constexpr):
    """(even, odd) bfloat16 [K, P] of K FP4 entries (one e4m3 scale for 8 pairs)."""
    pair, group = tl.arange(0, P), tl.arange(0, P // 8)
    byte = tl.load(data[:, None] + pair[None, :], mask=inside[:, None] & (pair < dim // 2)[None, :], other=0)
    scale = tl.load(scales[:, None] + group[None, :], mask=inside[:, None] & (group * 8 < dim // 2)[None, :], other=0)
    factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)[:, :, None]
    even, odd = decoded_pairs(byte)
    even = tl.reshape(tl.reshape(even, (K, P // 8, 8)) * factor, (K, P))
    odd = tl.reshape(tl.reshape(odd, (K, P // 8, 8)) * factor, (K, P))
    return even, odd


@triton.jit
def _side_by_side(even, odd):
    """[n, 2 * P]: even elements, then odd ones."""
    both = tl.permute(tl.join(even, odd), (0, 2, 1))
    return tl.reshape(both, (even.shape[0], 2 * even.shape[1]))


@triton.jit
def _attend(
    q_even, q_odd, k_even, k_odd, inside, scale, top, total, out_even, out_odd, WHOLE: tl.constexpr
):  # fmt: skip
    """One block of keys into the running softmax: (top, total, out_even, out_odd). WHOLE: q_even and out_even hold whole vectors."""
    if WHOLE:
        k_even = _side_by_side(k_even, k_odd)
    s = tl.dot(q_even, tl.trans(k_even))
    if not WHOLE:
        s = tl.dot(q_odd, tl.trans(k_odd), s)
    s = tl.where(inside[None, :], s * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(s - base[:, None])
    shrink = tl.exp(top - base)
    total = total * shrink + tl.sum(p, 1)
    p = p.to(tl.bfloat16)
    out_even = tl.dot(p, k_even, out_even * shrink[:, None])
    if not WHOLE:
        out_odd = tl.dot(p, k_odd, out_odd * shrink[:, None])
    return new_top, total, out_even, out_odd


@triton.jit
def _query(query, row, head, heads, stride, head_stride, cos, sin, dim, P: tl.constexpr):
    """(even, odd) bfloat16 [H, P]: the rotated query of a row."""
    pair, two = tl.arange(0, P), tl.arange(0, 2)
    at = query + row * stride + head[:, None, None] * head_stride + pair[None, :, None] * 2 + two[None, None, :]
    q = tl.load(at, mask=(head < heads)[:, None, None] & (pair < dim // 2)[None, :, None], other=0.0)
    even, odd = tl.split(q.to(tl.float32))
    even, odd = rotated(even, odd, cos[None, :], sin[None, :])
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def _finish(
    out_even, out_odd, top, total, sink, table, positions, out, row, head, heads, dim, P: tl.constexpr, RD: tl.constexpr
):  # fmt: skip
    """Divides by the sum with the sink, rounds, un-rotates, stores."""
    pair, two = tl.arange(0, P), tl.arange(0, 2)
    cos, sin = rope_angles(table, tl.load(positions + row), pair, dim // 2 - RD // 2, RD, AGAIN=True)
    base = tl.where(top == float("-inf"), 0.0, top)
    total += tl.exp(tl.load(sink + head, mask=head < heads, other=0.0) - base)
    even = (out_even / total[:, None]).to(tl.bfloat16).to(tl.float32)
    odd = (out_odd / total[:, None]).to(tl.bfloat16).to(tl.float32)
    even, odd = rotated(even, odd, cos[None, :], -sin[None, :])
    at = out + (row * heads + head[:, None, None]) * dim + pair[None, :, None] * 2 + two[None, None, :]
    tl.store(at, tl.join(even, odd).to(tl.bfloat16), mask=(head < heads)[:, None, None] & (pair < dim // 2)[None, :, None])


@triton.jit(do_not_specialize=["columns", "window_stride", "table_stride", "selected_stride", "window_blocks", "split_blocks"])
def _attention_kernel(
    query, out, part_top, part_total, part_out, window_index, ring, current, selected, pages, block_table, sequence, sink, table, positions,
    scale, heads, dim, stride, head_stride, columns, window_stride, ring_rows, ring_n, ring_stride, ring_step, current_stride,
    topk, selected_stride, table_stride, page_n, page_stride, page_step, page_scale_first, page_scale_step, window_blocks, split_blocks,
    H: tl.constexpr, P: tl.constexpr, K: tl.constexpr, RD: tl.constexpr, SELECTED: tl.constexpr, FP4: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Blocks split*split_blocks .. of one row's keys: window blocks first, then selected ones."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, pair, lane = tl.arange(0, H), tl.arange(0, P), tl.arange(0, K)
    cos, sin = rope_angles(table, tl.load(positions + row), pair, dim // 2 - RD // 2, RD)
    q_even, q_odd = _query(query, row, head, heads, stride, head_stride, cos, sin, dim, P)
    top = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    if WHOLE:
        q_even = _side_by_side(q_even, q_odd)
        out_even = tl.zeros((H, 2 * P), tl.float32)
        out_odd = 0.0
    else:
        out_even = tl.zeros((H, P), tl.float32)
        out_odd = tl.zeros((H, P), tl.float32)
    first, last = split * split_blocks, (split + 1) * split_blocks
    for block in range(first, tl.minimum(last, window_blocks)):
        c = block * K + lane
        index = tl.load(window_index + row * window_stride + c, mask=c < columns, other=-1)
        inside = index >= 0
        stored = inside & (index < ring_rows)
        slot = tl.where(stored, index, 0).to(tl.int64)
        at = ring + (slot // ring_n) * ring_stride + (slot % ring_n) * ring_step
        k_even, k_odd = _fp8_keys(at, at + dim, stored, 2 * P, P, dim, K)
        fresh = inside & (index >= ring_rows)
        mine = current + tl.where(fresh, index - ring_rows, 0).to(tl.int64) * current_stride
        two = tl.arange(0, 2)
        mask = fresh[:, None, None] & (pair < dim // 2)[None, :, None]
        key = tl.load(mine[:, None, None] + pair[None, :, None] * 2 + two[None, None, :], mask=mask, other=0.0)
        fresh_even, fresh_odd = tl.split(key)
        k_even = tl.where(fresh[:, None], fresh_even, k_even)
        k_odd = tl.where(fresh[:, None], fresh_odd, k_odd)
        top, total, out_even, out_odd = _attend(q_even, q_odd, k_even, k_odd, inside, scale, top, total, out_even, out_odd, WHOLE)
    if SELECTED:
        pages_of = block_table + tl.load(sequence + row) * table_stride
        begin = tl.maximum(first - window_blocks, 0)
        for block in range(begin, tl.minimum(last - window_blocks, tl.cdiv(topk, K))):
            c = block * K + lane
            entry = tl.load(selected + row * selected_stride + c, mask=c < topk, other=-1)
            inside = entry >= 0
            entry = tl.maximum(entry, 0)
            page = pages + tl.load(pages_of + entry // page_n, mask=inside, other=0).to(tl.int64) * page_stride
            data = page + (entry % page_n) * page_step
            scales = page + page_scale_first + (entry % page_n) * page_scale_step
            if FP4:
                k_even, k_odd = _fp4_keys(data, scales, inside, P, dim, K)
            else:
                k_even, k_odd = _fp8_keys(data, scales, inside, 2 * P, P, dim, K)
            top, total, out_even, out_odd = _attend(q_even, q_odd, k_even, k_odd, inside, scale, top, total, out_even, out_odd, WHOLE)
    if WHOLE:
        out_even, out_odd = tl.split(tl.permute(tl.reshape(out_even, (H, 2, P)), (0, 2, 1)))
    if not SPLIT:
        _finish(out_even, out_odd, top, total, sink, table, positions, out, row, head, heads, dim, P, RD)
    else:
        at = (row * tl.num_programs(1) + split) * H + head
        tl.store(part_top + at, top)
        tl.store(part_total + at, total)
        tl.store(part_out + at[:, None] * (2 * P) + pair[None, :], out_even)
        tl.store(part_out + at[:, None] * (2 * P) + P + pair[None, :], out_odd)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    part_top, part_total, part_out, out, sink, table, positions, heads, dim, splits,
    H: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr, RD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of ROWS heads of one row, in order."""
    row = tl.program_id(0).to(tl.int64)
    head, pair, split = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, P), tl.arange(0, SPLITS)
    at = (row * splits + split)[:, None] * H + head[None, :]
    tops = tl.load(part_top + at, mask=(split < splits)[:, None], other=float("-inf"))
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.load(part_total + at, mask=(split < splits)[:, None], other=0.0)
    total = tl.sum(totals * tl.exp(tops - base[None, :]), 0)
    even = tl.zeros((ROWS, P), tl.float32)
    odd = tl.zeros((ROWS, P), tl.float32)
    for i in range(splits):
        place = (row * splits + i) * H + head
        share = tl.exp(tl.load(part_top + place) - base)[:, None]
        even += share * tl.load(part_out + place[:, None] * (2 * P) + pair[None, :])
        odd += share * tl.load(part_out + place[:, None] * (2 * P) + P + pair[None, :])
    _finish(even, odd, top, total, sink, table, positions, out, row, head, heads, dim, P, RD)


class AttentionOps:
    """The op `sparse_attention`."""

    _arch: int
    _invariant: bool

    def sparse_attention(
        self, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope
    ) -> Tensor:
        rows, heads, dim = query.shape
        if not self._invariant and expands(rows, window, selected):
            return prefill_attention(query, window, selected, sink, scale, rope, self._arch)
        device = query.device
        out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=device)
        columns, topk = window.index.shape[1], selected.index.shape[1] if selected else 0
        window_blocks = ceil_div(columns, _KEYS)
        blocks = window_blocks + ceil_div(topk, _KEYS)
        split_blocks = blocks if self._invariant else ceil_div(blocks, max(1, min(blocks, _MOST_SPLITS, _PROGRAMS // max(rows, 1))))
        splits = ceil_div(blocks, max(split_blocks, 1))
        h, p, rd = power_of_two(heads, 16), power_of_two(dim // 2, 16), rope.table.shape[1]
        part_out = torch.empty(rows, splits, h, 2 * p, device=device) if splits > 1 else None
        part_sums = torch.empty(2, rows, splits, h, device=device) if splits > 1 else (None, None)
        ring = EntryLayout.of_ring(window.ring, dim)
        source: tuple[Tensor | None, ...] = (None, None, None, None)
        strides = (0, 0)
        if selected:
            pages = EntryLayout.of_pages(selected.pages)
            source = (selected.index, selected.pages.data, selected.pages.block_table, selected.pages.sequence)
            strides = (selected.index.stride(0), selected.pages.block_table.stride(0))
        else:
            pages = EntryLayout(1, 0, 0, 0, 0)
        launch(
            _attention_kernel, (rows, splits), query, out, part_sums[0], part_sums[1], part_out, window.index, window.ring.data,
            window.current, *source, sink, rope.table, rope.positions, scale, heads, dim, query.stride(0), query.stride(1), columns,
            window.index.stride(0), window.ring.data.shape[0] * ring.n, ring.n, ring.group_stride, ring.data_step, window.current.stride(0),
            topk, *strides, pages.n, pages.group_stride, pages.data_step, pages.scale_first, pages.scale_step, window_blocks, split_blocks,
            warps=8, stages=2, H=h, P=p, K=_KEYS, RD=rd, SELECTED=selected is not None,
            FP4=selected is not None and FORMATS[selected.pages.format] == 1, SPLIT=splits > 1, WHOLE=self._arch >= 100,
        )  # fmt: skip
        if splits > 1:
            launch(
                _merge_kernel, (rows, h // 16), part_sums[0], part_sums[1], part_out, out, sink, rope.table, rope.positions, heads, dim,
                splits, warps=8, H=h, ROWS=16, P=p, RD=rd, SPLITS=_MOST_SPLITS,
            )  # fmt: skip
        return out
