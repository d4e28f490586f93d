"""Caches in their byte formats: window keys, compressed entries, index keys; the compressor; index queries.

One program handles one vector (of index queries: a few), as even and odd elements (see `numeric`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import bf16, e2m1_code, e2m1_value, fp4_exponent, fp8_exponent, fp8_round, rope_angles, rotated
from deepinfer_backends.cuda_sm100.numeric import power_of_two as exact_power
from deepinfer_backends.cuda_sm100.products import decoded_pairs
from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import CompressorRing, CompressorRows, IndexQuery, PagedEntries, Rope, WindowRing

_HEADS = 8  # heads of one program of `index_query`
FORMATS = {CacheFormat.FP8: 0, CacheFormat.FP4: 1, CacheFormat.FP4_INDEX: 2}


@dataclass(frozen=True)
class EntryLayout:
    """Where entry `slot` of a byte cache lies: group slot // n starts at group*group_stride; in it, entry i = slot % n has its data at
    i*data_step and its scales at scale_first + i*scale_step."""

    n: int
    group_stride: int
    data_step: int
    scale_first: int
    scale_step: int

    @classmethod
    def of_ring(cls, ring: WindowRing, dim: int) -> EntryLayout:
        step = ring.data.stride(1)
        return cls(ring.data.shape[1], ring.data.stride(0), step, ring.format.data_bytes(dim), step)

    @classmethod
    def of_pages(cls, pages: PagedEntries) -> EntryLayout:
        n, data, scales = pages.entries_per_page, pages.format.data_bytes(pages.dim), pages.format.scale_bytes(pages.dim)
        if pages.sectioned:
            return cls(n, pages.data.stride(0), data, n * data, scales)
        return cls(n, pages.data.stride(0), data + scales, data, data + scales)

    def numbers(self) -> tuple[int, int, int, int, int]:
        return (self.n, self.group_stride, self.data_step, self.scale_first, self.scale_step)


@triton.jit
def _load_pairs(at, pair, pairs):
    """(even, odd) float32 elements of the vector at `at`."""
    two = tl.arange(0, 2)
    both = tl.load(at + pair[:, None] * 2 + two[None, :], mask=(pair < pairs)[:, None], other=0.0)
    return tl.split(both.to(tl.float32))


@triton.jit
def _store_pairs(at, even, odd, pair, pairs):
    two = tl.arange(0, 2)
    tl.store(at + pair[:, None] * 2 + two[None, :], tl.join(even, odd), mask=(pair < pairs)[:, None])


@triton.jit
def _normed(even, odd, weight, eps, pair, pairs):
    """RMSNorm of a vector held in pairs, rounded to bfloat16."""
    rstd = tl.rsqrt((tl.sum(even * even, 0) + tl.sum(odd * odd, 0)) / (2 * pairs) + eps)
    weight_even, weight_odd = _load_pairs(weight, pair, pairs)
    return bf16(even * rstd * weight_even), bf16(odd * rstd * weight_odd)


@triton.jit
def _group_amax(even, odd, P: tl.constexpr, G: tl.constexpr):
    """Largest magnitude of each group of G pairs: [P / G]."""
    return tl.max(tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), (P // G, G)), 1)


@triton.jit
def _spread(group, P: tl.constexpr, G: tl.constexpr):
    """Each group's value on all its G pairs: [P]."""
    return tl.reshape(tl.broadcast_to(group[:, None], (P // G, G)), (P,))


@triton.jit
def _store_encoded(even, odd, data, scales, pair, pairs, P: tl.constexpr, FORMAT: tl.constexpr):
    """Encodes a vector held in pairs and stores its data and scale bytes."""
    if FORMAT == 0:
        exponent = fp8_exponent(_group_amax(even, odd, P, 16))
        on_pairs = _spread(exponent, P, 16)
        q_even, q_odd = fp8_round(even, on_pairs).to(tl.uint8, bitcast=True), fp8_round(odd, on_pairs).to(tl.uint8, bitcast=True)
        _store_pairs(data, q_even, q_odd, pair, pairs)
        g = tl.arange(0, P // 16)
        tl.store(scales + g, exponent.to(tl.uint8), mask=g * 16 < pairs)
    else:
        group: tl.constexpr = 8 if FORMAT == 1 else 16
        amax = _group_amax(even, odd, P, group)
        g = tl.arange(0, P // group)
        if FORMAT == 1:
            # 2^-9 is the smallest e4m3; the product with 1/6 rounds to the same e4m3 as the quotient for every bfloat16 magnitude.
            scale = tl.minimum(tl.maximum(amax * 0.16666667163372040, 0.001953125), 448.0).to(tl.float8e4nv)
            tl.store(scales + g, scale.to(tl.uint8, bitcast=True), mask=g * group < pairs)
            factor = scale.to(tl.float32)
        else:
            exponent = fp4_exponent(amax)
            tl.store(scales + g, exponent.to(tl.uint8), mask=g * group < pairs)
            factor = exact_power(exponent)
        on_pairs = _spread(factor, P, group)
        byte = e2m1_code(even, on_pairs) | (e2m1_code(odd, on_pairs) << 4)
        tl.store(data + pair, byte.to(tl.uint8), mask=pair < pairs)


@triton.jit
def _window_key_kernel(kv, weight, eps, table, positions, out, stride, hd, RD: tl.constexpr, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair, pairs = tl.arange(0, P), hd // 2
    even, odd = _load_pairs(kv + row * stride, pair, pairs)
    even, odd = _normed(even, odd, weight, eps, pair, pairs)
    cos, sin = rope_angles(table, tl.load(positions + row), pair, pairs - RD // 2, RD)
    even, odd = rotated(even, odd, cos, sin)
    exponent = _spread(fp8_exponent(_group_amax(even, odd, P, 16)), P, 16)
    factor = exact_power(exponent)
    even, odd = fp8_round(even, exponent).to(tl.float32) * factor, fp8_round(odd, exponent).to(tl.float32) * factor
    _store_pairs(out + row * hd, even.to(tl.bfloat16), odd.to(tl.bfloat16), pair, pairs)


@triton.jit
def _store_kernel(
    vectors, weight, eps, table, positions, slots, cache, stride, dim, n, group_stride, data_step, scale_first, scale_step,
    NORM: tl.constexpr, ROTATE: tl.constexpr, RD: tl.constexpr, FORMAT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One vector: optional RMSNorm, optional rotation, encoding, storing at its slot; slots < 0 store nothing."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        pair, pairs = tl.arange(0, P), dim // 2
        even, odd = _load_pairs(vectors + row * stride, pair, pairs)
        if NORM:
            even, odd = _normed(even, odd, weight, eps, pair, pairs)
        if ROTATE:
            cos, sin = rope_angles(table, tl.load(positions + row), pair, pairs - RD // 2, RD)
            even, odd = rotated(even, odd, cos, sin)
        group = cache + (slot // n) * group_stride
        data = group + (slot % n) * data_step
        _store_encoded(even, odd, data, group + scale_first + (slot % n) * scale_step, pair, pairs, P, FORMAT)


@triton.jit
def _index_query_kernel(
    query, table, positions, values, scales, stride, head_stride, heads, dim, RD: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row: rotated, on the FP4 grid; as bytes (SCALED) or as the bfloat16 values of the grid,
    the even ones first: keys are decoded that way."""
    row = tl.program_id(0).to(tl.int64)
    head, pair, two, pairs = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, P), tl.arange(0, 2), dim // 2
    real = (head < heads)[:, None] & (pair < pairs)[None, :]
    at = query + row * stride + head[:, None, None] * head_stride + pair[None, :, None] * 2 + two[None, None, :]
    even, odd = tl.split(tl.load(at, mask=real[:, :, None], other=0.0).to(tl.float32))
    cos, sin = rope_angles(table, tl.load(positions + row), pair, pairs - RD // 2, RD)
    even, odd = rotated(even, odd, cos[None, :], sin[None, :])
    amax = tl.max(tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), (HEADS, P // 16, 16)), 2)
    exponent = fp4_exponent(amax)
    factor = tl.reshape(tl.broadcast_to(exact_power(exponent)[:, :, None], (HEADS, P // 16, 16)), (HEADS, P))
    even, odd = e2m1_code(even, factor), e2m1_code(odd, factor)
    vector = (row * heads + head)[:, None]
    if SCALED:
        tl.store(values + vector * pairs + pair[None, :], (even | (odd << 4)).to(tl.uint8), mask=real)
        g = tl.arange(0, P // 16)
        has_scale = (head < heads)[:, None] & (g * 16 < pairs)[None, :]
        tl.store(scales + vector * (dim // 32) + g[None, :], exponent.to(tl.uint8), mask=has_scale)
    else:
        first = values + vector * dim + pair[None, :]
        tl.store(first, (e2m1_value(even) * factor).to(tl.bfloat16), mask=real)
        tl.store(first + pairs, (e2m1_value(odd) * factor).to(tl.bfloat16), mask=real)


@triton.jit
def fp8_keys(data, scales, inside, DIM: tl.constexpr, D: tl.constexpr, K: tl.constexpr):
    """bfloat16 [K, D] of K FP8 entries at data and scales; zeros where not inside."""
    d, group = tl.arange(0, D), tl.arange(0, D // 32)
    byte = tl.load(data[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0)
    scale = tl.load(scales[:, None] + group[None, :], mask=inside[:, None] & (group * 32 < DIM)[None, :], other=0)
    factor = (scale.to(tl.int32) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    values = byte.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    return tl.reshape(tl.reshape(values, (K, D // 32, 32)) * factor[:, :, None], (K, D))


@triton.jit
def fp4_keys(data, scales, inside, DIM: tl.constexpr, D: tl.constexpr, K: tl.constexpr):
    """bfloat16 [K, D] of K FP4 entries (one e4m3 scale for 8 pairs)."""
    pair, group = tl.arange(0, D // 2), tl.arange(0, D // 16)
    byte = tl.load(data[:, None] + pair[None, :], mask=inside[:, None] & (pair < DIM // 2)[None, :], other=0)
    scale = tl.load(scales[:, None] + group[None, :], mask=inside[:, None] & (group * 16 < DIM)[None, :], other=0)
    factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    even, odd = decoded_pairs(byte)
    values = tl.reshape(tl.join(even, odd), (K, D // 16, 16))
    return tl.reshape(values * factor[:, :, None], (K, D))


@triton.jit
def _member_row(rows, ring, member, kept, length, ring_stride, stride, hd):
    """Where the (latent, gate) row `member` starts: in the ring, or among this step's rows."""
    slot = tl.minimum(member, kept - 1).to(tl.int64)
    old = ring + (slot // length) * ring_stride + (slot % length) * (2 * hd)
    return tl.where(member < kept, old, rows + tl.maximum(member - kept, 0).to(tl.int64) * stride)


@triton.jit
def _compress_kernel(
    rows, ring, members, weight, eps, out, stride, hd, kept, length, ring_stride, RATIO: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pools one group: softmax of the members' gates per channel, weighted sum of their latents, rounded, RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < hd
    result = tl.zeros((BLOCK,), tl.float32)
    if tl.load(members + row * RATIO) >= 0:
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        for i in tl.static_range(RATIO):
            at = _member_row(rows, ring, tl.load(members + row * RATIO + i), kept, length, ring_stride, stride, hd)
            top = tl.maximum(top, tl.load(at + hd + c, mask=inside, other=0.0))
        total = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(RATIO):
            at = _member_row(rows, ring, tl.load(members + row * RATIO + i), kept, length, ring_stride, stride, hd)
            total += tl.exp(tl.load(at + hd + c, mask=inside, other=0.0) - top)
        for i in tl.static_range(RATIO):
            at = _member_row(rows, ring, tl.load(members + row * RATIO + i), kept, length, ring_stride, stride, hd)
            share = tl.exp(tl.load(at + hd + c, mask=inside, other=0.0) - top) / total
            result += share * tl.load(at + c, mask=inside, other=0.0)
        result = bf16(result)
        rstd = tl.rsqrt(tl.sum(tl.where(inside, result * result, 0.0), 0) / hd + eps)
        result = result * rstd * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hd + c, result.to(tl.bfloat16), mask=inside)


@triton.jit
def _keep_kernel(rows, ring, slots, stride, size, length, ring_stride, BLOCK: tl.constexpr):
    """Copies a step's (latent, gate) row to its ring slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        c = tl.arange(0, BLOCK)
        at = ring + (slot // length) * ring_stride + (slot % length) * size
        tl.store(at + c, tl.load(rows + row * stride + c, mask=c < size), mask=c < size)


class CacheOps:
    """The cache stores, the compressor and `index_query`."""

    _arch: int

    def window_key(self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope) -> Tensor:
        rows, hd = kv.shape
        out = torch.empty(rows, hd, dtype=torch.bfloat16, device=kv.device)
        launch(
            _window_key_kernel, (rows,), kv, norm_weight, eps, rope.table, rope.positions, out, kv.stride(0), hd,
            warps=1, RD=rope.table.shape[1], P=power_of_two(hd // 2, 16),
        )  # fmt: skip
        return out

    def store_window(self, key: Tensor, ring: WindowRing, slots: Tensor) -> None:
        self._store(key, None, 0.0, None, slots, ring.data, EntryLayout.of_ring(ring, key.shape[1]), ring.format)

    def store_entries(self, latent: Tensor, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        self._store(latent, None, 0.0, rope, slots, pages.data, EntryLayout.of_pages(pages), pages.format)

    def store_index_keys(self, key: Tensor, norm_weight: Tensor, eps: float, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        self._store(key, norm_weight, eps, rope, slots, pages.data, EntryLayout.of_pages(pages), pages.format)

    def _store(
        self, vectors: Tensor, weight: Tensor | None, eps: float, rope: Rope | None, slots: Tensor, cache: Tensor, layout: EntryLayout,
        fmt: CacheFormat,
    ) -> None:  # fmt: skip
        rows, dim = vectors.shape
        table, positions, rd = (None, None, 2) if rope is None else (rope.table, rope.positions, rope.table.shape[1])
        launch(
            _store_kernel, (rows,), vectors, weight, eps, table, positions, slots, cache, vectors.stride(0), dim, *layout.numbers(),
            warps=1, NORM=weight is not None, ROTATE=rope is not None, RD=rd, FORMAT=FORMATS[fmt],
            P=power_of_two(dim // 2, 16),
        )  # fmt: skip

    def index_query(self, query: Tensor, rope: Rope) -> IndexQuery:
        rows, heads, dim = query.shape
        scaled = self._arch >= 100
        shape = (rows, heads, dim // 2 if scaled else dim)
        values = torch.empty(shape, dtype=torch.uint8 if scaled else torch.bfloat16, device=query.device)
        scales = torch.empty(rows, heads, dim // 32, dtype=torch.uint8, device=query.device) if scaled else None
        launch(
            _index_query_kernel, (rows, ceil_div(heads, _HEADS)), query, rope.table, rope.positions, values, scales, query.stride(0),
            query.stride(1), heads, dim, warps=1, RD=rope.table.shape[1], P=power_of_two(dim // 2, 16), HEADS=_HEADS, SCALED=scaled,
        )  # fmt: skip
        return IndexQueryRows(values, scales)

    def compress(self, rows: Tensor, ring: CompressorRing, index: CompressorRows, norm_weight: Tensor, eps: float) -> Tensor:
        slots, length, _, hd = ring.data.shape
        count, ratio = index.members.shape
        out = torch.empty(count, hd, dtype=torch.bfloat16, device=rows.device)
        launch(
            _compress_kernel, (count,), rows, ring.data, index.members.contiguous(), norm_weight, eps, out, rows.stride(0), hd,
            slots * length, length, ring.data.stride(0), warps=4, RATIO=ratio, BLOCK=power_of_two(hd),
        )  # fmt: skip
        launch(
            _keep_kernel, (count,), rows, ring.data, index.slots, rows.stride(0), 2 * hd, length, ring.data.stride(0),
            warps=4, BLOCK=power_of_two(2 * hd),
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class IndexQueryRows:
    """Index queries on the FP4 grid."""

    values: Tensor  # bf16 [T, heads, d] (even, then odd elements) on SM90; uint8 [T, heads, d/2] on SM100
    scales: Tensor | None  # uint8 (e8m0) [T, heads, d/32] on SM100
