"""The experts: grouped gate/up product with the SwiGLU epilogue, grouped down product, combination.

One launch of each serves the routed experts and the shared expert together: the shared expert alone would not fill the device. Rows of a
tile belong to one expert; what a row gets does not depend on the other rows of its tile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.activations import QuantizedRows
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.linears import product_warps
from deepinfer_backends.cuda_sm100.numeric import fp8_exponent, fp8_round
from deepinfer_backends.cuda_sm100.numeric import power_of_two as exact_power
from deepinfer_backends.cuda_sm100.products import FORMAT_CODE, tile_product
from deepinfer_backends.cuda_sm100.routing import ExpertPlan, expert_plan
from deepinfer_backends.cuda_sm100.weights import TILE, ExpertWeights, MatrixWeight, expert_weights
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


@triton.jit(do_not_specialize=["rows", "pairs", "shared_tiles"])
def _up_kernel(
    x, x_scales, weight, scales, shared, shared_scales, h, h_scales, order, route_weights,
    tile_expert, tile_first, tile_last, tile_count, rows, pairs, shared_tiles, width, shared_width, h_width, inputs, x_stride,
    weight_step, scale_step, limit,
    N: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr,
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
    elif (tile - shared_tiles < tl.load(tile_count)) & (n_tile * N < width):
        tile -= shared_tiles
        expert = tl.load(tile_expert + tile).to(tl.int64)
        slot = tl.load(tile_first + tile) + lane
        mask = slot < tl.load(tile_last + tile)
        pair = tl.load(order + slot, mask=mask, other=0)
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
    h, h_scales, weight, scales, shared, shared_scales, out,
    tile_expert, tile_first, tile_last, tile_count, rows, pairs, shared_tiles, width, shared_width, h_width, outputs,
    weight_step, scale_step,
    N: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr, SHARED_FORMAT: tl.constexpr,
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
    elif tile - shared_tiles < tl.load(tile_count):
        tile -= shared_tiles
        expert = tl.load(tile_expert + tile).to(tl.int64)
        slot = tl.load(tile_first + tile) + lane
        _down(
            h, h_scales, weight + expert * weight_step, scales + expert * scale_step, out, slot, slot < tl.load(tile_last + tile),
            n_tile, width, h_width, outputs, N, R, FORMAT, PACKED, X_SCALED, EVEN, EVEN_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _combine_kernel(
    out, ids, position, y, pairs, size, TOP_K: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y[row] = rounded sum of the row's down projections by ascending place (= ascending expert), the shared expert last."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    k = tl.arange(0, K)
    pair = row * TOP_K + k
    chosen = (k < TOP_K) & (tl.load(ids + pair, mask=k < TOP_K, other=-1) >= 0)
    place = tl.load(position + pair, mask=chosen, other=pairs)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(TOP_K):
        first = tl.min(place, 0)
        total += tl.load(out + first.to(tl.int64) * size + column, mask=inside & (first < pairs), other=0.0).to(tl.float32)
        place = tl.where(place == first, pairs, place)
    if SHARED:
        total += tl.load(out + (pairs.to(tl.int64) + row) * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * size + column, total.to(tl.bfloat16), mask=inside)


def tile_rows(rows: int, top_k: int, experts: int) -> int:
    """Pairs of one tile: about what an expert gets, between 16 (the least a tensor core takes) and 128."""
    return min(128, power_of_two(min(rows, ceil_div(2 * rows * top_k, experts)), 16))


def _scales(weight: MatrixWeight) -> tuple[Tensor, int]:
    """(scales, distance between the scales of two experts); a bf16 weight has none: any pointer does, it is not read."""
    return (weight.data, 0) if weight.scales is None else (weight.scales, weight.scales.stride(0))


_PROGRAMS = 396  # programs below which tiles are halved: three for each multiprocessor of an H200


class ExpertOps:
    """The ops `prepare_experts` and `moe`."""

    device: torch.device
    _arch: int
    _invariant: bool

    def prepare_experts(self, experts: Iterable[ExpertTensors], count: int) -> Weight:
        return expert_weights(experts, count, self.device, self._arch)

    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        rows, top_k = routing.ids.shape
        ids = routing.ids.contiguous()
        plan = expert_plan(ids, experts.w13.count, tile_rows(rows, top_k, experts.w13.count))
        h = self._swiglu(x, plan, routing.weights.contiguous(), experts, shared, limit, rows, top_k)
        out = self._down_projections(h, plan, experts, shared, rows, ids.numel())
        y = torch.empty(rows, experts.w2.outputs, dtype=torch.bfloat16, device=out.device)
        block = min(1024, power_of_two(y.shape[1]))
        launch(
            _combine_kernel, (rows, ceil_div(y.shape[1], block)), out, ids, plan.position, y, ids.numel(), y.shape[1],
            TOP_K=top_k, K=power_of_two(top_k), SHARED=shared is not None, BLOCK=block,
        )  # fmt: skip
        return y

    def _swiglu(
        self, x: QuantizedRows, plan: ExpertPlan, route: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, limit: float,
        rows: int, top_k: int,
    ) -> QuantizedRows:  # fmt: skip
        w, s = experts.w13, (shared or experts).w13
        (w_scales, scale_step), (s_scales, _) = _scales(w), _scales(s)
        width, shared_width = w.outputs // 2, s.outputs // 2
        h_width = max(width, shared_width)
        h = QuantizedRows.empty(rows * (top_k + (shared is not None)), h_width, x.values.device, self._arch)
        shared_tiles = ceil_div(rows, plan.tile_rows) if shared is not None else 0
        block_n = self._block_n(plan.tile_rows)
        if self._arch < 100 and (shared_tiles + plan.tiles) * ceil_div(h_width, block_n) < _PROGRAMS:
            block_n = 32
        launch(
            _up_kernel, (ceil_div(h_width, block_n), shared_tiles + plan.tiles),
            x.values, x.scales, w.data, w_scales, s.data, s_scales, h.values, h.scales, plan.order, route,
            plan.tile_expert, plan.tile_first, plan.tile_last, plan.tile_count, rows, rows * top_k, shared_tiles,
            width, shared_width, h_width, w.inputs, x.values.stride(0), w.data.stride(0), scale_step, limit,
            warps=self._tile_warps(block_n * 2, plan.tile_rows), stages=4 if block_n == 32 else 3, N=block_n, R=plan.tile_rows, TOP_K=top_k,
            FORMAT=FORMAT_CODE[w.format], PACKED=w.packed, SHARED_FORMAT=FORMAT_CODE[s.format], SHARED_PACKED=s.packed,
            X_SCALED=x.scales is not None, EVEN=w.inputs % TILE == 0, EVEN_N=(width | shared_width) % block_n == 0,
        )  # fmt: skip
        return h

    def _down_projections(
        self, h: QuantizedRows, plan: ExpertPlan, experts: ExpertWeights, shared: ExpertWeights | None, rows: int, pairs: int
    ) -> Tensor:
        w, s = experts.w2, (shared or experts).w2
        (w_scales, scale_step), (s_scales, _) = _scales(w), _scales(s)
        out = torch.empty(h.values.shape[0], w.outputs, dtype=torch.bfloat16, device=h.values.device)
        block_n = self._block_n(plan.tile_rows)
        shared_tiles = ceil_div(rows, plan.tile_rows) if shared is not None else 0
        launch(
            _down_kernel, (ceil_div(w.outputs, block_n), shared_tiles + plan.tiles),
            h.values, h.scales, w.data, w_scales, s.data, s_scales, out,
            plan.tile_expert, plan.tile_first, plan.tile_last, plan.tile_count, rows, pairs, shared_tiles,
            w.inputs, s.inputs, h.values.shape[1], w.outputs, w.data.stride(0), scale_step,
            warps=self._tile_warps(block_n, plan.tile_rows), stages=4 if plan.tile_rows <= 32 else 3, N=block_n, R=plan.tile_rows,
            FORMAT=FORMAT_CODE[w.format], PACKED=w.packed, SHARED_FORMAT=FORMAT_CODE[s.format], SHARED_PACKED=s.packed,
            X_SCALED=h.scales is not None, EVEN=(w.inputs | s.inputs) % TILE == 0, EVEN_N=w.outputs % block_n == 0,
        )  # fmt: skip
        return out

    def _tile_warps(self, block_n: int, rows: int) -> int:
        return product_warps(block_n, rows, self._invariant or self._arch >= 100)

    def _block_n(self, rows: int) -> int:
        return 128 if self._arch >= 100 or rows >= 128 else 64
