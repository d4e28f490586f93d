"""Draft passes as captured graphs: the drafter's blocks and its sequential heads over all sequences of a step, in one replay.

A pass over S sequences runs in the smallest bucket that holds S. Sequences up to the bucket's size are padding: state slot 0, no main keys.
Every bucket has one graph for each kind of sampling; edits of logits play no part, because drafts are drawn without them. A bucket that
cannot be captured stays eager, with one warning.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_core.backend.runtime import DeviceRuntime, Graph
from deepinfer_core.engine.sample_graphs import SampleKind, padding_batch
from deepinfer_core.model.drafter import DraftInputs
from deepinfer_core.sampling import HostBatch, Sampler
from deepinfer_core.sampling.batch import SamplingBatch
from deepinfer_core.sampling.packing import pack, unpack

log = logging.getLogger("deepinfer")


class Drafts(NamedTuple):
    """N drafts of each of S sequences."""

    ids: Tensor  # int64 [S, N]
    confidences: Tensor  # float32 [S, N]


DraftPass = Callable[[DraftInputs, SamplingBatch, Tensor], Drafts]
"""Drafts after `inputs`; the last argument, int64 [S], counts the drafts that this step accepted (see `Sampler.draft`)."""

_PADDING = (0, 0, 0, 1, 0)  # of `_Bucket.state`: position 0 lies before the first valid one


@dataclass
class _Bucket:
    """Buffers of one size and kind."""

    host: HostBatch  # padding: tells shapes and kind
    sampling: Tensor  # uint8, packed arrays of the step
    arrays: dict[str, Tensor]  # views of `sampling`
    state: Tensor  # int64 [5, size]: the fields of DraftInputs, then accepted drafts
    graph: Graph | None = None
    result: Drafts | None = None


class DraftGraphs:
    """Graphs of `draft` for passes of up to `sizes[-1]` sequences."""

    def __init__(self, runtime: DeviceRuntime, sampler: Sampler, draft: DraftPass, sizes: list[int]) -> None:
        self.sizes = sizes
        self._runtime, self._sampler, self._draft = runtime, sampler, draft
        self._buckets: dict[tuple[int, SampleKind], _Bucket] = {}
        self._padding = torch.tensor(_PADDING, dtype=torch.int64, device=runtime.device)[:, None]

    def capture(self) -> None:
        """Captures every bucket, largest first, after a run of the largest. What cannot be captured stays eager, with one warning."""
        for size in reversed(self.sizes):
            for kind in SampleKind:
                bucket = self._bucket(size, kind)
                try:
                    if size == self.sizes[-1]:
                        self._runtime.submit(partial(self._warm, bucket)).wait()
                    bucket.graph = self._runtime.capture(partial(self._run, bucket))
                except Exception as error:  # noqa: BLE001 whatever a device raises, eager execution is still there
                    log.warning("event=draft_graph_failed sequences=%d kind=%s reason=%r action=eager", size, kind.value, str(error))
                    continue
                self._buckets[size, kind] = bucket

    def run(self, host: HostBatch, inputs: DraftInputs, accepted: Tensor) -> Drafts | None:
        """Enqueues the drafts of `inputs`, whose sampling `host` describes; None: nothing was captured for such a pass.

        The result is valid until the next run.
        """
        at = bisect_left(self.sizes, host.count)
        bucket = self._buckets.get((self.sizes[at], SampleKind.of(host))) if at < len(self.sizes) else None
        if bucket is None or bucket.graph is None:
            return None
        self._runtime.to_device(pack(host.padded(self.sizes[at]).arrays)[0], out=bucket.sampling)
        bucket.state[:, : host.count].copy_(torch.stack((*inputs, accepted)))
        bucket.state[:, host.count :].copy_(self._padding.expand(-1, self.sizes[at] - host.count))
        bucket.graph.replay()
        assert bucket.result is not None
        return Drafts(*(tensor[: host.count] for tensor in bucket.result))

    def _warm(self, bucket: _Bucket) -> dict[str, Tensor]:
        """What the first run allocates for all (the distributions of drafts) must not come from a graph's memory."""
        self._run(bucket)
        return {}

    def _bucket(self, size: int, kind: SampleKind) -> _Bucket:
        host = padding_batch(size, kind)
        buffer, layout = pack(host.arrays)
        on_device = self._runtime.to_device(buffer)
        return _Bucket(host, on_device, unpack(on_device, layout), self._padding.repeat(1, size))

    @torch.inference_mode()
    def _run(self, bucket: _Bucket) -> None:
        *fields, accepted = bucket.state.unbind()
        bucket.result = self._draft(DraftInputs(*fields), self._sampler.batch_of(bucket.host, bucket.arrays), accepted)
