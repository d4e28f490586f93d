"""A scheduler with small sizes and a scripted device, for unit tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_core.cache import PagePool, SlotPool
from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.plan import StepPlan, StepResult, StepUpdates
from deepinfer_core.engine.request import RequestSpec
from deepinfer_core.engine.scheduler import Scheduler

SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "vocab_size": 100,
    "page_tokens": 4,
    "window": 4,
}


def make(pages: int = 40, slots: int = 12, cost: Any = None, exchange: Any = None, **options: Any) -> Scheduler:
    """A scheduler with limits `SMALL`, changed by `options`."""
    return Scheduler(SchedulerLimits(**{**SMALL, **options}), PagePool(pages), SlotPool(slots), cost=cost, exchange=exchange)


def spec(name: str, prompt: int | Sequence[int], max_tokens: int = 8, **options: Any) -> RequestSpec:
    """A request with `prompt` ids, or with that many ids 10, 11, …"""
    ids = list(range(10, 10 + prompt)) if isinstance(prompt, int) else list(prompt)
    return RequestSpec(name, ids, max_tokens, **options)


def answer(
    plan: StepPlan,
    emitted: Mapping[str, Sequence[int]] | None = None,
    drafts: Mapping[str, Sequence[int]] | None = None,
    confidences: Mapping[str, Sequence[float]] | None = None,
    width: int = 0,
    **options: Any,
) -> StepResult:
    """Each request emits what `emitted` says, else one id 50. `width`: drafts per request (D)."""
    size = plan.num_sequences
    tokens, counts = np.full((size, 1 + width), -1), np.zeros(size, np.int64)
    new, sure = np.full((size, width), -1), np.full((size, width), np.nan, np.float32)
    for s, name in enumerate(plan.requests):
        if plan.sample[s]:
            ids = (emitted or {}).get(name, [50])
            tokens[s, : len(ids)], counts[s] = ids, len(ids)
        ids = (drafts or {}).get(name, []) if plan.draft[s] else []
        new[s, : len(ids)] = ids
        sure[s, : len(ids)] = (confidences or {}).get(name, [1.0] * len(ids))
    return StepResult(tokens, counts, new if width else None, sure if width else None, **options)


def step(scheduler: Scheduler, *args: Any, **options: Any) -> StepUpdates:
    """Plans, answers and commits one step."""
    plan = scheduler.plan()
    assert plan is not None
    return scheduler.commit(plan, answer(plan, *args, **options))


def run_out(scheduler: Scheduler, most: int = 1000) -> list[Any]:
    """Steps until nothing is unfinished; returns all ends."""
    ends = list(scheduler.drain())
    for _ in range(most):
        if not scheduler.has_unfinished:
            return ends
        ends += step(scheduler).finished
    raise AssertionError(f"still unfinished after {most} steps")
