"""Sparse attention of few rows on Hopper: the bytes of 64 entries are copied ahead, decoded to bfloat16 in shared memory, multiplied.

A program handles a share of one row's tiles; only tiles that hold entries count. Shares are merged by `attention.merge_kernel`.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deepinfer_backends.cuda_sm100 import hopper
from deepinfer_backends.cuda_sm100.caches import FORMATS, EntryLayout
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
)
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.products import PAIR_ASSEMBLY
from deepinfer_core.backend.types import Rope, SelectedEntries, WindowKeys

_MOST_TILES = 40  # room for the lists of their entries in shared memory


def _byte_assembly() -> str:
    """Four e4m3 bytes -> bfloat16 values of the first two ($0) and of the last two ($1).

    Their bits, moved, are those of bfloat16 numbers that lack a factor 2^120. A cast would convert value by value.
    """
    lines = [".reg .b32 a, t, unit;", "mov.b32 unit, 0x7B807B80;"]
    for half, selector in ((0, "0x4140"), (1, "0x4342")):
        lines += [
            f"prmt.b32 a, $2, 0, {selector};",
            "shl.b32 t, a, 8;", "and.b32 t, t, 0x80008000;",
            "shl.b32 a, a, 4;", "lop3.b32 a, a, 0x07F007F0, t, 0xEA;",
            f"mul.rn.bf16x2 ${half}, a, unit;",
        ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


_BYTE_ASSEMBLY = gl.constexpr(_byte_assembly())
_ABSENT = gl.constexpr(-16)  # among byte offsets of entries: no entry
_CURRENT = gl.constexpr(-32)  # _CURRENT - x: element x of this step's keys
_LIST = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 2], [1, 0]))  # [tiles, 64] offsets
_BYTES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_DECODED = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0]))  # 128 values of 64 entries


@gluon.jit
def _window_offsets(index, columns, ring_rows, ring_n, ring_stride, ring_step, TILES: gl.constexpr):
    """int64 [TILES, 64]: where the row's window keys are, from their list."""
    c = gl.arange(0, TILES, layout=gl.SliceLayout(1, _LIST))[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, _LIST))[None, :]
    place = gl.load(index + c, mask=c < columns, other=-1)
    slot = gl.maximum(gl.minimum(place, ring_rows - 1), 0)
    stored = (slot // ring_n).to(gl.int64) * ring_stride + (slot % ring_n) * ring_step
    fresh = _CURRENT - (place - ring_rows).to(gl.int64) * 512
    return gl.where(place < 0, _ABSENT, gl.where(place < ring_rows, stored, fresh))


@gluon.jit
def _entry_offsets(index, pages_of, topk, n, stride, step, TILES: gl.constexpr):
    """(int64 [TILES, 64]: where the row's selected entries are, how many there are)."""
    c = gl.arange(0, TILES, layout=gl.SliceLayout(1, _LIST))[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, _LIST))[None, :]
    entry = gl.load(index + c, mask=c < topk, other=-1)
    real = entry >= 0
    number = gl.maximum(entry, 0)
    page = gl.load(pages_of + number // n, mask=real, other=0)
    offset = page.to(gl.int64) * stride + (number % n) * step
    return gl.where(real, offset, _ABSENT), gl.sum(gl.sum(real.to(gl.int32), 1), 0)


@gluon.jit
def _fetch(data, scales, base, offsets, scale_first, DATA: gl.constexpr, SCALES: gl.constexpr):
    """Starts the copy of 64 entries: DATA bytes and SCALES scale bytes of each; nothing where there is none."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [2, 16], [8, 1], [1, 0])
    offset = gl.multiple_of(offsets.load(gl.SliceLayout(1, ROWS)), 16)[:, None]
    byte = gl.arange(0, DATA, layout=gl.SliceLayout(0, ROWS))[None, :]
    async_copy.async_copy_global_to_shared(data, base + gl.maximum(offset, 0) + byte, mask=offset >= 0)
    ENDS: gl.constexpr = gl.BlockedLayout([1, 16], [512 // SCALES, SCALES // 16], [8, 1], [1, 0])
    offset = gl.multiple_of(offsets.load(gl.SliceLayout(1, ENDS)), 16)[:, None]
    byte = gl.arange(0, SCALES, layout=gl.SliceLayout(0, ENDS))[None, :] + scale_first
    async_copy.async_copy_global_to_shared(scales, base + gl.maximum(offset, 0) + byte, mask=offset >= 0)


@gluon.jit
def _fetch_tile(
    t, data, scales, ring, window, window_tiles, pages, entries, scale_first, ENTRIES: gl.constexpr, FP4: gl.constexpr
):  # fmt: skip
    """Starts the copy of tile t, of the window or of the selected entries: one group."""
    if t < window_tiles:
        _fetch(data, scales.slice(0, 16, dim=1), ring, window.index(t), 512, 512, 16)
    elif ENTRIES > 0:
        offsets = entries.index(gl.minimum(t - window_tiles, ENTRIES - 1))
        if FP4:
            _fetch(data.slice(0, 256, dim=1), scales, pages, offsets, scale_first, 256, 32)
        else:
            _fetch(data, scales.slice(0, 16, dim=1), pages, offsets, scale_first, 512, 16)
    async_copy.commit_group()


@gluon.jit
def _decode_fp8(k, data, scales, current, offset, C: gl.constexpr, FRESH: gl.constexpr):
    """Values 128*C .. of 64 FP8 entries; FRESH: keys of this step in place of those whose offset says so."""
    byte = data.slice(C * 128, 128, dim=1).load(_DECODED)
    values = gl.inline_asm_elementwise(_BYTE_ASSEMBLY, "=r,=r,r", [byte], dtype=gl.bfloat16, is_pure=True, pack=4)
    groups = gl.reshape(values, (64, 4, 2, 16))
    exponent = scales.slice(C * 4, 4, dim=1).load(gl.SliceLayout(2, gl.SliceLayout(3, groups.type.layout)))
    factor = (exponent.to(gl.int32) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    result = gl.convert_layout(gl.reshape(groups * gl.expand_dims(gl.expand_dims(factor, 2), 3), (64, 128)), _DECODED)
    if FRESH:
        d = C * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, _DECODED))
        fresh = offset <= _CURRENT
        at = current + gl.where(fresh, _CURRENT - offset, 0)[:, None] + d[None, :]
        result = gl.where(fresh[:, None], gl.load(at, mask=fresh[:, None], other=0.0), result)
    k.slice(C * 128, 128, dim=1).store(result)


@gluon.jit
def _decode_fp4(k, data, scales, C: gl.constexpr):
    """Values 128*C .. of 64 FP4 entries."""
    byte = data.slice(C * 64, 64, dim=1).load(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
    even, odd = gl.inline_asm_elementwise(
        PAIR_ASSEMBLY, "=r,=r,=r,=r,r", [byte], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
    )  # fmt: skip
    groups = gl.reshape(gl.join(even, odd), (64, 8, 16))
    GROUP: gl.constexpr = gl.SliceLayout(2, groups.type.layout)
    factor = scales.slice(C * 8, 8, dim=1).load(GROUP).to(gl.float8e4nv, bitcast=True).to(gl.bfloat16)
    k.slice(C * 128, 128, dim=1).store(gl.reshape(groups * gl.expand_dims(factor, 2), (64, 128)))


@gluon.jit
def _decode_tile(t, k, data, scales, current, window, window_tiles, ENTRIES: gl.constexpr, FP4: gl.constexpr):
    """k [64, 512]: the keys of tile t from their bytes, for all threads and for wgmma."""
    if t < window_tiles:
        offset = gl.multiple_of(window.index(t).load(gl.SliceLayout(1, _DECODED)), 16)
        for i in gl.static_range(4):
            _decode_fp8(k, data, scales.slice(0, 16, dim=1), current, offset, i, True)
    elif ENTRIES > 0:
        for i in gl.static_range(4):
            if FP4:
                _decode_fp4(k, data.slice(0, 256, dim=1), scales, i)
            else:
                _decode_fp8(k, data, scales.slice(0, 16, dim=1), current, 0, i, False)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _present(t, window, window_tiles, entries):
    """Which keys of tile t there are: [64] in the layout of keys."""
    offset = window.index(gl.minimum(t, window_tiles - 1)).load(OF_KEYS)
    if t >= window_tiles:
        offset = entries.index(t - window_tiles).load(OF_KEYS)
    return offset != _ABSENT


@gluon.jit
def _absorb(q, k, p_shared, present, scale, top, total, o):
    """One tile into the running softmax, base 2: (top, total, o)."""
    s = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([64, 64], gl.float32, SCORES), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    x = gl.where(present[None, :], s * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(x, 1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = gl.exp2(top - base)
    p = gl.exp2(x - base[:, None])
    p_shared.store(p.to(gl.bfloat16))
    total = total * shrink + gl.sum(p, 1)
    gl.thread_barrier()
    o = o * gl.convert_layout(shrink, OF_VALUES)[:, None]
    o = warpgroup_mma(p_shared.load(gl.DotOperandLayout(0, VALUES, 2)), k, o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    gl.thread_barrier()
    return new_top, total, o


@gluon.jit(do_not_specialize=["columns", "window_stride", "ring_rows", "ring_n", "topk", "selected_stride", "table_stride", "page_n"])
def decode_kernel(
    query, out, part_top, part_total, part_out, window_index, ring, current, selected, pages, block_table, sequence, sink, table, positions,
    scale, columns, window_stride, ring_rows, ring_n, ring_stride, ring_step, topk, selected_stride, table_stride, page_n, page_stride,
    page_step, page_scale_first, HEADS: gl.constexpr, WINDOW: gl.constexpr, ENTRIES: gl.constexpr, FP4: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Share program_id(1) of row program_id(0): its parts if SPLIT, else the result. scale: includes log2(e).

    WINDOW, ENTRIES: room for tiles of the window and of topk entries (0: none), powers of two. Offsets and strides of bytes are multiples
    of 16.
    """
    row, share = gl.program_id(0).to(gl.int64), gl.program_id(1)
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 512], OPERAND)
    k = gl.allocate_shared_memory(gl.bfloat16, [64, 512], OPERAND)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 64], OPERAND)
    data = gl.allocate_shared_memory(gl.uint8, [2, 64, 512], _BYTES)
    scales = gl.allocate_shared_memory(gl.uint8, [2, 64, 32], _PLAIN)
    angles = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    window_list = gl.allocate_shared_memory(gl.int64, [WINDOW, 64], _PLAIN)
    fetch_query(q, query + row * (HEADS * 512), HEADS)
    fetch_angles(angles, table, gl.load(positions + row))
    async_copy.commit_group()
    window_list.store(_window_offsets(window_index + row * window_stride, columns, ring_rows, ring_n, ring_stride, ring_step, WINDOW))
    window = window_list._reinterpret(gl.int64, [WINDOW, 64], FLAT)
    window_tiles = (columns + 63) // 64
    entries, tiles = window, window_tiles
    if ENTRIES > 0:
        entry_list = gl.allocate_shared_memory(gl.int64, [ENTRIES, 64], _PLAIN)
        pages_of = block_table + gl.load(sequence + row).to(gl.int64) * table_stride
        offsets, count = _entry_offsets(selected + row * selected_stride, pages_of, topk, page_n, page_stride, page_step, ENTRIES)
        entry_list.store(offsets)
        entries = entry_list._reinterpret(gl.int64, [ENTRIES, 64], FLAT)
        tiles = window_tiles + (count + 63) // 64
    length = (tiles + gl.num_programs(1) - 1) // gl.num_programs(1)
    first = share * length
    last = gl.minimum(first + length, tiles)
    gl.thread_barrier()
    begin = gl.minimum(first, tiles - 1)
    _fetch_tile(begin, data.index(0), scales.index(0), ring, window, window_tiles, pages, entries, page_scale_first, ENTRIES, FP4)
    top = gl.full([64], float("-inf"), gl.float32, OF_SCORES)
    total = gl.zeros([64], gl.float32, OF_SCORES)
    o = gl.zeros([64, 512], gl.float32, VALUES)
    async_copy.wait_group(1)
    gl.thread_barrier()
    turn(q.slice(448, 64, dim=1), angles, 1.0)
    for t in range(first, last):
        here, other = (t - first) % 2, (t - first + 1) % 2
        ahead = gl.minimum(t + 1, last - 1)
        _fetch_tile(
            ahead, data.index(other), scales.index(other), ring, window, window_tiles, pages, entries, page_scale_first, ENTRIES, FP4
        )
        async_copy.wait_group(1)
        gl.thread_barrier()
        _decode_tile(t, k, data.index(here), scales.index(here), current, window, window_tiles, ENTRIES, FP4)
        present = _present(t, window, window_tiles, entries)
        top, total, o = _absorb(q, k, p_shared, present, scale, top, total, o)
    async_copy.wait_group(0)
    if SPLIT:
        _store_part(row * gl.num_programs(1) + share, part_top, part_total, part_out, top, total, o)
    else:
        _store_row(row, q, angles, out, sink, top, total, o, HEADS)


@gluon.jit
def _store_part(part, part_top, part_total, part_out, top, total, o):
    """What `attention.merge_kernel` takes: the maximum to base e, the sum, the unscaled values."""
    head = gl.arange(0, 64, layout=OF_SCORES)
    gl.store(part_top + part * 64 + head, top * 0.6931471805599453)
    gl.store(part_total + part * 64 + head, total)
    head_of_values = gl.arange(0, 64, layout=OF_VALUES)
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, VALUES))
    gl.store(part_out + part * (64 * 512) + (head_of_values * 512)[:, None] + d[None, :], o)


@gluon.jit
def _store_row(row, q, angles, out, sink, top, total, o, HEADS: gl.constexpr):
    """The finished row, by way of the shared memory of its query."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    head = gl.arange(0, 64, layout=OF_SCORES)
    sinks = gl.load(sink + head, mask=head < HEADS, other=0.0) * 1.4426950408889634
    base = gl.where(top == float("-inf"), 0.0, top)
    inverse = gl.convert_layout(1.0 / (total + gl.exp2(sinks - base)), OF_VALUES)[:, None]
    gl.thread_barrier()
    q.store((o * inverse).to(gl.bfloat16))
    gl.thread_barrier()
    turn(q.slice(448, 64, dim=1), angles, -1.0)
    head_of_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, ROWS))
    at = out + row * (HEADS * 512) + (head_of_rows * 512)[:, None] + d[None, :]
    gl.store(at, q.load(ROWS), mask=(head_of_rows < HEADS)[:, None])


def _room(count: int) -> int:
    """Tiles that `count` keys take, rounded up to a power of two; 0 for none."""
    return power_of_two(ceil_div(count, 64)) if count else 0


def serves(arch: int, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, rope: Rope, scale: float) -> bool:
    """Whether `attend` handles these inputs. Decided by shapes, strides and addresses."""
    _, heads, dim = query.shape
    columns, topk = window.index.shape[1], selected.index.shape[1] if selected else 0
    if not hopper.serves(arch, heads, dim, rope.table.shape[1], scale) or columns == 0 or _room(columns) + _room(topk) > _MOST_TILES:
        return False
    numbers = [window.ring.data.data_ptr(), *EntryLayout.of_ring(window.ring, dim).numbers()[1:]]
    if selected:
        numbers += [selected.pages.data.data_ptr(), *EntryLayout.of_pages(selected.pages).numbers()[1:]]
    return all(number % 16 == 0 for number in numbers)


def attend(
    query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope, out: Tensor,
    parts: tuple[Tensor, Tensor, Tensor] | None, splits: int,
) -> None:  # fmt: skip
    """`sparse_attention` where `serves`: into out, or the parts of `splits` shares of each row (maxima, sums, values) into `parts`."""
    rows, heads, dim = query.shape
    ring, columns = EntryLayout.of_ring(window.ring, dim), window.index.shape[1]
    pages, topk = EntryLayout(1, 0, 0, 0, 0), 0
    source: tuple[Tensor | None, ...] = (None, None, None, None)
    strides = (0, 0)
    if selected:
        pages, topk = EntryLayout.of_pages(selected.pages), selected.index.shape[1]
        source = (selected.index, selected.pages.data, selected.pages.block_table, selected.pages.sequence)
        strides = (selected.index.stride(0), selected.pages.block_table.stride(0))
    launch(
        decode_kernel, (rows, splits), query.contiguous(), out, *(parts or (None, None, None)), window.index, window.ring.data,
        window.current.contiguous(), *source, sink, rope.table, rope.positions, scale * LOG2_E, columns, window.index.stride(0),
        window.ring.data.shape[0] * ring.n, ring.n, ring.group_stride, ring.data_step, topk, *strides, pages.n, pages.group_stride,
        pages.data_step, pages.scale_first, warps=8, HEADS=heads, WINDOW=_room(columns), ENTRIES=_room(topk),
        FP4=selected is not None and FORMATS[selected.pages.format] == 1, SPLIT=parts is not None,
    )  # fmt: skip
