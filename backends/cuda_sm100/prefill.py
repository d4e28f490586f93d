"""Sparse attention for many rows: the keys are decoded once to bfloat16, then gathered by every row straight into shared memory.

Worth it when the rows that read a key outnumber the keys: a prefill chunk reads each entry of its sequence many times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100 import hopper, hopper_prefill
from deepinfer_backends.cuda_sm100.caches import FORMATS, EntryLayout, fp4_keys, fp8_keys
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import turned
from deepinfer_core.backend.types import Rope, SelectedEntries, WindowKeys

PREFILL_ROWS = 256
"""Rows from which keys are expanded, if there are not more than `KEYS_PER_ROW` times as many of them."""

KEYS_PER_ROW = 64
_KEYS = 64  # keys of one block
_SIZES = 32  # rows of more tiles than this are taken for equally long
_EXPANDED = 16  # entries that one program expands


class RowJobs(NamedTuple):
    """What to do for each row, longest rows first."""

    places: Tensor  # int32 [rows, width]: rows of the expanded keys, as many as count; the rest names a row of zeros
    order: Tensor  # int32 [rows]: the row that is done i-th
    tally: Tensor  # int32 [rows]: its count


@triton.jit(do_not_specialize=["count", "entries", "table_stride"])
def _expand_kernel(
    cache, table, out, count, entries, n, group_stride, data_step, scale_first, scale_step, table_stride,
    PAGED: tl.constexpr, FP4: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out[i] = bfloat16 values of entry i; PAGED: of entry i % entries of sequence i // entries, found through its block table."""
    i = (tl.program_id(0) * E + tl.arange(0, E)).to(tl.int64)
    real = i < count
    if PAGED:
        entry = i % entries
        group = tl.load(table + (i // entries) * table_stride + entry // n, mask=real, other=0).to(tl.int64)
        slot = entry % n
    else:
        group, slot = i // n, i % n
    base = cache + tl.where(real, group, 0) * group_stride
    data, scales = base + slot * data_step, base + scale_first + slot * scale_step
    k = fp4_keys(data, scales, real, DIM, D, E) if FP4 else fp8_keys(data, scales, real, DIM, D, E)
    d = tl.arange(0, D)
    tl.store(out + i[:, None] * DIM + d[None, :], k, mask=real[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["columns", "width", "window_stride", "selected_stride", "first_entry", "entries", "nothing"])
def _join_kernel(
    window, selected, sequence, out, counts, places, sizes, columns, topk, width, window_stride, selected_stride, first_entry, entries,
    nothing, SELECTED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """out[row] = rows of the expanded keys that the row attends to: of its window, of its selected entries, `nothing` for the rest.

    counts[row]: how many; sizes[SIZES - 1 - n]: rows of n tiles; places[row]: place of the row among those of its size, in any order.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    index = tl.load(window + row * window_stride + c, mask=c < columns, other=-1)
    if SELECTED:
        entry = tl.load(selected + row * selected_stride + c - columns, mask=(c >= columns) & (c < columns + topk), other=-1)
        index = tl.where(entry >= 0, first_entry + tl.load(sequence + row) * entries + entry, index)
    real = index >= 0
    count = tl.sum(real.to(tl.int32), 0)
    tl.store(out + row * width + tl.cumsum(real.to(tl.int32), 0) - 1, index, mask=real)
    tl.store(out + row * width + c, nothing, mask=(c >= count) & (c < width))
    tl.store(counts + row, count)
    size = tl.minimum(tl.cdiv(count, TILE), SIZES - 1)
    tl.store(places + row, tl.atomic_add(sizes + SIZES - 1 - size, 1, sem="relaxed"))


@triton.jit(do_not_specialize=["rows"])
def _order_kernel(counts, places, sizes, order, tally, rows, BLOCK: tl.constexpr, TILE: tl.constexpr, SIZES: tl.constexpr):
    """order: the rows, those with most tiles first; tally: their counts."""
    row, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZES)
    inside = row < rows
    of_size = tl.load(sizes + n)
    first = tl.cumsum(of_size, 0) - of_size
    count = tl.load(counts + row, mask=inside, other=0)
    size = SIZES - 1 - tl.minimum(tl.cdiv(count, TILE), SIZES - 1)
    at = tl.load(places + row, mask=inside, other=0) + tl.sum(tl.where(size[:, None] == n[None, :], first[None, :], 0), 1)
    tl.store(order + at, row, mask=inside)
    tl.store(tally + at, count, mask=inside)


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


@triton.jit
def attend_block(q, k, inside, scale, top, total, acc):
    """One block of keys into the running softmax: (top, total, acc)."""
    s = tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(s - base[:, None])
    shrink = tl.exp(top - base)
    return new_top, total * shrink + tl.sum(p, 1), tl.dot(p.to(tl.bfloat16), k, acc * shrink[:, None])


@triton.jit(do_not_specialize=["width"])
def _rows_kernel(
    query, keys, index, order, tally, sink, table, positions, out, scale, heads, width, stride, head_stride,
    DIM: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, RD: tl.constexpr,
):  # fmt: skip
    """One row, all heads: online softmax over its gathered keys.

    The query is rotated already: what comes straight from memory stays in shared memory as an operand of wgmma, which then need not wait
    between products.
    """
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    count = tl.load(tally + tl.program_id(0))
    head, d = tl.arange(0, H), tl.arange(0, D)
    mask = (head < heads)[:, None] & (d < DIM)[None, :]
    at = query + row * stride + head[:, None] * head_stride + d[None, :]
    q = tl.load(at, mask=mask, other=0.0)
    top = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    acc = tl.zeros((H, D), tl.float32)
    lane = tl.arange(0, K)
    for first in range(0, count, K):
        place = tl.load(index + row * width + first + lane)
        rows = keys + place.to(tl.int64)[:, None] * DIM + d[None, :]
        k = tl.load(rows) if DIM == D else tl.load(rows, mask=(d < DIM)[None, :], other=0.0)
        top, total, acc = attend_block(q, k, first + lane < count, scale, top, total, acc)
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
    return rows >= PREFILL_ROWS and keys <= KEYS_PER_ROW * rows


def prefill_attention(
    query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope, arch: int
) -> Tensor:
    """`sparse_attention` over expanded keys."""
    rows, heads, dim = query.shape
    keys, first_entry, entries = _expanded(window, selected, dim)
    jobs = _joined(window, selected, first_entry, entries, len(keys) - 1)
    if hopper.serves(arch, heads, dim, rope.table.shape[1], scale):
        return hopper_prefill.attend(query, keys, *jobs, sink, scale, rope)
    block = _KEYS if arch < 100 else _KEYS // 2  # SM100 pipelines deeper: half the block fits its shared memory
    turned_query, out = (torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=query.device) for _ in range(2))
    launch(
        rotate_kernel, (rows, ceil_div(heads, 8)), query, turned_query, rope.table, rope.positions, heads, query.stride(0),
        query.stride(1), warps=4, DIM=dim, D=power_of_two(dim, 32), ROWS=8, RD=rope.table.shape[1],
    )  # fmt: skip
    launch(
        _rows_kernel, (rows,), turned_query, keys, jobs.places, jobs.order, jobs.tally, sink, rope.table, rope.positions, out, scale, heads,
        jobs.places.shape[1], heads * dim, dim, warps=8, stages=2, DIM=dim, H=power_of_two(heads, 16), D=power_of_two(dim, 32), K=block,
        RD=rope.table.shape[1],
    )  # fmt: skip
    return out


def _joined(window: WindowKeys, selected: SelectedEntries | None, first_entry: int, entries: int, nothing: int) -> RowJobs:
    """What each row attends to among the expanded keys, longest rows first."""
    rows, columns = window.index.shape
    topk = selected.index.shape[1] if selected else 0
    width = ceil_div(columns + topk, _KEYS) * _KEYS
    device = window.index.device
    index = torch.empty(rows, width, dtype=torch.int32, device=device)
    counts, places, order, tally = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(4))
    sizes = torch.zeros(_SIZES, dtype=torch.int32, device=device)
    chosen, sequence, stride = (selected.index, selected.pages.sequence, selected.index.stride(0)) if selected else (None, None, 0)
    launch(
        _join_kernel, (rows,), window.index, chosen, sequence, index, counts, places, sizes, columns, topk, width, window.index.stride(0),
        stride, first_entry, entries, nothing, warps=2, SELECTED=selected is not None, BLOCK=power_of_two(width), TILE=_KEYS, SIZES=_SIZES,
    )  # fmt: skip
    launch(_order_kernel, (ceil_div(rows, 256),), counts, places, sizes, order, tally, rows, warps=4, BLOCK=256, TILE=_KEYS, SIZES=_SIZES)
    return RowJobs(index, order, tally)


def _expanded(window: WindowKeys, selected: SelectedEntries | None, dim: int) -> tuple[Tensor, int, int]:
    """(bf16 keys [*, dim], row of the first entry, entries of a sequence). Rows: the ring, this step, entries by sequence, one of zeros."""
    ring_rows, current = window.ring.data.shape[0] * window.ring.data.shape[1], window.current.shape[0]
    table = selected.pages.block_table if selected else None
    entries = 0 if selected is None or table is None else table.shape[1] * selected.pages.entries_per_page
    count = 0 if table is None else table.shape[0] * entries
    keys = torch.empty(ring_rows + current + count + 1, dim, dtype=torch.bfloat16, device=window.current.device)
    ring = EntryLayout.of_ring(window.ring, dim)
    sizes = {"DIM": dim, "D": power_of_two(dim, 32), "E": _EXPANDED}
    launch(
        _expand_kernel, (ceil_div(ring_rows, _EXPANDED),), window.ring.data, None, keys, ring_rows, 0, *ring.numbers(), 0, warps=4,
        PAGED=False, FP4=False, **sizes,
    )  # fmt: skip
    keys[ring_rows : ring_rows + current] = window.current
    keys[-1] = 0
    if selected and table is not None:
        pages = EntryLayout.of_pages(selected.pages)
        launch(
            _expand_kernel, (ceil_div(count, _EXPANDED),), selected.pages.data, table, keys[ring_rows + current : -1], count, entries,
            *pages.numbers(), table.stride(0), warps=4, PAGED=True, FP4=FORMATS[selected.pages.format] == 1, **sizes,
        )  # fmt: skip
    return keys, ring_rows + current, entries
