"""Hyper-connections (mHC, shifted variant)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.linear import LinearOps, matmul
from deepinfer_core.backend.types import HcConstants, HcInput, HcWeights


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). torch.sigmoid differs by an ulp between vector and scalar loops, so a row's value would depend on its place."""
    return 1.0 / (1.0 + (-x).exp())


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Almost doubly stochastic matrices of float32 logits [..., m, m]: softmax of rows + eps, columns, then rows and columns in turn."""
    m = logits.softmax(-1).add_(eps)
    m.div_(m.sum(-2, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        m.div_(m.sum(-1, keepdim=True).add_(eps))
        m.div_(m.sum(-2, keepdim=True).add_(eps))
    return m


@lru_cache
def _scale_of_column(m: int, device: torch.device) -> Tensor:
    """Index into `scale` of each of the m*(m+2) mix columns: m pre, m post, m*m comb."""
    return torch.tensor([0] * m + [1] * m + [2] * m * m, device=device)


class HyperOps(LinearOps):
    """Ops of the contract's group "hyper-connections"."""

    def hc_pre(self, streams: Tensor, pre: Tensor, weights: HcWeights, norm_weight: Tensor, constants: HcConstants) -> HcInput:
        rows, m, _ = streams.shape
        f = streams.float()
        flat = f.flatten(1)
        rstd = (flat * flat).mean(-1, keepdim=True).add_(constants.norm_eps).rsqrt_()
        mix = matmul(flat, weights.fn) * rstd
        mix = mix * weights.scale[_scale_of_column(m, streams.device)] + weights.base
        gates = sigmoid(mix[:, : 2 * m])
        comb = sinkhorn(mix[:, 2 * m :].reshape(rows, m, m), constants.sinkhorn_iters, constants.hc_eps)
        x = self.rms_norm(self._collapse(f, pre), norm_weight, constants.norm_eps)
        return HcInput(x, self.quantize(x), gates[:, :m] + constants.hc_eps, 2.0 * gates[:, m:], comb)

    def hc_post(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        f = streams.float()
        mixed = post[:, :, None] * y.float()[:, None]
        for j in range(streams.shape[1]):
            mixed += comb[:, j, :, None] * f[:, j, None]
        return self._round(mixed)

    def hc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        return self._collapse(streams.float(), pre)

    def _collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        return self._round((pre[:, :, None] * streams).sum(1))

    def stream_mean(self, streams: Tensor) -> Tensor:
        return self._round(streams.float().mean(1))
