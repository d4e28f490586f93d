"""One call of every op at given dimensions, on any device: compared with the reference, dispatched on meta tensors, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import quant
from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.types import (
    CandidateSpec,
    CompressorRing,
    CompressorRows,
    EngramHashTables,
    ExpertTensors,
    HcConstants,
    HcWeights,
    PagedEntries,
    QuantTensor,
    RandomRows,
    Rope,
    Routing,
    SamplingRows,
    SelectedEntries,
    WindowKeys,
    WindowRing,
)


@dataclass(frozen=True)
class Dims:
    """Sizes of a model and of a step. The defaults are small; `RELEASED` has the released model's."""

    rows: int = 7
    sequences: int = 2
    hidden: int = 128
    heads: int = 4
    head: int = 64
    rope: int = 16
    q_rank: int = 96
    o_rank: int = 32
    groups: int = 2
    experts: int = 8
    chosen: int = 2
    ff: int = 64
    window: int = 8
    ring: int = 14
    topk: int = 8
    index_heads: int = 2
    index_head: int = 32
    page: int = 16  # entries
    pages: int = 4  # of a sequence
    blocks: int = 4
    block: int = 4
    columns: int = 6  # of an Engram hash
    engram: int = 32
    vocabulary: int = 96


SMALL = Dims()
RELEASED = Dims(
    rows=5,
    hidden=5120,
    heads=64,
    head=512,
    rope=64,
    q_rank=1280,
    o_rank=1024,
    groups=8,
    experts=384,
    chosen=6,
    ff=2304,
    window=128,
    ring=134,
    topk=512,
    index_heads=32,
    index_head=128,
    page=64,
    pages=64,
    blocks=2048,
    block=8,
    columns=24,
    engram=256,
    vocabulary=129280,
)


class Source:
    """Seeded inputs on a device. On "meta" only shapes and types are made."""

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, dtype=torch.float32, scale=scale)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def fixed(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    def fp8(self, out: int, into: int) -> QuantTensor:
        """A checkpoint weight of e4m3 with one scale per 32x32 block, about 1/sqrt(in) in size."""
        scale = self.integers(127 - 9, 127 - 6, -(-out // 32), -(-into // 32), dtype=torch.uint8)
        return QuantTensor(self._e4m3(out, into), scale.view(torch.float8_e8m0fnu))

    def fp4(self, out: int, into: int) -> QuantTensor:
        """A checkpoint weight of e2m1 pairs with one scale per row and 32 inputs."""
        scale = self.integers(127 - 5, 127 - 2, out, into // 32, dtype=torch.uint8)
        return QuantTensor(self.integers(-128, 128, out, into // 2, dtype=torch.int8), scale.view(torch.float8_e8m0fnu))

    def bf16(self, out: int, into: int) -> QuantTensor:
        return QuantTensor(self.normal(out, into, scale=into**-0.5))

    def _e4m3(self, *shape: int) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        return (torch.randn(shape, generator=self.generator) * 8).to(torch.float8_e4m3fn)

    def table(self, rows: int, width: int) -> QuantTensor:
        scale = self.integers(120, 130, rows, width // 32, dtype=torch.uint8)
        return QuantTensor(self._e4m3(rows, width), scale.view(torch.float8_e8m0fnu))

    def rope(self, d: Dims, rows: int) -> Rope:
        positions = self.integers(0, 64, rows, dtype=torch.int64)
        if self.device == "meta":
            return Rope(torch.empty(64, d.rope, device="meta"), positions)
        angles = torch.arange(64.0)[:, None] * 10.0 ** -torch.linspace(0, 2, d.rope // 2)
        return Rope(torch.cat((angles.cos(), angles.sin()), 1), positions)

    def experts(self, d: Dims, count: int, make: Callable[[int, int], QuantTensor]) -> list[ExpertTensors]:
        one = [
            ExpertTensors(make(d.ff, d.hidden), make(d.hidden, d.ff), make(d.ff, d.hidden))
            for _ in range(count if self.device == "cpu" else 1)
        ]
        return one * (count // len(one))

    def routing(self, d: Dims) -> Routing:
        if self.device == "meta" or not d.rows:
            ids = self.integers(0, 1, d.rows, d.chosen)
        else:
            ids = torch.stack([torch.randperm(d.experts, generator=self.generator)[: d.chosen] for _ in range(d.rows)]).int()
        return Routing(ids, self.floats(d.rows, d.chosen).abs())

    def pool(self, groups: int, width: int, padding: int) -> Tensor:
        """A cache buffer [groups, width] whose rows lie `padding` bytes apart, full of junk."""
        return self.integers(0, 120, groups, width + padding, dtype=torch.uint8)[:, :width]

    def filled(self, fmt: CacheFormat, groups: int, n: int, dim: int, sectioned: bool, padding: int) -> Tensor:
        """Like `pool`, with entries of valid values."""
        pool = self.pool(groups, n * fmt.entry_bytes(dim), padding)
        if self.device == "cpu":
            data, scales = quant.encode(self.floats(groups, n, dim), fmt)
            parts = (data.flatten(1), scales.flatten(1)) if sectioned else (torch.cat((data, scales), -1).flatten(1),)
            pool.copy_(torch.cat(parts, 1))
        return pool

    def pages(self, d: Dims, fmt: CacheFormat, dim: int, sectioned: bool, padding: int = 64) -> PagedEntries:
        total = 1 + d.sequences * d.pages
        data = self.filled(fmt, total, d.page, dim, sectioned, padding)
        table = self.fixed(torch.arange(1, total).view(d.sequences, d.pages).flip(1), torch.int32)
        sequence = self.fixed([i * d.sequences // max(d.rows, 1) for i in range(d.rows)], torch.int32)
        return PagedEntries(data, fmt, dim, d.page, sectioned, table, sequence)


Case = Callable[[Kernels, Source, Dims], dict[str, Any]]
"""Calls one op; returns what it returned or changed, by name."""

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def embed(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return {"exact": k.embed(s.integers(0, d.vocabulary, d.rows, dtype=torch.int64), s.normal(d.vocabulary, d.hidden))}


@case
def rms_norm(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    weight = s.normal(d.hidden)
    return {"bf16": k.rms_norm(s.normal(d.rows, d.hidden), weight, 1e-20), "f32": k.rms_norm(s.floats(d.rows, d.hidden), weight, 1e-20)}


@case
def rms_norm_quantize(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    x = k.rms_norm_quantize(s.normal(d.rows, d.q_rank), s.normal(d.q_rank), 1e-20)
    return {"y": k.quantized_linear(x, k.prepare_linear([s.fp8(64, d.q_rank)]))}


@case
def quantized_linear(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    x = s.normal(d.rows, d.hidden)
    if s.device == "cpu" and d.rows:
        x[-1] *= 300  # beyond the largest e4m3 value
    stacked = k.prepare_linear([s.fp8(64, d.hidden), s.fp8(32, d.hidden)])
    narrow = k.quantize(s.normal(d.rows, d.q_rank))
    wide = k.quantized_linear(narrow, k.prepare_linear([s.fp8(d.heads * d.head, d.q_rank)]))
    tiny = k.quantized_linear(k.quantize(s.normal(d.rows, d.hidden, scale=1e-9)), stacked)
    return {"stacked": k.quantized_linear(k.quantize(x), stacked), "odd blocks": wide, "tiny": tiny}


@case
def linear(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    x, weight = s.normal(d.rows, d.hidden), k.prepare_linear([s.bf16(d.head, d.hidden), s.bf16(d.head, d.hidden)])
    return {"rounded": k.linear(x, weight), "f32": k.linear(x, weight, torch.float32)}


@case
def hc_pre(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    m = 4
    weights = HcWeights(s.floats(m * (m + 2), m * d.hidden, scale=(m * d.hidden) ** -0.5), s.floats(m * (m + 2)), s.floats(3))
    result = k.hc_pre(s.normal(d.rows, m, d.hidden), s.floats(d.rows, m), weights, s.normal(d.hidden), HcConstants(1e-20, 1e-6, 20))
    projected = k.quantized_linear(result.quantized, k.prepare_linear([s.fp8(64, d.hidden)]))
    return {"x": result.x, "pre": result.pre, "post": result.post, "comb": result.comb, "quantized": projected}


@case
def hc_post(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return {"streams": k.hc_post(s.normal(d.rows, 4, d.hidden), s.normal(d.rows, d.hidden), s.floats(d.rows, 4), s.floats(d.rows, 4, 4))}


@case
def hc_collapse(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return {"x": k.hc_collapse(s.normal(d.rows, 4, d.hidden), s.floats(d.rows, 4))}


@case
def window_key(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return {"key": k.window_key(s.normal(d.rows, d.head), s.normal(d.head), 1e-20, s.rope(d, d.rows))}


@case
def store_window(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    key = s.normal(d.rows, d.head, scale=30)
    key = key if s.device == "meta" else quant.fake_fp8(key.float()).bfloat16()
    data = s.pool(3, d.ring * CacheFormat.FP8.entry_bytes(d.head), 32).unflatten(1, (d.ring, -1))
    slots = s.fixed([-1 if i % 3 == 1 else d.ring + (i * 5) % d.ring for i in range(d.rows)], torch.int32)
    k.store_window(key, WindowRing(data, CacheFormat.FP8), slots)
    nothing = s.pool(3, d.ring * CacheFormat.FP8.entry_bytes(d.head), 7).unflatten(1, (d.ring, -1))
    k.store_window(key, WindowRing(nothing, CacheFormat.FP8), s.fixed([-1] * d.rows, torch.int32))
    return {"exact ring": data, "exact untouched ring": nothing}


@case
def compress(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    ring = CompressorRing(s.floats(3, 7, 2, d.head))
    rows = s.floats(d.rows, 2 * d.head)
    past = 21
    members = [[7 + 5, past] if i == 0 else [past + i - 1, past + i] if i % 2 == 0 else [-1, -1] for i in range(d.rows)]
    slots = s.fixed([-1 if i == 0 or i > 7 else 7 + i % 7 for i in range(d.rows)], torch.int32)
    index = CompressorRows(s.fixed(members or torch.zeros(0, 2), torch.int32), slots)
    return {"latent": k.compress(rows, ring, index, s.normal(d.head), 1e-20), "exact ring": ring.data}


def _slots(s: Source, d: Dims) -> Tensor:
    return s.fixed([-1 if i % 4 == 1 else d.page + 3 * i for i in range(d.rows)], torch.int32)


@case
def store_entries(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    result = {}
    for fmt in (CacheFormat.FP4, CacheFormat.FP8):
        pages = s.pages(d, fmt, d.head, sectioned=False)
        latent = s.normal(d.rows, d.head, scale=3)
        if s.device == "cpu" and d.rows:
            latent[0, :16] = torch.tensor([6, 0.25, 1.25, 2.5, 5, -0.25, -1.25, 0.75, 1.75, 3.5, 0, -5, -0.1, 0.1, 4, 3])  # ties
            latent[-1, 16:32] = 0
        k.store_entries(latent, s.rope(d, d.rows), pages, _slots(s, d))
        result[f"exact {fmt}"] = pages.data
    return result


@case
def store_index_keys(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    pages = s.pages(d, CacheFormat.FP4_INDEX, d.index_head, sectioned=True)
    key = s.normal(d.rows, d.index_head, scale=3)
    if s.device == "cpu" and d.rows:
        key[0] = 0  # CANN says nothing about a block of zeros
    k.store_index_keys(key, s.normal(d.index_head), 1e-20, s.rope(d, d.rows), pages, _slots(s, d))
    return {"exact pages": pages.data}


def _select(k: Kernels, s: Source, d: Dims, **options: Any) -> dict[str, Any]:
    query = k.index_query(s.normal(d.rows, d.index_heads, d.index_head), s.rope(d, d.rows))
    keys = s.pages(d, CacheFormat.FP4_INDEX, d.index_head, sectioned=True)
    capacity = d.page * d.pages
    visible = s.fixed([(i * 37) % (capacity + 1) for i in range(d.rows)], torch.int32)
    found = k.select_entries(query, s.floats(d.rows, d.index_heads), keys, visible, d.topk, **options)
    return {"exact index": found.index} | ({} if found.candidates is None else {"exact blocks": found.candidates})


@case
def select_entries(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return _select(k, s, d)


@case
def select_entries_and_blocks(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return _select(k, s, d, emit=CandidateSpec(d.blocks, d.block))


@case
def select_entries_in_blocks(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    """Candidates that cover part of the context, and candidates that could cover all of it."""
    few = [[(i + 3 * j) % (d.page * d.pages // d.block) if j < 3 else -1 for j in range(d.blocks)] for i in range(d.rows)]
    few = [sorted(row, key=lambda b: (b < 0, b)) for row in few]
    wide = [row + [-1] * (d.page * d.pages // d.block) for row in few]
    result = {}
    for name, table in {"few": few, "wide": wide}.items():
        candidates = s.fixed(table or torch.zeros(0, d.blocks), torch.int32)
        result[f"exact {name}"] = _select(k, s, d, candidates=candidates, block_size=d.block)["exact index"]
    return result


def _attention(s: Source, d: Dims) -> tuple[WindowKeys, SelectedEntries]:
    ring = WindowRing(s.filled(CacheFormat.FP8, 3, d.ring, d.head, False, 32).unflatten(1, (d.ring, -1)), CacheFormat.FP8)
    current = s.normal(d.rows, d.head)
    past = 3 * d.ring
    index = [[-1 if c < d.window - 3 - i else d.ring + c if c < d.window - 1 else past + i for c in range(d.window)] for i in range(d.rows)]
    window = WindowKeys(ring, current, s.fixed(index or torch.zeros(0, d.window), torch.int32))
    chosen = [[j * 2 + i if j < min(d.topk, 3 * i) else -1 for j in range(d.topk)] for i in range(d.rows)]
    pages = s.pages(d, CacheFormat.FP4, d.head, sectioned=False)
    return window, SelectedEntries(pages, s.fixed(chosen or torch.zeros(0, d.topk), torch.int32))


@case
def sparse_attention(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    window, selected = _attention(s, d)
    query, sink = s.normal(d.rows, d.heads, d.head), s.floats(d.heads)
    rope, scale = s.rope(d, d.rows), d.head**-0.5
    lonely = WindowKeys(window.ring, window.current, s.fixed(torch.full((d.rows, d.window), -1), torch.int32))
    return {
        "window and entries": k.sparse_attention(query, window, selected, sink, scale, rope),
        "window": k.sparse_attention(query, window, None, sink, scale, rope),
        "no keys": k.sparse_attention(query, lonely, None, sink, scale, rope),
    }


@case
def attention_output(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    wo_a = k.prepare_linear([s.fp8(d.groups * d.o_rank, d.heads * d.head // d.groups)])
    wo_b = k.prepare_linear([s.fp8(d.hidden, d.groups * d.o_rank)])
    return {"y": k.attention_output(s.normal(d.rows, d.heads, d.head), wo_a, wo_b, d.groups)}


@case
def engram_hash(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    ngrams = s.integers(0, 90000, d.rows, 4, dtype=torch.int64)
    if s.device == "cpu" and d.rows:
        ngrams[-1] = -1
    columns = 3 * (d.columns // 3)
    primes = s.fixed([16000057 + 22 * i for i in range(columns)], torch.int64)
    tables = EngramHashTables(s.integers(2**40, 2**46, 4, dtype=torch.int64), primes, s.fixed(range(columns), torch.int64))
    return {"exact rows": k.engram_hash(ngrams, tables)}


@case
def engram_gather(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    rows = s.integers(0, 50, d.rows, d.columns, dtype=torch.int64)
    if s.device == "cpu" and d.rows:
        rows[-1] = -1
    gathered = k.engram_gather(k.prepare_engram_table(s.table(50, d.engram)), rows)
    return {"kv": k.quantized_linear(gathered, k.prepare_linear([s.fp8(160, d.columns * d.engram)]))}


@case
def engram_gate(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    mask = s.fixed([i % 3 != 2 for i in range(d.rows)], torch.bool)
    kv = s.normal(d.rows, 5, d.hidden)
    return {"streams": k.engram_gate(s.normal(d.rows, 4, d.hidden), kv, s.normal(4, d.hidden), s.normal(4, d.hidden), 1e-20, mask)}


@case
def moe_gate(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    routing = k.moe_gate(s.normal(d.rows, d.hidden), k.prepare_linear([s.bf16(d.experts, d.hidden)]), s.floats(d.experts), d.chosen, 1.5)
    return {"exact ids": routing.ids, "weights": routing.weights}


def _moe(k: Kernels, s: Source, d: Dims, make: Callable[[int, int], QuantTensor], count: int) -> dict[str, Any]:
    x = k.quantize(s.normal(d.rows, d.hidden, scale=3))
    experts = k.prepare_experts(s.experts(d, count, make), count)
    shared = k.prepare_experts(s.experts(d, 1, s.fp8), 1)
    routing = s.routing(d)
    if s.device == "cpu" and d.rows:
        routing.ids[0, 0] = -1
    routing = Routing(routing.ids.clamp_max(count - 1), routing.weights)
    return {"with shared": k.moe(x, routing, experts, shared, 10.0), "routed": k.moe(x, routing, experts, None, 10.0)}


@case
def moe(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return _moe(k, s, d, s.fp4, d.experts)


@case
def moe_fp8(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return _moe(k, s, d, s.fp8, min(d.experts, 8))


@case
def moe_bf16(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return _moe(k, s, d, s.bf16, min(d.experts, 8))


@case
def stream_mean(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    return {"mean": k.stream_mean(s.normal(d.rows, 4, d.hidden))}


@case
def markov_logits(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    head = k.prepare_linear([s.bf16(d.vocabulary, 64)])
    previous = s.integers(0, d.vocabulary, d.rows, dtype=torch.int64)
    return {"logits": k.markov_logits(s.floats(d.rows, d.vocabulary), previous, s.normal(d.vocabulary, 64), head)}


@case
def confidence(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    previous = s.integers(0, d.vocabulary, d.rows, dtype=torch.int64)
    return {
        "p": k.confidence(s.normal(d.rows, d.hidden), previous, s.normal(d.vocabulary, 64), s.normal(1, d.hidden + 64, scale=0.05), 1.0)
    }


def _sampling_rows(s: Source, d: Dims) -> tuple[SamplingRows, RandomRows]:
    rows = SamplingRows(
        s.fixed([i % 3 * 0.7 for i in range(d.rows)], torch.float32),
        s.fixed([-1 if i % 2 else 5 for i in range(d.rows)], torch.int32),
        s.fixed([1.0 if i % 4 else 0.8 for i in range(d.rows)], torch.float32),
        s.fixed([0.0] * d.rows, torch.float32),
    )
    return rows, RandomRows(s.integers(0, 2**40, d.rows, dtype=torch.int64), s.integers(0, 1000, d.rows, dtype=torch.int64))


@case
def sample(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    rows, random = _sampling_rows(s, d)
    log_probs = k.log_probs(s.floats(d.rows, d.vocabulary), rows)
    return {"p": log_probs.exp(), "exact tokens": k.sample(log_probs, random)}


@case
def verify(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    _, random = _sampling_rows(s, d)
    target, draft = (s.floats(d.rows, d.vocabulary).log_softmax(-1) for _ in range(2))
    drafts, greedy = s.integers(-1, d.vocabulary, d.rows, dtype=torch.int64), s.fixed([i % 2 == 0 for i in range(d.rows)], torch.bool)
    result = k.verify(target, draft, drafts, random, greedy)
    return {"exact accepted": result.accepted, "exact tokens": result.tokens, "estimate": result.estimate}


@case
def apply_token_bitmask(k: Kernels, s: Source, d: Dims) -> dict[str, Any]:
    logits = s.floats(d.rows, d.vocabulary)
    mask = s.integers(-(2**31), 2**31 - 1, d.rows // 2, -(-d.vocabulary // 32))
    k.apply_token_bitmask(logits, mask, s.fixed(range(d.rows // 2), torch.int64))
    return {"exact logits": logits}
