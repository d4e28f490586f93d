"""The indexer: scores of cached keys, exact top-k with ties to the lower entry, candidate blocks.

Scores are computed keys x (rows * heads), so that keys, which are decoded, are the operand that tensor cores take from registers, and the
sum over heads stays within a few threads. The k-th highest score is found bit by bit on the ordered bits of the scores: exact, with no
sort, and independent of how the row is cut into parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.caches import IndexQueryRows
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.products import decoded_pairs
from deepinfer_core.backend.types import CandidateSpec, IndexQuery, PagedEntries, Selection

SCORE_BYTES = 256 << 20
"""Scores of at most this many bytes exist at once; more rows are handled in pieces."""

_PART = 8192  # scores that one program of the selection holds in registers
_KEYS = 128  # keys of one tile of scores
_MOST_TILES = 16  # tiles of keys for which a program keeps its queries
_PROGRAMS = 528  # programs below which no work is put together: four for each multiprocessor of an H200
_E2M1 = tl.constexpr("e2m1")


@triton.jit
def _entry_of(candidates, row, j, count, SIZE: tl.constexpr):
    """Entry number of place j of a row's candidate blocks, -1 where there is none."""
    block = tl.load(candidates + row * count + j // SIZE, mask=j // SIZE < count, other=-1)
    return tl.where(block >= 0, block * SIZE + j % SIZE, -1)


@triton.jit
def _queries(
    query, query_scales, weight, first_row, end_row, heads, dim, R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """(q, other, share): the index queries of R * H lanes as the right operands of `_dots`, and the weight of each lane's head."""
    lane = tl.arange(0, R * H)
    row, head = first_row + lane // H, lane % H
    real = (head < heads) & (row < end_row)
    q_row = row.to(tl.int64) * heads + head
    pair, group = tl.arange(0, D // 2), tl.arange(0, D // 32)
    inside = real[None, :] & (pair < dim // 2)[:, None]
    if SCALED:
        q = tl.load(query + (q_row * (dim // 2))[None, :] + pair[:, None], mask=inside, other=0)
        at = query_scales + (q_row * (dim // 32))[:, None] + group[None, :]
        other = tl.load(at, mask=real[:, None] & (group < dim // 32)[None, :], other=0)
    else:
        at = query + (q_row * dim)[None, :] + pair[:, None]
        q = tl.load(at, mask=inside, other=0.0)
        other = tl.load(at + dim // 2, mask=inside, other=0.0)
    return q, other, tl.load(weight + row * heads + head, mask=real, other=0.0)


@triton.jit
def _scores_of(
    q, other, share, pages, table, entry, inside, page_stride, n, data_bytes, section, dim,
    R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """float32 [K, R]: scores of K keys of one sequence for R rows."""
    page = tl.load(table + entry // n, mask=inside, other=0).to(tl.int64)
    slot = entry % n
    pair, group = tl.arange(0, D // 2), tl.arange(0, D // 32)
    at = pages + page * page_stride
    byte = tl.load((at + slot * data_bytes)[:, None] + pair[None, :], mask=inside[:, None] & (pair < dim // 2)[None, :], other=0)
    scale_at = (at + section + slot * (dim // 32))[:, None] + group[None, :]
    scale = tl.load(scale_at, mask=inside[:, None] & (group < dim // 32)[None, :], other=0)
    dots = tl.zeros((K, R * H), tl.float32)
    if SCALED:
        dots = tl.dot_scaled(byte, scale, _E2M1, q, other, _E2M1, dots)
    else:
        even, odd = decoded_pairs(byte)
        factor = (scale.to(tl.int32) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, :, None]
        even = tl.reshape(tl.reshape(even, (K, D // 32, 16)) * factor, (K, D // 2))
        odd = tl.reshape(tl.reshape(odd, (K, D // 32, 16)) * factor, (K, D // 2))
        dots = tl.dot(even, q, dots)
        dots = tl.dot(odd, other, dots)
    return tl.sum(tl.reshape(tl.maximum(dots, 0.0) * share[None, :], (K, R, H)), 2)


@triton.jit
def _score_tile(
    start, q, other, share, pages, table, candidates, scores, first_row, first, most, seen, belongs, width, count,
    page_stride, n, data_bytes, section, dim,
    R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Scores of the K places from `start` on, for the rows that belong to the sequence of `table`."""
    j = start + tl.arange(0, K)
    entry = _entry_of(candidates, first_row + first, j, count, SIZE) if SIZE > 0 else j
    inside = (entry >= 0) & (entry < most)
    values = _scores_of(
        q, other, share, pages, table, entry, inside, page_stride, n, data_bytes, section, dim, R, H, D, K, SCALED
    )  # fmt: skip
    keep = belongs[None, :] & inside[:, None] & (entry[:, None] < seen[None, :])
    at = scores + (first + tl.arange(0, R)).to(tl.int64)[None, :] * width + j[:, None]
    tl.store(at, values, mask=keep & (j < width)[:, None])


@triton.jit(do_not_specialize=["rows", "first_row", "width", "count", "table_stride"])
def _score_kernel(
    query, query_scales, weight, pages, table, sequence, visible, candidates, scores, rows, first_row, width, count, table_stride,
    page_stride, n, data_bytes, section, heads, dim,
    R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Scores of TILES tiles of K keys for R rows: by entry number, or (SIZE > 0, R = 1) by place in the row's candidate blocks.

    Rows of a tile may belong to several sequences: each run of rows of one sequence gets a pass of its own.
    """
    first = tl.program_id(1) * R  # among the rows of `scores`
    lane = tl.arange(0, R)
    row = first_row + first + lane
    here = first + lane < rows
    seen = tl.load(visible + row, mask=here, other=0)
    last = width
    if SIZE == 0:
        last = tl.max(seen, 0)
    begin = tl.program_id(0) * (K * TILES)
    if begin < last:
        q, other, share = _queries(query, query_scales, weight, first_row + first, first_row + rows, heads, dim, R, H, D, SCALED)
        mine = tl.load(sequence + row, mask=here, other=-1)
        previous = -1
        for i in tl.static_range(R):
            own = tl.max(tl.where(lane == i, mine, -1), 0)
            if (own >= 0) & (own != previous):
                most = tl.max(tl.where(mine == own, seen, 0), 0)
                keys = table + own * table_stride
                belongs = mine == own
                if TILES == 1:
                    _score_tile(
                        begin, q, other, share, pages, keys, candidates, scores, first_row, first, most, seen, belongs, width, count,
                        page_stride, n, data_bytes, section, dim, R, H, D, K, SIZE, SCALED,
                    )  # fmt: skip
                else:
                    for start in range(begin, tl.minimum(begin + K * TILES, last), K):
                        _score_tile(
                            start, q, other, share, pages, keys, candidates, scores, first_row, first, most, seen, belongs, width, count,
                            page_stride, n, data_bytes, section, dim, R, H, D, K, SIZE, SCALED,
                        )  # fmt: skip
            previous = own


@triton.jit(do_not_specialize=["width", "blocks"])
def _block_max_kernel(scores, visible, best, width, blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Highest visible score of each block of SIZE entries; +inf for the row's last visible block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(visible + row)
    entry = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(scores + row * width + entry, mask=(entry < seen) & (entry < width), other=float("-inf"))
    value = tl.where(block == (seen - 1) // SIZE, float("inf"), tl.max(x, 1))
    tl.store(best + row * blocks + block, value, mask=block < blocks)


@triton.jit(do_not_specialize=["width", "count", "parts"])
def _select_kernel(
    scores, index, candidates, visible, out_scores, out_index, width, count, topk, parts, unit,
    INDEXED: tl.constexpr, SIZE: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The topk highest scores of one part of one row, by ascending entry; equal scores: the lower entry first. -1 padded.

    The entry of place j is index[row, j] (INDEXED), the row's candidate entry j (SIZE > 0), or j, if it is below the row's `visible`
    (counted in units of `unit` entries). LAST: only entries are wanted, else also their scores.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = part * BLOCK + tl.arange(0, BLOCK)
    seen = tl.cdiv(tl.load(visible + row), unit)
    if INDEXED:
        entry = tl.load(index + row * width + j, mask=j < width, other=-1)
    elif SIZE > 0:
        entry = _entry_of(candidates, row, j, count, SIZE)
    else:
        entry = j
    valid = (j < width) & (entry >= 0) & (entry < seen)
    score = tl.load(scores + row * width + j, mask=valid, other=0.0)
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    # Ordered bits of a float are never 0 except for a NaN: 0 marks what may not be chosen.
    key = tl.where(valid, tl.where(bits < 0, ~bits, bits ^ -2147483648), 0).to(tl.uint32, bitcast=True)
    number = tl.sum(valid.to(tl.int32), 0)
    keep = valid
    if number > topk:
        bound = tl.full((), 0, tl.uint32)
        bit = tl.full((), 2147483648, tl.uint32)
        for _ in range(32):
            tried = bound | bit
            bound = tl.where(tl.sum((key >= tried).to(tl.int32), 0) >= topk, tried, bound)
            bit = bit >> 1
        above = (key > bound).to(tl.int32)
        equal = (key == bound).to(tl.int32)
        keep = (above > 0) | ((equal > 0) & (tl.cumsum(equal, 0) <= topk - tl.sum(above, 0)))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    base = (row * parts + part) * topk
    tl.store(out_index + base + place, entry, mask=keep)
    if not LAST:
        tl.store(out_scores + base + place, score, mask=keep)
    for first in range(0, topk, BLOCK):
        empty = first + tl.arange(0, BLOCK)
        tl.store(out_index + base + empty, tl.full((BLOCK,), -1, tl.int32), mask=(empty >= number) & (empty < topk))


class IndexerOps:
    """The op `select_entries`."""

    def select_entries(
        self,
        query: IndexQuery,
        head_weights: Tensor,
        keys: PagedEntries,
        visible: Tensor,
        topk: int,
        candidates: Tensor | None = None,
        emit: CandidateSpec | None = None,
        block_size: int = 0,
    ) -> Selection:
        rows = visible.shape[0]
        width = keys.block_table.shape[1] * keys.entries_per_page
        index = torch.empty(rows, topk, dtype=torch.int32, device=visible.device)
        blocks = None if emit is None else torch.empty(rows, emit.blocks, dtype=torch.int32, device=visible.device)
        listed = candidates.contiguous() if candidates is not None else None
        places = width if listed is None else listed.shape[1] * block_size
        step = max(4, SCORE_BYTES // (4 * max(places, width, 1)) // 4 * 4)
        for first in range(0, rows, step):
            piece = slice(first, min(first + step, rows))
            dense = None
            if listed is None or emit is not None:
                dense = _scores(query, head_weights, keys, visible, piece, width, None, 0)
            if emit is not None and blocks is not None and dense is not None:
                _best_blocks(dense, visible[piece], emit, blocks[piece])
            if listed is None and dense is not None:
                _select(dense, None, visible[piece], index[piece])
            elif listed is not None:
                compact = _scores(query, head_weights, keys, visible, piece, places, listed, block_size)
                _select(compact, listed[piece], visible[piece], index[piece], block_size)
        return Selection(index, blocks)


def _scores(
    query: IndexQueryRows, weights: Tensor, keys: PagedEntries, visible: Tensor, piece: slice, places: int, candidates: Tensor | None,
    block_size: int,
) -> Tensor:  # fmt: skip
    """float32 [rows of the piece, places]; places that no row may choose stay unwritten."""
    rows = piece.stop - piece.start
    heads = query.values.shape[1]
    scores = torch.empty(rows, places, dtype=torch.float32, device=visible.device)
    head_lanes = power_of_two(heads)
    many = candidates is None and rows >= 4 * keys.block_table.shape[0]
    tile_rows = max(4 if many else 1, 16 // head_lanes)
    if candidates is not None:
        tile_rows, head_lanes = 1, max(head_lanes, 16)
    data_bytes = keys.format.data_bytes(keys.dim)
    tiles = min(_MOST_TILES, max(1, ceil_div(places, _KEYS) * ceil_div(rows, tile_rows) // _PROGRAMS))
    # Triton 3.6 does not compile a block-scaled product whose scales stay the same in a loop (SM100).
    tiles = 1 if query.scales is not None else 1 << (tiles.bit_length() - 1)
    launch(
        _score_kernel, (ceil_div(places, _KEYS * tiles), ceil_div(rows, tile_rows)),
        query.values, query.scales, weights.float().contiguous(), keys.data, keys.block_table, keys.sequence, visible, candidates, scores,
        rows, piece.start, places, 0 if candidates is None else candidates.shape[1], keys.block_table.stride(0), keys.data.stride(0),
        keys.entries_per_page, data_bytes, keys.entries_per_page * data_bytes, heads, keys.dim,
        warps=8 if tile_rows * head_lanes >= 128 else 4, R=tile_rows, H=head_lanes, D=power_of_two(keys.dim, 32), K=_KEYS, TILES=tiles,
        SIZE=block_size if candidates is not None else 0, SCALED=query.scales is not None,
    )  # fmt: skip
    return scores


def _best_blocks(scores: Tensor, visible: Tensor, spec: CandidateSpec, out: Tensor) -> None:
    rows, width = scores.shape
    blocks = ceil_div(width, spec.block_size)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    block = min(512, power_of_two(blocks))
    launch(
        _block_max_kernel, (rows, ceil_div(blocks, block)), scores, visible, best, width, blocks, warps=4, SIZE=spec.block_size, BLOCK=block
    )
    _select(best, None, visible, out, unit=spec.block_size)


def _select(scores: Tensor, candidates: Tensor | None, visible: Tensor, out: Tensor, block_size: int = 0, unit: int = 1) -> None:
    """Fills out [rows, topk] with the entries of the highest scores; wide rows are narrowed part by part first."""
    rows, topk = out.shape
    index = None
    while True:
        width = scores.shape[1]
        block = min(max(_PART, power_of_two(2 * topk)), power_of_two(max(width, 32)))
        parts = ceil_div(width, block)
        last = parts <= 1
        next_scores = None if last else torch.empty(rows, parts * topk, dtype=torch.float32, device=out.device)
        next_index = out if last else torch.empty(rows, parts * topk, dtype=torch.int32, device=out.device)
        launch(
            _select_kernel, (rows, max(parts, 1)), scores, index, candidates, visible, next_scores, next_index, width,
            0 if candidates is None else candidates.shape[1], topk, parts, unit,
            warps=8, INDEXED=index is not None, SIZE=block_size if index is None and candidates is not None else 0, LAST=last, BLOCK=block,
        )  # fmt: skip
        if last or next_scores is None:
            return
        scores, index = next_scores, next_index
