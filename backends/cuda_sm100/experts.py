"""The experts: grouped gate/up product with the SwiGLU epilogue, grouped down product, combination.

One launch of each serves the routed experts and the shared expert together: the shared expert alone would not fill the device. Rows of a
tile belong to one expert; what a row gets does not depend on the other rows of its tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100 import grouped
from deepinfer_backends.cuda_sm100.activations import QuantizedRows
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.linears import decoded_weight, product_warps
from deepinfer_backends.cuda_sm100.numeric import fp8_exponent, fp8_round
from deepinfer_backends.cuda_sm100.numeric import power_of_two as exact_power
from deepinfer_backends.cuda_sm100.products import FORMAT_CODE, tile_product
from deepinfer_backends.cuda_sm100.routing import ExpertPlan, expert_plan
from deepinfer_backends.cuda_sm100.weights import TILE, ExpertWeights, MatrixWeight, expert_weights
from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.types import Activation, ExpertTensors, Routing, Weight


@triton.jit
def _gate_up(
    x, x_scales, weight, scales, row, mask, n_tile, width, inputs, x_stride,
    N: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr, X_SCALED: tl.constexpr, EVEN: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """(gate, up) float32 [R, N] of activation rows `row` for intermediate channels n_tile*N .. of one expert.

    N = 32: one tile holds 32 rows of each projection, for which a tensor core's least of 64 rows would otherwise be too many.
    """
    if N == 32:
        i = tl.arange(0, 64)
        n = tl.minimum(n_tile * 32 + i % 32, width - 1) + tl.where(i < 32, 0, width)
        acc = tl.zeros((64, R), tl.float32)
        for tile in range(tl.cdiv(inputs, 128)):
            acc = tile_product(
                acc, weight, scales, tile, n, 2 * width, x + row.to(tl.int64) * x_stride, x, mask, inputs, FORMAT, PACKED, False, EVEN
            )
        return tl.split(tl.permute(tl.reshape(acc, (2, 32, R)), (2, 1, 0)))
    n = n_tile * N + tl.arange(0, N)
    if not EVEN_N:
        n = tl.minimum(n, width - 1)
    x_rows = x + row.to(tl.int64) * x_stride
    scale_rows = x_scales + row.to(tl.int64) * (inputs // 32) if X_SCALED else x
    gate = tl.zeros((N, R), tl.float32)
    up = tl.zeros((N, R), tl.float32)
    tiles = tl.cdiv(inputs, 128)
    if X_SCALED:
        # Triton 3.6 does not compile two block-scaled products in one loop for SM100.
        for tile in range(tiles):
            gate = tile_product(gate, weight, scales, tile, n, 2 * width, x_rows, scale_rows, mask, inputs, FORMAT, PACKED, True, EVEN)
        n += width
        for tile in range(tiles):
            up = tile_product(up, weight, scales, tile, n, 2 * width, x_rows, scale_rows, mask, inputs, FORMAT, PACKED, True, EVEN)
    else:
        for tile in range(tiles):
            gate = tile_product(gate, weight, scales, tile, n, 2 * width, x_rows, x, mask, inputs, FORMAT, PACKED, False, EVEN)
            up = tile_product(up, weight, scales, tile, n + width, 2 * width, x_rows, x, mask, inputs, FORMAT, PACKED, False, EVEN)
    return tl.trans(gate), tl.trans(up)


@triton.jit
def _store_swiglu(
    gate, up, route, limit, h, h_scales, slot, mask, n_tile, width, h_width,
    N: tl.constexpr, R: tl.constexpr, X_SCALED: tl.constexpr,
):  # fmt: skip
    """SwiGLU of the rounded products times the routing weight, rounded and quantised, into rows `slot` of h."""
    gate = tl.minimum(gate.to(tl.bfloat16).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(tl.bfloat16).to(tl.float32), -limit), limit)
    a = (gate / (1.0 + tl.exp(-gate)) * up * route[:, None]).to(tl.bfloat16).to(tl.float32)
    grouped = tl.reshape(a, (R, N // 32, 32))
    exponent = fp8_exponent(tl.max(tl.abs(grouped), 2))
    q = fp8_round(grouped, exponent[:, :, None])
    n = n_tile * N + tl.arange(0, N)
    at = h + slot.to(tl.int64)[:, None] * h_width + n[None, :]
    keep = mask[:, None] & (n < width)[None, :]
    if X_SCALED:
        tl.store(at, tl.reshape(q.to(tl.uint8, bitcast=True), (R, N)), mask=keep)
        g = n_tile * (N // 32) + tl.arange(0, N // 32)
        scale_at = h_scales + slot.to(tl.int64)[:, None] * (h_width // 32) + g[None, :]
        tl.store(scale_at, exponent.to(tl.uint8), mask=mask[:, None] & (g * 32 < width)[None, :])
    else:
        tl.store(at, tl.reshape(q.to(tl.float32) * exact_power(exponent)[:, :, None], (R, N)).to(tl.bfloat16), mask=keep)


@triton.jit
def _single_places(ids, TOP_K: tl.constexpr, K: tl.constexpr):
    """int32 [K]: places of the choices of a step of one row, -1 for ids of -1 and beyond TOP_K. It needs no plan."""
    k = tl.arange(0, K)
    expert = tl.load(ids + k, mask=k < TOP_K, other=-1)
    lower = (expert[None, :] < expert[:, None]) & (expert[None, :] >= 0)
    return tl.where(expert >= 0, tl.sum(lower.to(tl.int32), 1), -1)


@triton.jit
def _tile(
    ids, tile, order, tile_expert, tile_first, tile_last, R: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, SINGLE: tl.constexpr
):
    """(expert, places [R], mask [R], pairs [R]) of a tile of routed rows."""
    lane = tl.arange(0, R)
    if SINGLE:
        choice = tl.max(tl.where(_single_places(ids, TOP_K, K) == tile, tl.arange(0, K), 0), 0)
        return tl.load(ids + choice).to(tl.int64), tile + lane, lane < 1, choice + lane * 0
    slot = tl.load(tile_first + tile) + lane
    mask = slot < tl.load(tile_last + tile)
    return tl.load(tile_expert + tile).to(tl.int64), slot, mask, tl.load(order + slot, mask=mask, other=0)


@triton.jit
def _tiles(ids, tile_count, TOP_K: tl.constexpr, K: tl.constexpr, SINGLE: tl.constexpr):
    """Number of tiles of routed rows."""
    if SINGLE:
        return tl.max(_single_places(ids, TOP_K, K), 0) + 1
    return tl.load(tile_count)


@triton.jit(do_not_specialize=["rows", "pairs", "shared_tiles"])
def _up_kernel(
    x, x_scales, weight, scales, shared, shared_scales, h, h_scales, ids, route_weights,
    order, tile_expert, tile_first, tile_last, tile_count, rows, pairs, shared_tiles, width, shared_width, h_width, inputs, x_stride,
    weight_step, scale_step, limit,
    N: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, SINGLE: tl.constexpr,
    FORMAT: tl.constexpr, PACKED: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, SHARED_PACKED: tl.constexpr, X_SCALED: tl.constexpr, EVEN: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """h [pairs + rows, h_width]: quantised SwiGLU of the routed pairs, grouped by expert, then of all rows for the shared expert."""
    n_tile, tile = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, R)
    if tile < shared_tiles:
        if n_tile * N < shared_width:
            row = tile * R + lane
            mask = row < rows
            gate, up = _gate_up(
                x, x_scales, shared, shared_scales, row, mask, n_tile, shared_width, inputs, x_stride,
                N, R, SHARED_FORMAT, SHARED_PACKED, X_SCALED, EVEN, EVEN_N,
            )  # fmt: skip
            route = tl.full((R,), 1.0, tl.float32)
            _store_swiglu(gate, up, route, limit, h, h_scales, pairs + row, mask, n_tile, shared_width, h_width, N, R, X_SCALED)
    elif (tile - shared_tiles < _tiles(ids, tile_count, TOP_K, K, SINGLE)) & (n_tile * N < width):
        tile -= shared_tiles
        expert, slot, mask, pair = _tile(ids, tile, order, tile_expert, tile_first, tile_last, R, TOP_K, K, SINGLE)
        gate, up = _gate_up(
            x, x_scales, weight + expert * weight_step, scales + expert * scale_step, pair // TOP_K, mask, n_tile, width, inputs, x_stride,
            N, R, FORMAT, PACKED, X_SCALED, EVEN, EVEN_N,
        )  # fmt: skip
        route = tl.load(route_weights + pair, mask=mask, other=0.0)
        _store_swiglu(gate, up, route, limit, h, h_scales, slot, mask, n_tile, width, h_width, N, R, X_SCALED)


@triton.jit
def _down(
    h, h_scales, weight, scales, out, slot, mask, n_tile, width, h_width, outputs,
    N: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr, X_SCALED: tl.constexpr, EVEN: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """out rows `slot` = rounded h @ w2.T for outputs n_tile*N .. of one expert."""
    n = n_tile * N + tl.arange(0, N)
    n_read = n if EVEN_N else tl.minimum(n, outputs - 1)
    h_rows = h + slot.to(tl.int64) * h_width
    scale_rows = h_scales + slot.to(tl.int64) * (h_width // 32) if X_SCALED else h
    acc = tl.zeros((N, R), tl.float32)
    for tile in range(tl.cdiv(width, 128)):
        acc = tile_product(acc, weight, scales, tile, n_read, outputs, h_rows, scale_rows, mask, width, FORMAT, PACKED, X_SCALED, EVEN)
    at = out + slot.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at, tl.trans(acc).to(tl.bfloat16), mask=mask[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize=["rows", "pairs", "shared_tiles"])
def _down_kernel(
    h, h_scales, weight, scales, shared, shared_scales, out, ids,
    order, tile_expert, tile_first, tile_last, tile_count, rows, pairs, shared_tiles, width, shared_width, h_width, outputs,
    weight_step, scale_step,
    N: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, SINGLE: tl.constexpr,
    FORMAT: tl.constexpr, PACKED: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    SHARED_PACKED: tl.constexpr, X_SCALED: tl.constexpr, EVEN: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """out [pairs + rows, outputs]: down projections of h, in h's row order."""
    n_tile, tile = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, R)
    if tile < shared_tiles:
        row = tile * R + lane
        _down(
            h, h_scales, shared, shared_scales, out, pairs + row, row < rows, n_tile, shared_width, h_width, outputs,
            N, R, SHARED_FORMAT, SHARED_PACKED, X_SCALED, EVEN, EVEN_N,
        )  # fmt: skip
    elif tile - shared_tiles < _tiles(ids, tile_count, TOP_K, K, SINGLE):
        tile -= shared_tiles
        expert, slot, mask, _ = _tile(ids, tile, order, tile_expert, tile_first, tile_last, R, TOP_K, K, SINGLE)
        _down(
            h, h_scales, weight + expert * weight_step, scales + expert * scale_step, out, slot, mask,
            n_tile, width, h_width, outputs, N, R, FORMAT, PACKED, X_SCALED, EVEN, EVEN_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _combine_kernel(
    out, ids, position, y, pairs, size,
    TOP_K: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[row] = rounded sum of the row's down projections by ascending place (= ascending expert), the shared expert last."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    k = tl.arange(0, K)
    pair = row * TOP_K + k
    chosen = (k < TOP_K) & (tl.load(ids + pair, mask=k < TOP_K, other=-1) >= 0)
    place = tl.where(chosen, _single_places(ids, TOP_K, K), pairs) if SINGLE else tl.load(position + pair, mask=chosen, other=pairs)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(TOP_K):
        first = tl.min(place, 0)
        total += tl.load(out + first.to(tl.int64) * size + column, mask=inside & (first < pairs), other=0.0).to(tl.float32)
        place = tl.where(place == first, pairs, place)
    if SHARED:
        total += tl.load(out + (pairs.to(tl.int64) + row) * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * size + column, total.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(products, h, rows, width, limit, R: tl.constexpr, N: tl.constexpr):
    """h [rows, width]: quantised SwiGLU of products [rows, 2 * width], gate channels first."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    n = tl.program_id(1) * N + tl.arange(0, N)
    keep = (row < rows)[:, None] & (n < width)[None, :]
    at = products + row.to(tl.int64)[:, None] * (2 * width) + n[None, :]
    gate = tl.load(at, mask=keep, other=0.0)
    up = tl.load(at + width, mask=keep, other=0.0)
    route = tl.full((R,), 1.0, tl.float32)
    _store_swiglu(gate, up, route, limit, h, h, row, row < rows, tl.program_id(1), width, width, N, R, False)


def tile_rows(rows: int, top_k: int, experts: int, least: int = 16) -> int:
    """Pairs of one tile: a third more than an expert gets if routing is even, between `least` and 128."""
    return min(128, power_of_two(min(rows, ceil_div(4 * rows * top_k, 3 * experts)), least))


def _scales(weight: MatrixWeight) -> tuple[Tensor, int]:
    """(scales, distance between the scales of two experts); a bf16 weight has none: any pointer does, it is not read."""
    return (weight.data, 0) if weight.scales is None else (weight.scales, weight.scales.stride(0))


_PROGRAMS = 396  # programs below which tiles are halved: three for each multiprocessor of an H200


class _Shape(NamedTuple):
    """How a product is cut."""

    block_n: int  # outputs of a program (of each projection)
    warps: int
    stages: int


@dataclass(frozen=True)
class _Work:
    """What the two products of a step have in common: tiles of at most `block_r` rows, those of the shared expert first."""

    ids: Tensor  # int32 [T, K]
    route: Tensor  # float32 [T, K]
    plan: ExpertPlan
    block_r: int
    shared_tiles: int
    routed_tiles: int  # upper bound

    @property
    def tiles(self) -> int:
        return self.shared_tiles + self.routed_tiles

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        plan = self.plan
        tiles = (plan.order, plan.tile_expert, plan.tile_first, plan.tile_last, plan.tile_count)
        return (*tiles, self.ids.shape[0], self.ids.numel(), self.shared_tiles)

    @property
    def constants(self) -> dict[str, int | bool]:
        rows, top_k = self.ids.shape
        return {"R": self.block_r, "TOP_K": top_k, "K": power_of_two(top_k), "SINGLE": rows == 1}


class ExpertOps:
    """The ops `prepare_experts` and `moe`."""

    device: torch.device
    _arch: int
    _invariant: bool

    def prepare_experts(self, experts: Iterable[ExpertTensors], count: int) -> Weight:
        return expert_weights(experts, count, self.device, self._arch)

    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        (rows, top_k), pairs = routing.ids.shape, routing.ids.numel()
        block_r = tile_rows(rows, top_k, experts.w13.count, 16 if self._invariant or self._arch >= 100 else 8)
        many = block_r >= 64 and grouped.takes(experts, self._arch, rows, top_k)
        library = x.scales is None and self._library(rows) and shared is not None and _is_decodable(shared)  # type: ignore[attr-defined]
        shared_tiles = 0 if shared is None or library else ceil_div(rows, block_r)
        ids, route = routing.ids.contiguous(), routing.weights.contiguous()
        plan = expert_plan(ids, experts.w13.count, grouped.TILE_ROWS if many else block_r)
        work = _Work(ids, route, plan, block_r, shared_tiles, 0 if many else plan.tiles)
        h_width = max(experts.w2.inputs, (shared or experts).w2.inputs)
        h = QuantizedRows.empty(pairs + (rows if shared_tiles else 0), h_width, x.values.device, self._arch)
        out = torch.empty(pairs + (rows if shared is not None else 0), experts.w2.outputs, dtype=torch.bfloat16, device=x.values.device)
        if many:
            grouped.routed_up(x.values, plan, route, experts, limit, top_k, h.values)
        self._up_projections(x, work, experts, shared, limit, h)
        if many:
            grouped.routed_down(h.values, plan, experts, out)
        self._down_projections(h, work, experts, shared, out)
        if shared is not None and library:
            _shared_product(x.values, shared, limit, out[pairs:])
        return _combined(out, work, shared is not None)

    def _up_projections(
        self, x: QuantizedRows, work: _Work, experts: ExpertWeights, shared: ExpertWeights | None, limit: float, h: QuantizedRows
    ) -> None:
        w, s = experts.w13, (shared or experts).w13
        (w_scales, scale_step), (s_scales, _) = _scales(w), _scales(s)
        width, shared_width, h_width = w.outputs // 2, s.outputs // 2, h.values.shape[1]
        shape = self._up_shape(work, h_width)
        launch(
            _up_kernel, (ceil_div(h_width, shape.block_n), work.tiles),
            x.values, x.scales, w.data, w_scales, s.data, s_scales, h.values, h.scales, work.ids, work.route, *work.arguments,
            width, shared_width, h_width, w.inputs, x.values.stride(0), w.data.stride(0), scale_step, limit,
            warps=shape.warps, stages=shape.stages, N=shape.block_n, **work.constants,
            FORMAT=FORMAT_CODE[w.format], PACKED=w.packed, SHARED_FORMAT=FORMAT_CODE[s.format], SHARED_PACKED=s.packed,
            X_SCALED=x.scales is not None, EVEN=w.inputs % TILE == 0, EVEN_N=(width | shared_width) % shape.block_n == 0,
        )  # fmt: skip

    def _down_projections(self, h: QuantizedRows, work: _Work, experts: ExpertWeights, shared: ExpertWeights | None, out: Tensor) -> None:
        w, s = experts.w2, (shared or experts).w2
        (w_scales, scale_step), (s_scales, _) = _scales(w), _scales(s)
        shape = self._down_shape(work, w.outputs)
        launch(
            _down_kernel, (ceil_div(w.outputs, shape.block_n), work.tiles),
            h.values, h.scales, w.data, w_scales, s.data, s_scales, out, work.ids, *work.arguments,
            w.inputs, s.inputs, h.values.shape[1], w.outputs, w.data.stride(0), scale_step,
            warps=shape.warps, stages=shape.stages, N=shape.block_n, **work.constants,
            FORMAT=FORMAT_CODE[w.format], PACKED=w.packed, SHARED_FORMAT=FORMAT_CODE[s.format], SHARED_PACKED=s.packed,
            X_SCALED=h.scales is not None, EVEN=(w.inputs | s.inputs) % TILE == 0, EVEN_N=w.outputs % shape.block_n == 0,
        )  # fmt: skip

    def _up_shape(self, work: _Work, h_width: int) -> _Shape:
        block_n = self._block_n(work.block_r)
        if self._arch < 100 and work.tiles * ceil_div(h_width, block_n) < _PROGRAMS:
            block_n = 32
        return _Shape(block_n, self._tile_warps(block_n * 2, work.block_r), 4 if block_n == 32 else 3)

    def _down_shape(self, work: _Work, outputs: int) -> _Shape:
        block_n = self._block_n(work.block_r)
        if work.block_r == 8 and work.tiles * ceil_div(outputs, 128) >= _PROGRAMS:
            block_n = 128
        return _Shape(block_n, self._tile_warps(block_n, work.block_r), 4 if 16 <= work.block_r <= 32 else 3)

    def _tile_warps(self, block_n: int, rows: int) -> int:
        return product_warps(block_n, rows, self._invariant or self._arch >= 100)

    def _block_n(self, rows: int) -> int:
        return 128 if self._arch >= 100 or rows >= 128 else 64


def _combined(out: Tensor, work: _Work, shared: bool) -> Tensor:
    rows, top_k = work.ids.shape
    y = torch.empty(rows, out.shape[1], dtype=torch.bfloat16, device=out.device)
    block = min(1024, power_of_two(y.shape[1]))
    launch(
        _combine_kernel, (rows, ceil_div(y.shape[1], block)), out, work.ids, work.plan.position, y, rows * top_k, y.shape[1],
        TOP_K=top_k, K=power_of_two(top_k), SHARED=shared, SINGLE=rows == 1, BLOCK=block,
    )  # fmt: skip
    return y


def _is_decodable(experts: ExpertWeights) -> bool:
    """Whether `decoded_weight` knows the formats."""
    return all(w.format is not WeightFormat.FP4_G32 for w in (experts.w13, experts.w2))


def _shared_product(x: Tensor, shared: ExpertWeights, limit: float, out: Tensor) -> None:
    """out [T, outputs] = the shared expert of x, by library products."""
    rows, width = x.shape[0], shared.w2.inputs
    products = torch.mm(x, decoded_weight(shared.w13).t())
    h = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
    launch(_swiglu_kernel, (ceil_div(rows, 16), ceil_div(width, 128)), products, h, rows, width, limit, R=16, N=128)
    torch.mm(h, decoded_weight(shared.w2).t(), out=out)
