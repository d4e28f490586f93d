"""Which running requests decode in a step, with how many drafts, and who must give up pages for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer_core.engine.ledger import Ledger
from deepinfer_core.engine.table import RUNNING
from deepinfer_core.engine.verification import CostTable, DraftingGauge, allocate_drafts, plan_budget


class DecodeRows(NamedTuple):
    """The decoding part of a step. R requests."""

    rows: np.ndarray  # int64 [R] table rows, longest sequence first
    drafts: np.ndarray  # int64 [R] drafts to verify
    reallocate: int  # >= 0: the device spreads this many draft rows anew; -1: as planned
    draft: bool = True  # new drafts are worth their cost

    @property
    def num_rows(self) -> int:
        """Step rows."""
        return len(self.rows) + int(self.drafts.sum())


class DecodePlanner:
    """Chooses decode rows and grows their block tables. Mutates the ledger: it may preempt."""

    def __init__(self, ledger: Ledger, cost: CostTable | None) -> None:
        self.ledger, self.limits, self.cost = ledger, ledger.limits, cost
        schedules = self.limits.varlen_verification and cost is not None and self.limits.num_draft_tokens
        self.gauge = DraftingGauge(self.limits.num_draft_tokens, cost) if schedules and cost is not None else None

    def none(self) -> DecodeRows:
        """No decode rows: for a step that only prefills."""
        nothing = np.empty(0, np.int64)
        return DecodeRows(nothing, nothing, -1, self._worth_drafting(0))

    def select(self) -> DecodeRows:
        """The decode rows of the next step; all pages that they may write are allocated.

        Drafts are verified even where `limit` leaves no room for them: how much room there is depends on tokens in flight, and the row
        that a token comes from selects its random numbers, so with fewer rows the mode would change the output.
        """
        table = self.ledger.table
        pending = table.sampling > 0  # a sample is in flight: at least one more token will come
        ready = (table.state == RUNNING) & ~table.filling & (table.length + pending < table.limit)
        rows = ready.nonzero()[0]
        rows = rows[np.argsort(-table.length[rows], kind="stable")]
        in_flight = pending[rows]
        available = np.where(in_flight, self.limits.num_draft_tokens * (table.will_draft & table.drafting)[rows], table.num_drafts[rows])
        drafts, reallocate = self._spread(rows, available, in_flight)
        widest = self.limits.num_draft_tokens if reallocate >= 0 else drafts
        kept = self._grow(rows, table.scheduled[rows] + 1 + widest)
        if len(kept) < len(rows):
            rows, drafts = rows[kept], drafts[kept]
            reallocate = int(drafts.sum()) if reallocate >= 0 else -1
        return DecodeRows(rows, drafts, reallocate, self._worth_drafting(len(rows)))

    def _worth_drafting(self, requests: int) -> bool:
        if self.gauge is None:
            return True
        return self.gauge.decide(requests) if requests else self.gauge.pays

    def _spread(self, rows: np.ndarray, available: np.ndarray, in_flight: np.ndarray) -> tuple[np.ndarray, int]:
        if self.gauge is None or self.cost is None or not available.any():
            return available, -1
        table, flying = self.ledger.table, np.count_nonzero(in_flight)
        exists = np.arange(self.limits.num_draft_tokens) < available[:, None]
        rates = table.rates.take(rows, axis=0)
        known = rates if flying == len(rows) else np.where(in_flight[:, None], rates, table.previous_rates.take(rows, axis=0))
        newest = _survival(rates, exists, self.gauge.mean)
        older = newest if known is rates else _survival(known, exists, self.gauge.mean)
        unknown = np.isnan(known)
        self.gauge.learn(known[~unknown.any(axis=1)] if unknown.any() else known)
        budget = plan_budget(older, self.cost) - len(rows)
        drafts = np.minimum(allocate_drafts(newest, budget), available)
        return drafts, int(drafts.sum()) if flying else -1

    def _grow(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Gives each row pages for positions below its end, preempting if needed. Returns the indices of rows that still run."""
        ledger, table = self.ledger, self.ledger.table
        missing = -(-ends // self.limits.page_tokens) - table.num_pages[rows]
        growing = (missing > 0).nonzero()[0]
        if not len(growing):
            return np.arange(len(rows))
        needy = rows[growing]
        fewest_first = growing[np.lexsort((table.order[needy], table.length[needy] - table.prompt_len[needy]))]
        for row, count in zip(rows[fewest_first].tolist(), missing[fewest_first].tolist(), strict=True):
            while table.state[row] == RUNNING and not ledger.pages.can_allocate(count):
                ledger.preempt(self._victim())
            if table.state[row] == RUNNING:
                table.add_pages(row, ledger.pages.allocate(count))
        return np.flatnonzero(table.state[rows] == RUNNING)

    def _victim(self) -> int:
        """The running row with most outputs, the youngest of equals."""
        table = self.ledger.table
        running = table.running()
        outputs = table.length[running] - table.prompt_len[running]
        return int(running[np.lexsort((table.order[running], outputs))[-1]])


def _survival(rates: np.ndarray, exists: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Survivals with unknown ones as the mean at their position and drafts that do not exist as 0."""
    survival = np.where(np.isnan(rates), mean.astype(np.float32), rates)
    survival[~exists] = 0.0
    return survival
