"""Starting Triton kernels: one function, so that compilation checks see every launch; and the facts about a device that choose code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

INTERPRETED = triton.knobs.runtime.interpret
"""True when kernels run in Triton's interpreter on CPU tensors (TRITON_INTERPRET=1). Inline assembly is then replaced by plain code."""

if INTERPRETED:
    from deepinfer_backends.cuda_sm100 import interpreter

    interpreter.install()


@dataclass(frozen=True)
class Launch:
    """One kernel launch as a compiler needs to see it."""

    kernel: Any  # the @triton.jit function
    args: tuple[Any, ...]  # tensors and numbers, in parameter order
    constants: dict[str, Any]
    warps: int
    stages: int


_observers: list[Callable[[Launch], None]] = []


@contextmanager
def observed_launches(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Hands every launch to `observer` instead of a device. Tensors may be meta tensors: nothing reads them."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any) -> None:
    """Enqueues `kernel` over `grid`. A grid without programs does nothing. Products and sums are not fused: results equal eager torch's.

    Matrix kernels are not affected by the last point: tensor cores fuse by nature.
    """
    if 0 in grid:
        return
    if _observers:
        _observers[-1](Launch(kernel, args, constants, warps, stages))
        return
    kernel[grid](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two >= max(n, least)."""
    return max(least, 1 << max(n - 1, 0).bit_length())


@lru_cache
def architecture(device: torch.device) -> int:
    """90 for Hopper, 100 for Blackwell data-centre parts: which instructions and weight layouts to use. 90 without a GPU."""
    if device.type != "cuda":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    return 100 if major == 10 else 90


def plain_function(kernel: Any) -> JITFunction:
    """The compilable form of a kernel, also when this process interprets kernels."""
    return kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
