"""Kernels that report every call of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepinfer_core.backend.kernels import OPS, Kernels

OnCall = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]


def traced(kernels: Kernels, on_call: OnCall) -> Kernels:
    """The same kernels, sharing all state, that call `on_call(op, args, kwargs, result)` after every op the caller runs.

    Ops that an op runs itself are not reported.
    """
    depth = [0]

    def wrap(op: str) -> Any:
        inner = getattr(type(kernels), op)

        @functools.wraps(inner)
        def method(self: Kernels, *args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                result = inner(self, *args, **kwargs)
            finally:
                depth[0] -= 1
            if not depth[0]:
                on_call(op, args, kwargs, result)
            return result

        return method

    cls = type("Traced", (type(kernels),), {op: wrap(op) for op in OPS})
    same: Kernels = object.__new__(cls)
    same.__dict__ = kernels.__dict__
    return same
