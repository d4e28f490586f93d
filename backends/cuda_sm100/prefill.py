"""Sparse attention for many rows: the keys are decoded once to bfloat16, then gathered by every row straight into shared memory.

Worth it when the rows that read a key outnumber the keys: a prefill chunk reads each entry of its sequence many times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.caches import FORMATS, EntryLayout
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import e2m1_value, turned
from deepinfer_backends.cuda_sm100.numeric import power_of_two as exact_power
from deepinfer_core.backend.types import Rope, SelectedEntries, WindowKeys

PREFILL_ROWS = 256
"""Rows from which keys are expanded, if there are not more than `_KEYS_PER_ROW` times as many of them."""

_KEYS_PER_ROW = 64
_KEYS = 64  # keys of one block


@triton.jit(do_not_specialize=["entries", "table_stride"])
def _expand_kernel(
    cache, table, out, entries, n, group_stride, data_step, scale_first, scale_step, dim, table_stride,
    PAGED: tl.constexpr, FP4: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """out[i] = bfloat16 values of entry i; PAGED: of entry i % entries of sequence i // entries, found through its block table."""
    i = tl.program_id(0).to(tl.int64)
    if PAGED:
        entry = i % entries
        group = tl.load(table + (i // entries) * table_stride + entry // n).to(tl.int64)
        slot = entry % n
    else:
        group, slot = i // n, i % n
    base = cache + group * group_stride
    pair = tl.arange(0, P)
    inside = pair < dim // 2
    two = tl.arange(0, 2)
    if FP4:
        byte = tl.load(base + slot * data_step + pair, mask=inside, other=0).to(tl.int32)
        scale = tl.load(base + scale_first + slot * scale_step + pair // 8, mask=inside, other=0)
        factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        both = tl.join(e2m1_value(byte & 15) * factor, e2m1_value(byte >> 4) * factor)
    else:
        at = base + slot * data_step + pair[:, None] * 2 + two[None, :]
        byte = tl.load(at, mask=inside[:, None], other=0)
        scale = tl.load(base + scale_first + slot * scale_step + pair // 16, mask=inside, other=127)
        both = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * exact_power(scale)[:, None]
    tl.store(out + i * dim + pair[:, None] * 2 + two[None, :], both.to(tl.bfloat16), mask=inside[:, None])


@triton.jit(do_not_specialize=["columns", "width", "window_stride", "selected_stride", "first_entry", "entries", "nothing"])
def _join_kernel(
    window, selected, sequence, out, columns, topk, width, window_stride, selected_stride, first_entry, entries, nothing,
    SELECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = rows of the expanded keys that the row attends to: its window, then its selected entries; row `nothing` for none."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    index = tl.load(window + row * window_stride + c, mask=c < columns, other=-1)
    if SELECTED:
        entry = tl.load(selected + row * selected_stride + c - columns, mask=(c >= columns) & (c < columns + topk), other=-1)
        index = tl.where(entry >= 0, first_entry + tl.load(sequence + row) * entries + entry, index)
    tl.store(out + row * width + c, tl.where(index >= 0, index, nothing), mask=c < width)


@triton.jit
def rotate_kernel(
    query, out, table, positions, heads, stride, head_stride, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, RD: tl.constexpr
):  # fmt: skip
    """out [rows, heads, DIM] = rotated queries of ROWS heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    mask = (head < heads)[:, None] & (d < DIM)[None, :]
    at = query + row * stride + head[:, None] * head_stride + d[None, :]
    q = turned(tl.load(at, mask=mask, other=0.0).to(tl.float32), table, tl.load(positions + row), 1.0, DIM, RD)
    tl.store(out + (row * heads + head[:, None]) * DIM + d[None, :], q, mask=mask)


@triton.jit(do_not_specialize=["width", "nothing"])
def _rows_kernel(
    query, keys, index, sink, table, positions, out, scale, heads, width, stride, head_stride, nothing,
    DIM: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, RD: tl.constexpr,
):  # fmt: skip
    """One row, all heads: online softmax over gathered keys. Row `nothing` of the keys is zero and does not count.

    The query is rotated already: what comes straight from memory stays in shared memory as an operand of wgmma, which then need not wait
    between products.
    """
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, H), tl.arange(0, D)
    mask = (head < heads)[:, None] & (d < DIM)[None, :]
    at = query + row * stride + head[:, None] * head_stride + d[None, :]
    q = tl.load(at, mask=mask, other=0.0)
    top = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    acc = tl.zeros((H, D), tl.float32)
    lane = tl.arange(0, K)
    for first in range(0, width, K):
        place = tl.load(index + row * width + first + lane)
        rows = keys + place.to(tl.int64)[:, None] * DIM + d[None, :]
        k = tl.load(rows) if DIM == D else tl.load(rows, mask=(d < DIM)[None, :], other=0.0)
        s = tl.where((place != nothing)[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        peak = tl.max(s, 1)
        # Sums are kept relative to `top`, which need not be the maximum: p stays below e^8 and rounds alike. So most blocks leave the
        # accumulators alone.
        if tl.max(peak - top, 0) > 8.0:
            new_top = tl.maximum(top, peak)
            shrink = tl.exp(top - tl.where(new_top == float("-inf"), 0.0, new_top))
            acc = acc * shrink[:, None]
            total = total * shrink
            top = new_top
        p = tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = total + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), k, acc)
    base = tl.where(top == float("-inf"), 0.0, top)
    total += tl.exp(tl.load(sink + head, mask=head < heads, other=0.0) - base)
    rounded = (acc * (1.0 / total)[:, None]).to(tl.bfloat16).to(tl.float32)
    back = turned(rounded, table, tl.load(positions + row), -1.0, DIM, RD)
    tl.store(out + (row * heads + head[:, None]) * DIM + d[None, :], back, mask=mask)


def expands(rows: int, window: WindowKeys, selected: SelectedEntries | None) -> bool:
    """Whether `prefill_attention` is the faster way. Decided by shapes alone."""
    keys = window.ring.data.shape[0] * window.ring.data.shape[1]
    if selected:
        keys += selected.pages.block_table.numel() * selected.pages.entries_per_page
    return rows >= PREFILL_ROWS and keys <= _KEYS_PER_ROW * rows


def prefill_attention(
    query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope, arch: int
) -> Tensor:
    """`sparse_attention` over expanded keys."""
    rows, heads, dim = query.shape
    keys, first_entry, entries = _expanded(window, selected, dim)
    columns, topk = window.index.shape[1], selected.index.shape[1] if selected else 0
    block = _KEYS if arch < 100 else _KEYS // 2  # SM100 pipelines deeper: half the block fits its shared memory
    width = ceil_div(columns + topk, _KEYS) * _KEYS
    index = torch.empty(rows, width, dtype=torch.int32, device=query.device)
    chosen, sequence, stride = (selected.index, selected.pages.sequence, selected.index.stride(0)) if selected else (None, None, 0)
    launch(
        _join_kernel, (rows,), window.index, chosen, sequence, index, columns, topk, width, window.index.stride(0), stride,
        first_entry, entries, len(keys) - 1, warps=2, SELECTED=selected is not None, BLOCK=power_of_two(width),
    )  # fmt: skip
    turned_query, out = (torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=query.device) for _ in range(2))
    launch(
        rotate_kernel, (rows, ceil_div(heads, 8)), query, turned_query, rope.table, rope.positions, heads, query.stride(0),
        query.stride(1), warps=4, DIM=dim, D=power_of_two(dim, 32), ROWS=8, RD=rope.table.shape[1],
    )  # fmt: skip
    launch(
        _rows_kernel, (rows,), turned_query, keys, index, sink, rope.table, rope.positions, out, scale, heads, width, heads * dim,
        dim, len(keys) - 1, warps=8, stages=2, DIM=dim, H=power_of_two(heads, 16), D=power_of_two(dim, 32), K=block,
        RD=rope.table.shape[1],
    )  # fmt: skip
    return out


def _expanded(window: WindowKeys, selected: SelectedEntries | None, dim: int) -> tuple[Tensor, int, int]:
    """(bf16 keys [*, dim], row of the first entry, entries of a sequence). Rows: the ring, this step, entries by sequence, one of zeros."""
    ring_rows, current = window.ring.data.shape[0] * window.ring.data.shape[1], window.current.shape[0]
    table = selected.pages.block_table if selected else None
    entries = 0 if selected is None or table is None else table.shape[1] * selected.pages.entries_per_page
    count = 0 if table is None else table.shape[0] * entries
    keys = torch.empty(ring_rows + current + count + 1, dim, dtype=torch.bfloat16, device=window.current.device)
    p = power_of_two(dim // 2, 16)
    ring = EntryLayout.of_ring(window.ring, dim)
    launch(_expand_kernel, (ring_rows,), window.ring.data, None, keys, 0, *ring.numbers(), dim, 0, warps=2, PAGED=False, FP4=False, P=p)
    keys[ring_rows : ring_rows + current] = window.current
    keys[-1] = 0
    if selected and table is not None:
        pages = EntryLayout.of_pages(selected.pages)
        launch(
            _expand_kernel, (count,), selected.pages.data, table, keys[ring_rows + current : -1], entries, *pages.numbers(), dim,
            table.stride(0), warps=2, PAGED=True, FP4=FORMATS[selected.pages.format] == 1, P=p,
        )  # fmt: skip
    return keys, ring_rows + current, entries
