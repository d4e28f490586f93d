"""Entry point of the Ascend backend."""

from deepinfer_core.backend.base import Backend
from deepinfer_core.backend.hookspecs import hookimpl


@hookimpl
def deepinfer_backends() -> list[type[Backend]]:
    """The Ascend backend."""
    from deepinfer_backends.ascend950.backend import AscendBackend

    return [AscendBackend]
