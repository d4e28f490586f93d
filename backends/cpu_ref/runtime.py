"""`CpuRuntime`: the CPU as a device. Work runs in order on one worker thread, so that the host really runs beside it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.backend.runtime import DeviceRuntime, Event, Graph, MemoryInfo, PendingCopy
from deepinfer_core.errors import BackendError, EngineError


class CpuRuntime(DeviceRuntime):
    """Enqueues work for a worker thread; with `inline=True` work runs at once in the caller's thread, for debugging and for tests.

    Work may enqueue more work; in the worker thread that runs at once. An exception of a piece of work is raised by its own `wait`
    and by the next event recorded after it; later work still runs.
    """

    def __init__(self, device: str = "cpu", inline: bool = False) -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise BackendError(f"backend 'cpu_ref' has no runtime for device {device!r}, only for 'cpu': set backend.device to '' or 'cpu'")
        self._pool = None if inline else ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu_ref", initializer=self._enter_worker)
        self._worker: int | None = None  # ident of the worker thread once it runs
        self._unrecorded: list[Future[Any]] = []  # enqueued since the last event: still running or failed
        self._last: _Work | None = None  # enqueued last, by the host
        self._guards = 0  # open `forbid_sync` scopes
        self._closed = False

    def to_device(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        source = torch.from_numpy(np.array(array, order="C"))  # a copy: the caller may reuse its array at once
        if out is None:
            return source
        self._enqueue(lambda: out.copy_(source))
        return out

    def to_host(self, tensors: dict[str, Tensor]) -> PendingCopy:
        return self.submit(lambda: tensors)

    def submit(self, work: Callable[[], dict[str, Tensor]]) -> PendingCopy:
        return _Pending(self, self._enqueue(lambda: {name: tensor.numpy().copy() for name, tensor in work().items()}))

    def record(self) -> Event:
        self._refuse_if_closed()
        unrecorded, self._unrecorded = self._unrecorded, []
        return _Event(self, unrecorded, None if self._runs_here() else self._last)

    def synchronize(self) -> None:
        self.record().wait()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Keeps `work` and runs it again on replay: nothing is gained, but buffers and buckets are handled as on a real device."""
        self._enqueue(work).result()
        return _Replay(self, work)

    def memory(self) -> MemoryInfo:
        return host_memory()

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        """Inside, `wait` and `synchronize` raise EngineError in every thread but the worker, whether or not they would block."""
        self._guards += 1
        try:
            yield
        finally:
            self._guards -= 1

    def close(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _enter_worker(self) -> None:
        self._worker = threading.get_ident()

    def _runs_here(self) -> bool:
        """Whether work that is enqueued now runs at once, in this thread."""
        return self._pool is None or threading.get_ident() == self._worker

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the CPU runtime was closed: no work can be enqueued any more; build a new engine")

    def _enqueue(self, call: Callable[[], Any]) -> Future[Any]:
        self._refuse_if_closed()
        work = _Work(call)
        if self._pool is None or self._runs_here():
            work.future = _run_now(work)
        else:
            work.future = self._pool.submit(work)
            self._last = work
        self._unrecorded = [f for f in self._unrecorded if not f.done() or f.exception() is not None]
        self._unrecorded.append(work.future)
        return work.future

    def _may_block(self, what: str) -> None:
        if self._guards and threading.get_ident() != self._worker:
            raise EngineError(f"{what} inside forbid_sync: this section may not wait for the device; move the wait behind the launch")


class _Pending(PendingCopy):
    def __init__(self, runtime: CpuRuntime, future: Future[dict[str, np.ndarray]]) -> None:
        self._runtime = runtime
        self._future = future

    def wait(self) -> dict[str, np.ndarray]:
        self._runtime._may_block("PendingCopy.wait")
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class _Replay(Graph):
    def __init__(self, runtime: CpuRuntime, work: Callable[[], None]) -> None:
        self._runtime = runtime
        self._work = work

    def replay(self) -> None:
        self._runtime._enqueue(self._work)


class _Work:
    """One piece of work, and when it ended."""

    future: Future[Any]

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.ended = 0.0

    def __call__(self) -> Any:
        call = self._call
        del self._call  # an event keeps this object: it must not keep the step, which keeps the events before it
        try:
            with torch.no_grad():  # the mode belongs to a thread
                return call()
        finally:
            self.ended = time.perf_counter()


class _Event(Event):
    """Nothing is enqueued for an event: it is reached when it is recorded, or when the work before it ends if that is later."""

    def __init__(self, runtime: CpuRuntime, unrecorded: list[Future[Any]], last: _Work | None) -> None:
        self._runtime, self._unrecorded, self._last = runtime, unrecorded, last
        self._recorded = time.perf_counter()

    def wait(self) -> None:
        self._runtime._may_block("Event.wait")
        for future in self._unrecorded:
            future.result()
        self._reached()

    def done(self) -> bool:
        return self._last is None or self._last.future.done()

    def milliseconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Event)
        return 1e3 * (self._reached() - earlier._reached())

    def _reached(self) -> float:
        if self._last is None:
            return self._recorded
        self._last.future.exception()  # waits, and leaves an error to the event that was recorded next after it
        return max(self._recorded, self._last.ended)


def _run_now(work: _Work) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 handed to whoever waits, exactly as the worker thread does
        future.set_exception(error)
    return future


def host_memory(root: Path = Path("/")) -> MemoryInfo:
    """Memory of the machine or, if that is less, of the container (cgroup v2 or v1). `root` is where /proc and /sys are looked up."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = _meminfo_available(root / "proc/meminfo") or total
    for limit, usage in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        most, used = (_number(root / "sys/fs/cgroup" / name) for name in (limit, usage))
        if most is not None and used is not None and most < total:
            total = most
            available = min(available, max(most - used, 0))
    return MemoryInfo(total=total, available=available)


def _meminfo_available(path: Path) -> int | None:
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file or it holds a word ("max")."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
