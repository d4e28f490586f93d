"""Mixture of experts: routing and the experts' SwiGLU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.linear import LinearOps, LinearWeight
from deepinfer_core.backend.types import Activation, ExpertTensors, Routing, Weight


@dataclass(frozen=True)
class ExpertWeights:
    """Gate and up projections stacked (`w13`), and the down projection, of each expert."""

    w13: tuple[LinearWeight, ...]
    w2: tuple[LinearWeight, ...]


class MoeOps(LinearOps):
    """Ops of the contract's group "mixture of experts"."""

    def prepare_experts(self, experts: Iterable[ExpertTensors], count: int) -> Weight:
        w13, w2 = [], []
        for expert in experts:
            w13.append(self.prepare_linear((expert.w1, expert.w3)))
            w2.append(self.prepare_linear((expert.w2,)))
        if len(w13) != count:
            raise ValueError(f"prepare_experts got {len(w13)} experts, expected {count}")
        return ExpertWeights(tuple(w13), tuple(w2))

    def moe_gate(self, x: Tensor, weight: Weight, bias: Tensor, top_k: int, scale: float) -> Routing:
        logits = self.linear(x, weight, torch.float32)
        scores = (logits.clamp_min(0) + (-logits.abs()).exp().log1p()).sqrt()
        ids = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        chosen = scores.gather(1, ids)
        return Routing(ids.int(), chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale)

    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        rows, top_k = routing.ids.shape
        flat = routing.ids.flatten()
        order = flat.sort(stable=True).indices  # rows of the same expert side by side, in row order
        counts = torch.bincount(flat.long() + 1, minlength=len(experts.w13) + 1).tolist()
        order, counts = order[counts[0] :], counts[1:]
        source = order // top_k
        out = self._experts(x[source], routing.weights.flatten()[order], counts, experts, limit)
        total = torch.zeros(rows, top_k + 1, out.shape[1], device=out.device)
        # Column j of a token holds the j-th of its experts by ascending id, the last column the shared expert.
        rank = routing.ids.sort(dim=1, stable=True).indices.argsort(dim=1).flatten()[order]
        total[source, rank] = out
        if shared is not None:
            total[:, top_k] = self._experts(x, None, [rows], shared, limit)
        result = total[:, 0]
        for j in range(1, top_k + 1):
            result = result + total[:, j]
        return self._round(result)

    def _experts(self, x: Tensor, weights: Tensor | None, counts: list[int], experts: ExpertWeights, limit: float) -> Tensor:
        """Down projections (rounded, as float32) of rows x [R, D] that lie expert by expert, counts[e] rows for expert e."""
        gate, up = self._grouped(x, counts, experts.w13).chunk(2, 1)
        gate = gate.clamp_max(limit)
        a = gate / (1.0 + (-gate).exp()) * up.clamp(-limit, limit)
        if weights is not None:
            a = a * weights[:, None]
        return self._grouped(self.quantize(self._round(a)), counts, experts.w2)

    def _grouped(self, x: Tensor, counts: list[int], weights: tuple[LinearWeight, ...]) -> Tensor:
        parts, first = [], 0
        for count, weight in zip(counts, weights, strict=True):
            if count:
                parts.append(weight.multiply(x[first : first + count]))
            first += count
        if not parts:
            return x.new_zeros(0, weights[0].rows)
        return self._round(torch.cat(parts)).float()
