"""How many drafts of each request a step verifies (confidence-scheduled verification).

The budget (total rows) comes from confidences that are one step older than the drafts it is spent on, and so cannot depend on their
values; the newest confidences only rank the drafts. With survival a[r, j] = product of the confidences of drafts 0 .. j of request r,
B rows for R requests emit R + (sum of the B - R largest survivals) tokens on average; the budget with most tokens per millisecond wins.

Source: DSpark scheduling in DeepInfer 0.1.0 (model notes, runtime section 4.6).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np


class CostTable(Protocol):
    """What a decode step costs."""

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        """Milliseconds of steps of `rows` [n] rows (ascending) for `requests` requests; inf where no such step is allowed."""


def plan_budget(survival: np.ndarray, cost: CostTable) -> int:
    """Total rows of the step that emits most tokens per millisecond: R .. R + R*D.

    survival [R, D] from the older confidences; drafts that do not exist are 0. The smallest budget wins among equals, so a larger one
    must be strictly better. If no budget is allowed, all drafts are verified.
    """
    requests, drafts = survival.shape
    gains = np.sort(survival, axis=None)[::-1]
    rows = np.arange(requests, requests * (1 + drafts) + 1)
    expected = requests + np.concatenate([[0.0], np.cumsum(gains, dtype=np.float64)])
    cost_ms = cost.step_ms(rows, requests)
    if not np.isfinite(cost_ms).any():
        return int(rows[-1])
    return int(rows[np.argmax(expected / cost_ms)])


def allocate_drafts(survival: np.ndarray, budget: int) -> np.ndarray:
    """Drafts to verify of each request, int64 [R]: the `budget` largest entries of survival [R, D], ties to the lower flat index.

    Survivals fall along each row, so a request's drafts are always taken from its first on. Device code must repeat this rule.
    """
    flat = survival.reshape(-1)
    if budget <= 0:
        return np.zeros(len(survival), np.int64)
    if budget >= flat.size:
        return np.full(len(survival), survival.shape[1])
    smallest = np.partition(flat, flat.size - budget)[flat.size - budget]
    chosen = flat > smallest
    ties = np.flatnonzero(flat == smallest)
    chosen[ties[: budget - np.count_nonzero(chosen)]] = True
    return chosen.reshape(survival.shape).sum(axis=1)


class ProfiledCost:
    """A cost table from measured steps: bucket sizes with a base time each, corrected online for context length and sampling.

    T(B, R) = base[g] + slope * g + sampler(R), with g the smallest bucket that holds B rows. Times are milliseconds.
    """

    STEP_WINDOW = 5000  # newest decode steps that the slope looks at
    MIN_STEPS = 10  # samples a bucket needs to count
    SAMPLER_WINDOW = 9  # newest sampling times of one request count
    MIN_SAMPLES = 5  # of these needed, else the median over all request counts

    def __init__(self, base_ms: Mapping[int, float]) -> None:
        if not base_ms or min(base_ms) < 1:
            raise ValueError(f"cost table: {dict(base_ms)!r}; expected at least one bucket size >= 1 with its milliseconds")
        self._sizes = sorted(base_ms)
        self._base = np.array([base_ms[size] for size in self._sizes], np.float64)
        self._steps: deque[tuple[int, float]] = deque(maxlen=self.STEP_WINDOW)
        self._sampler: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=self.SAMPLER_WINDOW))
        self._slope: float | None = 0.0

    @property
    def slope(self) -> float:
        """Milliseconds per row that the base times lack: the median over buckets of their median residual per row, at least 0."""
        if self._slope is None:
            residuals: dict[int, list[float]] = defaultdict(list)
            for index, residual in self._steps:
                residuals[index].append(residual)
            medians = [np.median(values) for values in residuals.values() if len(values) >= self.MIN_STEPS]
            self._slope = max(float(np.median(medians)), 0.0) if medians else 0.0
        return self._slope

    def sampler_ms(self, requests: int) -> float:
        """Median time of sampling and drafting for `requests` requests."""
        own = self._sampler.get(requests, ())
        times = own if len(own) >= self.MIN_SAMPLES else [t for window in self._sampler.values() for t in window]
        return float(np.median(times)) if len(times) >= self.MIN_SAMPLES else 0.0

    def observe(self, rows: int, requests: int, forward_ms: float, sampler_ms: float) -> None:
        """Learns from a decode step that ran in a bucket: rows before padding, and the device times of its two parts."""
        index = bisect_left(self._sizes, rows)
        if index < len(self._sizes):
            self._steps.append((index, (forward_ms - self._base[index]) / self._sizes[index]))
            self._slope = None
        self._sampler[requests].append(sampler_ms)

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        """See `CostTable`."""
        sizes = np.array(self._sizes)
        index = np.searchsorted(sizes, rows)
        fits = index < len(sizes)
        index = np.minimum(index, len(sizes) - 1)
        cost = self._base[index] + self.slope * sizes[index] + self.sampler_ms(requests)
        return np.where(fits, cost, np.inf)
