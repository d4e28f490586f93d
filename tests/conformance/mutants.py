"""Mutants, registered by the modules `mutants_*`: faulty backends, each with one plausible bug in one op.

The suite must fail every one of them, at the level where it belongs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backends.cpu_ref.backend import CpuReference
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.formats import Numerics


@dataclass(frozen=True)
class Mutant:
    """One faulty kernels class and what must catch it."""

    kernels: type[ReferenceKernels]
    op: str  # the op (or check) whose cases must fail
    level: str = "ops"

    @property
    def name(self) -> str:
        return self.kernels.__name__


MUTANTS: list[Mutant] = []


def mutant(op: str, level: str = "ops"):
    """Registers a faulty kernels class."""

    def register(cls):
        MUTANTS.append(Mutant(cls, op, level))
        return cls

    return register


def backend_of(kernels: type[ReferenceKernels]) -> CpuReference:
    """A backend with these kernels, otherwise the reference."""

    class Faulty(CpuReference):
        name = "faulty"

        def kernels(self, device, numerics=Numerics.RELEASE, batch_invariant=False):
            return kernels(torch.device(device or "cpu"), numerics)

    return Faulty()
