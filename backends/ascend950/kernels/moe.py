"""Mixture of experts: stable routing, grouped products in expert order, and a fixed summation order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.ascend950.kernels.calls import Mx
from deepinfer_backends.ascend950.kernels.linears import LinearOps
from deepinfer_backends.ascend950.layout import NO_SCALE, ExpertWeights, Layout, paired_scales, row_scales
from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.types import Activation, ExpertTensors, QuantTensor, Routing, Weight

_PAIR_BYTES = 32  # two blocks of 32 e2m1 values
_FORMATS = {torch.int8: WeightFormat.FP4_G32, torch.float8_e4m3fn: WeightFormat.FP8_B32, torch.bfloat16: WeightFormat.BF16}


class MoeOps(LinearOps):
    """Ops of the contract's group "mixture of experts". `moe_gate` is inherited: a stable sort, because CANN's top-k leaves ties open."""

    def prepare_experts(self, experts: Iterable[ExpertTensors], count: int) -> Weight:
        stacks = _Stacks(count, self.device)
        got = 0
        for got, expert in enumerate(experts, 1):
            if got <= count:
                stacks.add(got - 1, expert)
        if got != count:
            raise ValueError(f"prepare_experts got {got} experts, expected {count}")
        return stacks.finish(self._layout)

    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        rows, top_k = routing.ids.shape
        if not rows:
            return x.values.new_empty((0, _outputs(experts)), dtype=torch.bfloat16)
        ids = torch.where(routing.ids < 0, experts.count, routing.ids)
        routed = calls.route(x, ids, experts.count)
        weights = _in_expert_order(routing.weights.flatten(), routed.place)
        out = _feed_forward(routed.rows, weights, routed.counts, experts, limit)
        # Rows lie by ascending expert, so ascending places of a token are its experts in ascending order.
        places = routed.place.view(rows, top_k).sort(dim=1).values.long()
        total: Tensor | None = None
        for j in range(top_k):
            place = places[:, j]
            # Rows past the valid count are undefined (they may hold NaN): select, do not multiply by zero.
            part = torch.where((place >= 0)[:, None], out[place.clamp_min(0)].float(), 0.0)
            total = part if total is None else total + part
        assert total is not None  # top_k is at least 1
        if shared is not None:
            total = total + _feed_forward(x, None, _all_rows(rows, x.values.device), shared, limit).float()
        return total.bfloat16()


class _Stacks:
    """Experts stacked one at a time, so that only one is held twice."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.format: WeightFormat | None = None
        self.tensors: dict[str, Tensor] = {}

    def add(self, index: int, expert: ExpertTensors) -> None:
        kind = _FORMATS.get(expert.w1.weight.dtype)
        if kind is None or (self.format or kind) is not kind:
            raise ValueError(
                f"expert {index} has weights of {expert.w1.weight.dtype}: experts are int8 (e2m1 pairs), e4m3 or bfloat16, all alike"
            )
        self.format = kind
        for name, parts in {"w13": (expert.w1, expert.w3), "w2": (expert.w2,)}.items():
            weight = torch.cat([part.weight for part in parts])
            if kind is WeightFormat.FP4_G32:  # the operator wants whole pairs of blocks; zero weights add nothing
                weight = functional.pad(weight, (0, -weight.shape[1] % _PAIR_BYTES))
            self._put(name, index, weight)
            if kind is not WeightFormat.BF16:
                self._put(name + "_scales", index, paired_scales(torch.cat([_scales_of_rows(part) for part in parts])))

    def _put(self, name: str, index: int, value: Tensor) -> None:
        if name not in self.tensors:
            self.tensors[name] = value.new_empty((self.count, *value.shape), device=self.device)
        self.tensors[name][index].copy_(value)

    def finish(self, layout: Layout) -> ExpertWeights:
        assert self.format is not None
        kept = dict(self.tensors)
        self.tensors.clear()
        for name in ("w13", "w2"):
            stacked = kept.pop(name)
            if self.format is WeightFormat.FP4_G32:
                stacked = layout.tile(stacked.view(torch.uint8))
            kept[name] = stacked.transpose(1, 2)
        scales = {name: tensor.transpose(1, 2) for name, tensor in kept.items() if name.endswith("_scales")}
        return ExpertWeights(self.count, self.format, kept["w13"], scales.get("w13_scales"), kept["w2"], scales.get("w2_scales"))


def _scales_of_rows(part: QuantTensor) -> Tensor:
    assert part.scale is not None
    per_block = part.weight.dtype is torch.float8_e4m3fn
    return row_scales(part.scale, part.weight.shape[0]) if per_block else part.scale.view(torch.uint8)


def _outputs(experts: ExpertWeights) -> int:
    return experts.w2.shape[2]


def _in_expert_order(values: Tensor, place: Tensor) -> Tensor:
    """values [R] of choices, moved to the rows `place` [R] int32 that the router gave them; dropped choices (-1) go nowhere."""
    room = values.new_zeros(len(values) + 1)
    return room.scatter(0, torch.where(place < 0, len(values), place).long(), values)[:-1]


def _all_rows(rows: int, device: torch.device) -> Tensor:
    return torch.full((1,), rows, dtype=torch.int64, device=device)


def _feed_forward(x: Mx, weights: Tensor | None, counts: Tensor, experts: ExpertWeights, limit: float) -> Tensor:
    """bf16 [R, D]: w2 of the clamped SwiGLU of w13, times the routing weight before w2; rows of x in expert order."""
    hidden = calls.clipped_swiglu(_product(x, experts.w13, experts.w13_scales, counts, experts).float(), limit)
    if weights is not None:
        hidden = hidden * weights[:, None]
    return _product(calls.quantize_fp8(hidden.bfloat16()), experts.w2, experts.w2_scales, counts, experts)


def _whole_pairs(x: Mx) -> Mx:
    """x with zeros up to a multiple of 64 values. The scale that padded an odd number of blocks now has values, so it must be a number."""
    odd = x.values.shape[1] % 64
    if not odd:
        return x
    values = functional.pad(x.values.view(torch.uint8), (0, 64 - odd)).view(torch.float8_e4m3fn)
    last = torch.arange(x.scales.shape[1] * 2, device=x.scales.device).view(-1, 2) == x.scales.shape[1] * 2 - 1
    return Mx(values, torch.where(last, NO_SCALE, x.scales))


def _product(x: Mx, weight: Tensor, scales: Tensor | None, counts: Tensor, experts: ExpertWeights) -> Tensor:
    if scales is None:
        return calls.experts_bf16(calls.dequantize(x), weight, counts)
    if experts.format is WeightFormat.FP4_G32:
        return calls.experts_fp4(_whole_pairs(x), weight, scales, counts)
    if experts.count == 1:
        return calls.linear_fp8(x, weight[0].t(), scales[0])
    return calls.experts_fp8(x, weight, scales, counts)
