"""`ReferenceKernels`: every op of the contract in plain PyTorch, on any device."""

from __future__ import annotations

from deepinfer_backends.cpu_ref.attention import AttentionOps
from deepinfer_backends.cpu_ref.draft import DraftOps
from deepinfer_backends.cpu_ref.engram import EngramOps
from deepinfer_backends.cpu_ref.hyper import HyperOps
from deepinfer_backends.cpu_ref.moe import MoeOps
from deepinfer_backends.cpu_ref.sampling import SamplingOps
from deepinfer_core.backend.kernels import Kernels


class ReferenceKernels(HyperOps, AttentionOps, EngramOps, MoeOps, DraftOps, SamplingOps, Kernels):
    """The semantics of every op, readable first. The base class of other backends: override what is native, inherit the rest.

    Batch invariant by construction where the BLAS behind torch computes a row of a product alike for any number of rows >= 8; the
    conformance suite's `claims` level checks this on the machine at hand. May synchronise with the device (boolean masks, expert
    counts): a backend that captures graphs overrides the ops it captures.
    """
