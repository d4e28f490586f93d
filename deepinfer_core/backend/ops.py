"""Which ops of a backend are its own, and which it inherits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer_core.backend.base import Backend
from deepinfer_core.backend.kernels import OPS, KernelContractError, Kernels
from deepinfer_core.backend.registry import Found, Registry, package_of
from deepinfer_core.errors import BackendError


@dataclass(frozen=True)
class OpOrigin:
    """Where one op of a backend comes from."""

    op: str
    status: Literal["native", "inherited", "missing"]
    module: str  # that defines it; "" if missing
    owner: str  # backend to which that module belongs: the backend itself if native


def op_table(kernels: type[Kernels], backend: type[Backend], registry: Registry) -> list[OpOrigin]:
    """The origin of every op of `kernels`, by op name. An op is inherited if it is defined in the package of another backend."""
    foreign = {package_of(cls): cls.name for cls in _all_classes(registry) if package_of(cls) != package_of(backend)}
    return [_origin(op, kernels, backend.name, foreign) for op in OPS]


def backend_ops(found: Found, registry: Registry) -> list[OpOrigin]:
    """`op_table` of a registered backend. Builds its kernels; raises BackendError if they cannot be built here."""
    try:
        kernels = type(found.backend().kernels(""))
    except KernelContractError as error:
        kernels = error.kernels
    except Exception as error:
        raise BackendError(f"the ops of backend {found.backend.name!r} cannot be listed here: {type(error).__name__}: {error}") from error
    return op_table(kernels, found.backend, registry)


def refuse_inherited(kernels: Kernels, backend: type[Backend], registry: Registry) -> None:
    """Raises BackendError that lists every op which `kernels` inherits: what `backend.native_only` demands."""
    inherited = [origin.op for origin in op_table(type(kernels), backend, registry) if origin.status != "native"]
    if inherited:
        raise BackendError(
            f"backend {backend.name!r} inherits {len(inherited)} of {len(OPS)} ops ({', '.join(inherited)}), "
            "but backend.native_only is true: set it to false, or choose a backend that has them"
        )


def _origin(op: str, kernels: type[Kernels], name: str, foreign: dict[str, str]) -> OpOrigin:
    function = getattr(kernels, op)
    if getattr(function, "__isabstractmethod__", False):
        return OpOrigin(op, "missing", "", "")
    module = next(cls for cls in kernels.__mro__ if op in vars(cls)).__module__
    owners = [package for package in foreign if module == package or module.startswith(f"{package}.")]
    if owners:
        return OpOrigin(op, "inherited", module, foreign[max(owners, key=len)])
    return OpOrigin(op, "native", module, name)


def _all_classes(registry: Registry) -> list[type[Backend]]:
    shared = [found.backend for group in registry.ambiguous.values() for found in group]
    return [found.backend for found in registry.backends.values()] + shared
