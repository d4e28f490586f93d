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
    rows = _behind(decode.rows, [chunk.row for chunk in chunks])
    query_len = _behind(1 + decode.drafts, [chunk.count for chunk in chunks]).astype(INT)
    drafts = _behind(decode.drafts, [0] * len(chunks)).astype(INT)
    is_prefill = np.arange(len(rows)) >= some
    sample = _behind(np.ones(some, bool), [chunk.last for chunk in chunks])
    start = table.scheduled[rows].astype(INT)
    in_flight = table.sampling[rows] > 0
    plan = StepPlan(
        step=step,
        kind=kind,
        requests=tuple(table.names[rows].tolist()),
        query_len=query_len,
        start=start,
        tokens=_tokens(table, decode, in_flight[:some], chunks),
        remap=np.where(in_flight, table.last_index[rows], -1).astype(INT),
        pending_drafts=np.where(in_flight, table.last_drafts[rows], 0).astype(INT),
        num_drafts=drafts,
        history=_history(table, decode.rows, in_flight[:some], chunks),
        block_table=_block_table(table, rows),
        state_slot=table.slot[rows],
        valid_start=table.valid_start[rows],
        write_start=table.write_start[rows],
        keep_from=table.keep_from[rows] * table.filling[rows],
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


def _behind(array: np.ndarray, more: Sequence[int]) -> np.ndarray:
    """`array` with the numbers of prompt chunks behind it."""
    return np.concatenate([array, np.array(more, array.dtype)]) if more else array


def _tokens(table: RequestTable, decode: DecodeRows, in_flight: np.ndarray, chunks: Sequence[Chunk]) -> np.ndarray:
    parts = [table.known(chunk.row)[chunk.start : chunk.start + chunk.count] for chunk in chunks]
    return np.concatenate([_decode_tokens(table, decode, in_flight), *parts])


def _decode_tokens(table: RequestTable, decode: DecodeRows, in_flight: np.ndarray) -> np.ndarray:
    if in_flight.all():
        return np.full(decode.num_rows, -1, INT)
    width = int(decode.drafts.max())
    tokens = np.empty((len(decode.rows), 1 + width), INT)
    tokens[:, 0] = table.tail[decode.rows, -1]
    if width:
        tokens[:, 1:] = table.drafts.take(decode.rows, axis=0)[:, :width]
    tokens[in_flight] = -1
    return tokens[np.arange(1 + width) <= decode.drafts[:, None]]


def _history(table: RequestTable, rows: np.ndarray, in_flight: np.ndarray, chunks: Sequence[Chunk]) -> np.ndarray:
    size = table.limits.history
    tail = table.tail.take(rows, axis=0)
    history = np.where(in_flight[:, None], tail[:, 1:], tail[:, :-1])
    if not chunks:
        return history
    known = [table.known(chunk.row)[max(chunk.start - size, 0) : chunk.start] for chunk in chunks]
    return np.concatenate([history, *(np.concatenate([np.full(size - len(ids), -1, INT), ids])[None] for ids in known)])


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
