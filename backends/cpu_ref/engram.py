"""Engram: hashed n-gram lookup and its gate."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import quant
from deepinfer_backends.cpu_ref.hyper import sigmoid
from deepinfer_backends.cpu_ref.linear import LinearOps
from deepinfer_core.backend.types import Activation, EngramHashTables, QuantTensor, Weight

_GATE_FLOOR = 1e-6  # clamp of |d| before the square root (TileKernels' Engram gate)


class EngramOps(LinearOps):
    """Ops of the contract's group "Engram"."""

    def prepare_engram_table(self, table: QuantTensor) -> Weight:
        return table.to(self.device)

    def engram_hash(self, ngrams: Tensor, tables: EngramHashTables) -> Tensor:
        size = ngrams.shape[1]
        terms = ngrams * tables.multipliers
        primes, offsets = tables.primes.view(size - 1, -1), tables.offsets.view(size - 1, -1)
        h, columns = terms[:, 0], []
        for i in range(1, size):
            h = h ^ terms[:, i]
            columns.append(h[:, None] % primes[i - 1] + offsets[i - 1])
        return torch.where(ngrams[:, :1] < 0, -1, torch.cat(columns, 1))

    def engram_gather(self, table: Weight, rows: Tensor) -> Activation:
        index = rows.clamp_min(0)
        values = quant.decode_weight(table.weight[index].flatten(0, 1), table.scale[index].flatten(0, 1))
        values = values.view(*rows.shape, table.weight.shape[1])
        return torch.where(rows[..., None] >= 0, values, 0.0).flatten(1)

    def engram_gate(
        self, streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, mask: Tensor | None = None
    ) -> Tensor:
        h, m = streams.float(), streams.shape[1]
        k, v = kv[:, :m].float(), kv[:, m:].float()
        norms = ((h * h).mean(-1) + eps).rsqrt() * ((k * k).mean(-1) + eps).rsqrt()
        d = (h * k * (q_weight.float() * k_weight.float())).sum(-1) * norms * h.shape[-1] ** -0.5
        gate = sigmoid(d.abs().clamp_min(_GATE_FLOOR).sqrt().copysign(d))
        result = self._round(h + gate[..., None] * v)
        return result if mask is None else torch.where(mask[:, None, None], result, streams)
