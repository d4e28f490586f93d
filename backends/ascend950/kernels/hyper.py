"""Hyper-connections: CANN's mHC operators around a collapse with the previous sub-layer's weights."""

from __future__ import annotations

from torch import Tensor

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.ascend950.kernels.linears import LinearOps
from deepinfer_core.backend.types import HcConstants, HcInput, HcWeights

_STREAMS = (4, 6, 8)  # numbers of streams that the operators support


class HyperOps(LinearOps):
    """Ops of the contract's group "hyper-connections". `hc_collapse` and `stream_mean` are inherited: plain float32 sums.

    The released model has four streams. Other numbers than the operators know go through the reference's plain operators.
    """

    def hc_pre(self, streams: Tensor, pre: Tensor, weights: HcWeights, norm_weight: Tensor, constants: HcConstants) -> HcInput:
        if streams.shape[1] not in _STREAMS:
            return super().hc_pre(streams, pre, weights, norm_weight, constants)
        x = self.rms_norm(self.hc_collapse(streams, pre), norm_weight, constants.norm_eps)
        quantized = self.quantize(x)
        rows, m, _ = streams.shape
        if not rows:  # the operators refuse empty tensors
            return HcInput(x, quantized, pre.new_empty(0, m), pre.new_empty(0, m), pre.new_empty(0, m, m))
        own, post, logits = calls.mhc_coefficients(streams, weights.fn, weights.scale, weights.base, constants.norm_eps, constants.hc_eps)
        comb = calls.sinkhorn(logits, constants.hc_eps, constants.sinkhorn_iters)
        return HcInput(x, quantized, own, post, comb)

    def hc_post(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        if not len(streams) or streams.shape[1] not in _STREAMS:
            return super().hc_post(streams, y, post, comb)
        return calls.mhc_post(streams, comb, y, post)
