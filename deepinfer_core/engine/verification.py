"""How many drafts of each request a step verifies (confidence-scheduled verification).

The budget (total rows) comes from confidences that are one step older than the drafts it is spent on, and so cannot depend on their
values; the newest confidences only rank the drafts. With survival a[r, j] = product of the confidences of drafts 0 .. j of request r,
B rows for R requests emit R + (sum of the B - R largest survivals) tokens on average; the budget with most tokens per millisecond wins.

Drafting itself is left out of steps while verifying its drafts would not pay for it: see `DraftingGauge`.

Source: DSpark scheduling in DeepInfer 0.1.0 (model notes, runtime section 4.6); leaving drafting out is our own.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
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
    best = int(rates.argmax())
    return len(survival) + (best if rates[best] else survival.size)


def _tokens_per_ms(gains: np.ndarray, requests: int, cost: CostTable) -> np.ndarray:
    """float64 [n + 1]: expected tokens per millisecond with the first 0, 1, … of n drafts, whose survivals `gains` fall; 0: not allowed."""
    expected = np.zeros(len(gains) + 1)
    expected[1:] = gains
    expected.cumsum(out=expected)
    expected += requests
    expected /= cost.step_ms(np.arange(requests, requests + len(expected)), requests)
    return expected


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
    ties = (flat == smallest).nonzero()[0]
    chosen[ties[: budget - np.count_nonzero(chosen)]] = True
    return chosen.reshape(survival.shape) @ np.ones(survival.shape[1], np.int64)  # numpy is slow in summing short rows


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
            total = np.ones(len(survival)) @ survival  # numpy is slow in summing short rows
            self.mean += (total / len(survival) - self.mean) * len(survival) / (len(survival) + self._blocks)
            self._blocks = min(self._blocks + len(survival), self.MEMORY)

    def decide(self, requests: int) -> bool:
        """Whether the next step, of `requests` decoding requests, should draft."""
        gains = np.sort(self.mean)[::-1].repeat(requests)  # as if every request had the mean
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
        self._bucket = np.searchsorted(self._sizes, np.arange(self._sizes[-1] + 2))  # of each number of rows; the last means: none
        self._steps: deque[tuple[int, float]] = deque(maxlen=self.STEP_WINDOW)
        self._residuals: list[list[float]] = [[] for _ in self._base]  # those of `_steps`, by bucket, ascending
        self._sampler = [defaultdict[int, deque[float]](lambda: deque(maxlen=self.SAMPLER_WINDOW)) for _ in (False, True)]  # drafted?
        self._times: np.ndarray | None = None  # of steps of each number of rows, then inf; None: to be computed

    @property
    def slope(self) -> float:
        """Milliseconds per row that the base times lack: the median over buckets of their median residual per row, at least 0."""
        medians = [_median(values) for values in self._residuals if len(values) >= self.MIN_STEPS]
        return max(_median(sorted(medians)), 0.0) if medians else 0.0

    def sampler_ms(self, requests: int, drafted: bool = True) -> float:
        """Median time of sampling, with or without drafting, for `requests` requests."""
        windows = self._sampler[drafted]
        own = windows.get(requests, ())
        times = own if len(own) >= self.MIN_SAMPLES else [t for window in windows.values() for t in window]
        return _median(sorted(times)) if len(times) >= self.MIN_SAMPLES else 0.0

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
        index = bisect_left(self._sizes, rows)
        if index == len(self._sizes):
            return
        residual = float((forward_ms - self._base[index]) / self._sizes[index])
        if math.isnan(residual):  # the device cannot tell
            return
        if len(self._steps) == self._steps.maxlen:
            bucket, oldest = self._steps[0]
            del self._residuals[bucket][bisect_left(self._residuals[bucket], oldest)]
        self._steps.append((index, residual))
        insort(self._residuals[index], residual)
        self._times = None

    def _forward_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        if self._times is None:
            self._times = np.append(self._base + self.slope * self._sizes, np.inf).take(self._bucket)
        return self._times.take(rows, mode="clip")


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
        self._factor: float | None = None  # None: to be computed
        self._ratios: deque[float] = deque(maxlen=self.WINDOW)

    @property
    def factor(self) -> float:
        """Observed over predicted time; 1 before there are enough steps."""
        if self._factor is None:
            self._factor = _median(sorted(self._ratios)) if len(self._ratios) >= self.MIN_STEPS else 1.0
        return self._factor

    def _observe_forward(self, rows: int, requests: int, forward_ms: float) -> None:
        self._ratios.append(forward_ms / float(self._predicted(np.array([rows]), requests)[0]))
        self._factor = None

    def _forward_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        return self.factor * self._predicted(rows, requests)

    def _predicted(self, rows: np.ndarray, requests: int) -> np.ndarray:
        one, full = (np.interp(requests, self._sizes, times) for times in (self._base, self._full))
        return one + (full - one) * (rows - requests) / (requests * self._drafts)


def _median(ordered: Sequence[float]) -> float:
    """The median of at least one number, given in ascending order."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
