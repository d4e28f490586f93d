"""Mixture of experts and the Engram gate in C++."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend.types import Activation, ExpertTensors, QuantTensor, Routing, Weight
from deepinfer_core.errors import BackendError
from deepinfer_simd.tensors import address, dense_rows, owns_rows, threads_for

_FORMATS = {torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.int8: 2}  # enum Format in src/experts.cpp


@dataclass(frozen=True)
class SimdExperts:
    """Prepared experts: the checkpoint's own bytes, never decoded in memory."""

    tensors: tuple[Tensor, ...]  # keeps the memory alive
    table: Tensor  # int64 [experts, 3, 2]: addresses of values and scales of w1, w2, w3
    format: int
    inner: int


class _ExpertOps(ReferenceKernels):
    def prepare_experts(self, experts: Iterable[ExpertTensors], count: int) -> Weight:
        kept: list[Tensor] = []
        addresses, formats, sizes = [], set(), set()
        for expert in experts:
            for part in expert:
                values = part.weight.contiguous()
                scale = None if part.scale is None else part.scale.contiguous()
                kept += [values] if scale is None else [values, scale]
                addresses.append((values.data_ptr(), address(scale) or 0))
                formats.add(_FORMATS[values.dtype])
            sizes.add((expert.w1.weight.shape[0], _inputs(expert.w1)))
        if len(addresses) != 3 * count:
            raise ValueError(f"prepare_experts got {len(addresses) // 3} experts, expected {count}")
        if len(formats) != 1 or len(sizes) != 1 or any(size % 32 for size in next(iter(sizes))):
            raise BackendError(
                f"backend 'cpu_simd': experts of formats {sorted(formats)} and sizes {sorted(sizes)}, expected one format and one pair of "
                "sizes that are multiples of 32: use backend.name: cpu_ref"
            )
        return SimdExperts(tuple(kept), torch.tensor(addresses).view(count, 3, 2), formats.pop(), sizes.pop()[0])

    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        x, ids, weights = x.contiguous(), routing.ids.contiguous(), routing.weights.contiguous()
        rows, dim = x.shape
        top_k = ids.shape[1]
        y = torch.empty(rows, dim, dtype=self._dtype)
        self._c.simd_moe(
            x.data_ptr(), ids.data_ptr(), weights.data_ptr(), rows, top_k, dim, experts.table.data_ptr(), len(experts.table),
            experts.format, experts.inner, shared.table.data_ptr() if shared else None, shared.format if shared else 0,
            shared.inner if shared else 0, limit, self._bf16, y.data_ptr(), threads_for(rows * dim * experts.inner),
        )  # fmt: skip
        return y

    def moe_gate(self, x: Tensor, weight: Weight, bias: Tensor, top_k: int, scale: float) -> Routing:
        logits = self.linear(x, weight, torch.float32)
        rows, experts = logits.shape
        bias = bias.contiguous()
        ids, weights = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
        self._c.simd_route(
            logits.data_ptr(), bias.data_ptr(), experts if bias.dim() == 2 else 0, rows, experts, top_k, scale, ids.data_ptr(),
            weights.data_ptr(), threads_for(rows * experts * top_k),
        )  # fmt: skip
        return Routing(ids, weights)

    def engram_gate(
        self, streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, mask: Tensor | None = None
    ) -> Tensor:
        rows, m, dim = streams.shape
        out = streams if owns_rows(streams) else torch.empty(rows, m, dim, dtype=self._dtype)
        streams, kv, q_weight, k_weight = dense_rows(streams), dense_rows(kv), q_weight.contiguous(), k_weight.contiguous()
        mask = None if mask is None else mask.contiguous()
        self._c.simd_engram_gate(
            streams.data_ptr(), self._bf16, streams.stride(0), kv.data_ptr(), kv.stride(0), q_weight.data_ptr(), k_weight.data_ptr(), eps,
            address(mask), rows, m, dim, out.data_ptr(), out.stride(0), threads_for(rows * m * dim),
        )  # fmt: skip
        return out


def _inputs(part: QuantTensor) -> int:
    return part.weight.shape[1] * (2 if part.weight.dtype is torch.int8 else 1)
