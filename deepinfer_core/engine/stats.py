"""Counters of the scheduler. Times are the engine's business: nothing here reads a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class SchedulerStats:
    """Totals since the start; all but the gauges at the end only grow."""

    steps: int = 0
    prefill_tokens: int = 0  # rows of prompts (and of resumed requests) computed
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    replayed_tokens: int = 0  # rows recomputed only to rebuild windows
    decode_rows: int = 0  # rows of decoding requests, drafts included
    decode_requests: int = 0  # decoding requests, summed over steps
    wasted_rows: int = 0  # rows of requests that had ended or were preempted when the step was committed
    output_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    verified: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [D] drafts verified by position
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [D] drafts accepted by position
    running: int = 0  # gauges, as of the latest plan
    waiting: int = 0
    used_pages: int = 0
    usable_pages: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the verified drafts; 0 without drafts."""
        total = int(self.verified.sum())
        return int(self.accepted.sum()) / total if total else 0.0

    @property
    def mean_verified(self) -> float:
        """Rows per decoding request and step: 1 + mean number of verified drafts."""
        return self.decode_rows / self.decode_requests if self.decode_requests else 0.0

    @property
    def page_usage(self) -> float:
        """Share of pages with an owner."""
        return self.used_pages / self.usable_pages if self.usable_pages else 0.0
