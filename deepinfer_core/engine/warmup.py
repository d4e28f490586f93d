"""Before the first request: graphs are captured, and with confidence-scheduled verification decode steps of each size are timed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from deepinfer_core.engine.graphs import DecodeGraphs, bucket_sizes
from deepinfer_core.engine.runner import Runner
from deepinfer_core.engine.startup import EngineParts
from deepinfer_core.engine.verification import EagerCost, ProfiledCost

log = logging.getLogger("deepinfer")

TIMED_RUNS = 5  # per size, after one to warm up (DeepInfer 0.1.0, which takes a trimmed mean)


def warm_up(runner: Runner, parts: EngineParts) -> ProfiledCost | None:
    """Prepares the runner's decode buckets as configured. Returns the cost table of `speculative.enable_varlen`, else None."""
    config = parts.config
    eager = config.graphs.enforce_eager
    if eager is None:
        eager = parts.runtime.device.type == "cpu"
    captures = not eager and parts.selected.backend.capabilities().graph_capture
    if not captures and not config.speculative.enable_varlen:
        return None
    limits, interval = parts.limits, config.graphs.batch_size_interval
    if not captures:
        return eager_costs(runner, bucket_sizes(limits.max_num_seqs, interval), limits.num_draft_tokens)
    largest = limits.max_num_seqs * (1 + limits.num_draft_tokens)
    graphs = runner.use_graphs(bucket_sizes(largest, interval), limits.max_positions)
    failed = runner.capture()
    log.info("event=graphs_captured sizes=%d failed=%d", len(graphs.sizes) - len(failed), len(failed))
    return ProfiledCost(decode_times(runner, graphs)) if config.speculative.enable_varlen else None


def decode_times(runner: Runner, graphs: DecodeGraphs) -> dict[int, float]:
    """Milliseconds of the forward of a decode step in each bucket: short context, one row per sequence."""
    return _times(runner, graphs.sizes, lambda size: partial(graphs.run_padding, size, _tokens(runner, size)))


def eager_costs(runner: Runner, sizes: list[int], drafts: int) -> EagerCost | None:
    """Times of `sizes` sequences of one row, and of as many as drafting allows; None without drafts."""
    if not drafts:
        return None

    def times(rows: int) -> dict[int, float]:
        return _times(runner, sizes, lambda size: partial(runner.run_padding, _tokens(runner, size * rows), rows))

    return EagerCost(times(1), times(1 + drafts), drafts)


def _tokens(runner: Runner, count: int) -> np.ndarray:
    """Random ids. Equal ones would all choose the same experts, and rows would look cheaper than they are."""
    return np.random.default_rng(count).integers(0, runner.loaded.config.vocab_size, count)


def _times(runner: Runner, sizes: list[int], work: Callable[[int], Callable[[], object]]) -> dict[int, float]:
    """Milliseconds of `work(size)` for each size (ascending).

    Sizes take turns and the fastest run counts: whatever disturbs a run only adds to it. For the same reason a size never counts as dearer
    than a larger one.
    """
    times = dict.fromkeys(sizes, math.inf)
    for turn in range(1 + TIMED_RUNS):
        for size in reversed(sizes):
            before = runner.runtime.record()
            runner.runtime.submit(partial(_run, work(size)))
            after = runner.runtime.record()
            after.wait()
            if turn:
                times[size] = min(times[size], after.milliseconds_since(before))
    least = np.minimum.accumulate([times[size] for size in reversed(sizes)])
    return dict(zip(reversed(sizes), least.tolist(), strict=True))


@torch.inference_mode()
def _run(work: Callable[[], object]) -> dict[str, torch.Tensor]:
    work()
    return {}
