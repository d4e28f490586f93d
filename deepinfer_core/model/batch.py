"""What every row of a step needs to know: positions, window keys, slots, visibility, n-grams.

All of it is integer arithmetic in torch on the model's device, from a handful of numbers per sequence. So a step can be launched whose
starting positions are known on the device only (asynchronous speculation), and no backend has to supply any of it.
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


class _Layout(NamedTuple):
    """Where each row of a packed set of sequences belongs."""

    sequence: Tensor  # int64 [T]
    offset: Tensor  # int64 [T]: row within its sequence
    first: Tensor  # int64 [T]: first row of its sequence
    start: Tensor  # int64 [T]: position of that row


def _layout(query_len: Tensor, start: Tensor, total: int) -> _Layout:
    cu = torch.cumsum(query_len, 0) - query_len
    sequence = torch.repeat_interleave(torch.arange(len(cu), device=cu.device), query_len, output_size=total)
    first = cu[sequence]
    return _Layout(sequence, torch.arange(total, device=cu.device) - first, first, start[sequence])


def build_batch(g: BatchGeometry, s: SequenceInputs, token_map: Tensor | None, pad_id: int) -> StepBatch:
    """Metadata of one step. token_map int64 [V] maps ids to compressed ids for Engram (None: no Engram)."""
    layout = _layout(s.query_len, s.start, len(s.tokens))
    rows = _row_meta(g, s, layout, s.query_len, s.valid_start)
    entries = {r: _entry_meta(g, r, s, rows, layout) for r in g.ratios}
    ngrams = None if token_map is None else _ngrams(s, layout, token_map, pad_id, g.ngram)
    kept, decoder_rows = _truncate(g, s, layout, rows) if s.truncation else (None, None)
    return StepBatch(s.tokens, rows, entries, s.block_table, ngrams, kept, decoder_rows)


def _row_meta(g: BatchGeometry, s: SequenceInputs, layout: _Layout, query_len: Tensor, valid_start: Tensor) -> RowMeta:
    sequence = layout.sequence
    positions = layout.start + layout.offset
    ring_base = s.state_slot[sequence] * g.ring
    index = window_index(g, positions, layout.start, layout.first, ring_base, valid_start[sequence])
    # Rows older than the ring would be overwritten by newer ones of this step; rows of state slot 0 are padding.
    newest = (layout.offset >= (query_len - g.ring)[sequence]) & (ring_base > 0)
    return RowMeta(
        positions=positions,
        sequence=sequence.int(),
        window_index=index,
        window_slots=torch.where(newest, ring_base + positions % g.ring, -1).int(),
        visible={r: ((positions + 1) // r).int() for r in g.ratios},
    )


def _truncate(g: BatchGeometry, s: SequenceInputs, layout: _Layout, rows: RowMeta) -> tuple[Tensor | None, RowMeta]:
    """(kept rows or None, metadata of the decoder half)."""
    cut = s.truncation
    assert cut is not None
    valid_start = torch.maximum(s.valid_start, cut.keep_from)
    if cut.kept_len is None:
        return None, _row_meta(g, s, layout, s.query_len, valid_start)
    dropped = s.query_len - cut.kept_len
    kept_layout = _layout(cut.kept_len, s.start + dropped, cut.kept_rows)
    first = (torch.cumsum(s.query_len, 0) - s.query_len + dropped)[kept_layout.sequence]
    return first + kept_layout.offset, _row_meta(g, s, kept_layout, cut.kept_len, valid_start)


def window_index(g: BatchGeometry, positions: Tensor, start: Tensor, first: Tensor, ring_base: Tensor, valid_start: Tensor) -> Tensor:
    """int32 [T, W] in the address space of `WindowKeys`: column c is position p - W + 1 + c, from the ring if it lies before `start`."""
    seen = positions[:, None] + torch.arange(1 - g.window, 1, device=positions.device)
    current = g.state_slots * g.ring + first[:, None] + (seen - start[:, None])
    index = torch.where(seen >= start[:, None], current, ring_base[:, None] + seen % g.ring)
    return torch.where(seen >= valid_start.clamp_min(0)[:, None], index, -1).int()


def _entry_meta(g: BatchGeometry, r: int, s: SequenceInputs, rows: RowMeta, layout: _Layout) -> EntryMeta:
    p, sequence = rows.positions, layout.sequence
    completes = (p + 1) % r == 0
    entry, n = p // r, g.page_tokens // r
    page = s.block_table[sequence, (entry // n).clamp_max(s.block_table.shape[1] - 1)].long()
    base = s.state_slot[sequence] * g.compressor_ring
    writes = completes & (p >= s.write_start[sequence]) & (base > 0)
    slots = torch.where(writes, page * n + entry % n, -1).int()
    group_start = torch.where(completes, p - (r - 1), 0)
    if r == 1:
        return EntryMeta(slots, group_start, None)
    member = p[:, None] + torch.arange(1 - r, 1, device=p.device)
    here = g.state_slots * g.compressor_ring + layout.first[:, None] + (member - layout.start[:, None])
    index = torch.where(member >= layout.start[:, None], here, base[:, None] + member % g.compressor_ring)
    newest = (layout.offset >= (s.query_len - g.compressor_ring)[sequence]) & (base > 0)
    keep = torch.where(newest, base + p % g.compressor_ring, -1).int()
    return EntryMeta(slots, group_start, CompressorRows(torch.where(completes[:, None], index, -1).int(), keep))


def _ngrams(s: SequenceInputs, layout: _Layout, token_map: Tensor, pad_id: int, size: int) -> Tensor:
    """int64 [T, size] compressed ids of each row's token and its size-1 predecessors; pad_id before the sequence begins."""
    offset, row = layout.offset, torch.arange(len(s.tokens), device=layout.offset.device)
    columns = [token_map[s.tokens]]
    for i in range(1, size):
        inside = s.tokens[(row - i).clamp_min(0)]
        before = s.history[layout.sequence, (size - 1 - i + offset).clamp_max(size - 2)]
        previous = torch.where(offset >= i, inside, before)
        columns.append(torch.where(previous >= 0, token_map[previous.clamp_min(0)], pad_id))
    return torch.stack(columns, 1)
