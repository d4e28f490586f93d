"""`CudaRuntime`: one GPU. Work and copies are enqueued on the current stream, in order; the host waits only where it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.backend.runtime import DeviceRuntime, Event, Graph, MemoryInfo, PendingCopy
from deepinfer_core.errors import BackendError, EngineError

_TORCH_DTYPES = {
    np.dtype(name): getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
}


class CudaRuntime(DeviceRuntime):
    """Uses torch's caching allocators: a pinned buffer is handed out again only after the copies that use it are done."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise BackendError(f"backend 'cuda_sm100' has no runtime for device {device!r}: set backend.device to '' or 'cuda:N'")
        torch.cuda.set_device(self.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._guards = 0  # open `forbid_sync` scopes

    def to_device(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        staged = torch.empty(array.shape, dtype=_TORCH_DTYPES[array.dtype], pin_memory=True)
        staged.numpy()[...] = array
        if out is None:
            return staged.to(self.device, non_blocking=True)
        return out.copy_(staged, non_blocking=True)

    def to_host(self, tensors: dict[str, Tensor]) -> PendingCopy:
        copies = {}
        for name, tensor in tensors.items():
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        return _Pending(self, copies, self._recorded(), None)

    def submit(self, work: Callable[[], dict[str, Tensor]]) -> PendingCopy:
        try:
            with torch.no_grad():
                return self.to_host(work())
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for this piece of work
            return _Pending(self, {}, None, error)

    def record(self) -> Event:
        return _Event(self, self._recorded())

    def synchronize(self) -> None:
        self._may_block("synchronize")
        with _device_errors():
            torch.cuda.synchronize(self.device)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs `work` once eagerly, so that kernels are compiled and libraries initialised, then captures it.

        All graphs share one memory pool: replay them one after the other. Raises EngineError if the work cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            work()
            torch.cuda.synchronize(self.device)
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    work()
            except RuntimeError as error:
                raise EngineError(f"a CUDA graph could not be captured: {error}; run this step eagerly") from error
        return _Graph(graph)

    def memory(self) -> MemoryInfo:
        """Free memory of the device plus what torch's allocator holds unused."""
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryInfo(total, free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with torch.no_grad(), _device_errors():
            work()
            torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        """Inside, torch operations that wait for the device raise RuntimeError, waits of this runtime raise EngineError."""
        before = torch.cuda.get_sync_debug_mode()
        self._guards += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._guards -= 1
            torch.cuda.set_sync_debug_mode(before)

    def close(self) -> None:
        return None

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _may_block(self, what: str) -> None:
        if self._guards:
            raise EngineError(f"{what} inside forbid_sync: this section may not wait for the device; move the wait behind the launch")


class _Event(Event):
    def __init__(self, runtime: CudaRuntime, event: torch.cuda.Event) -> None:
        self._runtime = runtime
        self._event = event

    def wait(self) -> None:
        if not self.done():
            self._runtime._may_block("Event.wait")
        with _device_errors():
            self._event.synchronize()

    def done(self) -> bool:
        with _device_errors():
            return bool(self._event.query())

    def milliseconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Event)
        with _device_errors():
            return earlier._event.elapsed_time(self._event)


class _Pending(PendingCopy):
    def __init__(self, runtime: CudaRuntime, copies: dict[str, Tensor], event: torch.cuda.Event | None, error: Exception | None) -> None:
        self._copies = copies
        self._event = None if event is None else _Event(runtime, event)
        self._error = error

    def wait(self) -> dict[str, np.ndarray]:
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._event.wait()
        return {name: copy.numpy() for name, copy in self._copies.items()}

    def done(self) -> bool:
        return self._event is None or self._event.done()


class _Graph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _device_errors() -> Iterator[None]:
    """A failed kernel shows up at the next wait: says so instead of naming the wait."""
    try:
        yield
    except RuntimeError as error:
        message = f"the GPU reported an error of work enqueued earlier: {error}; set CUDA_LAUNCH_BLOCKING=1 to find the operation"
        raise EngineError(message) from error
