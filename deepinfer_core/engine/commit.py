"""What the result of a step changes: tokens, positions, drafts, the prefix index, and who has ended."""

from __future__ import annotations

import numpy as np

from deepinfer_core.engine.ledger import Ledger
from deepinfer_core.engine.plan import StepPlan, StepResult, StepUpdates
from deepinfer_core.engine.request import FinishReason, Request, Status
from deepinfer_core.engine.table import ENDING, RUNNING
from deepinfer_core.errors import EngineError


class Committer:
    """Applies step results. Mutates the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.limits = ledger, ledger.limits

    def commit(self, plan: StepPlan, result: StepResult) -> StepUpdates:
        """See `Scheduler.commit`."""
        table, rows = self.ledger.table, plan.rows
        emitted = self._checked_counts(plan, result)
        table.holds[rows] -= 1
        table.sampling[rows] -= plan.sample
        for s, message in result.errors.items():
            self._fail(int(rows[s]), message)
        state = table.state[rows]
        running, ending = state == RUNNING, (state == ENDING).nonzero()[0]
        preempted = self._preempted(rows, ending)
        live = running | preempted
        first = table.length[rows] - table.prompt_len[rows]
        kept, stopped = self._apply_stops(plan, result, emitted * live, first)
        full = table.length[rows] + kept >= table.limit[rows]
        advance = running.nonzero()[0]
        table.append(rows[advance], result.tokens.take(advance, axis=0), kept[advance])
        self._advance(plan, running)
        warnings = self._store_drafts(plan, result, running & plan.sample)
        self._register_pages(rows[advance])
        self._note_scored(plan, live)
        self._settle(plan, result, kept, ending, preempted)
        self._end(plan, live & plan.sample & (stopped | full), stopped)
        self._count(plan, result, emitted, kept, live)
        finished = tuple(self.ledger.finished)
        self.ledger.finished.clear()
        verified = plan.num_drafts if result.query_len is None else np.where(plan.is_prefill, 0, result.query_len - 1)
        return StepUpdates(plan, kept, first, verified, np.maximum(emitted - 1, 0), live, result.tokens, finished, warnings)

    def _preempted(self, rows: np.ndarray, ending: np.ndarray) -> np.ndarray:
        """Which rows belong to requests that were preempted while this step ran. Their tokens are good: only their cache is gone."""
        preempted = np.zeros(len(rows), bool)
        for s in ending:
            request = self.ledger.table.requests[rows[s]]
            preempted[s] = request is not None and request.status is Status.WAITING
        return preempted

    def _fail(self, row: int, message: str) -> None:
        request = self.ledger.table.requests[row]
        if request is not None and request.status is not Status.FINISHED:
            self.ledger.end(request, FinishReason.ERROR, f"request {request.request_id!r}: {message}")

    def _checked_counts(self, plan: StepPlan, result: StepResult) -> np.ndarray:
        """Emitted tokens of each sequence, 0 where the plan does not sample or the computation failed."""
        emitted = np.where(plan.sample, result.counts, 0).astype(np.int64)
        if result.errors:
            emitted[list(result.errors)] = 0
        most = plan.num_drafts + 1 if plan.reallocate_drafts < 0 else np.full(len(emitted), 1 + self.limits.num_draft_tokens)
        wrong = [s for s in (plan.sample & ((emitted > most) | (emitted < 1))).nonzero()[0] if s not in result.errors]
        if wrong:
            s = wrong[0]
            raise EngineError(
                f"step {plan.step}: request {plan.requests[s]!r} emitted {emitted[s]} tokens; expected 1 to {most[s]} for its rows: "
                "the runner's result does not belong to this plan"
            )
        return emitted

    def _apply_stops(self, plan: StepPlan, result: StepResult, emitted: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens to keep of each sequence, whether a stop id ended it). The stop id itself is kept."""
        table = self.ledger.table
        kept = np.minimum(emitted, table.limit[plan.rows] - table.length[plan.rows])
        stopped = np.zeros(len(kept), bool)
        suspects = self.ledger.stop_users.take(result.tokens, mode="clip") > 0  # ids behind the emitted ones may be anything
        if not suspects.any():
            return kept, stopped
        suspects &= np.arange(result.tokens.shape[1]) < kept[:, None]
        for s, column in zip(*suspects.nonzero(), strict=True):
            request = table.requests[plan.rows[s]]
            assert request is not None
            counts = first[s] + column + 1 >= request.spec.min_tokens
            if not stopped[s] and counts and int(result.tokens[s, column]) in request.spec.stop_ids:
                kept[s], stopped[s] = column + 1, True
        return kept, stopped

    def _advance(self, plan: StepPlan, live: np.ndarray) -> None:
        """Moves committed positions on, and corrects the next position where drafts were refused."""
        table = self.ledger.table
        partial = (live & ~plan.sample).nonzero()[0]
        table.computed[plan.rows[partial]] += plan.query_len[partial]
        rows = plan.rows[live & plan.sample]
        computed = table.length[rows] - 1
        table.computed[rows] = computed
        table.scheduled[rows] = computed + (1 + table.last_drafts[rows]) * (table.holds[rows] > 0)

    def _store_drafts(self, plan: StepPlan, result: StepResult, sampled: np.ndarray) -> tuple[str, ...]:
        """Keeps the new drafts and what the device thinks of them; returns warnings."""
        if not self.limits.num_draft_tokens:
            return ()
        table, emitting = self.ledger.table, plan.rows[sampled]
        table.num_drafts[emitting] = 0
        chosen = (sampled & plan.draft & table.drafting[plan.rows]).nonzero()[0]  # drafting may have ended since the plan was made
        rows = plan.rows[chosen]
        if result.drafts is not None:
            drafts = result.drafts.take(chosen, axis=0)
            table.drafts[rows] = drafts
            missing = drafts < 0
            table.num_drafts[rows] = (
                np.where(missing.any(axis=1), missing.argmax(axis=1), drafts.shape[1]) if missing.any() else drafts.shape[1]
            )
        if self.limits.varlen_verification:
            table.previous_rates[emitting] = table.rates.take(emitting, axis=0)
            table.rates[emitting] = np.nan
        if result.drafts is None or result.confidences is None:
            return ()
        confidences = result.confidences.take(chosen, axis=0)
        if self.limits.varlen_verification:
            table.rates[rows] = _survivals(confidences)
        unknown = np.isnan(confidences)
        if not unknown.any():
            return ()
        bad = np.flatnonzero((unknown & (np.arange(unknown.shape[1]) < table.num_drafts[rows, None])).any(axis=1))
        table.drafting[rows[bad]] = False
        table.num_drafts[rows[bad]] = 0
        return tuple(f"request {plan.requests[chosen[i]]!r}: a draft confidence is NaN; it goes on without drafting" for i in bad)

    def _register_pages(self, rows: np.ndarray) -> None:
        """Makes pages that this step completed known to the prefix index."""
        prefix, table, page = self.ledger.prefix, self.ledger.table, self.limits.page_tokens
        if prefix is None:
            return
        for row in rows[table.computed[rows] // page > table.registered[rows]].tolist():
            request = table.requests[row]
            assert request is not None
            complete, spec = int(table.computed[row]) // page, request.spec
            for i in range(int(table.registered[row]), complete):
                own = int(table.block_table[row, i])
                ids = table.tokens(row, i * page, (i + 1) * page)
                if len(request.hashes) == i:
                    prefix.append(request.hashes, ids, spec.cache_salt, spec.atomic_spans, spec.span_digests)
                held = prefix.register(request.hashes[i], own, ids, request.exact)
                if held != own:
                    self.ledger.pages.share([held])
                    request.pins[i] = held
            table.registered[row] = complete

    def _note_scored(self, plan: StepPlan, live: np.ndarray) -> None:
        for s in (live & (plan.logprob_start >= 0)).nonzero()[0]:
            request = self.ledger.table.requests[plan.rows[s]]
            assert request is not None
            request.scored = int(plan.start[s] + plan.query_len[s])

    def _settle(self, plan: StepPlan, result: StepResult, kept: np.ndarray, ending: np.ndarray, preempted: np.ndarray) -> None:
        """Keeps the tokens of preempted requests, and frees the rows that no uncommitted plan refers to any more."""
        table = self.ledger.table
        for s in ending:
            row = int(plan.rows[s])
            request = table.requests[row]
            assert request is not None
            if preempted[s]:
                request.outputs += result.tokens[s, : kept[s]].tolist()
            if table.holds[row] == 0:
                self.ledger.settle(row)

    def _end(self, plan: StepPlan, done: np.ndarray, stopped: np.ndarray) -> None:
        """Ends requests that emitted a stop id or reached their limit, preempted ones too."""
        for s in done.nonzero()[0]:
            request = self.ledger.requests[plan.requests[s]]
            if stopped[s]:
                self.ledger.end(request, FinishReason.STOP)
            else:
                self.ledger.end(request, request.limit_reason, self._limit_detail(request))

    def _limit_detail(self, request: Request) -> str:
        if request.limit_reason is FinishReason.LENGTH:
            return ""
        return (
            f"request {request.request_id!r}: the cache of {self.ledger.pages.usable} pages holds {request.limit} tokens of one request, "
            "fewer than max_tokens asks for; give the cache more memory"
        )

    def _count(self, plan: StepPlan, result: StepResult, emitted: np.ndarray, kept: np.ndarray, live: np.ndarray) -> None:
        stats, most = self.ledger.stats, self.limits.num_draft_tokens
        stats.output_tokens += int(kept.sum())
        query_len = plan.query_len if result.query_len is None else result.query_len
        stats.wasted_rows += int(query_len @ ~live)
        if most:
            decoding = live & ~plan.is_prefill
            stats.verified += _at_least(query_len[decoding] - 1, most)
            stats.accepted += _at_least(emitted[decoding] - 1, most)


def _survivals(confidences: np.ndarray) -> np.ndarray:
    """The cumulative product of each row, column by column: numpy is slow with short rows."""
    survivals = confidences.copy()
    for column in range(1, survivals.shape[1]):
        survivals[:, column] *= survivals[:, column - 1]
    return survivals


def _at_least(lengths: np.ndarray, most: int) -> np.ndarray:
    """int64 [most]: how many of `lengths` exceed 0, 1, …"""
    return np.bincount(np.maximum(lengths, 0), minlength=most + 1)[::-1].cumsum()[::-1][1:]
