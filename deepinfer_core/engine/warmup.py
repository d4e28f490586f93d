"""Before the first request: graphs are captured, and with confidence-scheduled verification decode steps of each size are timed."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import torch

from deepinfer_core.engine.graphs import DecodeGraphs, bucket_sizes
from deepinfer_core.engine.runner import Runner
from deepinfer_core.engine.startup import EngineParts
from deepinfer_core.engine.verification import ProfiledCost

log = logging.getLogger("deepinfer")

TIMED_RUNS = 5  # per size; the fastest and the slowest are dropped (DeepInfer 0.1.0)


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

    Equal tokens would all choose the same experts, and rows would look cheaper than they are. A bucket never counts as dearer than a
    larger one: then only the measurement was disturbed.
    """
    times, least, random = {}, np.inf, np.random.default_rng(0)
    for size in reversed(graphs.sizes):
        samples, tokens = [], random.integers(0, runner.loaded.config.vocab_size, size)
        for _ in range(1 + TIMED_RUNS):
            before = runner.runtime.record()
            runner.runtime.submit(partial(_run_padding, graphs, size, tokens))
            after = runner.runtime.record()
            after.wait()
            samples.append(after.milliseconds_since(before))
        kept = sorted(samples[1:])[1:-1]
        times[size] = least = min(sum(kept) / len(kept), least)
    return times


@torch.inference_mode()
def _run_padding(graphs: DecodeGraphs, size: int, tokens: np.ndarray) -> dict[str, torch.Tensor]:
    graphs.run_padding(size, tokens)
    return {}
