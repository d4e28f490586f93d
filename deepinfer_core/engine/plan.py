"""What the scheduler hands to the runner for one step, and what it gets back.

S sequences, T rows (sum of query_len), D most drafts of a sequence. Rows are packed: sequence 0's rows first, each in position order.
All arrays are numpy and read-only; nothing in a plan changes after it was made.

With asynchronous scheduling a plan is made while the previous one is still running. A sequence that the previous step samples has
`remap[s] >= 0`; then the host does not know how many drafts that step accepts, and the device completes the plan:

    accepted  = drafts that row remap[s] of the previous step accepted
    start[s] -= pending_drafts[s] - accepted
    row 0     = the token sampled by row remap[s];  row j > 0 = draft j-1 made by row remap[s]
    history   = the last ids of concat(history[s], first `accepted` drafts of row remap[s] that were verified in the previous step)

`start` is thus an upper bound, and pages in `block_table` cover it. A draft that does not exist is -1 and never accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from deepinfer_core.engine.request import Finished, FinishReason


class StepKind(StrEnum):
    """What a step holds."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class SlotCopy(NamedTuple):
    """Copy a whole state slot, before the forward and after all earlier steps; copies run in list order."""

    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    """One step. See the module docstring for how `remap` completes it on the device."""

    step: int  # counts from 0
    kind: StepKind
    requests: tuple[str, ...]  # [S] request ids
    query_len: np.ndarray  # int32 [S] rows of each sequence, at least 1
    start: np.ndarray  # int32 [S] position of the first row
    tokens: np.ndarray  # int32 [T] ids; -1 where only the device knows it, or where no draft exists
    remap: np.ndarray  # int32 [S] sequence index in the previous plan whose sample is row 0 here; -1: the host knows all tokens
    pending_drafts: np.ndarray  # int32 [S] drafts that the previous step verifies and `start` takes as accepted; 0 if remap is -1
    num_drafts: np.ndarray  # int32 [S] rows 1 .. num_drafts are drafts to verify; 0 for prefill
    history: np.ndarray  # int32 [S, N] ids before row 0, oldest first; -1: none. remap >= 0: ids before the previous step's drafts
    block_table: np.ndarray  # int32 [S, P] pages; 0 behind the last
    state_slot: np.ndarray  # int32 [S]
    valid_start: np.ndarray  # int32 [S] first position whose window key may be read
    write_start: np.ndarray  # int32 [S] rows at positions below write no pages
    keep_from: np.ndarray  # int32 [S] decoder-side replay: decoder layers see positions >= it only; 0: no truncation
    is_prefill: np.ndarray  # bool [S] all rows are known ids
    sample: np.ndarray  # bool [S] emits tokens; False for a prefill chunk that is not the last
    draft: np.ndarray  # bool [S] make new drafts after sampling
    logprob_start: np.ndarray  # int32 [S] rows at positions >= it give logprobs of the prompt id that follows; -1: none
    num_outputs: np.ndarray  # int32 [S] output tokens before this step; a lower bound if remap >= 0
    slot_copies: tuple[SlotCopy, ...] = ()
    reallocate_drafts: int = -1  # >= 0: the device spreads this many draft rows by confidence (`allocate_drafts`); -1: as planned
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64 [S] a request's own number while it runs

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @cached_property
    def has_prefill(self) -> bool:
        """Whether it holds prompt rows."""
        return bool(self.is_prefill.any())

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.requests)

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.tokens)


@dataclass(frozen=True)
class StepResult:
    """What a step produced, in the order of the plan's sequences."""

    tokens: np.ndarray  # int [S, 1 + D] emitted ids: accepted drafts, then the sampled token; anything behind
    counts: np.ndarray  # int [S] number of emitted ids: accepted drafts + 1; ignored where `sample` is False
    drafts: np.ndarray | None = None  # int [S, D] new drafts, -1 behind the last; None: no drafting
    confidences: np.ndarray | None = None  # float32 [S, D] estimated acceptance of each new draft given the ones before it
    query_len: np.ndarray | None = None  # int [S] rows as the device spread them; None: as planned
    errors: Mapping[int, str] = field(default_factory=dict)  # sequence index -> why its computation failed
    payload: Any = None  # logprobs and the like; opaque here, indexed by sequence


class RequestUpdate(NamedTuple):
    """What one step gave to one request."""

    request_id: str
    sequence: int  # its index in the plan and in `StepResult`
    tokens: np.ndarray  # int32 [n] new output tokens, after stop rules; n may be 0 (prefill chunk)
    first: int  # output index of tokens[0]
    verified: int  # drafts verified in the step
    accepted: int  # drafts accepted


@dataclass(frozen=True)
class StepUpdates:
    """Outcome of a committed step. Iterates over the requests that got tokens or prompt logprobs."""

    plan: StepPlan
    counts: np.ndarray  # int [S] output tokens kept; 0 for requests that had ended
    first: np.ndarray  # int [S] output index of the first of them
    verified: np.ndarray  # int [S] drafts verified, as the device spread them
    accepted: np.ndarray  # int [S] drafts accepted
    live: np.ndarray  # bool [S] the request had not ended before this step
    tokens: np.ndarray  # int [S, 1 + D], see StepResult
    finished: tuple[Finished, ...]  # every request that ended since the last call of `commit` or `drain`
    warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[RequestUpdate]:
        plan = self.plan
        wanted = self.live & ((self.counts > 0) | (plan.logprob_start >= 0))
        sequences = wanted.nonzero()[0]
        columns = (sequences, self.counts[sequences], self.first[sequences], self.verified[sequences], self.accepted[sequences])
        for s, count, first, verified, accepted in zip(*(column.tolist() for column in columns), strict=True):
            yield RequestUpdate(plan.requests[s], s, self.tokens[s, :count], first, verified, accepted)


__all__ = ["FinishReason", "Finished", "RequestUpdate", "SlotCopy", "StepKind", "StepPlan", "StepResult", "StepUpdates"]
