"""Hyper-connections (mHC, shifted variant)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.linear import LinearOps, inverse_rms, matmul
from deepinfer_backends.cpu_ref.scalars import scalar
from deepinfer_core.backend.types import HcConstants, HcInput, HcWeights


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). torch.sigmoid differs by an ulp between vector and scalar loops, so a row's value would depend on its place."""
    return x.neg().exp_().add_(scalar(1.0)).reciprocal_()


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Almost doubly stochastic matrices of float32 logits [T, m, m]: softmax of rows + eps, columns, then rows and columns in turn.

    A product with ones puts the sum of a row, or of a column, plus eps at each of its elements, with one op for both additions.
    """
    m = logits.softmax(-1).add_(scalar(eps))
    ones, sums = torch.ones_like(m), torch.empty_like(m)
    floor = scalar(eps).to(m.device)
    m.div_(torch.baddbmm(floor, ones, m, out=sums))
    for _ in range(iterations - 1):
        m.div_(torch.baddbmm(floor, m, ones, out=sums))
        m.div_(torch.baddbmm(floor, ones, m, out=sums))
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
        mix = matmul(flat, weights.fn).mul_(inverse_rms(flat, constants.norm_eps))
        mix = mix.mul_(weights.scale[_scale_of_column(m, streams.device)]).add_(weights.base)
        gates = sigmoid(mix[:, : 2 * m])
        comb = sinkhorn(mix[:, 2 * m :].reshape(rows, m, m), constants.sinkhorn_iters, constants.hc_eps)
        x = self.rms_norm(self._collapse(f, pre), norm_weight, constants.norm_eps)
        return HcInput(x, self.quantize(x), gates[:, :m] + scalar(constants.hc_eps), gates[:, m:] * scalar(2.0), comb)

    def hc_post(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = post.unsqueeze(2) * y.float().unsqueeze(1)
        for weight, stream in zip(comb.unsqueeze(3).unbind(1), streams.float().unsqueeze(2).unbind(1), strict=True):
            mixed.add_(weight * stream)
        return self._round(mixed)

    def hc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        return self._collapse(streams.float(), pre)

    def _collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        return self._round((pre.unsqueeze(2) * streams).sum(1))

    def stream_mean(self, streams: Tensor) -> Tensor:
        return self._round(streams.float().mean(1))
