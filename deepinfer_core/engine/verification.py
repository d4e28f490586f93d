"""How many drafts of each request a step verifies (confidence-scheduled verification).

The budget (total rows) comes from confidences that are one step older than the drafts it is spent on, and so cannot depend on their
values; the newest confidences only rank the drafts. With survival a[r, j] = product of the confidences of drafts 0 .. j of request r,
B rows for R requests emit R + (sum of the B - R largest survivals) tokens on average; the budget with most tokens per millisecond wins.

Drafting itself is left out of steps while verifying its drafts would not pay for it: see `DraftingGauge`.

Source: DSpark scheduling in DeepInfer 0.1.0 (model notes, runtime section 4.6); leaving drafting out is our own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np


class CostTable(Protocol):
    """What a decode step costs."""

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        """Milliseconds of steps of `rows` [n] rows (ascending) for `requests` requests, drafting included; inf: no such step is allowed."""

    def plain_ms(self, requests: int) -> float:
        """Milliseconds of a step of one row for each of `requests` requests that makes no drafts; inf if unknown."""


def plan_budget(survival: np.ndarray, cost: CostTable) -> int:
    """Total rows of the step that emits most tokens per millisecond: R .. R + R*D.

    survival [R, D] from the older confidences; drafts that do not exist are 0. The smallest budget wins among equals, so a larger one
    must be strictly better. If no budget is allowed, all drafts are verified.
    """
    rates = _tokens_per_ms(np.sort(survival, axis=None)[::-1], len(survival), cost)
    return len(survival) + (int(np.argmax(rates)) if rates.any() else survival.size)


def _tokens_per_ms(gains: np.ndarray, requests: int, cost: CostTable) -> np.ndarray:
    """float64 [n + 1]: expected tokens per millisecond with the first 0, 1, … of n drafts, whose survivals `gains` fall; 0: not allowed."""
    rows = np.arange(requests, requests + len(gains) + 1)
    expected = requests + np.concatenate([[0.0], np.cumsum(gains, dtype=np.float64)])
    return expected / cost.step_ms(rows, requests)


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


class DraftingGauge:
    """Tells whether steps should draft, from the mean survival of recent drafts and the costs of steps with and without drafting.

    Whether a step drafts changes no distribution: every token follows the target, whatever was drafted before it. While drafting is
    left out, one step in `PROBE` drafts nevertheless, so that a change is noticed.
    """

    PROBE = 64
    MARGIN = 1.05  # gain that drafting must promise: less would be lost in the error of the cost table
    MEMORY = 8  # drafted blocks that the mean remembers

    def __init__(self, drafts: int, cost: CostTable) -> None:
        self.mean = np.ones(drafts)  # survival at each draft position; what is unknown counts as sure
        self.pays = True  # the newest decision
        self._cost = cost
        self._idle = 0  # steps without drafting since the last one with it
        self._blocks = 0  # what `mean` is made of, at most MEMORY

    def learn(self, survival: np.ndarray) -> None:
        """Takes survivals [n, D] of drafts, made before those in flight."""
        if len(survival):
            self.mean += (survival.mean(axis=0) - self.mean) * len(survival) / (len(survival) + self._blocks)
            self._blocks = min(self._blocks + len(survival), self.MEMORY)

    def decide(self, requests: int) -> bool:
        """Whether the next step, of `requests` decoding requests, should draft."""
        gains = np.repeat(np.sort(self.mean)[::-1], requests)  # as if every request had the mean
        drafting = _tokens_per_ms(gains, requests, self._cost).max()
        self.pays = bool(drafting * self._cost.plain_ms(requests) >= self.MARGIN * requests) or self._idle >= self.PROBE
        self._idle = 0 if self.pays else self._idle + 1
        return self.pays


class ProfiledCost:
    """A cost table from measured steps: bucket sizes with a base time each, corrected online for context length and sampling.

    T(B, R) = base[g] + slope * g + sampler(R), with g the smallest bucket that holds B rows. Times are milliseconds. Steps with and
    without drafting have sampler times of their own.
    """

    STEP_WINDOW = 5000  # newest decode steps that the slope looks at
    MIN_STEPS = 10  # samples a bucket needs to count
    SAMPLER_WINDOW = 9  # newest sampling times of one request count
    MIN_SAMPLES = 5  # of these needed, else the median over all request counts

    def __init__(self, base_ms: Mapping[int, float]) -> None:
        if not base_ms or min(base_ms) < 1:
            raise ValueError(f"cost table: {dict(base_ms)!r}; expected at least one bucket size >= 1 with its milliseconds")
        self._sizes = np.array(sorted(base_ms))
        self._base = np.array([base_ms[size] for size in self._sizes.tolist()], np.float64)
        self._steps: deque[tuple[int, float]] = deque(maxlen=self.STEP_WINDOW)
        self._sampler = [defaultdict[int, deque[float]](lambda: deque(maxlen=self.SAMPLER_WINDOW)) for _ in (False, True)]  # drafted?
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

    def sampler_ms(self, requests: int, drafted: bool = True) -> float:
        """Median time of sampling, with or without drafting, for `requests` requests."""
        windows = self._sampler[drafted]
        own = windows.get(requests, ())
        times = own if len(own) >= self.MIN_SAMPLES else [t for window in windows.values() for t in window]
        return float(np.median(times)) if len(times) >= self.MIN_SAMPLES else 0.0

    def observe(self, rows: int, requests: int, forward_ms: float, sampler_ms: float, drafted: bool = True) -> None:
        """Learns from a decode step that ran in a bucket: rows before padding, and the device times of its two parts."""
        self._observe_forward(rows, requests, forward_ms)
        self._sampler[drafted][requests].append(sampler_ms)

    def plain_ms(self, requests: int) -> float:
        """See `CostTable`."""
        return float(self._forward_ms(np.array([requests]), requests)[0]) + self.sampler_ms(requests, drafted=False)

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        """See `CostTable`."""
        return self._forward_ms(rows, requests) + self.sampler_ms(requests)

    def _observe_forward(self, rows: int, requests: int, forward_ms: float) -> None:
        index = int(np.searchsorted(self._sizes, rows))
        if index < len(self._sizes):
            self._steps.append((index, float((forward_ms - self._base[index]) / self._sizes[index])))
            self._slope = None

    def _forward_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        index = np.searchsorted(self._sizes, rows).clip(max=len(self._sizes) - 1)
        return np.where(rows <= self._sizes[-1], self._base[index] + self.slope * self._sizes[index], np.inf)


class EagerCost(ProfiledCost):
    """A cost table of steps that are not padded to buckets, where a sequence costs something besides its rows.

    T(B, R) = factor * (one(R) + (full(R) - one(R)) * (B - R) / (R * D)) + sampler(R): between the measured times of R sequences of one row
    each and of 1 + D rows each. `factor`, the median of observed over predicted times, corrects for context length and for what else the
    device does.
    """

    WINDOW = 200  # newest decode steps that the factor looks at

    def __init__(self, one_ms: Mapping[int, float], full_ms: Mapping[int, float], drafts: int) -> None:
        super().__init__(one_ms)
        self._full = np.array([full_ms[size] for size in self._sizes.tolist()], np.float64)
        self._drafts = drafts
        self._ratios: deque[float] = deque(maxlen=self.WINDOW)

    @property
    def factor(self) -> float:
        """Observed over predicted time; 1 before there are enough steps."""
        return float(np.median(self._ratios)) if len(self._ratios) >= self.MIN_STEPS else 1.0

    def _observe_forward(self, rows: int, requests: int, forward_ms: float) -> None:
        self._ratios.append(forward_ms / float(self._predicted(np.array([rows]), requests)[0]))

    def _forward_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        return self.factor * self._predicted(rows, requests)

    def _predicted(self, rows: np.ndarray, requests: int) -> np.ndarray:
        one, full = (np.interp(requests, self._sizes, times) for times in (self._base, self._full))
        return one + (full - one) * (rows - requests) / (requests * self._drafts)
