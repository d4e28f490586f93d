"""`AscendKernels`: the ops of the contract on an Ascend 950. One module for each family; `calls` holds the CANN operators."""

from __future__ import annotations

from deepinfer_backends.ascend950.kernels.attention import AttentionOps
from deepinfer_backends.ascend950.kernels.caches import CacheOps
from deepinfer_backends.ascend950.kernels.engram import EngramOps
from deepinfer_backends.ascend950.kernels.hyper import HyperOps
from deepinfer_backends.ascend950.kernels.indexer import IndexerOps
from deepinfer_backends.ascend950.kernels.moe import MoeOps
from deepinfer_backends.ascend950.kernels.sampling import SamplingOps


class AscendKernels(HyperOps, CacheOps, AttentionOps, IndexerOps, EngramOps, MoeOps, SamplingOps):
    """Release numerics only. No op reads anything back to the host, so every one of them can be captured in an NPU graph.

    Not batch invariant: CANN's matrix and attention operators choose tiles by shape.
    """
