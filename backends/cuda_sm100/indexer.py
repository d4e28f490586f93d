"""The indexer: scores of cached keys, exact top-k with ties to the lower entry, candidate blocks.

Scores are computed keys x (rows * heads), so that keys, which are decoded, are the operand that tensor cores take from registers, and the
sum over heads stays within a few threads. The k-th highest score is found by halving the interval that holds it: exact, with no sort, and
independent of how the row is cut into parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.caches import IndexQueryRows
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.products import bf16_product, decoded_pairs
from deepinfer_core.backend.types import CandidateSpec, IndexQuery, PagedEntries, Selection

SCORE_BYTES = 256 << 20
"""Scores of at most this many bytes exist at once; more rows are handled in pieces."""

_PART = 8192  # scores that one program of the selection holds in registers
_KEYS = 128  # keys of one tile of scores; half of them where several rows share them, so that two programs fit a multiprocessor
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
    q, other, share, pages, table, entry, inside, page_stride, data_bytes, section, dim,
    R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """float32 [K, R]: scores of K keys of one sequence for R rows. WORDS: four scale bytes are read as one aligned word."""
    page = tl.load(table + entry // PAGE, mask=inside, other=0).to(tl.int64)
    slot = entry % PAGE
    pair, group = tl.arange(0, D // 2), tl.arange(0, D // 32)
    at = pages + page * page_stride
    byte = tl.load((at + slot * data_bytes)[:, None] + pair[None, :], mask=inside[:, None] & (pair < dim // 2)[None, :], other=0)
    scale_at = at + section + slot * (dim // 32)
    if WORDS:
        quad = tl.arange(0, D // 128)
        word_at = scale_at.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + quad[None, :]
        word = tl.load(word_at, mask=inside[:, None] & (quad * 128 < dim)[None, :], other=0)
        scale = tl.reshape((word[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255, (K, D // 32))
    else:
        scale = tl.load(scale_at[:, None] + group[None, :], mask=inside[:, None] & (group < dim // 32)[None, :], other=0)
    dots = tl.zeros((K, R * H), tl.float32)
    if SCALED:
        dots = tl.dot_scaled(byte, scale.to(tl.uint8), _E2M1, q, other, _E2M1, dots)
    else:
        even, odd = decoded_pairs(byte)
        factor = (scale.to(tl.int32) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, :, None]
        factor = tl.reshape(tl.broadcast_to(factor, (K, D // 32, 16)), (K, D // 2))
        even, odd = bf16_product(even, factor), bf16_product(odd, factor)
        dots = tl.dot(even, q, dots)
        dots = tl.dot(odd, other, dots)
    return tl.sum(tl.reshape(tl.maximum(dots, 0.0) * share[None, :], (K, R, H)), 2)


@triton.jit
def _score_tile(
    start, q, other, share, pages, table, candidates, scores, first_row, first, most, seen, belongs, width, count,
    page_stride, data_bytes, section, dim,
    R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Scores of the K places from `start` on, for the rows that belong to the sequence of `table`."""
    j = start + tl.arange(0, K)
    entry = _entry_of(candidates, first_row + first, j, count, SIZE) if SIZE > 0 else j
    inside = (entry >= 0) & (entry < most)
    values = _scores_of(
        q, other, share, pages, table, entry, inside, page_stride, data_bytes, section, dim, R, H, D, K, PAGE, SCALED, WORDS
    )  # fmt: skip
    keep = belongs[None, :] & inside[:, None] & (entry[:, None] < seen[None, :])
    at = scores + (first + tl.arange(0, R)).to(tl.int64)[None, :] * width + j[:, None]
    tl.store(at, values, mask=keep & (j < width)[:, None])


@triton.jit(do_not_specialize=["rows", "first_row", "width", "count", "table_stride"])
def _score_kernel(
    query, query_scales, weight, pages, table, sequence, visible, candidates, scores, rows, first_row, width, count, table_stride,
    page_stride, data_bytes, section, heads, dim,
    R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SCALED: tl.constexpr, WORDS: tl.constexpr,
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
        for i in range(R):
            own = tl.max(tl.where(lane == i, mine, -1), 0)
            if (own >= 0) & (own != previous):
                most = tl.max(tl.where(mine == own, seen, 0), 0)
                keys = table + own * table_stride
                belongs = mine == own
                if TILES == 1:
                    _score_tile(
                        begin, q, other, share, pages, keys, candidates, scores, first_row, first, most, seen, belongs, width, count,
                        page_stride, data_bytes, section, dim, R, H, D, K, SIZE, PAGE, SCALED, WORDS,
                    )  # fmt: skip
                else:
                    for start in range(begin, tl.minimum(begin + K * TILES, last), K):
                        _score_tile(
                            start, q, other, share, pages, keys, candidates, scores, first_row, first, most, seen, belongs, width, count,
                            page_stride, data_bytes, section, dim, R, H, D, K, SIZE, PAGE, SCALED, WORDS,
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


@triton.jit
def _entry(index, candidates, row, j, width, count, mask, INDEXED: tl.constexpr, SIZE: tl.constexpr):
    """Entries of places j: index[row, j] (INDEXED), the row's candidate entry j (SIZE > 0), or j."""
    if INDEXED:
        return tl.load(index + row * width + j, mask=mask, other=-1)
    elif SIZE > 0:  # noqa: RET505 - both are compile-time branches
        return tl.where(mask, _entry_of(candidates, row, j, count, SIZE), -1)
    else:
        return j


@triton.jit
def _ordered(score):
    """uint32 that orders float32 as the values do (-0 as 0); never 0 except for a NaN."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    """The float32 of an ordered key."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _bound(key, valid, topk):
    """The topk-th highest of more than topk valid keys, or a higher key that as many keys reach.

    Halves the interval between the lowest and the highest key: first by value, because scores lie densely around the bound, after 20 steps
    by key, which ends for any input.
    """
    low = tl.min(tl.where(valid, key, 0xFFFFFFFF), 0)  # at least topk keys are >= low
    high = tl.max(key, 0)  # fewer than topk keys are > high
    step = 0
    while low < high:
        middle = low + (high - low) // 2
        if step < 20:
            middle = tl.minimum(tl.maximum(_ordered(0.5 * _value(low) + 0.5 * _value(high)), low), high - 1)
        above = tl.sum((key > middle).to(tl.int32), 0)
        high = tl.where(above > topk, high, tl.where(above == topk, middle + 1, middle))
        low = tl.where(above >= topk, middle + 1, low)
        step += 1
    return low


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
    valid = j < width
    if INDEXED or SIZE > 0:
        entry = _entry(index, candidates, row, j, width, count, valid, INDEXED, SIZE)
        valid &= (entry >= 0) & (entry < seen)
    else:
        valid &= j < seen
    # 0 marks what may not be chosen. Only the keys stay in registers: scores and entries are read again where they are kept.
    key = tl.where(valid, _ordered(tl.load(scores + row * width + j, mask=valid, other=0.0)), 0)
    number = tl.sum(valid.to(tl.int32), 0)
    keep = valid
    if number > topk:
        bound = _bound(key, valid, topk)
        keep = key >= bound
        if tl.sum(keep.to(tl.int32), 0) > topk:  # the lower entries among equals
            above = tl.sum((key > bound).to(tl.int32), 0)
            equal = (key == bound).to(tl.int32)
            keep = (key > bound) | ((equal > 0) & (tl.cumsum(equal, 0) <= topk - above))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    base = (row * parts + part) * topk
    tl.store(out_index + base + place, _entry(index, candidates, row, j, width, count, keep, INDEXED, SIZE), mask=keep)
    if not LAST:
        tl.store(out_scores + base + place, tl.load(scores + row * width + j, mask=keep, other=0.0), mask=keep)
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
    data_bytes, tile_keys = keys.format.data_bytes(keys.dim), _KEYS // 2 if many else _KEYS
    tiles = min(_MOST_TILES, max(1, ceil_div(places, tile_keys) * ceil_div(rows, tile_rows) // _PROGRAMS))
    # Triton 3.6 does not compile a block-scaled product whose scales stay the same in a loop (SM100).
    tiles = 1 if query.scales is not None else 1 << (tiles.bit_length() - 1)
    launch(
        _score_kernel, (ceil_div(places, tile_keys * tiles), ceil_div(rows, tile_rows)),
        query.values, query.scales, weights.float().contiguous(), keys.data, keys.block_table, keys.sequence, visible, candidates, scores,
        rows, piece.start, places, 0 if candidates is None else candidates.shape[1], keys.block_table.stride(0), keys.data.stride(0),
        data_bytes, keys.entries_per_page * data_bytes, heads, keys.dim,
        warps=8 if tile_keys * tile_rows * head_lanes > 64 * 128 else 4, R=tile_rows, H=head_lanes, D=power_of_two(keys.dim, 32),
        K=tile_keys, TILES=tiles, SIZE=block_size if candidates is not None else 0, PAGE=keys.entries_per_page,
        SCALED=query.scales is not None, WORDS=keys.dim % 128 == 0 and keys.data.stride(0) % 4 == 0,
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
            warps=4 if rows >= 1024 and index is None and candidates is None else 8, INDEXED=index is not None,
            SIZE=block_size if index is None and candidates is not None else 0, LAST=last, BLOCK=block,
        )  # fmt: skip
        if last or next_scores is None:
            return
        scores, index = next_scores, next_index
