"""Before the first request: graphs are captured, and with confidence-scheduled verification decode steps of each size are timed."""

from __future__ import annotations

import logging
import math
from functools import partial

import numpy as np
import torch

from deepinfer_core.engine.graphs import DecodeGraphs, bucket_sizes
from deepinfer_core.engine.runner import Runner
from deepinfer_core.engine.startup import EngineParts
from deepinfer_core.engine.verification import ProfiledCost

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
    largest = parts.limits.max_num_seqs * (1 + parts.limits.num_draft_tokens)
    graphs = runner.use_graphs(bucket_sizes(largest, config.graphs.batch_size_interval), parts.limits.max_positions)
    if captures:
        failed = runner.capture()
        log.info("event=graphs_captured sizes=%d failed=%d", len(graphs.sizes) - len(failed), len(failed))
    costs = ProfiledCost(decode_times(runner, graphs), padded=captures) if config.speculative.enable_varlen else None
    if not captures:
        runner.graphs = None  # they served as buffers for timing
    return costs


def decode_times(runner: Runner, graphs: DecodeGraphs) -> dict[int, float]:
    """Milliseconds of the forward of a decode step in each bucket: short context, one row per sequence, random tokens.

    Equal tokens would all choose the same experts, and rows would look cheaper than they are. Sizes take turns and the fastest run counts:
    whatever disturbs a run only adds to it. For the same reason a bucket never counts as dearer than a larger one.
    """
    times, random = dict.fromkeys(graphs.sizes, math.inf), np.random.default_rng(0)
    for turn in range(1 + TIMED_RUNS):
        for size in reversed(graphs.sizes):
            tokens = random.integers(0, runner.loaded.config.vocab_size, size)
            before = runner.runtime.record()
            runner.runtime.submit(partial(_run_padding, graphs, size, tokens))
            after = runner.runtime.record()
            after.wait()
            if turn:
                times[size] = min(times[size], after.milliseconds_since(before))
    least = np.minimum.accumulate([times[size] for size in reversed(graphs.sizes)])
    return dict(zip(reversed(graphs.sizes), least.tolist(), strict=True))


@torch.inference_mode()
def _run_padding(graphs: DecodeGraphs, size: int, tokens: np.ndarray) -> dict[str, torch.Tensor]:
    graphs.run_padding(size, tokens)
    return {}
