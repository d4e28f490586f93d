"""Everything the engine needs of a device besides ops: placement, overlap, graphs, memory figures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryInfo:
    """Device memory in bytes. `available` is what the engine may still allocate."""

    total: int
    available: int


class Event(ABC):
    """A point in the order of device work."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until all work recorded before the event is done. Raises the device's error, if it failed."""

    @abstractmethod
    def done(self) -> bool:
        """True if `wait` would return at once. Never blocks."""

    def milliseconds_since(self, earlier: Event) -> float:
        """(optional) Device time between `earlier` and this event of the same runtime, both done; NaN if the device cannot tell."""
        return math.nan


class Graph(ABC):
    """A captured sequence of device work over fixed buffers."""

    @abstractmethod
    def replay(self) -> None:
        """Enqueues the captured work. Inputs are whatever the captured buffers hold when the work runs."""


class DeviceRuntime(ABC):
    """One device of one process. Not thread safe. Work runs in the order it is enqueued."""

    device: torch.device

    @abstractmethod
    def to_device(self, array: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copies a host array to the device (into `out` if given) without waiting. The array may be reused at once."""

    @abstractmethod
    def to_host(self, tensors: dict[str, Tensor]) -> PendingCopy:
        """Enqueues a copy of `tensors` to the host. The tensors may be overwritten by later work."""

    @abstractmethod
    def submit(self, work: Callable[[], dict[str, Tensor]]) -> PendingCopy:
        """Enqueues `work`, which launches ops and returns tensors, then copies its result to the host, all in order.

        A device with streams runs `work` at once (launches return early); the CPU may run it on a worker thread.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event after all work enqueued so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until all enqueued work is done."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Graph:
        """Captures `work` (no synchronisation, no new buffers that outlive it) for replay. Only if `graph_capture` is claimed."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Current memory figures."""

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        """(optional) Runs `work` and returns the device memory that it needed beyond what was in use before; None: cannot tell.

        A backend that can tell lets the engine size its caches with what a full step leaves free.
        """
        return None

    @abstractmethod
    def forbid_sync(self) -> AbstractContextManager[None]:
        """(guard) Inside, anything that blocks the host on the device raises. A device that cannot tell does nothing."""

    @abstractmethod
    def close(self) -> None:
        """Frees threads and streams. Idempotent."""


class PendingCopy(ABC):
    """Host copies in flight."""

    @abstractmethod
    def wait(self) -> dict[str, np.ndarray]:
        """Blocks until the copies are there, and returns them by name. Raises what the work raised."""

    @abstractmethod
    def done(self) -> bool:
        """True if `wait` would return at once."""
