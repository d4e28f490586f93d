"""`AscendRuntime`: streams, events, pinned staging and NPU graphs, through torch.npu (which mirrors torch.cuda)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_backends.ascend950 import environment
from deepinfer_core.backend.runtime import DeviceRuntime, Event, Graph, MemoryInfo, PendingCopy
from deepinfer_core.errors import EngineError


class AscendRuntime(DeviceRuntime):
    """One NPU. Work runs on one compute stream; copies to the host run on a second one, behind an event."""

    def __init__(self, device: str = "npu:0") -> None:
        self._npu = environment.configure()
        self.device = torch.device(device)
        self._npu.set_device(self.device)
        self._compute = self._npu.current_stream(self.device)
        self._copies = self._npu.Stream(device=self.device)
        self._guards = 0
        self._closed = False

    def to_device(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        self._refuse_closed()
        staged = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        if out is None:
            return staged.to(self.device, non_blocking=True)
        return out.copy_(staged, non_blocking=True)

    def to_host(self, tensors: dict[str, Tensor]) -> PendingCopy:
        self._refuse_closed()
        # A snapshot in the compute stream: later work may overwrite the tensors before the copy stream reads them.
        snapshots = {name: tensor.clone() for name, tensor in tensors.items()}
        self._copies.wait_stream(self._compute)
        host = {}
        with self._npu.stream(self._copies):
            for name, tensor in snapshots.items():
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)
        return _Pending(self, host, self._event(self._copies))

    def submit(self, work: Callable[[], dict[str, Tensor]]) -> PendingCopy:
        with torch.no_grad():
            return self.to_host(work())

    def record(self) -> Event:
        self._refuse_closed()
        return _Event(self, self._event(self._compute))

    def synchronize(self) -> None:
        self._may_block("synchronize")
        self._npu.synchronize(self.device)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures `work` after one eager run of it, which allocates, loads kernels and decodes weights that are decoded on first use."""
        self._refuse_closed()
        with torch.no_grad():
            work()
            self._npu.synchronize(self.device)
            graph = self._npu.NPUGraph()
            with self._npu.graph(graph):
                work()
        return _Graph(graph)

    def memory(self) -> MemoryInfo:
        free, total = self._npu.mem_get_info(self.device)
        cached = self._npu.memory_reserved(self.device) - self._npu.memory_allocated(self.device)
        return MemoryInfo(total=int(total), available=int(free + cached))

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        """Inside, this runtime's waits raise, and torch_npu raises for synchronising operators."""
        self._guards += 1
        previous = self._npu.get_sync_debug_mode()
        self._npu.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._guards -= 1
            self._npu.set_sync_debug_mode(previous)

    def close(self) -> None:
        if not self._closed:
            self._npu.synchronize(self.device)
        self._closed = True

    def _event(self, stream: Any) -> Any:
        event = self._npu.Event()
        event.record(stream)
        return event

    def _may_block(self, what: str) -> None:
        if self._guards:
            raise EngineError(f"{what} inside forbid_sync: this section may not wait for the device; move the wait behind the launch")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("the Ascend runtime was closed: no work can be enqueued any more; build a new engine")


class _Pending(PendingCopy):
    def __init__(self, runtime: AscendRuntime, host: dict[str, Tensor], event: Any) -> None:
        self._runtime, self._host, self._event = runtime, host, event

    def wait(self) -> dict[str, np.ndarray]:
        self._runtime._may_block("PendingCopy.wait")
        self._event.synchronize()
        return {name: tensor.numpy() for name, tensor in self._host.items()}

    def done(self) -> bool:
        return bool(self._event.query())


class _Event(Event):
    def __init__(self, runtime: AscendRuntime, event: Any) -> None:
        self._runtime, self._event = runtime, event

    def wait(self) -> None:
        self._runtime._may_block("Event.wait")
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class _Graph(Graph):
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()
