"""Mixture of experts: routing and the experts' SwiGLU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.linear import ROW_MULTIPLE, LinearOps, LinearWeight, pad_rows
from deepinfer_backends.cpu_ref.scalars import scalar
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
        softplus = logits.abs().neg_().exp_().log1p_().add_(logits.clamp_min(0.0))
        scores = softplus.sqrt_()
        ids = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        chosen = scores.gather(1, ids)
        return Routing(ids.int(), chosen.div_(chosen.sum(1, True).add_(scalar(1e-20))).mul_(scalar(scale)))

    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        rows, top_k = routing.ids.shape
        groups = _group(routing.ids.tolist(), len(experts.w13))
        index = torch.tensor(groups.tokens + groups.pairs + groups.places, dtype=torch.int64, device=x.device)
        tokens, pairs, places = index.split_with_sizes((len(groups.tokens), len(groups.pairs), len(groups.places)))
        weights = routing.weights.flatten().index_select(0, pairs)
        routed = self._experts(x.index_select(0, tokens), weights, groups.sizes, experts, limit)
        if groups.has_gaps:
            routed = torch.cat((routed, routed.new_zeros(1, routed.shape[1])))
        total = routed.index_select(0, places).view(rows, top_k, routed.shape[1]).sum(1)
        if shared is not None:
            padded = pad_rows(x)
            total.add_(self._experts(padded, None, {0: padded.shape[0]}, shared, limit)[:rows])
        return self._round(total)

    def _experts(self, x: Tensor, weights: Tensor | None, sizes: dict[int, int], experts: ExpertWeights, limit: float) -> Tensor:
        """Down projections (rounded, as float32) of rows x [R, D] that lie expert by expert, sizes[e] rows for expert e."""
        gate, up = self._grouped(x, sizes, experts.w13).chunk(2, 1)
        gate = gate.clamp_max(limit)
        a = gate.div_(gate.neg().exp_().add_(scalar(1.0))).mul_(up.clamp(-limit, limit))
        if weights is not None:
            a = a.mul_(weights.unsqueeze(1))
        return self._grouped(self.quantize(self._round(a)), sizes, experts.w2)

    def _grouped(self, x: Tensor, sizes: dict[int, int], weights: tuple[LinearWeight, ...]) -> Tensor:
        y = x.new_empty(x.shape[0], weights[0].rows)
        parts = tuple(sizes.values())
        for expert, source, target in zip(sizes, x.split_with_sizes(parts), y.split_with_sizes(parts), strict=True):
            weights[expert].multiply(source, out=target)
        return self._round(y).float()


class _Groups(NamedTuple):
    """(token, expert) pairs side by side by expert, each expert's rows padded to a multiple of `ROW_MULTIPLE` with its first pair."""

    sizes: dict[int, int]  # expert -> rows, padding included; ascending, without idle experts
    tokens: list[int]  # token of each row
    pairs: list[int]  # pair of each row: token * top_k + column of `Routing`
    places: list[int]  # row of each token's experts by ascending id, token by token; one behind the last row where there is none
    has_gaps: bool  # a token has fewer than top_k experts


def _group(ids: list[list[int]], count: int) -> _Groups:
    """Groups of the chosen experts ids[token]; -1 is none."""
    members: list[list[int]] = [[] for _ in range(count)]
    top_k = len(ids[0]) if ids else 0
    for token, chosen in enumerate(ids):
        for column, expert in enumerate(chosen):
            if expert >= 0:
                members[expert].append(token * top_k + column)
    sizes: dict[int, int] = {}
    pairs: list[int] = []
    rows: list[list[int]] = [[] for _ in ids]
    for expert, mine in enumerate(members):
        if mine:
            for row, pair in enumerate(mine, len(pairs)):
                rows[pair // top_k].append(row)
            padding = -len(mine) % ROW_MULTIPLE
            sizes[expert] = len(mine) + padding
            pairs += mine + mine[:1] * padding
    places = [row for mine in rows for row in mine + [len(pairs)] * (top_k - len(mine))]
    return _Groups(sizes, [pair // top_k for pair in pairs], pairs, places, any(len(mine) < top_k for mine in rows))
