"""`CudaKernels`: the ops as Triton kernels; what is not native is inherited from the PyTorch reference."""

from __future__ import annotations

import torch

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cuda_sm100.activations import ActivationOps
from deepinfer_backends.cuda_sm100.attention import AttentionOps
from deepinfer_backends.cuda_sm100.caches import CacheOps
from deepinfer_backends.cuda_sm100.distribution import DistributionOps
from deepinfer_backends.cuda_sm100.drafting import DraftOps
from deepinfer_backends.cuda_sm100.engram import EngramOps
from deepinfer_backends.cuda_sm100.experts import ExpertOps
from deepinfer_backends.cuda_sm100.hyper import HyperOps
from deepinfer_backends.cuda_sm100.indexer import IndexerOps
from deepinfer_backends.cuda_sm100.launch import architecture
from deepinfer_backends.cuda_sm100.linears import LinearOps
from deepinfer_backends.cuda_sm100.routing import RoutingOps
from deepinfer_backends.cuda_sm100.sampling import SamplingOps
from deepinfer_core.backend.canonical import exp_table
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.errors import BackendError


class CudaKernels(
    AttentionOps,
    IndexerOps,
    EngramOps,
    DraftOps,
    DistributionOps,
    SamplingOps,
    HyperOps,
    CacheOps,
    ExpertOps,
    RoutingOps,
    LinearOps,
    ActivationOps,
    ReferenceKernels,
):
    """The ops on one NVIDIA GPU (compute capability 9.0 or 10.x), `release` numerics.

    With `batch_invariant` a row's result does not depend on the other rows: no library products (cuBLAS chooses by shape), keys of a row
    are never divided among programs. Uses one stream at a time: split products count arrivals in shared counters.
    """

    def __init__(self, device: torch.device, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> None:
        if numerics is not Numerics.RELEASE:
            raise BackendError(
                f"backend 'cuda_sm100' computes numerics 'release' only, not {numerics.value!r}: set model.numerics: release, "
                "or use backend 'cpu_ref'"
            )
        super().__init__(device, numerics)
        self._arch = architecture(device)
        self._invariant = batch_invariant
        exp_table(device)  # built by a blocking copy at first use: not inside a section that may not wait for the device
