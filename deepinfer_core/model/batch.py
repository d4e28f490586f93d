"""What every row of a step needs to know: positions, window keys, slots, visibility, n-grams.

All of it is integer arithmetic on the model's device (see `model.arrays`), from a handful of numbers per sequence. So a step can be
launched whose starting positions are known on the device only (asynchronous speculation), and no backend has to supply any of it.

Each operation is a launch: a decode step of one sequence takes a few milliseconds, so what can be shared is computed once, in int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from deepinfer_core.backend.types import CompressorRows
from deepinfer_core.model.arrays import Array, Arrays, arrays_on


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

    xp: Arrays
    sequence: Array
    offset: Array | None  # row within its sequence; None: 0 everywhere
    positions: Array
    start: Array  # position of the first row
    state_slot: Array
    valid_start: Array
    write_start: Array
    query_len: Array
    row: Array
    real: Array  # bool: not padding, whose state slot is 0

    def newest(self, count: int) -> Array:
        """bool [T]: rows that a ring of `count` entries keeps; older ones would be overwritten by this step."""
        return self.real if self.offset is None else self.real & (self.offset >= self.query_len - count)

    def pages(self, block_table: Array, page: Array) -> Array:
        """int32 [T]: the page numbered `page` of each row's sequence; the last one if there are fewer."""
        page = page.clip(max=block_table.shape[1] - 1)
        return self.xp.picked(block_table, page) if self.offset is None else block_table[self.sequence, page]

    def addresses(self, count: int, ring: int, slots: int) -> tuple[Array, Array, Array]:
        """The `count` positions up to each row's own, oldest first, int32 [T, count]; where each is found in an address space of
        `slots` rings of `ring` entries, then the step's rows: in the ring if it lies before the step's first row; and the ring entry
        of the row's own position, int32 [T]."""
        seen = self.positions[:, None] + self.xp.arange(1 - count, 1)
        rings = (self.state_slot * ring)[:, None] + seen % ring
        if self.offset is None:
            found = self.xp.joined([rings[:, :-1], (self.row + slots * ring)[:, None]], 1)
        else:
            here = seen + (self.row - self.positions + slots * ring)[:, None]
            found = self.xp.chosen(seen >= self.start[:, None], here, rings)
        return seen, found, rings[:, -1]


def build_batch(g: BatchGeometry, s: SequenceInputs, token_map: Tensor | None, pad_id: int) -> StepBatch:
    """Metadata of one step. token_map int64 [V] maps ids to compressed ids for Engram (None: no Engram)."""
    xp = arrays_on(s.tokens.device)
    rows = _rows(xp, s, s.query_len, s.start, s.valid_start, len(s.tokens))
    meta = _row_meta(g, rows)
    table = xp.of(s.block_table)
    entries = {r: _entry_meta(g, r, table, rows, meta) for r in g.ratios}
    ngrams = None if token_map is None else _ngrams(s, rows, token_map, pad_id, g.ngram)
    kept, decoder_rows = _truncate(g, s, xp) if s.truncation else (None, None)
    return StepBatch(s.tokens, meta, entries, s.block_table, ngrams, kept, decoder_rows)


def _rows(xp: Arrays, s: SequenceInputs, query_len: Tensor, start: Tensor, valid_start: Tensor, total: int) -> _Rows:
    parts = [xp.of(part)[None] for part in (start, s.state_slot, valid_start, s.write_start, query_len)]
    numbers, row = xp.int32(xp.joined(parts, 0)), xp.arange(0, total)
    if s.one_row:
        begin, slot, valid, write, length = numbers
        return _Rows(xp, row, None, begin, begin, slot, valid, write, length, row, slot > 0)
    length = numbers[-1]
    sequence = xp.repeated(xp.arange(0, len(length)), xp.of(query_len), total)
    begins = xp.int32(length.cumsum(0) - length)
    begin, slot, valid, write, length, first = xp.joined([numbers, begins[None]], 0)[:, sequence]
    offset = row - first
    return _Rows(xp, sequence, offset, begin + offset, begin, slot, valid, write, length, row, slot > 0)


def _row_meta(g: BatchGeometry, rows: _Rows) -> RowMeta:
    xp = rows.xp
    seen, found, ring = rows.addresses(g.window, g.ring, g.state_slots)
    visible = {r: xp.tensor((rows.positions + 1) // r if r > 1 else rows.positions + 1) for r in g.ratios}
    return RowMeta(
        positions=xp.tensor(xp.int64(rows.positions)),
        sequence=xp.tensor(rows.sequence),
        window_index=xp.tensor(xp.chosen(seen >= rows.valid_start[:, None].clip(min=0), found, xp.none)),
        window_slots=xp.tensor(xp.chosen(rows.newest(g.ring), ring, xp.none)),
        visible=visible,
    )


def _truncate(g: BatchGeometry, s: SequenceInputs, xp: Arrays) -> tuple[Tensor | None, RowMeta]:
    """(kept rows or None, metadata of the decoder half)."""
    cut = s.truncation
    assert cut is not None
    valid_start = s.valid_start.maximum(cut.keep_from)
    if cut.kept_len is None:
        return None, _row_meta(g, _rows(xp, s, s.query_len, s.start, valid_start, len(s.tokens)))
    dropped = s.query_len - cut.kept_len
    rows = _rows(xp, s, cut.kept_len, s.start + dropped, valid_start, cut.kept_rows)
    assert rows.offset is not None
    first = xp.of(s.query_len.cumsum(0) - s.query_len + dropped)[rows.sequence]
    return xp.tensor(first + rows.offset), _row_meta(g, rows)


def _entry_meta(g: BatchGeometry, r: int, block_table: Array, rows: _Rows, meta: RowMeta) -> EntryMeta:
    xp, p, n = rows.xp, rows.positions, g.page_tokens // r
    entry = p // r if r > 1 else p
    writes = (p >= rows.write_start) & rows.real
    slot = rows.pages(block_table, entry // n) * n + entry % n
    if r == 1:
        return EntryMeta(xp.tensor(xp.chosen(writes, slot, xp.none)), meta.positions, None)
    completes = (p + 1) % r == 0
    _, found, ring = rows.addresses(r, g.compressor_ring, g.state_slots)
    return EntryMeta(
        slots=xp.tensor(xp.chosen(completes & writes, slot, xp.none)),
        positions=xp.tensor(xp.int64((p - (r - 1)) * completes)),
        rows=CompressorRows(
            xp.tensor(xp.chosen(completes[:, None], found, xp.none)),
            xp.tensor(xp.chosen(rows.newest(g.compressor_ring), ring, xp.none)),
        ),
    )


def _ngrams(s: SequenceInputs, rows: _Rows, token_map: Tensor, pad_id: int, size: int) -> Tensor:
    """int64 [T, size] compressed ids of each row's token and its size-1 predecessors; pad_id before the sequence begins."""
    xp = rows.xp
    tokens, history = xp.of(s.tokens), xp.of(s.history)
    if rows.offset is None:
        ids = xp.reversed(xp.joined([history, tokens[:, None]], 1))
    else:
        back, total, offset = xp.arange(0, size), len(s.tokens), rows.offset[:, None]
        told = total + (rows.sequence * (size - 1) + size - 1)[:, None] + offset
        ids = xp.joined([tokens, history.reshape(-1)], 0)[xp.chosen(offset >= back, rows.row[:, None], told) - back]
    return xp.tensor(xp.chosen(ids >= 0, xp.of(token_map)[ids.clip(min=0)], pad_id))
