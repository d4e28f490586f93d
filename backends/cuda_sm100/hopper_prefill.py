"""Sparse attention of many rows on Hopper: keys are gathered from their expanded bfloat16 form straight into what wgmma reads.

A program takes row after row. Two tiles of 64 keys lie in shared memory: while one is multiplied, the other arrives. Between rows
nothing is waited for either: the next row's first keys and its query are on their way while the last tile of this one is multiplied, and
its scores are being computed while this row's output is written.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deepinfer_backends.cuda_sm100.hopper import (
    FLAT,
    LOG2_E,
    OF_KEYS,
    OF_SCORES,
    OF_VALUES,
    OPERAND,
    SCORES,
    VALUES,
    fetch_angles,
    fetch_query,
    turn,
    turned_pairs,
)
from deepinfer_backends.cuda_sm100.launch import launch
from deepinfer_core.backend.types import Rope

_PROGRAMS = 132  # multiprocessors of an H200; one program fills one
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # 16 bytes a thread, 256 of a row side by side
# Sums of both halves of a tile's keys [64 heads, 2], each where its warpgroup has its scores.
_HALVES = gl.constexpr(
    gl.SliceLayout(
        2,
        gl.DistributedLinearLayout(
            [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
            [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0], [0, 1, 0]],
            [],
            [64, 2, 32],
        ),
    )
)


@gluon.jit
def _fetch_keys(tile, keys, place):
    """Starts the copy of the 64 keys at rows `place`."""
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, _COPIED))
    async_copy.async_copy_global_to_shared(tile, keys + (place.to(gl.int64) * 512)[:, None] + d[None, :])


@gluon.jit
def _jobs(rows):
    """How many rows this program does."""
    rounds = rows // gl.num_programs(0)
    end = gl.where(rounds % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
    return rounds + (end < rows % gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _place(job, jobs):
    """Where a program's job stands among all rows, longest first: there and back again, so that long and short rows even out, and each
    program starts elsewhere in its list, so that not all of them read queries at the same time."""
    job = (job + gl.program_id(0)) % jobs
    forward, backward = gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0)
    return job * gl.num_programs(0) + gl.where(job % 2 == 0, forward, backward)


@gluon.jit
def _advanced(at, left, job, next_row, next_count, order, tally, jobs, width):
    """The tile after the one at `at`, of whose row `left` keys remain from there on: of the same row or of job `job`, next_row."""
    at += 64
    left -= 64
    if left <= 0:
        at = next_row * width
        left = next_count
        job += 1
        place = _place(job, jobs)
        next_row = gl.load(order + place)
        next_count = gl.load(tally + place)
    return at, left, job, next_row, next_count


@gluon.jit
def _scores(q, tile):
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    return warpgroup_mma(q, tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s, top, total, scale):
    """One tile into the running softmax, base 2: (new top, new total, exponentials, factor of what was summed so far)."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = gl.exp2(top - base)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    p = gl.exp2(gl.fma(s, gl.full([64, 64], scale, gl.float32, SCORES), zero - base[:, None]))
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, _HALVES))[:, None]
    total += gl.convert_layout(gl.sum(gl.reshape(p, (64, 2, 32)), 2), _HALVES)
    return new_top, total, p, gl.convert_layout(shrink, OF_VALUES)[:, None]


@gluon.jit
def _halves(x):
    """[64, 2, 2n] -> two [64, 2, n]: the first and the second half of the last axis."""
    n: gl.constexpr = x.shape[2] // 2
    return gl.split(gl.permute(gl.reshape(x, (64, 2, 2, n)), (0, 1, 3, 2)))


@gluon.jit
def _write(buffer, part, out, HEADS: gl.constexpr):
    """bfloat16 part [64, 128] to columns 0..63 and 256..319 of out: each warpgroup has one of the two."""
    buffer.store(part)
    gl.thread_barrier()
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPIED))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, _COPIED))
    at = out + (head * 512)[:, None] + (c + gl.where(c >= 64, 192, 0))[None, :]
    if HEADS < 64:
        gl.store(at, buffer.load(_COPIED), cache_modifier=".cs", mask=(head < HEADS)[:, None])
    else:
        gl.store(at, buffer.load(_COPIED), cache_modifier=".cs")
    gl.thread_barrier()


@gluon.jit
def _write_row(buffer, o, angles, out, HEADS: gl.constexpr):
    """Float32 o [64, 512], rounded, its last 64 columns rotated back."""
    left, right = _halves(gl.reshape(o, (64, 2, 256)))
    first, second = _halves(left)
    third, fourth = _halves(right)
    _write(buffer, gl.reshape(first, (64, 128)).to(gl.bfloat16), out, HEADS)
    _write(buffer, gl.reshape(second, (64, 128)).to(gl.bfloat16), out + 64, HEADS)
    _write(buffer, gl.reshape(third, (64, 128)).to(gl.bfloat16), out + 128, HEADS)
    rounded = gl.reshape(fourth, (64, 128)).to(gl.bfloat16).to(gl.float32)
    _write(buffer, turned_pairs(rounded, angles, -1.0, 64), out + 192, HEADS)


@gluon.jit
def _begin(q, k, angles, query, keys, index, order, tally, table, positions, jobs, width, HEADS: gl.constexpr):
    """The first query, rotated, and its first two tiles on their way. Returns the two first rows and what `_advanced` moves on."""
    begin, following = _place(0, jobs), _place(1, jobs)
    row, count = gl.load(order + begin), gl.load(tally + begin)
    next_row, next_count = gl.load(order + following), gl.load(tally + following)
    fetch_query(q, query + row.to(gl.int64) * (HEADS * 512), HEADS)
    fetch_angles(angles, table, gl.load(positions + row))
    async_copy.commit_group()
    # the tile to fetch next starts at `at`, where `left` keys of its row remain; then follows row coming_row, job `job`
    at, left, job, coming_row, coming_count = row * width, count, 1, next_row, next_count
    for i in gl.static_range(2):
        _fetch_keys(k.index(i), keys, gl.load(index + at + gl.arange(0, 64, layout=gl.SliceLayout(1, _COPIED))))
        async_copy.commit_group()
        at, left, job, coming_row, coming_count = _advanced(at, left, job, coming_row, coming_count, order, tally, jobs, width)
    async_copy.wait_group(1)
    gl.thread_barrier()
    turn(q.slice(448, 64, dim=1), angles, 1.0)
    return row, count, next_row, next_count, at, left, job, coming_row, coming_count


@gluon.jit(do_not_specialize=["rows", "width"])
def rows_kernel(
    query, keys, index, order, tally, sink, table, positions, out, scale, rows, width, HEADS: gl.constexpr,
):  # fmt: skip
    """See `attend`. scale: includes log2(e), as all exponents here are base 2."""
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 512], OPERAND)
    k = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], OPERAND)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 64], OPERAND)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [64, 128], OPERAND)
    angles = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT)  # of this row and of the next
    for i in gl.static_range(2):
        angles.index(i).store(gl.where(gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [8], [0])) < 64, 1.0, 0.0))
    gl.thread_barrier()
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, _COPIED))
    key, head = gl.arange(0, 64, layout=OF_KEYS), gl.arange(0, 64, layout=OF_SCORES)
    jobs = _jobs(rows)
    sinks = gl.load(sink + head, mask=head < HEADS, other=0.0) * 1.4426950408889634

    row, count, next_row, next_count, at, left, job, coming_row, coming_count = _begin(
        q, k, angles.index(0), query, keys, index, order, tally, table, positions, jobs, width, HEADS
    )
    s = _scores(q, k.index(0))
    here = 0
    for done in range(jobs):
        after = _place(done + 2, jobs)
        after_row, after_count = gl.load(order + after), gl.load(tally + after)
        next_position = gl.load(positions + next_row)
        own_angles, next_angles = angles.index(done % 2), angles.index((done + 1) % 2)
        o = gl.zeros([64, 512], gl.float32, VALUES)
        top, total = sinks, gl.zeros([64, 2], gl.float32, _HALVES)
        for first in range(0, gl.maximum(count, 1), 64):
            last = first + 64 >= count
            place = gl.load(index + at + lane)
            x = warpgroup_mma_wait(0, deps=[s])
            if last:
                x = gl.where((first + key < count)[None, :], x, float("-inf"))
                gl.thread_barrier()
                fetch_query(q, query + next_row.to(gl.int64) * (HEADS * 512), HEADS)
                fetch_angles(next_angles, table, next_position)
            async_copy.commit_group()
            top, total, p, shrink = _softmax(x, top, total, scale)
            p_shared.store(p.to(gl.bfloat16))
            fence_async_shared()
            gl.thread_barrier()
            o = warpgroup_mma(p_shared, k.index(here), o * shrink, is_async=True)
            at, left, job, coming_row, coming_count = _advanced(at, left, job, coming_row, coming_count, order, tally, jobs, width)
            async_copy.wait_group(0)  # the other tile, and after the last one the next query
            gl.thread_barrier()
            if last:
                turn(q.slice(448, 64, dim=1), next_angles, 1.0)
            s = _scores(q, k.index(1 - here))
            o = warpgroup_mma_wait(1, deps=[o])
            gl.thread_barrier()
            _fetch_keys(k.index(here), keys, place)
            async_copy.commit_group()
            here = 1 - here
        base = gl.where(top == float("-inf"), 0.0, top)
        sums = gl.convert_layout(gl.sum(total, 1), OF_SCORES) + gl.exp2(sinks - base)
        o = o * gl.convert_layout(1.0 / sums, OF_VALUES)[:, None]
        _write_row(buffer, o, own_angles, out + row.to(gl.int64) * (HEADS * 512), HEADS)
        row, count, next_row, next_count = next_row, next_count, after_row, after_count
    s = warpgroup_mma_wait(0, deps=[s])
    async_copy.wait_group(0)


def attend(query: Tensor, keys: Tensor, index: Tensor, order: Tensor, tally: Tensor, sink: Tensor, scale: float, rope: Rope) -> Tensor:
    """`sparse_attention` of query [rows, heads, 512] over expanded keys [*, 512] bfloat16.

    index [rows, width]: rows of `keys` that each row attends to, all of them valid, width a multiple of 64; order [rows]: the row done
    i-th; tally [rows]: how many of its keys count. Where `hopper.serves`.
    """
    rows, heads, _ = query.shape
    out = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
    launch(
        rows_kernel, (min(rows, _PROGRAMS),), query.contiguous(), keys, index, order, tally, sink, rope.table, rope.positions, out,
        scale * LOG2_E, rows, index.shape[1], warps=8, HEADS=heads,
    )  # fmt: skip
    return out
