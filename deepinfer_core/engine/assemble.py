"""Turns the rows and chunks of a step into the arrays of a `StepPlan`, and notes in the table that they are in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.engine.decode import DecodeRows
from deepinfer_core.engine.plan import SlotCopy, StepKind, StepPlan
from deepinfer_core.engine.prefill import Chunk
from deepinfer_core.engine.table import RequestTable

INT = np.int32


def assemble(
    table: RequestTable, step: int, kind: StepKind, decode: DecodeRows, chunks: Sequence[Chunk], copies: tuple[SlotCopy, ...]
) -> StepPlan:
    """The plan of a step: decode rows first, then prompt chunks. Mutates the table: see `_note`."""
    limits, some = table.limits, len(decode.rows)
    rows = np.concatenate([decode.rows, np.array([chunk.row for chunk in chunks], np.int64)])
    is_prefill = np.arange(len(rows)) >= some
    drafts = np.concatenate([decode.drafts, np.zeros(len(chunks), np.int64)])
    query_len = np.concatenate([1 + decode.drafts, np.array([chunk.count for chunk in chunks], np.int64)])
    sample = np.concatenate([np.ones(some, bool), np.array([chunk.last for chunk in chunks], bool)])
    start = table.scheduled[rows]
    in_flight = table.sampling[rows] > 0
    parts = [_decode_tokens(table, decode, in_flight[:some])] + [_chunk_tokens(table, chunk) for chunk in chunks]
    filling = table.filling[rows]
    plan = StepPlan(
        step=step,
        kind=kind,
        requests=tuple(map(table.names.__getitem__, rows.tolist())),
        query_len=query_len.astype(INT),
        start=start.astype(INT),
        tokens=np.concatenate(parts),
        remap=np.where(in_flight, table.last_index[rows], -1).astype(INT),
        pending_drafts=np.where(in_flight, table.last_drafts[rows], 0).astype(INT),
        num_drafts=drafts.astype(INT),
        history=_history(table, decode.rows, in_flight[:some], chunks),
        block_table=_block_table(table, rows),
        state_slot=table.slot[rows],
        valid_start=table.valid_start[rows],
        write_start=table.write_start[rows],
        keep_from=np.where(filling, table.keep_from[rows], 0).astype(INT),
        is_prefill=is_prefill,
        sample=sample,
        draft=sample & decode.draft & table.drafting[rows] & (limits.draft_after_prefill | ~is_prefill),
        logprob_start=_logprob_start(table, some, chunks),
        num_outputs=(table.length[rows] - table.prompt_len[rows]).astype(INT),
        slot_copies=copies,
        reallocate_drafts=decode.reallocate,
        rows=rows,
    )
    _note(table, plan, chunks)
    return plan


def _note(table: RequestTable, plan: StepPlan, chunks: Sequence[Chunk]) -> None:
    """The plan's rows are in flight: positions move on as if all drafts were accepted."""
    rows = plan.rows
    respread = plan.reallocate_drafts >= 0
    drafts = np.where(plan.is_prefill, 0, table.limits.num_draft_tokens) if respread else plan.num_drafts
    table.holds[rows] += 1
    table.sampling[rows] += plan.sample
    table.last_index[rows] = np.arange(len(rows))
    table.last_drafts[rows] = drafts
    table.will_draft[rows] = plan.draft
    table.scheduled[rows] = plan.start + np.where(plan.is_prefill, plan.query_len, 1 + drafts)
    for chunk in chunks:
        if chunk.last:
            table.end_filling(chunk.row)


def _decode_tokens(table: RequestTable, decode: DecodeRows, in_flight: np.ndarray) -> np.ndarray:
    width = int(decode.drafts.max(initial=0))
    tokens = np.concatenate([table.tail[decode.rows, -1:], table.drafts[decode.rows, :width]], axis=1)
    tokens[in_flight] = -1
    return tokens[np.arange(1 + width) <= decode.drafts[:, None]]


def _chunk_tokens(table: RequestTable, chunk: Chunk) -> np.ndarray:
    return table.known(chunk.row)[chunk.start : chunk.start + chunk.count]


def _history(table: RequestTable, rows: np.ndarray, in_flight: np.ndarray, chunks: Sequence[Chunk]) -> np.ndarray:
    size = table.limits.history
    tail = table.tail[rows]
    parts = [np.where(in_flight[:, None], tail[:, 1:], tail[:, :-1])]
    for chunk in chunks:
        ids = table.known(chunk.row)[max(chunk.start - size, 0) : chunk.start]
        parts.append(np.concatenate([np.full(size - len(ids), -1, INT), ids])[None])
    return np.concatenate(parts)


def _block_table(table: RequestTable, rows: np.ndarray) -> np.ndarray:
    return table.block_table[rows, : int(table.num_pages[rows].max(initial=1))]


def _logprob_start(table: RequestTable, some: int, chunks: Sequence[Chunk]) -> np.ndarray:
    start = np.full(some + len(chunks), -1, INT)
    for s, chunk in enumerate(chunks, some):
        request = table.requests[chunk.row]
        assert request is not None
        begin = max(chunk.start, request.scored)
        if request.spec.prompt_logprobs and begin < min(chunk.start + chunk.count, len(request.prompt) - 1):
            start[s] = begin
    return start
