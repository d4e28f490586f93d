"""The entry module. Imported whenever backends are listed: no torch here."""

from deepinfer_core.backend.hookspecs import hookimpl


@hookimpl
def deepinfer_backends():
    """The backend of this package."""
    from deepinfer_simd.backend import SimdBackend

    return [SimdBackend]
