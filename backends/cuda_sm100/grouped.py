"""Products of routed experts with many rows on SM90, in Gluon: weights are decoded while the tensor cores work.

Triton waits for every product whose first operand comes from registers. Here layouts are explicit and products asynchronous: a thread
loads the packed words of exactly the weights that `wgmma` takes from it, and decodes a group of 32 inputs while the product of the group
before runs. Activations come through shared memory, two tiles of 128 inputs ahead.

A tile is 256 weight rows times up to 128 + `_REST` rows of one expert. In a large step many experts have a few rows more than 128: a
second, narrow product with the same decoded weights takes them along, which costs an eighth of a second tile. Sums have the order of
`products.tile_product`, so that results do not depend on which of the two kernels a row meets.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from deepinfer_backends.cuda_sm100.launch import INTERPRETED, launch
from deepinfer_backends.cuda_sm100.routing import ExpertPlan
from deepinfer_backends.cuda_sm100.weights import TILE, ExpertWeights
from deepinfer_core.backend.formats import WeightFormat

_REST = 16
TILE_ROWS = 128 + _REST

_WARPS = 8  # two groups of four: each takes 64 of every 128 weight rows
_SLOTS, _AHEAD = 4, 2
"""Tiles of activations in shared memory; how many are on their way. The last products may still read the tile before the current one."""


def _group_assembly(group: int) -> str:
    """Two packed words -> the two parts of inputs 32*group .. as pairs of bfloat16 bits (see weights.packed_words)."""
    lines = [".reg .b32 w, t, u;", f"prmt.b32 w, $2, $3, {'0x5410' if group < 2 else '0x7632'};"]
    if group % 2 == 0:
        lines += ["and.b32 $0, w, 0x81C081C0;", "shl.b32 t, w, 3;", "and.b32 $1, t, 0x81C081C0;"]
    else:
        lines += [
            "shl.b32 t, w, 6;", "and.b32 $0, t, 0x81C081C0;",
            "shl.b32 t, w, 1;", "and.b32 t, t, 0x80008000;",
            "shr.u32 u, w, 5;", "lop3.b32 t, u, 0x01000100, t, 0xEA;",
            "shr.u32 u, w, 4;", "lop3.b32 $1, u, 0x00C000C0, t, 0xEA;",
        ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


_ASSEMBLY_0, _ASSEMBLY_1, _ASSEMBLY_2, _ASSEMBLY_3 = (gl.constexpr(_group_assembly(group)) for group in range(4))
# [256, 16] words as wgmma takes its first operand from threads; of one thread: columns 1 and 8, rows 8 and 128.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [128, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]], [], [256, 16]
    )
)
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # [rows, 128]: 16 threads read the 256 bytes of a row
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def _decoded(word, exponents, group: gl.constexpr, operand: gl.constexpr):
    """bf16 [256, 32]: the weights of 32 inputs, scaled."""
    assembly: gl.constexpr = (
        _ASSEMBLY_0 if group == 0 else _ASSEMBLY_1 if group == 1 else _ASSEMBLY_2 if group == 2 else _ASSEMBLY_3
    )  # fmt: skip
    a, b = gl.inline_asm_elementwise(assembly, "=r,=r,r,r", [word], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    factor = gl.expand_dims((((exponents >> (8 * group)) & 255) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True), 1)
    parts = gl.permute(gl.join(a * factor, b * factor), (0, 2, 1))
    return gl.convert_layout(gl.reshape(parts, (256, 32)), operand, assert_trivial=True)


@gluon.jit
def _product(
    weight, scales, n, outputs, x, x_at, rest_at, tiles,
    R: gl.constexpr, REST: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """float32 [256, R] and [256, REST]: weight rows n [256] times the rows of x at offsets x_at [R, 128] and rest_at [REST, 128].

    Without REST the second result means nothing.
    """
    narrow: gl.constexpr = REST if REST else 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, R, 16])
    rest_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, narrow, 16])
    buffer = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, R, 128], _SHARED)
    rest_buffer = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, narrow, 128], _SHARED)
    word_at = (gl.expand_dims(n * 16, 1) + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, _WORDS)), 0)).to(gl.uint32)
    for t in gl.static_range(AHEAD):
        async_copy.async_copy_global_to_shared(buffer.index(t), x + t * 128 + x_at)
        if REST:
            async_copy.async_copy_global_to_shared(rest_buffer.index(t), x + t * 128 + rest_at)
        async_copy.commit_group()
    word = gl.load(weight + word_at)
    exponents = gl.load(scales + n)
    acc = gl.zeros((256, R), gl.float32, mma)
    rest = gl.zeros((256, narrow), gl.float32, rest_mma)
    w = _decoded(word, exponents, 0, gl.DotOperandLayout(0, mma, 2))
    for t in range(tiles):
        async_copy.wait_group(AHEAD - 1)
        gl.thread_barrier()
        coming = (t + AHEAD) % SLOTS
        ahead = gl.minimum(t + AHEAD, tiles - 1) * 128
        after = gl.minimum(t + 1, tiles - 1) * outputs
        values, rest_values = buffer.index(t % SLOTS), rest_buffer.index(t % SLOTS)
        for group in gl.static_range(4):
            acc = warpgroup_mma(w, values.slice(group * 32, 32, dim=1).permute((1, 0)), acc, is_async=True)
            if REST:
                rest_w = gl.convert_layout(w, gl.DotOperandLayout(0, rest_mma, 2), assert_trivial=True)
                rest = warpgroup_mma(rest_w, rest_values.slice(group * 32, 32, dim=1).permute((1, 0)), rest, is_async=True)
            if group == 0:  # what later tiles need is asked for early
                next_word = gl.load(weight + after * 16 + word_at)
                next_exponents = gl.load(scales + after + n)
            if group < 3:
                w = _decoded(word, exponents, group + 1, gl.DotOperandLayout(0, mma, 2))
            else:  # the next product starts right behind the barrier
                w = _decoded(next_word, next_exponents, 0, gl.DotOperandLayout(0, mma, 2))
            if group == 0:
                async_copy.async_copy_global_to_shared(buffer.index(coming), x + ahead + x_at)
                if REST:
                    async_copy.async_copy_global_to_shared(rest_buffer.index(coming), x + ahead + rest_at)
                async_copy.commit_group()
            if REST:
                acc, rest = warpgroup_mma_wait(2, deps=[acc, rest])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
        word = next_word
        exponents = next_exponents
    async_copy.wait_group(0)
    if REST:
        acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, rest


@gluon.jit
def _offsets(row, stride):
    """int32 [rows, 128]: where the first 128 inputs of `row` lie."""
    return gl.expand_dims(row * stride, 1) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, _ROWS)), 0)


@gluon.jit
def _slots(first, last, R: gl.constexpr):
    """Places first .. of a tile, repeating the last one."""
    return gl.minimum(first + gl.arange(0, R, gl.SliceLayout(1, _ROWS)), last - 1)


@gluon.jit
def _store_outputs(acc, out, first, last, n0, outputs, R: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    y = gl.allocate_shared_memory(gl.bfloat16, [R, 256], _SHARED, gl.permute(acc.to(gl.bfloat16), (1, 0))).load(layout)
    slot = first + gl.arange(0, R, gl.SliceLayout(1, layout))
    at = gl.expand_dims(slot.to(gl.int64) * outputs, 1) + gl.expand_dims(n0 + gl.arange(0, 256, gl.SliceLayout(0, layout)), 0)
    gl.store(out + at, y, mask=gl.expand_dims(slot < last, 1))


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _store_hidden(acc, order, route_weights, limit, h, first, last, n0, width, R: gl.constexpr):
    """Stores SwiGLU times the routing weight, quantised. Of 16 rows of acc, eight are gate channels and eight their up channels."""
    gate, up = gl.split(gl.permute(gl.reshape(acc, (16, 2, 8, R)), (0, 2, 3, 1)))  # [16, 8, R]
    layout: gl.constexpr = gate.type.layout
    slot = gl.minimum(first + gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(0, layout))), last - 1)
    route = gl.expand_dims(gl.expand_dims(gl.load(route_weights + gl.load(order + slot)), 0), 0)
    gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), limit)
    up = gl.minimum(gl.maximum(up.to(gl.bfloat16).to(gl.float32), -limit), limit)
    a = gl.reshape((gate / (1.0 + gl.exp(-gate)) * up * route).to(gl.bfloat16), (128, R))
    a = gl.allocate_shared_memory(gl.bfloat16, [R, 128], _SHARED, gl.permute(a, (1, 0))).load(_ROWS)
    grouped = gl.reshape(a, (R, 4, 32)).to(gl.float32)
    bits = gl.maximum(gl.reduce(gl.abs(grouped), 2, _larger), 1e-4).to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)  # as numeric.fp8_exponent
    inverse = gl.expand_dims(((254 - exponent) << 23).to(gl.float32, bitcast=True), 2)
    factor = gl.expand_dims((exponent << 23).to(gl.float32, bitcast=True), 2)
    q = gl.minimum(gl.maximum(grouped * inverse, -448.0), 448.0).to(gl.float8e4nv)
    y = gl.reshape((q.to(gl.float32) * factor).to(gl.bfloat16), (R, 128))
    y = gl.convert_layout(y, _ROWS, assert_trivial=True)
    slot = first + gl.arange(0, R, gl.SliceLayout(1, _ROWS))
    at = gl.expand_dims(slot.to(gl.int64) * width, 1) + gl.expand_dims(n0 + gl.arange(0, 128, gl.SliceLayout(0, _ROWS)), 0)
    gl.store(h + at, y, mask=gl.expand_dims(slot < last, 1))


@gluon.jit
def _up_tile(
    x, weight, scales, h, order, route_weights, first, last, n0, n, inputs, x_stride, width, h_width, limit,
    TOP_K: gl.constexpr, R: gl.constexpr, REST: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    narrow: gl.constexpr = REST if REST else 16
    x_at = _offsets(gl.load(order + _slots(first, last, R)) // TOP_K, x_stride)
    rest_at = _offsets(gl.load(order + _slots(first + R, last, narrow)) // TOP_K, x_stride)
    acc, rest = _product(weight, scales, n, 2 * width, x, x_at, rest_at, inputs // 128, R, REST, SLOTS, AHEAD)
    _store_hidden(acc, order, route_weights, limit, h, first, last, n0, h_width, R)
    if REST:
        _store_hidden(rest, order, route_weights, limit, h, first + R, last, n0, h_width, REST)


@gluon.jit
def _routed_up_kernel(
    x, weight, scales, h, order, route_weights, tile_expert, tile_first, tile_last, tile_count,
    inputs, x_stride, width, h_width, weight_step, scale_step, limit,
    TOP_K: gl.constexpr, REST: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """h [pairs, h_width]: quantised SwiGLU of the routed pairs, grouped by expert. One program: 128 channels of one tile of rows."""
    n0, tile = gl.program_id(0) * 128, gl.program_id(1)
    if tile < gl.load(tile_count):
        expert = gl.load(tile_expert + tile).to(gl.int64)
        first, last = gl.load(tile_first + tile), gl.load(tile_last + tile)
        row = gl.arange(0, 256, gl.SliceLayout(1, _WORDS))
        n = n0 + row // 16 * 8 + row % 8 + gl.where(row % 16 < 8, 0, width)
        weight += expert * weight_step
        scales += expert * scale_step
        if last - first > 128:
            _up_tile(
                x, weight, scales, h, order, route_weights, first, last, n0, n, inputs, x_stride, width, h_width, limit,
                TOP_K, 128, REST, SLOTS, AHEAD,
            )  # fmt: skip
        elif last - first > 64:
            _up_tile(
                x, weight, scales, h, order, route_weights, first, last, n0, n, inputs, x_stride, width, h_width, limit,
                TOP_K, 128, 0, SLOTS, AHEAD,
            )  # fmt: skip
        else:
            _up_tile(
                x, weight, scales, h, order, route_weights, first, last, n0, n, inputs, x_stride, width, h_width, limit,
                TOP_K, 64, 0, SLOTS, AHEAD,
            )  # fmt: skip


@gluon.jit
def _down_tile(
    h, weight, scales, out, first, last, n0, width, h_width, outputs,
    R: gl.constexpr, REST: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    narrow: gl.constexpr = REST if REST else 16
    h_at, rest_at = _offsets(_slots(first, last, R), h_width), _offsets(_slots(first + R, last, narrow), h_width)
    n = n0 + gl.arange(0, 256, gl.SliceLayout(1, _WORDS))
    acc, rest = _product(weight, scales, n, outputs, h, h_at, rest_at, width // 128, R, REST, SLOTS, AHEAD)
    _store_outputs(acc, out, first, last, n0, outputs, R)
    if REST:
        _store_outputs(rest, out, first + R, last, n0, outputs, REST)


@gluon.jit
def _routed_down_kernel(
    h, weight, scales, out, tile_expert, tile_first, tile_last, tile_count, width, h_width, outputs, weight_step, scale_step,
    REST: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """out [pairs, outputs]: down projections of h, in h's row order. One program: 256 outputs of one tile of rows."""
    n0, tile = gl.program_id(0) * 256, gl.program_id(1)
    if tile < gl.load(tile_count):
        expert = gl.load(tile_expert + tile).to(gl.int64)
        first, last = gl.load(tile_first + tile), gl.load(tile_last + tile)
        weight += expert * weight_step
        scales += expert * scale_step
        if last - first > 128:
            _down_tile(h, weight, scales, out, first, last, n0, width, h_width, outputs, 128, REST, SLOTS, AHEAD)
        elif last - first > 64:
            _down_tile(h, weight, scales, out, first, last, n0, width, h_width, outputs, 128, 0, SLOTS, AHEAD)
        else:
            _down_tile(h, weight, scales, out, first, last, n0, width, h_width, outputs, 64, 0, SLOTS, AHEAD)


def takes(experts: ExpertWeights, arch: int, rows: int, top_k: int) -> bool:
    """Whether these kernels can multiply `experts` for `rows` rows: packed e2m1, whole tiles only, and offsets of 31 bits."""
    matrices = (experts.w13, experts.w2)
    packed = all(w.packed and w.format is WeightFormat.FP4_G32 for w in matrices)
    whole = all(w.outputs % 256 == 0 and w.inputs % TILE == 0 for w in matrices)
    offsets = max(rows * experts.w13.inputs, rows * (top_k + 1) * experts.w2.inputs)
    return arch == 90 and not INTERPRETED and packed and whole and offsets < 2**31


def routed_up(x: Tensor, plan: ExpertPlan, route: Tensor, experts: ExpertWeights, limit: float, top_k: int, h: Tensor) -> None:
    """Writes the first `pairs` rows of h [.., h_width] bf16; x [T, inputs] bf16, route float32 [T, K]."""
    w = experts.w13
    assert w.scales is not None
    launch(
        _routed_up_kernel, (w.outputs // 256, plan.tiles), x, w.data, w.scales, h, plan.order, route,
        plan.tile_expert, plan.tile_first, plan.tile_last, plan.tile_count,
        w.inputs, x.stride(0), w.outputs // 2, h.shape[1], w.data.stride(0), w.scales.stride(0), limit,
        warps=_WARPS, TOP_K=top_k, REST=_REST, SLOTS=_SLOTS, AHEAD=_AHEAD,
    )  # fmt: skip


def routed_down(h: Tensor, plan: ExpertPlan, experts: ExpertWeights, out: Tensor) -> None:
    """Writes the first `pairs` rows of out [.., outputs] bf16."""
    w = experts.w2
    assert w.scales is not None
    launch(
        _routed_down_kernel, (w.outputs // 256, plan.tiles), h, w.data, w.scales, out,
        plan.tile_expert, plan.tile_first, plan.tile_last, plan.tile_count,
        w.inputs, h.shape[1], w.outputs, w.data.stride(0), w.scales.stride(0),
        warps=_WARPS, REST=_REST, SLOTS=_SLOTS, AHEAD=_AHEAD,
    )  # fmt: skip
