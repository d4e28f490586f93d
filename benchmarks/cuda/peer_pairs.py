"""What a comparison with a public kernel consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cuda_checks.inputs import Inputs
from torch import Tensor

from deepinfer_backends.cpu_ref import quant
from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_core.backend.types import QuantTensor

DEVICE = torch.device("cuda:0")


@dataclass(frozen=True)
class Pair:
    """Two ways to the same result, on inputs that are there. `same` gives the relative difference of their results."""

    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    same: Callable[[], float] | None = None


@dataclass(frozen=True)
class Comparison:
    """One row of the table. `build` makes the inputs and imports the peer, which may not be installed."""

    op: str
    rows: int
    peer: str
    build: Callable[[], Pair]
    bound: float = 2e-2  # largest relative difference (Frobenius norm) of the results; two roundings to bfloat16 or e4m3 differ by less
    differs: str = ""  # what the two do not share


@cache
def kernels() -> CudaKernels:
    """Ours, in the default mode."""
    return CudaKernels(DEVICE)


def inputs(seed: int) -> Inputs:
    return Inputs(DEVICE, seed=seed)


def difference(got: Tensor, want: Tensor) -> float:
    """Relative difference in the Frobenius norm; infinite for NaN or another shape."""
    if got.shape != want.shape:
        return float("inf")
    a, b = got.float(), want.float()
    size = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return size if size == size else float("inf")


def decoded(part: QuantTensor) -> Tensor:
    """bfloat16 values of a checkpoint weight: exact."""
    return quant.decode_weight(*part).bfloat16()
