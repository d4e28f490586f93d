"""The MoE gate, and the plan that groups token rows by expert. Both stay on the device and do not depend on timing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_core.backend.types import Routing, Weight


@triton.jit
def _route_kernel(
    logits, bias, ids, weights, experts, bias_stride, scale, E: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """One row: scores, the TOP_K highest of score + bias (ties to the lower expert), normalised weights."""
    row = tl.program_id(0)
    e = tl.arange(0, E)
    inside = e < experts
    logit = tl.load(logits + row * experts + e, mask=inside, other=0.0)
    x = tl.exp(-tl.abs(logit))
    # log(1 + x) without the loss of 1 + x: correct the rounding of the sum by the ratio of what was meant and what was added.
    total = 1.0 + x
    added = total - 1.0
    log1p = tl.where(added == 0.0, x, tl.log(total) * (x / tl.where(added == 0.0, 1.0, added)))
    score = tl.sqrt_rn(tl.maximum(logit, 0.0) + log1p)
    ranked = tl.where(inside, score + tl.load(bias + row * bias_stride + e, mask=inside, other=0.0), float("-inf"))
    k = tl.arange(0, K)
    chosen = tl.zeros((K,), tl.int32) - 1
    chosen_score = tl.zeros((K,), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(ranked, 0)
        winner = tl.min(tl.where(ranked == best, e, E), 0)
        chosen = tl.where(k == i, winner, chosen)
        chosen_score = tl.where(k == i, tl.sum(tl.where(e == winner, score, 0.0), 0), chosen_score)
        ranked = tl.where(e == winner, float("-inf"), ranked)
    normal = chosen_score / (tl.sum(chosen_score, 0) + 1e-20) * scale
    tl.store(ids + row * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(weights + row * TOP_K + k, normal, mask=k < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids, counts, pairs, BLOCK: tl.constexpr):
    """counts[e]: pairs of expert e, one program each."""
    e = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        flat = first + lanes
        total += (tl.load(ids + flat, mask=flat < pairs, other=-1) == e).to(tl.int32)
    tl.store(counts + e, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs"])
def _plan_kernel(
    ids, counted, order, position, tile_expert, tile_first, tile_last, tile_count, pairs, experts,
    R: tl.constexpr, E: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Expert e's share of the plan. Every program knows the counts of all experts (COUNTED) or counts by itself, so that none waits."""
    e = tl.program_id(0)
    bins = tl.arange(0, E)
    lanes = tl.arange(0, BLOCK)
    if COUNTED:
        counts = tl.load(counted + bins, mask=bins < experts, other=0)
    else:
        counts = tl.zeros((E,), tl.int32)
        for first in range(0, pairs, BLOCK):
            flat = first + lanes
            expert = tl.load(ids + flat, mask=flat < pairs, other=-1)
            counts += tl.histogram(tl.where(expert < 0, 0, expert), E, mask=expert >= 0)
    tiles = (counts + R - 1) // R
    mine = tl.sum(tl.where(bins == e, counts, 0), 0)
    start = tl.sum(tl.where(bins < e, counts, 0), 0)
    tile = tl.sum(tl.where(bins < e, tiles, 0), 0)
    if e == experts - 1:
        tl.store(tile_count, tl.sum(tiles, 0))
    for i in range(tl.cdiv(mine, R)):
        tl.store(tile_expert + tile + i, e)
        tl.store(tile_first + tile + i, start + i * R)
        tl.store(tile_last + tile + i, start + tl.minimum((i + 1) * R, mine))
    filled = start
    if mine > 0:
        for first in range(0, pairs, BLOCK):
            flat = first + lanes
            member = (tl.load(ids + flat, mask=flat < pairs, other=-1) == e).to(tl.int32)
            at = filled + tl.cumsum(member, 0) - 1
            tl.store(order + at, flat, mask=member > 0)
            tl.store(position + flat, at, mask=member > 0)
            filled += tl.sum(member, 0)


@dataclass(frozen=True)
class ExpertPlan:
    """(row, choice) pairs grouped by expert, ascending within an expert, and cut into tiles of at most `tile_rows` pairs."""

    tile_rows: int
    tiles: int  # upper bound of the number of tiles
    order: Tensor  # int32 [pairs]: flat pair number (row * K + choice) at each place
    position: Tensor  # int32 [pairs]: place of each flat pair; undefined for ids of -1
    tile_expert: Tensor  # int32 [tiles]
    tile_first: Tensor  # int32 [tiles]: first place
    tile_last: Tensor  # int32 [tiles]: end of the tile's places
    tile_count: Tensor  # int32 [1]


_MANY_PAIRS = 4096
"""(row, choice) pairs above which a launch of its own counts them: below, each program counts faster than a launch starts."""


def expert_plan(ids: Tensor, experts: int, tile_rows: int) -> ExpertPlan:
    """The plan of routing ids int32 [T, K]; one or two launches, no host synchronisation.

    A step of one row needs no plan: its kernels find their tile among the ids, which stand here for every array.
    """
    pairs = ids.numel()
    if ids.shape[0] == 1:
        return ExpertPlan(tile_rows, pairs, ids, ids, ids, ids, ids, ids)
    used = min(pairs, experts)
    tiles = min(pairs, used + pairs // tile_rows)
    sizes = [ceil_div(size, 4) * 4 for size in (pairs, pairs, tiles, tiles, tiles, 1)]  # 16 bytes: every piece is aligned alike
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device)
    order, position, expert, first, last, count = buffer.split(sizes)
    many = pairs > _MANY_PAIRS
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device) if many else count
    if many:
        launch(_count_kernel, (experts,), ids, counts, pairs, warps=8, BLOCK=4096)
    launch(
        _plan_kernel, (experts if pairs else 0,), ids, counts, order, position, expert, first, last, count, pairs, experts,
        warps=8 if many else 4, R=tile_rows, E=power_of_two(experts, 32), COUNTED=many,
        BLOCK=4096 if many else min(1024, power_of_two(pairs, 32)),
    )  # fmt: skip
    return ExpertPlan(tile_rows, tiles, order, position, expert, first, last, count)


class RoutingOps:
    """The op `moe_gate`."""

    def moe_gate(self, x: Tensor, weight: Weight, bias: Tensor, top_k: int, scale: float) -> Routing:
        logits = self.linear(x, weight, torch.float32)  # type: ignore[attr-defined]
        rows, experts = logits.shape
        ids = torch.empty(rows, top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
        launch(
            _route_kernel, (rows,), logits, bias, ids, weights, experts, bias.stride(0) if bias.dim() == 2 else 0, scale,
            warps=4, E=power_of_two(experts), TOP_K=top_k, K=power_of_two(top_k),
        )  # fmt: skip
        return Routing(ids, weights)
