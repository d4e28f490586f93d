"""The CPU reference: the semantics of every op in plain PyTorch. Backends inherit from `ReferenceKernels`.

Names are imported when they are first used, because listing the backends imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_backends.cpu_ref.kernels import ReferenceKernels as ReferenceKernels

__all__ = ["ReferenceKernels"]


def __getattr__(name: str) -> Any:
    if name != "ReferenceKernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepinfer_backends.cpu_ref.kernels import ReferenceKernels

    return ReferenceKernels
