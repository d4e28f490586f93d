"""What steps cost: times of their parts on the host and on the device, and a timeline of them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_core.backend.runtime import Event
from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.runner import StepHandle
from deepinfer_core.engine.stats import SchedulerStats

WINDOW = 1000  # newest steps that averages look at
HOST, DEVICE = 1, 2  # rows of the timeline


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one step."""

    rows: int
    sequences: int
    forward: float
    sample: float  # sampling and drafting
    decodes: bool  # no prefill rows

    @property
    def device(self) -> float:
        return self.forward + self.sample


@dataclass
class StepTimes:
    """Collects step costs; with `record_timeline` also every span of host and device work."""

    steps: deque[StepCost] = field(default_factory=lambda: deque(maxlen=WINDOW))
    host: dict[str, deque[float]] = field(default_factory=dict)  # milliseconds of each host part
    timeline: list[dict[str, Any]] | None = None
    _origin: tuple[Event, float] | None = None  # an event, and the host's clock in microseconds at that event

    def record_timeline(self, origin: Event) -> None:
        """Starts a timeline. `origin` is an event that is done at this moment."""
        self.timeline = []
        self._origin = (origin, time.perf_counter() * 1e6)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times a part of the host's work."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.host.setdefault(name, deque(maxlen=WINDOW)).append(1e3 * (end - begin))
            if self.timeline is not None:
                self.timeline.append(_span(name, HOST, begin * 1e6, (end - begin) * 1e6))

    def finish(self, handle: StepHandle) -> StepCost:
        """Takes the device times of a finished step."""
        start, forwarded, sampling, done = handle.marks
        plan = handle.plan
        cost = StepCost(
            rows=len(plan.tokens),
            sequences=len(plan.requests),
            forward=forwarded.milliseconds_since(start),
            sample=done.milliseconds_since(sampling),
            decodes=not plan.is_prefill.any(),
        )
        self.steps.append(cost)
        if self.timeline is not None and self._origin is not None:
            event, clock = self._origin
            arguments = {"step": plan.step, "rows": cost.rows, "sequences": cost.sequences, "kind": str(plan.kind)}
            for name, begin, length in (("forward", start, cost.forward), ("sample+draft", sampling, cost.sample)):
                at = clock + 1e3 * begin.milliseconds_since(event)
                self.timeline.append(_span(name, DEVICE, at, 1e3 * length, arguments))
        return cost

    def summary(self) -> dict[str, float]:
        """Mean milliseconds of the newest steps: device parts, and host parts by name."""
        count = max(len(self.steps), 1)
        result = {
            "device_forward_ms": sum(step.forward for step in self.steps) / count,
            "device_sample_ms": sum(step.sample for step in self.steps) / count,
        }
        for name, values in self.host.items():
            result[f"host_{name}_ms"] = sum(values) / max(len(values), 1)
        return result

    def write_timeline(self, path: Path) -> None:
        """Writes the timeline in the Chrome trace format (open it in chrome://tracing or Perfetto)."""
        names = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": label}}
            for tid, label in ((HOST, "host"), (DEVICE, "device"))
        ]
        path.write_text(json.dumps({"traceEvents": [*names, *(self.timeline or [])], "displayTimeUnit": "ms"}), encoding="utf-8")


def statistics(counters: SchedulerStats, times: StepTimes, limits: SchedulerLimits) -> dict[str, Any]:
    """One flat record: DeepInfer 0.1.0's names where it has the figure."""
    verified, accepted = counters.verified, counters.accepted
    rates = [round(float(a) / float(v), 4) if v else 0.0 for a, v in zip(accepted, verified, strict=True)]
    steps = list(times.steps)
    device = sum(step.device for step in steps) / 1e3
    rows = sum(step.rows for step in steps)
    return {
        "steps": counters.steps,
        "running": counters.running,
        "pending": counters.waiting,
        "prompt_tokens": counters.prefill_tokens,
        "completion_tokens": counters.output_tokens,
        "cached_tokens": counters.cached_tokens,
        "replayed_tokens": counters.replayed_tokens,
        "wasted_rows": counters.wasted_rows,
        "preempted": counters.preemptions,
        "finished": {str(reason): count for reason, count in counters.finished.items()},
        "KV_cache_usage": round(counters.page_usage, 4),
        "verified_tokens": int(verified.sum()),
        "accepted_tokens": int(accepted.sum()),
        "avg_nextn_accept_rate": round(counters.acceptance_rate, 4),
        "nextn_accept_rate": rates,
        "avg_verified_len": round(counters.mean_verified, 3),
        "num_batched_tokens": round(rows / len(steps), 1) if steps else 0.0,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "device_rows_per_s": round(rows / device, 1) if device else 0.0,
        **{name: round(value, 3) for name, value in times.summary().items()},
    }


def _span(name: str, row: int, start_us: float, length_us: float, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": row, "name": name, "ts": start_us, "dur": length_us, "args": arguments or {}}
