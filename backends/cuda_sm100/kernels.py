"""`CudaKernels`: the ops as Triton kernels; what is not native is inherited from the PyTorch reference."""

from __future__ import annotations

import os

import torch
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cuda_sm100.activations import ActivationOps
from deepinfer_backends.cuda_sm100.attention import AttentionOps
from deepinfer_backends.cuda_sm100.caches import CacheOps
from deepinfer_backends.cuda_sm100.drafting import DraftOps
from deepinfer_backends.cuda_sm100.engram import EngramOps
from deepinfer_backends.cuda_sm100.experts import ExpertOps
from deepinfer_backends.cuda_sm100.hyper import HyperOps
from deepinfer_backends.cuda_sm100.indexer import IndexerOps
from deepinfer_backends.cuda_sm100.launch import architecture
from deepinfer_backends.cuda_sm100.linears import LinearOps
from deepinfer_backends.cuda_sm100.routing import RoutingOps
from deepinfer_backends.cuda_sm100.sampling import SamplingOps

from deepinfer_core.backend.formats import Numerics


class CudaKernels(AttentionOps, IndexerOps, EngramOps, DraftOps, SamplingOps, HyperOps, CacheOps, ExpertOps, RoutingOps, LinearOps, ActivationOps, ReferenceKernels):
    """The ops on one NVIDIA GPU (compute capability 9.0 or 10.x), `release` numerics."""

    def __init__(self, device: torch.device, numerics: Numerics = Numerics.RELEASE) -> None:
        if numerics is not Numerics.RELEASE:
            raise ValueError(f"backend 'cuda_sm100' computes numerics 'release' only, not {numerics.value!r}; use backend 'cpu_ref' for it")
        super().__init__(device, numerics)
        self._arch = architecture(device)
        self._invariant = os.environ.get("DEEPINFER_BATCH_INVARIANT") == "1"
