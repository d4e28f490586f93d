"""The scheduler: requests in, step plans out, results back. Pure host code: no torch, no clock, no randomness.

    add / abort / finish ─▶ plan() ─▶ StepPlan ─▶ (runner) ─▶ StepResult ─▶ commit() ─▶ StepUpdates

Plans are committed in the order in which they were made. In asynchronous mode one plan may be uncommitted when the next is made. Not
thread safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from deepinfer_core.cache.pages import PagePool, SlotPool
from deepinfer_core.engine.assemble import assemble
from deepinfer_core.engine.commit import Committer
from deepinfer_core.engine.decode import DecodePlanner, DecodeRows
from deepinfer_core.engine.ledger import Ledger
from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.plan import StepKind, StepPlan, StepResult, StepUpdates
from deepinfer_core.engine.policy import is_vote_point, prefill_vote
from deepinfer_core.engine.prefill import Chunk, PrefillPlanner
from deepinfer_core.engine.request import Finished, FinishReason, Request, RequestSpec, Status
from deepinfer_core.engine.stats import SchedulerStats
from deepinfer_core.engine.verification import CostTable
from deepinfer_core.errors import EngineError


class Scheduler:
    """State machine over all requests of one data-parallel rank.

    pages, slots: the pools it hands out; nobody else may use them. identity: model revision and cache formats, part of every prefix
    hash. cost: step times for confidence-scheduled verification; None: all drafts are verified. exchange: for policy `alternate` with
    several ranks, gathers one flag of every rank.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: PagePool,
        slots: SlotPool,
        identity: bytes = b"",
        cost: CostTable | None = None,
        exchange: Callable[[bool], Sequence[bool]] | None = None,
    ) -> None:
        needed = limits.max_num_seqs + 1 + (limits.window_snapshots if limits.prefix_cache else 0)
        if slots.available + 1 < needed:
            raise EngineError(
                f"scheduler: {slots.available + 1} state slots; expected at least {needed} = max_num_seqs {limits.max_num_seqs} + 1 "
                "placeholder + window snapshots; allocate more or lower max_num_seqs"
            )
        self.limits = limits
        self._ledger = Ledger(limits, pages, slots, identity)
        self._decode = DecodePlanner(self._ledger, cost)
        self._prefill = PrefillPlanner(self._ledger)
        self._committer = Committer(self._ledger)
        self._exchange = exchange
        self._uncommitted: deque[StepPlan] = deque()
        self._steps = 0
        self._decode_steps = 0  # since the last prefill step; policy `alternate` only
        self._arrivals = 0

    # ------------------------------------------------------------------ requests

    def add(self, spec: RequestSpec) -> None:
        """Queues a request, or ends it at once if it can never run; the reason then is in the next `drain` or `commit`.

        Raises ValueError if an unfinished request has the same id.
        """
        if spec.request_id in self._ledger.requests:
            raise ValueError(f"request {spec.request_id!r}: an unfinished request has the same id; choose another")
        prompt = np.ascontiguousarray(spec.prompt, np.int32)
        refusal = self._refusal(spec, prompt)
        if refusal is not None:
            self._ledger.refuse(spec.request_id, *refusal)
            return
        limit, reason = min(len(prompt) + spec.max_tokens, self.limits.max_model_len + 1), FinishReason.LENGTH
        capacity = self.limits.capacity(self._ledger.pages.usable)
        if limit > capacity:
            limit, reason = capacity, FinishReason.NO_RESOURCE
        self._ledger.enqueue(Request(spec, prompt, self._arrivals, limit, reason, schedulable=spec.schedulable))
        self._arrivals += 1

    def abort(self, request_id: str) -> bool:
        """Ends a request with reason `abort`. False if it has ended already or was never added."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, keep_outputs: int | None = None, detail: str = "") -> bool:
        """Ends a request for a reason found outside the scheduler, keeping its first `keep_outputs` output tokens.

        A stop string ends a request so. False if it has ended already or was never added.
        """
        request = self._ledger.requests.get(request_id)
        if request is None:
            return False
        if keep_outputs is not None and keep_outputs < self.num_outputs(request_id):
            if request.status is Status.RUNNING:
                self._ledger.table.truncate(request.row, keep_outputs)
            else:
                del request.outputs[keep_outputs:]
        self._ledger.end(request, reason, detail)
        return True

    def set_schedulable(self, request_id: str) -> None:
        """What the request waited for (an image, a grammar, a transfer) is there. Unknown ids are ignored: it may have been aborted."""
        request = self._ledger.requests.get(request_id)
        if request is not None:
            request.schedulable = True

    def num_outputs(self, request_id: str) -> int:
        """Output tokens of an unfinished request."""
        request = self._ledger.requests[request_id]
        if request.status is Status.RUNNING:
            return int(self._ledger.table.length[request.row]) - len(request.prompt)
        return len(request.outputs)

    def drain(self) -> tuple[Finished, ...]:
        """Requests that ended since the last call of `drain` or `commit`."""
        finished = tuple(self._ledger.finished)
        self._ledger.finished.clear()
        return finished

    # ------------------------------------------------------------------ steps

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute before the uncommitted step is committed, or at all.

        With `exchange` (several ranks) it never returns None: a rank without work gets a plan without sequences.
        Raises EngineError if more steps are uncommitted than the mode allows.
        """
        if len(self._uncommitted) > int(self.limits.asynchronous):
            raise EngineError(f"scheduler: {len(self._uncommitted)} steps are uncommitted; commit the oldest before planning another")
        self._prefill.start_snapshots()
        kind, decode, chunks = self._mixed() if self.limits.policy == "mixed" else self._alternate()
        if not len(decode.rows) and not chunks and self._exchange is None:
            return None
        step = self._steps
        plan = assemble(self._ledger.table, step, kind, decode, chunks, self._prefill.carry_copies(step))
        self._steps += 1
        self._decode_steps = 0 if kind is StepKind.PREFILL else self._decode_steps + 1
        self._uncommitted.append(plan)
        self._count(decode, chunks, plan.num_rows)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepUpdates:
        """Takes the result of the oldest uncommitted plan: appends tokens, applies stop rules, frees what nobody uses any more.

        Raises EngineError if another plan is the oldest, or if the result does not fit the plan.
        """
        if not self._uncommitted or self._uncommitted[0] is not plan:
            raise EngineError(f"scheduler: step {plan.step} is not the oldest uncommitted step; commit plans in order, each once")
        for s in result.errors:
            self._prefill.spoil(int(plan.state_slot[s]))
        updates = self._committer.commit(plan, result)
        self._uncommitted.popleft()
        self._prefill.complete_copies(plan.step)
        return updates

    # ------------------------------------------------------------------ figures

    @property
    def has_unfinished(self) -> bool:
        """True while a request has not ended."""
        return bool(self._ledger.requests)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return self._ledger.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that own a state slot."""
        return self._ledger.num_running

    @property
    def num_uncommitted(self) -> int:
        """Plans that were made and not committed."""
        return len(self._uncommitted)

    def stats(self) -> SchedulerStats:
        """Counters, live: copy what must not change."""
        return self._ledger.stats

    # ------------------------------------------------------------------ inside

    def _refusal(self, spec: RequestSpec, prompt: np.ndarray) -> tuple[FinishReason, str] | None:
        limits, pages = self.limits, self._ledger.pages
        where, count = f"request {spec.request_id!r}: ", len(prompt)
        capacity = limits.capacity(pages.usable)
        outside = [t for t in (prompt.min(initial=0), prompt.max(initial=0), *spec.stop_ids) if not 0 <= t < limits.vocab_size]
        long = [(b, e) for b, e in spec.atomic_spans if e - b > limits.largest_chunk]
        if count == 0:
            return FinishReason.INVALID, where + "the prompt is empty; expected at least one token"
        if spec.max_tokens < 1:
            return FinishReason.INVALID, where + f"max_tokens is {spec.max_tokens}; expected at least 1"
        if outside:
            return FinishReason.INVALID, where + f"token id {outside[0]} is outside the vocabulary; expected 0 .. {limits.vocab_size - 1}"
        if spec.prompt_logprobs and limits.keep_tokens:
            return FinishReason.INVALID, (
                where + "prompt_logprobs needs every prompt row, but decoder-side replay keeps only the last "
                f"{limits.keep_tokens}; switch the truncation off or do not ask for them"
            )
        if long:
            return FinishReason.INVALID, (
                where
                + f"tokens {long[0][0]} to {long[0][1]} must be computed in one step, but a step holds {limits.max_num_batched_tokens} "
                "tokens; raise scheduler.max_num_batched_tokens"
            )
        if count > limits.max_model_len:
            return FinishReason.PROMPT_TOO_LONG, (
                where
                + f"the prompt has {count} tokens; expected at most max_model_len {limits.max_model_len}; shorten it or raise the limit"
            )
        if count + 1 > capacity:
            return FinishReason.PROMPT_TOO_LONG, (
                where + f"the prompt has {count} tokens and can never fit: all {pages.usable} cache pages hold {max(capacity - 1, 0)}; "
                "give the cache more memory or shorten the prompt"
            )
        return None

    def _mixed(self) -> tuple[StepKind, DecodeRows, list[Chunk]]:
        decode = self._decode.select()
        return StepKind.MIXED, decode, self._prefill.select(self.limits.max_num_batched_tokens - decode.num_rows)

    def _alternate(self) -> tuple[StepKind, DecodeRows, list[Chunk]]:
        limits = self.limits
        exchange = self._exchange or (lambda flag: (flag,))
        intervals = (limits.prefill_interval, limits.prefill_any_interval)
        idle = self._exchange is None and not (self._ledger.table.running().size)
        if idle or is_vote_point(self._decode_steps, *intervals):
            want = self._prefill.want()
            if idle or prefill_vote(self._decode_steps, exchange(want), *intervals):
                chunks = self._prefill.select(limits.max_num_batched_tokens) if want else []
                if any(exchange(bool(chunks))):  # otherwise a prompt that cannot start would stop decoding for good
                    return StepKind.PREFILL, self._decode.none(), chunks
        decode = self._decode.select()
        if not len(decode.rows) and self._exchange is None:  # nothing decodes: no reason to wait for a vote
            return StepKind.PREFILL, decode, self._prefill.select(limits.max_num_batched_tokens)
        return StepKind.DECODE, decode, []

    def _count(self, decode: DecodeRows, chunks: list[Chunk], rows: int) -> None:
        ledger = self._ledger
        stats = ledger.stats
        stats.steps += 1
        stats.decode_requests += len(decode.rows)
        prefill = sum(chunk.count for chunk in chunks)
        stats.decode_rows += rows - prefill
        stats.prefill_tokens += prefill
        stats.running, stats.waiting, stats.used_pages = ledger.num_running, ledger.num_waiting, ledger.pages.used
