"""Puts an engine into the state that a measurement needs, and steps it.

Contexts are not computed token by token: one sequence is prefilled, its cache bytes are copied into all pages and slots, and requests are
admitted with their prefill skipped (`SkippedPrefill`). The scheduler sees an ordinary history; what attention reads are real cache bytes of
other tokens. Every measured step runs through `Engine.step`, as for a user.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.backend.types import Routing
from deepinfer_core.engine.engine import Engine
from deepinfer_core.engine.plan import StepPlan, StepResult
from deepinfer_core.engine.results import StepPayload, TokenScores
from deepinfer_core.engine.runner import Runner, StepHandle
from deepinfer_core.model.batch import SequenceInputs
from deepinfer_core.sampling import SamplingParams


class SkippedStep(StepHandle):
    """A step whose device work was left out: every sequence gets a random token."""

    def wait(self) -> StepResult:
        count = len(self.plan.requests)
        tokens = np.random.default_rng(self.plan.step).integers(3, 500, (count, 1))
        scores = TokenScores(np.zeros((count, 1), np.float32), None, None)
        return StepResult(tokens, np.ones(count, np.int64), payload=StepPayload(scores, {}, None))


class SkippedPrefill(Runner):
    """Stands in for `runner` while requests are admitted."""

    def __init__(self, runner: Runner) -> None:
        self.__dict__.update(vars(runner))

    def forward(self, plan: StepPlan) -> StepHandle:
        return SkippedStep(plan, marks=[self.runtime.record() for _ in range(4)])

    def await_rows(self, handle: StepHandle) -> None:
        """The rows are as planned."""
        handle.rows = handle.plan.query_len.astype(np.int64)

    def sample(self, handle: StepHandle, requests: Mapping[str, Any], accepted: np.ndarray | None) -> None:
        """Nothing to do."""


def random_ids(count: int, vocab: int, seed: int) -> np.ndarray:
    """int32 [count] token ids."""
    return np.random.default_rng(seed).integers(3, vocab, count).astype(np.int32)


@torch.inference_mode()
def fill_caches(engine: Engine, context: int) -> None:
    """Prefills one sequence of `context` tokens, then copies its pages and its slot everywhere, pages shifted from copy to copy."""
    loaded, device = engine.parts.loaded, engine.parts.kernels.device
    caches, count = loaded.caches, loaded.layout.pages_for(context)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    tokens = torch.from_numpy(random_ids(context, loaded.config.vocab_size, 1)).long().to(device)
    table = torch.arange(1, 1 + loaded.layout.pages_for(engine.parts.limits.max_positions), dtype=torch.int32, device=device)[None]
    history = torch.full((1, engine.parts.limits.history), -1, dtype=torch.int64, device=device)
    inputs = SequenceInputs(zero + context, zero, zero + 1, table, zero, zero, history, tokens)
    hidden = loaded.model.forward(loaded.batch(inputs), caches).hidden
    if not bool(hidden.isfinite().all()):
        raise RuntimeError("the prefill of random weights is not finite: the speed run would measure nothing useful")
    image = caches.pages[1 : 1 + count].clone()
    for copy, first in enumerate(range(1, len(caches.pages), count)):
        target = caches.pages[first : first + count]
        target.copy_(image.roll(copy, 0)[: len(target)])
    caches.slots.copy_(caches.slots[1:2].clone().expand_as(caches.slots))
    engine.parts.runtime.synchronize()


def admit(engine: Engine, batch: int, context: int, temperature: float, name: str) -> list[str]:
    """Requests that decode, `context` tokens long (up to `batch` more: they are admitted one after the other). Returns their ids."""
    limits = engine.parts.limits
    ids = [f"{name}-{i}" for i in range(batch)]
    params = SamplingParams(temperature=temperature, max_tokens=limits.max_model_len - context, ignore_eos=True)
    for i, request in enumerate(ids):
        engine.add_request(request, random_ids(context, limits.vocab_size, 100 + i), params)
    runner = engine.runner
    engine.runner = SkippedPrefill(runner)
    try:
        waiting = True
        for _ in range(4 * batch + 4):
            engine.step()
            waiting = engine.scheduler.num_waiting > 0
            if not waiting:
                break
        engine.settle()
    finally:
        engine.runner = runner
    if waiting:
        raise RuntimeError(f"{engine.scheduler.num_waiting} of {batch} requests were not admitted: too few pages")
    return ids


def leave(engine: Engine, ids: list[str]) -> list[str]:
    """Ends the requests. Returns errors of those that had failed."""
    running = [request for request in ids if engine.is_unfinished(request)]
    for request in running:
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()
    engine.settle()
    return [f"{request} ended early" for request in ids if request not in running]


def timed_steps(engine: Engine, steps: int, warm: int = 3) -> tuple[list[float], list[float]]:
    """Milliseconds between steps by the host's clock, and device milliseconds (forward and sampling) of the same steps."""
    for _ in range(warm):
        engine.step()
    engine.times.steps.clear()
    intervals = []
    last = time.perf_counter()
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        intervals.append(1e3 * (now - last))
        last = now
    device = [cost.device for cost in engine.times.steps]
    engine.settle()
    return intervals, device


def timed_prefill(engine: Engine, tokens: int, seed: int) -> tuple[float, float]:
    """(seconds by the host's clock until the first token, device milliseconds) of one prompt."""
    engine.add_request(
        f"prefill-{seed}", random_ids(tokens, engine.parts.limits.vocab_size, seed), SamplingParams(temperature=0.0, max_tokens=1)
    )
    engine.times.steps.clear()
    begin = time.perf_counter()
    finished = []
    while engine.has_unfinished:
        finished += engine.step().finished
    finished += engine.settle().finished
    seconds = time.perf_counter() - begin
    for output in finished:
        if output.error:
            raise RuntimeError(f"prefill failed: {output.error}")
    return seconds, sum(cost.device for cost in engine.times.steps)


@contextmanager
def recorded_routing(engine: Engine) -> Iterator[list[Routing]]:
    """Collects what `moe_gate` returns in eager steps and while graphs are captured."""
    kernels, seen = engine.parts.kernels, []
    gate = kernels.moe_gate

    def recording(*args: Any) -> Routing:
        routing = gate(*args)
        seen.append(routing)
        return routing

    kernels.moe_gate = recording  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del kernels.moe_gate


def distinct_experts(ids: list[Tensor]) -> float:
    """Mean number of distinct experts of layers whose rows chose `ids`."""
    return float(np.mean([chosen.unique().numel() for chosen in ids]))
