"""Runs pieces of work one after the other on a thread that can be given up."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any


class TimeLimitError(Exception):
    """A piece of work took longer than it may."""


class _Stop(BaseException):
    """Raised inside a thread that was given up, at its next Python instruction."""


class Watchdog:
    """One worker thread, replaced after a piece of work that exceeds the limit.

    A thread that is given up is asked to stop with an exception; one that hangs in native code stays until the process ends (threads
    are daemons). Native code that hangs and keeps Python's interpreter lock stops the whole run: nothing in the process can help it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start()

    def run(self, work: Callable[[], Any], patience: float = 1.0) -> Any:
        """The result of `work`, which may take `patience` times the limit. Raises what it raises, and TimeLimitError."""
        limit = self.seconds * patience
        answer: queue.Queue[tuple[bool, Any]] = queue.Queue()
        self._tasks.put((work, answer))
        try:
            good, value = answer.get(timeout=limit)
        except queue.Empty:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_Stop))
            self._start()
            raise TimeLimitError(f"no result after {limit:g} s (time limit)") from None
        if good:
            return value
        raise value

    def close(self) -> None:
        """Ends the worker thread."""
        self._tasks.put(None)

    def _start(self) -> None:
        self._tasks: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name="conformance", daemon=True)
        self._thread.start()


def _work(tasks: queue.Queue[Any]) -> None:
    while (task := tasks.get()) is not None:
        work, answer = task
        try:
            result = (True, work())
        except _Stop:
            return
        except BaseException as error:  # noqa: BLE001 handed to the caller, whatever it is
            result = (False, error)
        answer.put(result)
