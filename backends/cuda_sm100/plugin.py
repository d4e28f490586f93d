"""Entry point of the NVIDIA backend."""

from deepinfer_core.backend.base import Backend
from deepinfer_core.backend.hookspecs import hookimpl


@hookimpl
def deepinfer_backends() -> list[type[Backend]]:
    """The NVIDIA backend."""
    from deepinfer_backends.cuda_sm100.backend import CudaBackend

    return [CudaBackend]
