"""Entry point of the CPU reference."""

from deepinfer_core.backend.base import Backend
from deepinfer_core.backend.hookspecs import hookimpl


@hookimpl
def deepinfer_backends() -> list[type[Backend]]:
    """The CPU reference."""
    from deepinfer_backends.cpu_ref.backend import CpuReference

    return [CpuReference]
