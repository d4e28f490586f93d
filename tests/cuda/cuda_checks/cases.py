"""One way to call every op on random inputs: for comparison with the reference, for compilation, for timing.

A case is built once for some inputs; `prepare` makes what one `Kernels` object needs (its weights, its own copies of buffers that the op
changes), `run` calls the op and returns what the contract lets one see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda_checks.inputs import Geometry, Inputs
from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.types import (
    CandidateSpec,
    CompressorRing,
    EngramHashTables,
    HcConstants,
    PagedEntries,
    QuantTensor,
    RandomRows,
    SamplingRows,
    WindowRing,
)

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One op on one set of inputs. `bound`: largest relative error (Frobenius norm) against the reference; 0: equal bit for bit."""

    op: str
    prepare: Callable[[Kernels], Any]
    run: Callable[[Kernels, Any], Results]
    bound: float
    traffic: float = 0.0  # bytes that must move: every input once, every output once
    operations: float = 0.0  # multiplications and additions
    note: str = ""


# One bfloat16 rounding of a sum taken in another order flips few results by one step: 2^-8 of them at most, spread over the norm.
ROUNDED = 4e-3
FLOAT = 1e-5  # float32 results: order of summation, approximate exp


def _nothing(_: Kernels) -> None:
    return None


def norm_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    x, w = i.bf16(rows, g.hidden), i.bf16(g.hidden)
    ids, table = i.ints(0, g.vocab, rows, dtype=torch.int64), i.bf16(g.vocab, g.hidden)
    row = 2.0 * rows * g.hidden
    identity = [QuantTensor(torch.eye(g.hidden, device=i.device).bfloat16())] if g.hidden <= 1024 else None

    def values(k: Kernels, activation: Any, weight: Any) -> Results:
        return {"x": k.quantized_linear(activation, weight)} if weight is not None else {}

    def prepared(k: Kernels) -> Any:
        return None if identity is None else k.prepare_linear(identity)

    return [
        Case("embed", _nothing, lambda k, _: {"x": k.embed(ids, table)}, 0.0, 2 * row),
        Case("rms_norm", _nothing, lambda k, _: {"x": k.rms_norm(x, w, 1e-6)}, ROUNDED, 2 * row),
        Case("quantize", prepared, lambda k, s: values(k, k.quantize(x), s), 0.0, 2 * row),
        Case("rms_norm_quantize", prepared, lambda k, s: values(k, k.rms_norm_quantize(x, w, 1e-6), s), 2e-2, 2 * row),
    ]


def linear_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    cases = []
    for note, parts, size in (
        ("wq_a+wkv", (g.q_lora, g.head_dim), g.hidden),
        ("wq_b", (g.heads * g.head_dim,), g.q_lora),
        ("wo_b", (g.hidden,), g.o_groups * g.o_lora),
    ):
        weights = [i.fp8_weight(n, size) for n in parts]
        x = i.bf16(rows, size)
        n = sum(parts)
        cases.append(
            Case(
                "quantized_linear",
                lambda k, w=weights, x=x: (k.prepare_linear(w), k.quantize(x)),
                lambda k, s: {"y": k.quantized_linear(s[1], s[0])},
                ROUNDED,
                n * size + 2.0 * rows * (size + n),
                2.0 * rows * n * size,
                note,
            )
        )
    x = i.bf16(rows, g.hidden)
    for note, n, dtype in (
        ("router", g.experts, torch.float32),
        ("index wk", g.index_dim, None),
        ("compressor", 2 * g.head_dim, torch.float32),
    ):
        weight = [i.bf16_weight(n, g.hidden)]
        cases.append(
            Case(
                "linear",
                lambda k, w=weight: k.prepare_linear(w),
                lambda k, s, dtype=dtype: {"y": k.linear(x, s, dtype)},
                FLOAT if dtype else ROUNDED,
                2.0 * n * g.hidden + rows * (2 * g.hidden + 4 * n),
                2.0 * rows * n * g.hidden,
                note,
            )
        )
    out = i.bf16(rows, g.heads, g.head_dim)
    inner = g.heads * g.head_dim // g.o_groups
    wo_a, wo_b = [i.fp8_weight(g.o_groups * g.o_lora, inner)], [i.fp8_weight(g.hidden, g.o_groups * g.o_lora)]
    size = g.o_groups * g.o_lora * (inner + g.hidden)
    cases.append(
        Case(
            "attention_output",
            lambda k: (k.prepare_linear(wo_a), k.prepare_linear(wo_b)),
            lambda k, s: {"y": k.attention_output(out, s[0], s[1], g.o_groups)},
            2e-2,
            size + 2.0 * rows * (g.heads * g.head_dim + g.hidden),
            2.0 * rows * size,
        )
    )
    return cases


def hyper_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    m, size = g.streams, g.hidden
    streams, pre, weights, norm, y = i.bf16(rows, m, size), i.pre(rows, m), i.hc_weights(g), i.bf16(size), i.bf16(rows, size)
    post, comb = i.pre(rows, m), i.pre(rows, m * m).view(rows, m, m)
    constants = HcConstants(1e-20, 1e-6, 20)
    stream, row = 2.0 * rows * m * size, 2.0 * rows * size

    def run_pre(k: Kernels, _: Any) -> Results:
        result = k.hc_pre(streams, pre, weights, norm, constants)
        return {"x": result.x, "pre": result.pre, "post": result.post, "comb": result.comb}

    return [
        Case("hc_pre", _nothing, run_pre, ROUNDED, stream + 3 * row),
        Case("hc_post", lambda k: streams.clone(), lambda k, s: {"x": k.hc_post(s, y, post, comb)}, ROUNDED, 2 * stream + row),
        Case("hc_collapse", _nothing, lambda k, _: {"x": k.hc_collapse(streams, pre)}, ROUNDED, stream + row),
        Case("stream_mean", _nothing, lambda k, _: {"x": k.stream_mean(streams)}, ROUNDED, stream + row),
    ]


def _own(pages: PagedEntries) -> PagedEntries:
    return dataclasses.replace(pages, data=pages.data.clone())


def cache_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    hd, d = g.head_dim, g.index_dim
    kv, key, norm, index_norm, rope = i.bf16(rows, hd), i.bf16(rows, d), i.bf16(hd), i.bf16(d), i.rope(rows, g.rope_dim)
    ring = i.ring(max(4, rows // 8), 134 if hd == 512 else 9, hd)
    slots = i.distinct(rows, ring.data.shape[0] * ring.data.shape[1])
    per = max(2, -(-rows // 8))
    fp4, fp8 = (i.pages(f, hd, 8, per, rows, 2, False) for f in (CacheFormat.FP4, CacheFormat.FP8))
    index = i.pages(CacheFormat.FP4_INDEX, d, 8, per, rows, 2, True)
    page_slots = i.distinct(rows, 8 * per)
    query = i.bf16(rows, g.index_heads, d)
    state, members = i.compressor(rows, 2, max(2, rows // 4), 7, hd)
    pair = i.f32(rows, 2 * hd)
    value = 2.0 * rows * hd

    def store_window(k: Kernels, own: WindowRing) -> Results:
        k.store_window(k.window_key(kv, norm, 1e-6, rope), own, slots)
        return {"ring": own.data}

    def store_entries(k: Kernels, own: PagedEntries) -> Results:
        k.store_entries(kv, rope, own, page_slots)
        return {"pages": own.data}

    def store_index(k: Kernels, own: PagedEntries) -> Results:
        k.store_index_keys(key, index_norm, 1e-6, rope, own, page_slots)
        return {"pages": own.data}

    def compress(k: Kernels, own: CompressorRing) -> Results:
        return {"latent": k.compress(pair, own, members, norm, 1e-6), "ring": own.data}

    def index_query(k: Kernels, _: Any) -> Results:
        k.index_query(query, rope)  # opaque: seen through select_entries
        return {}

    return [
        Case("window_key", _nothing, lambda k, _: {"key": k.window_key(kv, norm, 1e-6, rope)}, 2e-2, 2 * value),
        Case("store_window", lambda k: WindowRing(ring.data.clone(), ring.format), store_window, 2e-2, 1.5 * value),
        Case("store_entries", lambda k: _own(fp4), store_entries, 0.0, 1.3 * value, note="fp4"),
        Case("store_entries", lambda k: _own(fp8), lambda k, own: store_entries(k, own), 0.0, 1.5 * value, note="fp8"),
        Case("store_index_keys", lambda k: _own(index), store_index, 2e-2, 2.6 * rows * d),
        Case("index_query", _nothing, index_query, 0.0, 2.6 * rows * g.index_heads * d),
        Case("compress", lambda k: CompressorRing(state.data.clone()), compress, ROUNDED, 5 * value),
    ]


def index_cases(g: Geometry, i: Inputs, rows: int, context: int) -> list[Case]:
    d, n = g.index_dim, 16
    sequences = max(rows, 1) if rows <= 64 else 1
    per = max(1, context // n)
    keys = i.pages(CacheFormat.FP4_INDEX, d, n, per, rows, sequences, True)
    query, rope, weights = i.bf16(rows, g.index_heads, d), i.rope(rows, g.rope_dim), i.f32(rows, g.index_heads)
    visible = i.ints(max(1, context // 2), per * n + 1, rows)
    visible[:1] = min(3, per * n)
    size = 8 if g.hidden > 1000 else 4
    blocks = min(g.candidate_blocks, per * n // size)
    spec = CandidateSpec(blocks, size)
    listed = torch.arange(blocks, device=i.device).int().expand(rows, blocks).contiguous()
    operations = 2.0 * rows * g.index_heads * d * context * 0.75
    traffic = sequences * context * 0.75 * 68 + rows * g.index_heads * d * 2

    def prepared(k: Kernels) -> Any:
        return k.index_query(query, rope)

    def plain(k: Kernels, q: Any) -> Results:
        return {"index": k.select_entries(q, weights, keys, visible, g.index_topk).index}

    def emitting(k: Kernels, q: Any) -> Results:
        result = k.select_entries(q, weights, keys, visible, g.index_topk, emit=spec)
        assert result.candidates is not None
        return {"index": result.index, "candidates": result.candidates}

    def restricted(k: Kernels, q: Any) -> Results:
        return {"index": k.select_entries(q, weights, keys, visible, g.index_topk, listed, None, size).index}

    cases = [
        Case("select_entries", prepared, plain, 1e-2, traffic, operations, f"context {context}"),
        Case("select_entries", prepared, emitting, 1e-2, traffic, operations, f"emit, context {context}"),
        Case("select_entries", prepared, restricted, 1e-2, traffic, operations, f"candidates, context {context}"),
    ]
    if g.hidden <= 1024:
        tied = weights * (torch.arange(rows, device=i.device) % 2)[:, None]  # every other row scores 0 everywhere

        def level(k: Kernels, q: Any) -> Results:
            result = k.select_entries(q, tied, keys, visible, g.index_topk, emit=spec)
            assert result.candidates is not None
            return {"index": result.index[::2], "candidates": result.candidates[::2]}

        cases.append(Case("select_entries", prepared, level, 0.0, note="ties"))
    return cases


def attention_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    hd = g.head_dim
    ring = i.ring(min(max(rows, 1), 64) + 1, g.window + 6, hd)
    window = i.window(rows, g.window, ring, hd)
    query, sink, rope = i.bf16(rows, g.heads, hd), i.f32(g.heads), i.rope(rows, g.rope_dim)
    sequences = max(rows, 1) if rows <= 64 else 1
    cases = []
    for fmt in (CacheFormat.FP4, CacheFormat.FP8, None):
        selected = None
        if fmt is not None:
            pages = i.pages(fmt, hd, 16, max(1, -(-3 * g.index_topk // 16)), rows, sequences, False)
            selected = i.selected(pages, rows, g.index_topk)
        topk = g.index_topk if fmt else 0
        keys = rows * (0.8 * g.window + topk / 2)
        cases.append(
            Case(
                "sparse_attention",
                _nothing,
                lambda k, _, selected=selected: {"out": k.sparse_attention(query, window, selected, sink, hd**-0.5, rope)},
                1e-2,
                rows * (0.8 * g.window * hd + (topk / 2) * (fmt.entry_bytes(hd) if fmt else 0)) + 4.0 * rows * g.heads * hd,
                4.0 * keys * g.heads * hd,
                fmt.value if fmt else "window only",
            )
        )
    return cases


def engram_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    m, size, columns = g.streams, g.hidden, g.engram_columns
    ngrams = i.ints(0, 90000, rows, 4, dtype=torch.int64)
    hashes = EngramHashTables(
        i.ints(1, 1 << 44, 4, dtype=torch.int64) * 2 + 1,
        i.ints(16000, 17000, columns, dtype=torch.int64),
        i.ints(0, 99999, columns, dtype=torch.int64),
    )
    table = QuantTensor(i.f32(4096, g.engram_dim).to(torch.float8_e4m3fn), i.scales(4096, g.engram_dim // 32))
    index = i.ints(-1, 4096, rows, columns, dtype=torch.int64)
    inner = columns * g.engram_dim
    wkv = [i.fp8_weight(64, inner)]
    streams, kv, q_weight, k_weight = i.bf16(rows, m, size), i.bf16(rows, m + 1, size), i.bf16(m, size), i.bf16(m, size)
    mask = i.ints(0, 2, rows).bool()
    stream = 2.0 * rows * m * size
    return [
        Case("engram_hash", _nothing, lambda k, _: {"rows": k.engram_hash(ngrams, hashes)}, 0.0, rows * (32.0 + 8 * columns)),
        Case(
            "engram_gather",
            lambda k: (k.prepare_engram_table(table), k.prepare_linear(wkv)),
            lambda k, s: {"y": k.quantized_linear(k.engram_gather(s[0], index), s[1])},
            ROUNDED,
            3.0 * rows * inner,
        ),
        Case(
            "engram_gate", _nothing, lambda k, _: {"x": k.engram_gate(streams, kv, q_weight, k_weight, 1e-20, mask)}, ROUNDED, 3.25 * stream
        ),
    ]


def moe_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    x, bias = i.bf16(rows, g.hidden), i.f32(g.experts, scale=0.1)
    gate = [i.bf16_weight(g.experts, g.hidden)]
    few = min(g.experts, 8) if i.device.type == "meta" else g.experts
    experts, shared = [i.expert(g) for _ in range(min(few, 16))], i.expert(g, fp4=False)
    routing = i.routing(rows, g.top_k, g.experts)
    used = g.experts * (1 - (1 - g.top_k / g.experts) ** rows)
    expert_bytes = 3 * g.hidden * g.intermediate * (0.5 + 1 / 32)

    def prepared(k: Kernels) -> Any:
        routed = k.prepare_experts((experts[e % len(experts)] for e in range(few)), few)
        if few != g.experts:  # shapes only: say that there are as many experts as the router knows
            routed = dataclasses.replace(routed, w13=dataclasses.replace(routed.w13, count=g.experts))
        return routed, k.prepare_experts(iter([shared]), 1), k.quantize(x)

    def route(k: Kernels, weight: Any) -> Results:
        result = k.moe_gate(x, weight, bias, g.top_k, 1.5)
        return {"ids": result.ids, "weights": result.weights}

    cases = [
        Case("moe_gate", lambda k: k.prepare_linear(gate), route, FLOAT, 2.0 * g.experts * g.hidden + 2.0 * rows * g.hidden),
        Case(
            "moe",
            prepared,
            lambda k, s: {"y": k.moe(s[2], routing, s[0], s[1], 10.0)},
            2e-2,
            used * expert_bytes + 3 * g.hidden * g.intermediate + rows * g.hidden * 4.0,
            6.0 * rows * (g.top_k + 1) * g.hidden * g.intermediate,
        ),
    ]
    if g.hidden <= 1024:  # unquantised experts: no release has them
        plain = [i.expert(g, bf16=True) for _ in range(g.experts)]

        def prepared_plain(k: Kernels) -> Any:
            return k.prepare_experts(iter(plain), g.experts), k.quantize(x)

        cases.append(Case("moe", prepared_plain, lambda k, s: {"y": k.moe(s[1], routing, s[0], None, 10.0)}, 2e-2, note="bf16"))
    return cases


def draft_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    base, previous, embed = i.f32(rows, g.vocab), i.ints(0, g.vocab, rows, dtype=torch.int64), i.bf16(g.vocab, g.markov_rank)
    head, hidden, weight = [i.bf16_weight(g.vocab, g.markov_rank)], i.bf16(rows, g.hidden), i.bf16(1, g.hidden + g.markov_rank, scale=0.02)
    return [
        Case(
            "markov_logits",
            lambda k: k.prepare_linear(head),
            lambda k, s: {"x": k.markov_logits(base, previous, embed, s)},
            FLOAT,
            2.0 * g.vocab * g.markov_rank + 8.0 * rows * g.vocab,
        ),
        Case("confidence", _nothing, lambda k, _: {"c": k.confidence(hidden, previous, embed, weight, 1.0)}, FLOAT, 2.0 * rows * g.hidden),
    ]


def sampling_cases(g: Geometry, i: Inputs, rows: int) -> list[Case]:
    logits = i.f32(rows, g.vocab, scale=3.0)
    device = i.device
    kind = torch.arange(rows, device=device) % 4
    temperature = torch.where(kind == 3, 0.0, 0.7 + 0.1 * kind)
    filters = SamplingRows(
        temperature, torch.where(kind == 1, 40, -1).int(), torch.where(kind == 2, 0.9, 1.0), torch.where(kind == 1, 0.02, 0.0)
    )
    plain = filters._replace(any_filtered=False)
    target = torch.log_softmax(logits, 1)
    draft = torch.log_softmax(logits + i.f32(rows, g.vocab, scale=0.5), 1)
    drafts = torch.where(kind == 0, -1, i.ints(0, g.vocab, rows, dtype=torch.int64))
    random = RandomRows(i.ints(0, 1 << 62, rows, dtype=torch.int64), i.ints(0, 1 << 20, rows, dtype=torch.int64))
    bitmask, masked = i.ints(-(2**31), 2**31 - 1, rows, -(-g.vocab // 32)), torch.arange(rows, device=device)
    row = 4.0 * rows * g.vocab

    def verify(k: Kernels, _: Any) -> Results:
        return k.verify(target, draft, drafts, random, kind == 3)._asdict()

    def mask(k: Kernels, own: Tensor) -> Results:
        k.apply_token_bitmask(own, bitmask, masked)
        return {"logits": own}

    return [
        Case("log_probs", _nothing, lambda k, _: {"p": k.log_probs(logits, plain).exp()}, FLOAT, 2 * row, note="plain"),
        Case("log_probs", _nothing, lambda k, _: {"p": k.log_probs(logits, filters).exp()}, 1e-4, 3 * row, note="filtered"),
        Case("sample", _nothing, lambda k, _: {"ids": k.sample(target, random)}, 0.0, row),
        Case("verify", _nothing, verify, 1e-6, 2 * row),
        Case("apply_token_bitmask", lambda k: logits.clone(), mask, 0.0, row),
    ]


def all_cases(g: Geometry, inputs: Inputs, rows: int, context: int) -> list[Case]:
    """Every op of the contract at least once."""
    cases = norm_cases(g, inputs, rows) + linear_cases(g, inputs, rows) + hyper_cases(g, inputs, rows) + cache_cases(g, inputs, rows)
    cases += index_cases(g, inputs, rows, context) + attention_cases(g, inputs, rows) + engram_cases(g, inputs, rows)
    return cases + moe_cases(g, inputs, rows) + draft_cases(g, inputs, rows) + sampling_cases(g, inputs, rows)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; for integers the share of unequal elements. NaN never passes: it counts as infinite."""
    if got.shape != want.shape:
        return float("inf")
    if not got.is_floating_point():
        return float((got != want).double().mean()) if got.numel() else 0.0
    got, want = got.double(), want.double()
    same = got == want
    difference = torch.where(same, 0.0, got - want)
    if difference.isnan().any() or difference.isinf().any():
        return float("inf")
    finite = torch.where(want.isinf(), 0.0, want)
    return float(difference.norm() / finite.norm().clamp_min(1e-30))
