"""The backend under test, and everything a level needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepinfer_core.backend.base import Backend
from deepinfer_core.backend.capabilities import Capabilities
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.kernels import Kernels


@dataclass
class Subject:
    """A backend that can be used here, on one device."""

    backend: Backend
    device: str = ""  # as the backend takes it; "": its default
    _kernels: dict[tuple[Numerics, bool], Kernels] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def claims(self) -> Capabilities:
        return self.backend.capabilities()

    def kernels(self, numerics: Numerics, batch_invariant: bool = False) -> Kernels:
        """The ops, built once for each arithmetic and mode."""
        key = (numerics, batch_invariant)
        if key not in self._kernels:
            self._kernels[key] = self.backend.kernels(self.device, *key)
        return self._kernels[key]

    def invariant_kernels(self, numerics: Numerics) -> Kernels:
        """The ops in batch-invariant mode if the backend claims one, else as they are."""
        return self.kernels(numerics, self.claims.batch_invariant)

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""
        return self.kernels(next(iter(sorted(self.claims.numerics)))).device

    def numerics(self) -> list[Numerics]:
        """The arithmetics it offers, release first."""
        return [n for n in Numerics if n in self.claims.numerics]
