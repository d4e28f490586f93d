"""What every row of a step needs to know: positions, window keys, slots, visibility, n-grams.

All of it is integer arithmetic in torch on the model's device, from a handful of numbers per sequence. So a step can be launched whose
starting positions are known on the device only (asynchronous speculation), and no backend has to supply any of it.

Each operation is a launch: a decode step of one sequence takes a few milliseconds, so what can be shared is computed once, in int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_core.backend.types import CompressorRows


@dataclass(frozen=True)
class BatchGeometry:
    """The sizes that turn positions into slots."""

    window: int  # W, sliding_window
    ring: int  # R, entries of a window ring
    compressor_ring: int  # rows of a compressor ring
    state_slots: int  # number of state slots of the pool
    page_tokens: int
    ratios: tuple[int, ...]  # compress ratios that occur, each >= 1
    ngram: int  # engram_max_ngram_size; 0: no Engram


@dataclass(frozen=True)
class SequenceInputs:
    """One step's sequences, on the device. S sequences; T, the sum of query_len, is the length of `tokens`."""

    query_len: Tensor  # int64 [S]
    start: Tensor  # int64 [S]: position of the sequence's first row
    state_slot: Tensor  # int64 [S]; 0 marks padding, whose rows store nothing
    block_table: Tensor  # int32 [S, P]
    valid_start: Tensor  # int64 [S]: first position whose window key may be read
    write_start: Tensor  # int64 [S]: rows below it write no page
    history: Tensor  # int64 [S, N-1]: token ids before `start`, oldest first, -1 where there is none
    tokens: Tensor  # int64 [T]
    truncation: Truncation | None = None
    one_row: bool = False  # the host promises that every sequence has exactly one row; spares gathers


@dataclass(frozen=True)
class Truncation:
    """Decoder-side bounded replay: decoder layers see only positions >= keep_from."""

    keep_from: Tensor  # int64 [S]; 0 for sequences that decode
    kept_len: Tensor | None  # int64 [S]: last rows of each sequence that decoder layers run on ("compact"); None: all rows ("mask")
    kept_rows: int = 0  # sum of kept_len


@dataclass(frozen=True)
class RowMeta:
    """Per row of a step (or of its kept part)."""

    positions: Tensor  # int64 [T]
    sequence: Tensor  # int32 [T]
    window_index: Tensor  # int32 [T, W], see WindowKeys
    window_slots: Tensor  # int32 [T], -1: do not store
    visible: dict[int, Tensor]  # ratio -> int32 [T]: visible compressed entries


@dataclass(frozen=True)
class EntryMeta:
    """Per row: the compressed entry that it completes, if any."""

    slots: Tensor  # int32 [T]: page*n + entry, -1: none
    positions: Tensor  # int64 [T]: position of the group's first token (0 if none)
    rows: CompressorRows | None  # None for ratio 1


@dataclass(frozen=True)
class StepBatch:
    """One step, ready for the model graph."""

    tokens: Tensor  # int64 [T]
    rows: RowMeta
    entries: dict[int, EntryMeta]  # by ratio
    block_table: Tensor  # int32 [S, P]
    ngrams: Tensor | None  # int64 [T, N] compressed ids, own token first
    kept: Tensor | None = None  # int64: rows that go through the decoder half; None: all
    decoder_rows: RowMeta | None = None  # metadata of the decoder half; None: as `rows`


class _Rows(NamedTuple):
    """Per row of a packed set of sequences, int32 [T]: what its sequence and its place there say."""

    sequence: Tensor
    offset: Tensor | None  # row within its sequence; None: 0 everywhere
    positions: Tensor
    start: Tensor  # position of the first row
    state_slot: Tensor
    valid_start: Tensor
    write_start: Tensor
    query_len: Tensor
    shift: Tensor  # row minus position
    real: Tensor  # bool: not padding, whose state slot is 0
    none: Tensor  # int32 []: -1

    def newest(self, count: int) -> Tensor:
        """bool [T]: rows that a ring of `count` entries keeps; older ones would be overwritten by this step."""
        return self.real if self.offset is None else self.real & (self.offset >= self.query_len - count)

    def pages(self, block_table: Tensor, page: Tensor) -> Tensor:
        """int32 [T]: the page numbered `page` of each row's sequence; the last one if there are fewer."""
        page = page.clamp_max(block_table.shape[1] - 1)
        return block_table.gather(1, page[:, None].long())[:, 0] if self.offset is None else block_table[self.sequence, page]


def build_batch(g: BatchGeometry, s: SequenceInputs, token_map: Tensor | None, pad_id: int) -> StepBatch:
    """Metadata of one step. token_map int64 [V] maps ids to compressed ids for Engram (None: no Engram)."""
    rows = _rows(s, s.query_len, s.start, s.valid_start, len(s.tokens))
    meta = _row_meta(g, rows)
    entries = {r: _entry_meta(g, r, s, rows, meta) for r in g.ratios}
    ngrams = None if token_map is None else _ngrams(s, rows, token_map, pad_id, g.ngram)
    kept, decoder_rows = _truncate(g, s) if s.truncation else (None, None)
    return StepBatch(s.tokens, meta, entries, s.block_table, ngrams, kept, decoder_rows)


def _rows(s: SequenceInputs, query_len: Tensor, start: Tensor, valid_start: Tensor, total: int) -> _Rows:
    device = start.device
    numbers = torch.stack((start, s.state_slot, valid_start.clamp_min(0), s.write_start, query_len)).int()
    none = torch.full((), -1, dtype=torch.int32, device=device)
    row = torch.arange(total, dtype=torch.int32, device=device)
    if s.one_row:
        begin, slot, valid, write, length = numbers
        return _Rows(row, None, begin, begin, slot, valid, write, length, row - begin, slot > 0, none)
    every = torch.arange(len(query_len), device=device)
    sequence = torch.repeat_interleave(every, query_len, output_size=total)
    begins = (torch.cumsum(query_len, 0) - query_len).int()
    begin, slot, valid, write, length, first = torch.cat((numbers, begins[None])).index_select(1, sequence)
    offset = row - first
    positions = begin + offset
    return _Rows(sequence.int(), offset, positions, begin, slot, valid, write, length, first - begin, slot > 0, none)


def _row_meta(g: BatchGeometry, rows: _Rows) -> RowMeta:
    index, ring = _window_index(g, rows)
    visible = {r: (rows.positions + 1) // r if r > 1 else rows.positions + 1 for r in g.ratios}
    slots = torch.where(rows.newest(g.ring), ring, rows.none)
    return RowMeta(rows.positions.long(), rows.sequence, index, slots, visible)


def _truncate(g: BatchGeometry, s: SequenceInputs) -> tuple[Tensor | None, RowMeta]:
    """(kept rows or None, metadata of the decoder half)."""
    cut = s.truncation
    assert cut is not None
    valid_start = torch.maximum(s.valid_start, cut.keep_from)
    if cut.kept_len is None:
        return None, _row_meta(g, _rows(s, s.query_len, s.start, valid_start, len(s.tokens)))
    dropped = s.query_len - cut.kept_len
    rows = _rows(s, cut.kept_len, s.start + dropped, valid_start, cut.kept_rows)
    assert rows.offset is not None
    first = (torch.cumsum(s.query_len, 0) - s.query_len + dropped)[rows.sequence]
    return first + rows.offset, _row_meta(g, rows)


def _window_index(g: BatchGeometry, rows: _Rows) -> tuple[Tensor, Tensor]:
    """int32 [T, W] in the address space of `WindowKeys`: column c is position p - W + 1 + c, from the ring if it lies before the step's
    first row; and int32 [T]: the ring entry of p itself."""
    seen = rows.positions[:, None] + torch.arange(1 - g.window, 1, dtype=torch.int32, device=rows.positions.device)
    ring = (rows.state_slot * g.ring)[:, None] + seen % g.ring
    here = seen + (rows.shift + g.state_slots * g.ring)[:, None]
    index = torch.where(seen >= rows.start[:, None], here, ring)
    return torch.where(seen >= rows.valid_start[:, None], index, rows.none), ring[:, -1]


def _entry_meta(g: BatchGeometry, r: int, s: SequenceInputs, rows: _Rows, meta: RowMeta) -> EntryMeta:
    p, n = rows.positions, g.page_tokens // r
    entry = p // r if r > 1 else p
    writes = (p >= rows.write_start) & rows.real
    slot = rows.pages(s.block_table, entry // n) * n + entry % n
    if r == 1:
        return EntryMeta(torch.where(writes, slot, rows.none), meta.positions, None)
    completes = (p + 1) % r == 0
    member = p[:, None] + torch.arange(1 - r, 1, dtype=torch.int32, device=p.device)
    ring = (rows.state_slot * g.compressor_ring)[:, None] + member % g.compressor_ring
    here = member + (rows.shift + g.state_slots * g.compressor_ring)[:, None]
    index = torch.where(member >= rows.start[:, None], here, ring)
    return EntryMeta(
        slots=torch.where(completes & writes, slot, rows.none),
        positions=(meta.positions - (r - 1)) * completes,
        rows=CompressorRows(
            torch.where(completes[:, None], index, rows.none),
            torch.where(rows.newest(g.compressor_ring), ring[:, -1], rows.none),
        ),
    )


def _ngrams(s: SequenceInputs, rows: _Rows, token_map: Tensor, pad_id: int, size: int) -> Tensor:
    """int64 [T, size] compressed ids of each row's token and its size-1 predecessors; pad_id before the sequence begins."""
    if rows.offset is None:
        ids = torch.cat((s.history, s.tokens[:, None]), 1).flip(1)
    else:
        back = torch.arange(size, device=s.tokens.device)
        total, offset = len(s.tokens), rows.offset[:, None]
        row = torch.arange(total, device=s.tokens.device)[:, None]
        told = total + (rows.sequence.long() * (size - 1) + size - 1)[:, None] + offset
        ids = torch.cat((s.tokens, s.history.flatten()))[torch.where(offset >= back, row, told) - back]
    return torch.where(ids >= 0, token_map[ids.clamp_min(0)], pad_id)
