"""Sampling of plain decode steps as captured graphs: logits, draws and the results that the next step needs, in one replay.

Plain: every sequence decodes one row, no drafts, nothing edits its logits, no alternatives are reported (`HostBatch.is_plain`). Each
decode bucket has one graph for each kind of plain step; anything else is sampled eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from deepinfer_core.backend.runtime import DeviceRuntime, Graph
from deepinfer_core.engine.graphs import DecodeGraphs
from deepinfer_core.engine.results import DeviceStep
from deepinfer_core.sampling import HostBatch, Sampler, host_batch
from deepinfer_core.sampling.packing import pack, unpack

log = logging.getLogger("deepinfer")


class SampleKind(Enum):
    """What a plain step's sequences ask for."""

    GREEDY = "greedy"  # all take the most likely token
    DRAWN = "drawn"  # some draw from the whole distribution
    FILTERED = "filtered"  # some use top_k, top_p or min_p

    @classmethod
    def of(cls, host: HostBatch) -> SampleKind:
        if host.greedy == host.count:
            return cls.GREEDY
        return cls.FILTERED if host.filtered else cls.DRAWN


def padding_batch(size: int, kind: SampleKind) -> HostBatch:
    """A plain batch of `size` padding sequences that has the flags of the kind. Some may be greedy, if there are others."""
    padding = host_batch([]).padded(size)
    greedy = size if kind is SampleKind.GREEDY else min(1, size - 1)
    return HostBatch(padding.arrays, size, greedy, kind is SampleKind.FILTERED, 0)


@dataclass
class _Tail:
    """One bucket's sampling of one kind."""

    size: int
    host: HostBatch  # padding: tells shapes and kind
    buffer: Tensor  # uint8, packed arrays of the step
    arrays: dict[str, Tensor]  # views of `buffer`
    graph: Graph | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)  # of the newest run, padded


class SampleGraphs:
    """Graphs behind those of `decode`. `logits` maps hidden states [T, D] to logits [T, V]."""

    def __init__(self, runtime: DeviceRuntime, decode: DecodeGraphs, sampler: Sampler, logits: Callable[[Tensor], Tensor]) -> None:
        self._runtime, self._decode, self._sampler, self._logits = runtime, decode, sampler, logits
        self._tails: dict[tuple[int, SampleKind], _Tail] = {}

    def capture(self) -> None:
        """Captures sampling behind every captured bucket. What cannot be captured stays eager, with one warning."""
        for size in reversed(self._decode.captured):
            for kind in SampleKind:
                tail = self._tail(size, kind)
                try:
                    tail.graph = self._runtime.capture(partial(self._run, tail))
                except Exception as error:  # noqa: BLE001 whatever a device raises, eager execution is still there
                    log.warning("event=sample_graph_failed rows=%d kind=%s reason=%r action=eager", size, kind.value, str(error))
                    continue
                self._tails[size, kind] = tail

    def can_run(self, host: HostBatch, size: int) -> bool:
        """Whether the sampling of a step that ran in bucket `size` was captured."""
        return host.is_plain and (size, SampleKind.of(host)) in self._tails

    def run(self, host: HostBatch, size: int) -> tuple[DeviceStep, dict[str, Tensor]]:
        """Enqueues the sampling of the bucket's newest step: what the next step needs, what the host wants. Valid until the next run."""
        tail = self._tails[size, SampleKind.of(host)]
        self._runtime.to_device(pack(host.padded(size).arrays)[0], out=tail.buffer)
        assert tail.graph is not None
        tail.graph.replay()
        return self._decode.previous.first(host.count), {name: tensor[: host.count] for name, tensor in tail.outputs.items()}

    def _tail(self, size: int, kind: SampleKind) -> _Tail:
        host = padding_batch(size, kind)
        buffer, layout = pack(host.arrays)
        on_device = self._runtime.to_device(buffer)
        return _Tail(size, host, on_device, unpack(on_device, layout))

    @torch.inference_mode()
    def _run(self, tail: _Tail) -> None:
        logits = self._logits(self._decode.newest(tail.size).forward.hidden)
        chosen = self._sampler.sample(logits, self._sampler.batch_of(tail.host, tail.arrays))
        self._decode.previous.tokens[: tail.size].copy_(chosen.tokens)
        tail.outputs = {"emitted": chosen.tokens[:, None], "failed": chosen.failed, "scores": chosen.scores.tokens[:, None]}
