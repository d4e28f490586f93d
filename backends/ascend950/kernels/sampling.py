"""Sampling: the reference's canonical algorithm, with an argmax that does not depend on the order of the device's search."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.kernels.linears import LinearOps


class SamplingOps(LinearOps):
    """All ops of the contract's group "sampling" are inherited. CANN's samplers draw from other random numbers and break ties otherwise."""

    def _argmax(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[-1], device=x.device)
        return torch.where(x == x.amax(-1, keepdim=True), index, x.shape[-1] - 1).amin(-1)
