"""Decode graphs: the forward of decode steps, captured once for each bucket of rows and replayed over fixed buffers.

A step of T rows runs in the smallest bucket that holds T. Rows up to the bucket's size belong to padding sequences of one row each: state
slot 0, page 0, nothing stored. Every input is copied into the bucket's buffers; metadata is derived inside the graph. A bucket that
cannot be captured stays eager, with one warning.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepinfer_core.backend.runtime import DeviceRuntime, Graph
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


@dataclass
class _Bucket:
    inputs: SequenceInputs  # fixed buffers: `size` sequences, `size` rows
    graph: Graph | None = None
    result: ForwardResult | None = None


class DecodeGraphs:
    """The buckets of one runner. `forward` is what is captured; it must touch no buffer that outlives it but the caches."""

    def __init__(self, runtime: DeviceRuntime, forward: Forward, sizes: list[int], pages: int, history: int) -> None:
        self.sizes = sizes
        self._runtime, self._forward = runtime, forward
        self._buckets = {size: _Bucket(_padding(size, pages, history, runtime.device)) for size in sizes}

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

    def run(self, inputs: SequenceInputs, size: int) -> ForwardResult:
        """Enqueues a decode step; rows behind the step's own are padding. The result is valid until the bucket runs again."""
        self._fill(self._buckets[size].inputs, inputs, size)
        return self.run_again(size)

    def run_again(self, size: int) -> ForwardResult:
        """Enqueues a bucket with whatever its buffers hold: padding only, before its first step."""
        bucket = self._buckets[size]
        if bucket.graph is None:
            self._run(bucket)
        else:
            bucket.graph.replay()
        assert bucket.result is not None
        return bucket.result

    @torch.inference_mode()
    def _run(self, bucket: _Bucket) -> None:
        bucket.result = self._forward(bucket.inputs)

    def _warm(self, bucket: _Bucket) -> dict[str, Tensor]:
        self._run(bucket)
        return {}

    def _fill(self, buffers: SequenceInputs, inputs: SequenceInputs, size: int) -> None:
        count, rows = len(inputs.query_len), len(inputs.tokens)
        width = inputs.block_table.shape[1]
        if width > buffers.block_table.shape[1]:
            raise EngineError(f"decode graphs: a block table of {width} pages; the buffers hold {buffers.block_table.shape[1]}")
        for name in ("start", "state_slot", "valid_start", "write_start", "history"):
            target = getattr(buffers, name)
            target[:count].copy_(getattr(inputs, name))
            target[count:].zero_()
        buffers.block_table.zero_()
        buffers.block_table[:count, :width].copy_(inputs.block_table)
        buffers.query_len.zero_()
        buffers.query_len[:count].copy_(inputs.query_len)
        buffers.query_len[count : count + size - rows].fill_(1)
        buffers.tokens.zero_()
        buffers.tokens[:rows].copy_(inputs.tokens)


def _padding(size: int, pages: int, history: int, device: torch.device) -> SequenceInputs:
    """Buffers that hold nothing but padding: `size` sequences of one row."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    return SequenceInputs(
        query_len=zeros(size) + 1,
        start=zeros(size),
        state_slot=zeros(size),
        block_table=zeros(size, pages, dtype=torch.int32),
        valid_start=zeros(size),
        write_start=zeros(size),
        history=zeros(size, history) - 1,
        tokens=zeros(size),
    )
