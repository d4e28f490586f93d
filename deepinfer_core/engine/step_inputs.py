"""A step plan on the device: its numbers in one buffer, and their completion with what only the device knows.

Everything that a step needs besides the caches travels in one copy. Where each array lies depends on the sizes alone, so a captured graph
can read a buffer that every step fills anew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.engine.plan import StepPlan
from deepinfer_core.engine.results import DeviceStep
from deepinfer_core.model.batch import SequenceInputs
from deepinfer_core.sampling.packing import Layout, layout_of, unpack, unpack_array

_NUMBERS = ("query_len", "start", "state_slot", "valid_start", "write_start", "keep_from", "remap", "pending_drafts")


class StepSize(NamedTuple):
    """Sizes of a packed plan. What lies behind the plan's own sizes is padding: sequences of one row in state slot 0."""

    sequences: int  # S
    rows: int  # T
    pages: int  # P
    history: int  # N-1

    @classmethod
    def of(cls, plan: StepPlan) -> StepSize:
        """The plan's own sizes."""
        return cls(len(plan.requests), len(plan.tokens), plan.block_table.shape[1], plan.history.shape[1])


class PlanInputs(NamedTuple):
    """A plan's arrays on the device, views of one buffer; meanings as in `StepPlan`."""

    query_len: Tensor  # int64 [S]; the next seven likewise
    start: Tensor
    state_slot: Tensor
    valid_start: Tensor
    write_start: Tensor
    keep_from: Tensor
    remap: Tensor
    pending_drafts: Tensor
    history: Tensor  # int64 [S, N-1]
    tokens: Tensor  # int64 [T]
    block_table: Tensor  # int32 [S, P]


class CompletedInputs(NamedTuple):
    """A plan whose unknowns are filled in."""

    sequences: SequenceInputs  # without truncation
    tokens: Tensor  # int64 [T], -1 for a draft that does not exist


def packed(plan: StepPlan | None, size: StepSize) -> np.ndarray:
    """The plan's arrays, padded to `size`, as one uint8 buffer for `unpacked`. None: nothing but padding."""
    layout = _layout(size)
    buffer = np.zeros(layout.size, np.uint8)
    arrays = unpack_array(buffer, layout)
    numbers = arrays["numbers"]
    numbers[_NUMBERS.index("remap")] = -1
    arrays["history"][...] = -1
    count, rows = (len(plan.requests), len(plan.tokens)) if plan is not None else (0, 0)
    numbers[0, count : count + size.rows - rows] = 1
    if plan is not None:
        for row, name in enumerate(_NUMBERS):
            numbers[row, :count] = getattr(plan, name)
        arrays["history"][:count] = plan.history
        arrays["tokens"][:rows] = plan.tokens
        arrays["block_table"][:count, : plan.block_table.shape[1]] = plan.block_table
    return buffer


def unpacked(buffer: Tensor, size: StepSize) -> PlanInputs:
    """The arrays of `packed` as views of `buffer`."""
    views = unpack(buffer, _layout(size))
    return PlanInputs(*views.pop("numbers").unbind(0), **views)


def completed(inputs: PlanInputs, previous: DeviceStep | None, spread: Tensor | None = None, one_row: bool = False) -> CompletedInputs:
    """Replaces what the host did not know: see the module docstring of `deepinfer_core.engine.plan`.

    previous: results of the step before; None if no sequence has `remap` >= 0. spread int64 [S]: rows of each sequence as the device
    chose them; None: as planned. one_row: the caller promises that every sequence has exactly one row.
    """
    start, history, tokens = inputs.start, inputs.history, inputs.tokens
    query_len = inputs.query_len if spread is None else spread
    if previous is not None:
        known = inputs.remap < 0
        source = inputs.remap.clamp_min(0)
        if previous.drafts.shape[1]:
            accepted = previous.accepted[source].masked_fill(known, 0)
            start = start - (inputs.pending_drafts - accepted)
            ids = torch.cat((history, previous.verified[source]), 1)
            history = ids.gather(1, accepted[:, None] + torch.arange(history.shape[1], device=ids.device))
        if one_row:
            tokens = torch.where(known, tokens, previous.tokens[source])
        else:
            made = torch.cat((previous.tokens[:, None], previous.drafts), 1)[source]
            tokens = _completed_tokens(inputs, spread, known, made)
    sequences = SequenceInputs(
        query_len=query_len,
        start=start,
        state_slot=inputs.state_slot,
        block_table=inputs.block_table,
        valid_start=inputs.valid_start,
        write_start=inputs.write_start,
        history=history,
        tokens=tokens.clamp_min(0),  # a draft that does not exist is never accepted: any id will do
        one_row=one_row,
    )
    return CompletedInputs(sequences, tokens)


def _completed_tokens(inputs: PlanInputs, spread: Tensor | None, known: Tensor, made: Tensor) -> Tensor:
    """int64 [T]: rows of known sequences as the host told them, of the others from `made` int64 [S, 1+D], sampled token and drafts."""
    total, device, planned = len(inputs.tokens), made.device, inputs.query_len
    query_len = planned if spread is None else spread
    sequence = torch.repeat_interleave(torch.arange(len(known), device=device), query_len, output_size=total)
    offset = torch.arange(total, device=device) - (query_len.cumsum(0) - query_len)[sequence]
    fresh = made[sequence, offset.clamp_max(made.shape[1] - 1)]
    told = inputs.tokens
    if spread is not None:  # the host packed its tokens for the rows that it planned
        begin = (planned.cumsum(0) - planned)[sequence]
        told = torch.where(offset < planned[sequence], told[(begin + offset).clamp_max(total - 1)], -1)
    return torch.where(known[sequence], told, fresh)


@lru_cache(maxsize=256)
def _layout(size: StepSize) -> Layout:
    int64, int32 = np.dtype(np.int64), np.dtype(np.int32)
    return layout_of(
        (
            ("numbers", int64, (len(_NUMBERS), size.sequences)),
            ("history", int64, (size.sequences, size.history)),
            ("tokens", int64, (size.rows,)),
            ("block_table", int32, (size.sequences, size.pages)),
        )
    )
