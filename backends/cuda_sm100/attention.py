"""Sparse attention over window keys and selected entries, read from their byte formats: the way for few rows (see `prefill` for many).

A program handles all heads of one row and a share of its keys, so that few rows still fill the device; shares are merged by their
log-sum-exp. Queries are rotated by a kernel of their own, because every share needs them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100 import hopper, hopper_decode
from deepinfer_backends.cuda_sm100.caches import FORMATS, EntryLayout, fp4_keys, fp8_keys
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import turned
from deepinfer_backends.cuda_sm100.prefill import attend_block, expands, prefill_attention, rotate_kernel
from deepinfer_core.backend.types import Rope, SelectedEntries, WindowKeys

_KEYS = 32  # keys of one block: two blocks in flight, their decoded copy and the query fill the shared memory of a multiprocessor
_MOST_SPLITS = 32
_PROGRAMS = 132  # multiprocessors of an H200; one program fills one


_VARYING = ["columns", "window_stride", "table_stride", "selected_stride", "window_blocks", "split_blocks"]


@triton.jit(do_not_specialize=_VARYING)
def _attention_kernel(
    query, part_top, part_total, part_out, window_index, ring, current, selected, pages, block_table, sequence,
    scale, heads, columns, window_stride, ring_rows, ring_n, ring_stride, ring_step, current_stride,
    topk, selected_stride, table_stride, page_n, page_stride, page_step, page_scale_first, page_scale_step, window_blocks, split_blocks,
    H: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SELECTED: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """Blocks split*split_blocks .. of one row's keys: window blocks first, then selected ones. query: rotated, [rows, heads, DIM]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, d, lane = tl.arange(0, H), tl.arange(0, D), tl.arange(0, K)
    q_mask = (head < heads)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + (row * heads + head[:, None]) * DIM + d[None, :], mask=q_mask, other=0.0)
    top = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    acc = tl.zeros((H, D), tl.float32)
    first, last = split * split_blocks, (split + 1) * split_blocks
    for block in range(first, tl.minimum(last, window_blocks)):
        c = block * K + lane
        index = tl.load(window_index + row * window_stride + c, mask=c < columns, other=-1)
        stored = (index >= 0) & (index < ring_rows)
        slot = tl.where(stored, index, 0)
        at = ring + (slot // ring_n).to(tl.int64) * ring_stride + (slot % ring_n) * ring_step
        k = fp8_keys(at, at + DIM, stored, DIM, D, K)
        fresh = index >= ring_rows
        mine = current + tl.where(fresh, index - ring_rows, 0).to(tl.int64) * current_stride
        k = tl.where(fresh[:, None], tl.load(mine[:, None] + d[None, :], mask=fresh[:, None] & (d < DIM)[None, :], other=0.0), k)
        top, total, acc = attend_block(q, k, index >= 0, scale, top, total, acc)
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
            k = fp4_keys(data, scales, inside, DIM, D, K) if FP4 else fp8_keys(data, scales, inside, DIM, D, K)
            top, total, acc = attend_block(q, k, inside, scale, top, total, acc)
    at_part = (row * tl.num_programs(1) + split) * H + head
    tl.store(part_top + at_part, top)
    tl.store(part_total + at_part, total)
    tl.store(part_out + at_part[:, None] * D + d[None, :], acc)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_top, part_total, part_out, out, sink, table, positions, heads, splits,
    H: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, RD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one row: adds up the shares in order, divides by the sum with the sink, rounds, rotates back."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, d = tl.arange(0, SPLITS), tl.arange(0, D)
    at = (row * splits + split) * H + head
    real = split < splits
    tops = tl.load(part_top + at, mask=real, other=float("-inf"))
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp(tops - base)
    total = tl.sum(tl.load(part_total + at, mask=real, other=0.0) * share, 0) + tl.exp(tl.load(sink + head) - base)
    values = tl.load(part_out + at[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    rounded = (tl.sum(values * share[:, None], 0) / total).to(tl.bfloat16).to(tl.float32)
    back = tl.reshape(turned(rounded[None, :], table, tl.load(positions + row), -1.0, DIM, RD), (D,))
    tl.store(out + (row * heads + head) * DIM + d, back, mask=d < DIM)


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
        if hopper_decode.serves(self._arch, query, window, selected, rope, scale):
            return self._attention_on_hopper(query, window, selected, sink, scale, rope)
        device = query.device
        columns, topk = window.index.shape[1], selected.index.shape[1] if selected else 0
        blocks = ceil_div(columns, _KEYS) + ceil_div(topk, _KEYS)
        split_blocks = blocks if self._invariant else ceil_div(blocks, max(1, min(blocks, _MOST_SPLITS, _PROGRAMS // max(rows, 1))))
        splits = ceil_div(blocks, max(split_blocks, 1))
        h, d, rd = power_of_two(heads, 16), power_of_two(dim, 32), rope.table.shape[1]
        turned_query, out = (torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
        part_out = torch.empty(rows, splits, h, d, device=device)
        part_top, part_total = torch.empty(2, rows, splits, h, device=device)
        ring = EntryLayout.of_ring(window.ring, dim)
        pages = EntryLayout(1, 0, 0, 0, 0)
        source: tuple[Tensor | None, ...] = (None, None, None, None)
        strides = (0, 0)
        if selected:
            pages = EntryLayout.of_pages(selected.pages)
            source = (selected.index, selected.pages.data, selected.pages.block_table, selected.pages.sequence)
            strides = (selected.index.stride(0), selected.pages.block_table.stride(0))
        launch(
            rotate_kernel, (rows, ceil_div(heads, 8)), query, turned_query, rope.table, rope.positions, heads, query.stride(0),
            query.stride(1), warps=4, DIM=dim, D=d, ROWS=8, RD=rd,
        )  # fmt: skip
        launch(
            _attention_kernel, (rows, splits), turned_query, part_top, part_total, part_out, window.index, window.ring.data,
            window.current, *source, scale, heads, columns, window.index.stride(0), window.ring.data.shape[0] * ring.n, ring.n,
            ring.group_stride, ring.data_step, window.current.stride(0), topk, *strides, *pages.numbers(), ceil_div(columns, _KEYS),
            split_blocks, warps=8, stages=2, H=h, DIM=dim, D=d, K=_KEYS, SELECTED=selected is not None,
            FP4=selected is not None and FORMATS[selected.pages.format] == 1,
        )  # fmt: skip
        launch(
            merge_kernel, (rows, heads), part_top, part_total, part_out, out, sink, rope.table, rope.positions, heads, splits,
            warps=4, H=h, DIM=dim, D=d, RD=rd, SPLITS=_MOST_SPLITS,
        )  # fmt: skip
        return out

    def _attention_on_hopper(
        self, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope
    ) -> Tensor:
        rows, heads, dim = query.shape
        tile = hopper.TILE_KEYS
        tiles = ceil_div(window.index.shape[1], tile) + ceil_div(selected.index.shape[1] if selected else 0, tile)
        # Two tiles take less time than merging their shares.
        splits = 1 if self._invariant or tiles <= 2 else max(1, min(tiles, _PROGRAMS // max(rows, 1)))
        out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=query.device)
        if splits == 1:
            hopper_decode.attend(query, window, selected, sink, scale, rope, out, None, 1)
            return out
        h = hopper.HEADS
        part_out = torch.empty(rows, splits, h, dim, device=query.device)
        part_top, part_total = torch.empty(2, rows, splits, h, device=query.device)
        hopper_decode.attend(query, window, selected, sink, scale, rope, out, (part_top, part_total, part_out), splits)
        launch(
            merge_kernel, (rows, heads), part_top, part_total, part_out, out, sink, rope.table, rope.positions, heads, splits, warps=4,
            H=h, DIM=dim, D=dim, RD=rope.table.shape[1], SPLITS=power_of_two(splits, 4),
        )  # fmt: skip
        return out
