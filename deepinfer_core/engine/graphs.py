"""Decode graphs: the forward of decode steps, captured once for each bucket of rows and replayed over fixed buffers.

A step of T rows runs in the smallest bucket that holds T. Rows up to the bucket's size belong to padding sequences of one row each: state
slot 0, page 0, nothing stored. A step costs one copy of its plan into the bucket's buffer and one replay: the plan's completion, metadata
and the model are all inside the graph. A bucket that cannot be captured stays eager, with one warning.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.backend.runtime import DeviceRuntime, Graph
from deepinfer_core.engine.plan import StepPlan
from deepinfer_core.engine.results import DeviceStep
from deepinfer_core.engine.step_inputs import CompletedInputs, PlanInputs, StepSize, completed, packed, unpacked
from deepinfer_core.errors import EngineError
from deepinfer_core.model.batch import SequenceInputs
from deepinfer_core.model.graph import ForwardResult

log = logging.getLogger("deepinfer")

Forward = Callable[[SequenceInputs], ForwardResult]


def bucket_sizes(largest: int, interval: int) -> list[int]:
    """Rows of each bucket: powers of two below `interval`, its multiples below `largest`, then `largest` (DeepInfer 0.1.0)."""
    interval = min(interval, largest)
    powers = [1 << i for i in range(interval.bit_length()) if 1 << i < interval]
    return [*powers, *range(interval, largest, interval), largest]


class GraphOptions(NamedTuple):
    """Sizes of the buffers besides the buckets' own."""

    pages: int  # of the longest block table
    history: int  # ids before a row that the plan tells
    sequences: int  # most sequences of any step
    drafts: int  # most drafts of a sequence


class StepRun(NamedTuple):
    """What a bucket computed. Valid until it runs again."""

    inputs: CompletedInputs
    forward: ForwardResult


@dataclass
class _Bucket:
    size: StepSize
    buffer: Tensor  # uint8, see `packed`
    inputs: PlanInputs  # views of `buffer`
    spread: Tensor  # int64 [S]: rows of each sequence
    graph: Graph | None = None
    result: StepRun | None = None


class DecodeGraphs:
    """The buckets of one runner. `forward` is what is captured; it must touch no buffer that outlives it but the caches.

    `previous` holds the results of the newest sampled step; the runner keeps them there with `remember`.
    """

    def __init__(self, runtime: DeviceRuntime, forward: Forward, sizes: list[int], options: GraphOptions) -> None:
        self.sizes = sizes
        self._runtime, self._forward, self._options = runtime, forward, options
        self.previous = DeviceStep.blank(options.sequences, options.drafts, runtime.device)
        self._buckets = {size: self._bucket(size) for size in sizes}

    def size_for(self, rows: int) -> int | None:
        """The smallest bucket for a step of `rows` rows; None if it is larger than all."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def capture(self, progress: Callable[[int], None] = lambda size: None) -> list[int]:
        """Captures every bucket, largest first, each after one warm-up run. Returns the sizes that could not be captured."""
        failed = []
        for size in reversed(self.sizes):
            bucket = self._buckets[size]
            try:
                self._runtime.submit(partial(self._warm, bucket)).wait()
                bucket.graph = self._runtime.capture(partial(self._run, bucket))
            except Exception as error:  # noqa: BLE001 whatever a device raises, eager execution is still there
                bucket.graph = None
                failed.append(size)
                log.warning("event=graph_capture_failed rows=%d reason=%r action=eager", size, str(error))
            progress(size)
        return failed

    @property
    def captured(self) -> list[int]:
        """Sizes of the buckets that are replayed."""
        return [size for size in self.sizes if self._buckets[size].graph is not None]

    def newest(self, size: int) -> StepRun:
        """What a bucket computed when it ran last."""
        result = self._buckets[size].result
        assert result is not None
        return result

    def remember(self, step: DeviceStep) -> None:
        """Keeps a step's results where graphs look for them."""
        step.copy_to(self.previous)

    def run(self, plan: StepPlan, size: int, spread: Tensor | None = None) -> StepRun:
        """Enqueues a decode step; `spread` as of `completed`. Raises EngineError if the plan's block table is wider than the buffers."""
        bucket = self._buckets[size]
        width = plan.block_table.shape[1]
        if width > bucket.size.pages:
            raise EngineError(f"decode graphs: a block table of {width} pages; the buffers hold {bucket.size.pages}")
        self._runtime.to_device(packed(plan, bucket.size), out=bucket.buffer)
        if self._options.drafts:
            bucket.spread.copy_(bucket.inputs.query_len)
            if spread is not None:
                bucket.spread[: len(spread)].copy_(spread)
        return self._run_again(size)

    def run_padding(self, size: int, tokens: np.ndarray) -> StepRun:
        """Enqueues a bucket full of padding sequences with `tokens` int64 [size]: rows that cost what real ones do and store nothing."""
        bucket = self._buckets[size]
        self._runtime.to_device(packed(None, bucket.size), out=bucket.buffer)
        self._runtime.to_device(tokens, out=bucket.inputs.tokens)
        bucket.spread.copy_(bucket.inputs.query_len)
        return self._run_again(size)

    def _run_again(self, size: int) -> StepRun:
        bucket = self._buckets[size]
        if bucket.graph is None:
            self._run(bucket)
        else:
            bucket.graph.replay()
        return self.newest(size)

    @torch.inference_mode()
    def _run(self, bucket: _Bucket) -> None:
        drafts = self._options.drafts > 0
        inputs = completed(bucket.inputs, self.previous, bucket.spread if drafts else None, one_row=not drafts)
        bucket.result = StepRun(inputs, self._forward(inputs.sequences))

    def _warm(self, bucket: _Bucket) -> dict[str, Tensor]:
        self._run(bucket)
        return {}

    def _bucket(self, rows: int) -> _Bucket:
        size = StepSize(rows, rows, self._options.pages, self._options.history)
        buffer = self._runtime.to_device(packed(None, size))
        inputs = unpacked(buffer, size)
        return _Bucket(size, buffer, inputs, inputs.query_len.clone())
