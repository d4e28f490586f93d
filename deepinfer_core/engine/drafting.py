"""What became of drafts: how far their confidences were off, and records to calibrate the confidences from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer_core.engine.plan import StepPlan, StepResult, StepUpdates


class DraftRecords(NamedTuple):
    """n verified blocks of drafts."""

    confidences: np.ndarray  # float32 [n, D]: of each draft given the ones before it; NaN where unknown
    verified: np.ndarray  # int64 [n]: drafts that were verified
    accepted: np.ndarray  # int64 [n]: drafts that were accepted


class DraftStatistics:
    """Follows drafts from the step that makes them to the one that verifies them, by the requests' table rows."""

    def __init__(self, rows: int, drafts: int) -> None:
        self.error = 0.0  # sum of |estimated acceptance - confidence| over `verified` drafts
        self.verified = 0
        self._confidences = np.full((rows, drafts), np.nan, np.float32)  # of the newest drafts of each row
        self._records: list[DraftRecords] | None = None

    @property
    def mean_error(self) -> float:
        """Mean |estimated acceptance - confidence| of the verified drafts; 0 without any."""
        return self.error / self.verified if self.verified else 0.0

    def record(self) -> None:
        """Keeps every verified block from now on."""
        self._records = []

    def records(self) -> DraftRecords:
        """All blocks verified since `record`."""
        parts = [*(self._records or []), self._part(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))]
        return DraftRecords(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def take(self, plan: StepPlan, result: StepResult, updates: StepUpdates) -> None:
        """Takes a committed step."""
        drafts = self._confidences.shape[1]
        if not drafts:
            return
        chosen = np.flatnonzero(updates.live & plan.sample & (updates.verified > 0))
        if len(chosen):
            rows, verified = plan.rows[chosen], updates.verified[chosen].astype(np.int64)
            confidences = self._confidences[rows]
            counts = (np.arange(drafts) < verified[:, None]) & ~np.isnan(confidences)
            estimates = result.payload.estimates[chosen, :drafts]
            self.error += float(np.abs(estimates - confidences)[counts].sum())
            self.verified += int(counts.sum())
            if self._records is not None:
                self._records.append(self._part(rows, verified, updates.accepted[chosen].astype(np.int64)))
        self._confidences[plan.rows[plan.sample]] = np.nan
        if result.confidences is not None:
            self._confidences[plan.rows[plan.draft]] = result.confidences[plan.draft]

    def _part(self, rows: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> DraftRecords:
        return DraftRecords(self._confidences[rows], verified, accepted)
