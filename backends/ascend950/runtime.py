"""`AscendRuntime`: one NPU through torch.npu, whose streams, events and graphs mirror torch.cuda's. Work and copies keep their order."""

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
    """Everything is enqueued on the current stream. torch_npu keeps a pinned buffer until the copies that use it are done."""

    def __init__(self, device: str = "npu:0") -> None:
        self._npu = environment.configure()
        self.device = torch.device(device)
        self._npu.set_device(self.device)
        self._pool = self._npu.graph_pool_handle()
        self._guards = 0  # open `forbid_sync` scopes
        self._closed = False

    def to_device(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        self._refuse_closed()
        staged = torch.from_numpy(np.array(array)).pin_memory()  # copies: the caller may reuse its array at once
        if out is None:
            return staged.to(self.device, non_blocking=True)
        return out.copy_(staged, non_blocking=True)

    def to_host(self, tensors: dict[str, Tensor]) -> PendingCopy:
        self._refuse_closed()
        host = {}
        for name, tensor in tensors.items():
            host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        return _Pending(host, self._recorded(), None)

    def submit(self, work: Callable[[], dict[str, Tensor]]) -> PendingCopy:
        self._refuse_closed()
        try:
            with torch.no_grad():
                return self.to_host(work())
        except Exception as error:  # noqa: BLE001 belongs to whoever waits for this work
            return _Pending({}, None, error)

    def record(self) -> Event:
        self._refuse_closed()
        return self._recorded()

    def synchronize(self) -> None:
        self._may_block("synchronize")
        with _as_engine_error():
            self._npu.synchronize(self.device)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures `work` after one eager run of it, which loads kernels and decodes the weights that are decoded on first use.

        All graphs share one memory pool: replay them one after the other. Raises EngineError if the work cannot be captured.
        """
        self._refuse_closed()
        graph = self._npu.NPUGraph()
        with torch.no_grad():
            work()
            self._npu.synchronize(self.device)
            try:
                with self._npu.graph(graph, pool=self._pool):
                    work()
            except RuntimeError as error:
                raise EngineError(f"this step cannot be captured in an NPU graph ({error}): run it eagerly") from error
        return _Graph(graph)

    def memory(self) -> MemoryInfo:
        """Free memory of the device plus what torch_npu's allocator holds unused."""
        free, total = self._npu.mem_get_info(self.device)
        unused = self._npu.memory_reserved(self.device) - self._npu.memory_allocated(self.device)
        return MemoryInfo(total=int(total), available=int(free + unused))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        self._npu.synchronize(self.device)
        self._npu.reset_peak_memory_stats(self.device)
        before = self._npu.memory_allocated(self.device)
        with torch.no_grad(), _as_engine_error():
            work()
            self._npu.synchronize(self.device)
        return int(self._npu.max_memory_allocated(self.device) - before)

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        """Inside, waits of this runtime that would block raise EngineError, and synchronising torch_npu operations RuntimeError."""
        previous = self._npu.get_sync_debug_mode()
        self._npu.set_sync_debug_mode("error")
        self._guards += 1
        try:
            yield
        finally:
            self._guards -= 1
            self._npu.set_sync_debug_mode(previous)

    def close(self) -> None:
        if not self._closed:
            self._npu.synchronize(self.device)
        self._closed = True

    def _recorded(self) -> _Event:
        event = self._npu.Event(enable_timing=True)
        event.record(self._npu.current_stream(self.device))
        return _Event(self, event)

    def _may_block(self, what: str) -> None:
        if self._guards:
            raise EngineError(f"{what} inside forbid_sync: this section may not wait for the device; move the wait behind the launch")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("the Ascend runtime was closed: no work can be enqueued any more; build a new engine")


class _Event(Event):
    def __init__(self, runtime: AscendRuntime, event: Any) -> None:
        self._runtime, self._event = runtime, event

    def wait(self) -> None:
        if not self.done():
            self._runtime._may_block("waiting for an event")
        with _as_engine_error():
            self._event.synchronize()

    def done(self) -> bool:
        with _as_engine_error():
            return bool(self._event.query())

    def milliseconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Event)
        with _as_engine_error():
            return float(earlier._event.elapsed_time(self._event))


class _Pending(PendingCopy):
    """Copies in flight, or the error that the work raised when it was launched."""

    def __init__(self, host: dict[str, Tensor], event: _Event | None, error: Exception | None) -> None:
        self._host, self._event, self._error = host, event, error

    def wait(self) -> dict[str, np.ndarray]:
        if self._error is not None:
            raise self._error
        assert self._event is not None
        self._event.wait()
        return {name: tensor.numpy() for name, tensor in self._host.items()}

    def done(self) -> bool:
        return self._event is None or self._event.done()


class _Graph(Graph):
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _as_engine_error() -> Iterator[None]:
    """Turns the device's RuntimeError into an EngineError. CANN reports a failed operator at the next wait, not where it was launched."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"the NPU failed: {error}") from error
