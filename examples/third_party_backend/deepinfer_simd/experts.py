"""Mixture of experts in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.backend.types import Activation, ExpertTensors, Routing, Weight
from deepinfer_core.errors import BackendError
from deepinfer_simd._library import PackedWeight
from deepinfer_simd.linears import SimdWeight, _LinearOps
from deepinfer_simd.tensors import dense_rows, threads_for


@dataclass(frozen=True)
class SimdExperts:
    """Prepared experts: the checkpoint's bytes in another order, never decoded in memory."""

    weights: tuple[SimdWeight, ...]  # keeps the memory alive
    table: ctypes.Array[PackedWeight]  # w1, w2, w3 of each expert
    inner: int


class _ExpertOps(_LinearOps):
    def prepare_experts(self, experts: Iterable[ExpertTensors], count: int) -> Weight:
        weights, sizes = [], set()
        for expert in experts:
            w1, w2, w3 = (self.prepare_linear([part]) for part in expert)
            weights += [w1, w2, w3]
            sizes.add((w1.rows, w1.packed.inputs))
        if len(weights) != 3 * count:
            raise ValueError(f"prepare_experts got {len(weights) // 3} experts, expected {count}")
        if len(sizes) != 1 or any(size % 32 for size in next(iter(sizes))):
            raise BackendError(
                f"backend 'cpu_simd': experts of sizes {sorted(sizes)}, expected one pair of sizes that are multiples of 32: use "
                "backend.name: cpu_ref"
            )
        table = (PackedWeight * len(weights))(*(weight.packed for weight in weights))
        return SimdExperts(tuple(weights), table, weights[0].rows)

    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        x, ids, weights = x.contiguous(), routing.ids.contiguous(), routing.weights.contiguous()
        rows, dim = x.shape
        y = torch.empty(rows, dim, dtype=self._dtype)
        self._c.simd_moe(
            x.data_ptr(), ids.data_ptr(), weights.data_ptr(), rows, ids.shape[1], dim, ctypes.addressof(experts.table),
            len(experts.table) // 3, ctypes.addressof(shared.table) if shared else 0, limit, self._bf16, y.data_ptr(),
            threads_for(rows * dim * experts.inner),
        )  # fmt: skip
        return y

    def moe_gate(self, x: Tensor, weight: Weight, bias: Tensor, top_k: int, scale: float) -> Routing:
        x, bias = dense_rows(x), bias.contiguous()
        rows, experts = x.shape[0], weight.rows
        ids, weights = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
        self._c.simd_moe_gate(
            x.data_ptr(), x.dtype is torch.bfloat16, x.stride(0), rows, weight.address, bias.data_ptr(),
            experts if bias.dim() == 2 else 0, top_k, scale, ids.data_ptr(), weights.data_ptr(), threads_for(rows * x.shape[1] * experts),
        )  # fmt: skip
        return Routing(ids, weights)
