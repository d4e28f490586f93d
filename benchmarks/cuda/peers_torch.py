"""cuBLAS on decoded weights, torch's own kernels, and eager torch (the reference backend on the GPU) where no public kernel exists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from cuda_checks.cases import Case, cache_cases, draft_cases, engram_cases, error, hyper_cases, norm_cases, sampling_cases
from cuda_checks.inputs import RELEASED
from peer_pairs import DEVICE, Comparison, Pair, decoded, difference, inputs, kernels
from peers_humming import LINEARS, linear_parts
from torch import Tensor

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cpu_ref.quant import fake_fp8
from deepinfer_core.backend.formats import CacheFormat

G = RELEASED
CONTEXT = 8192
CHUNK = 512  # rows whose scores torch holds at once
SAMPLED_ROWS = 64


@cache
def reference() -> ReferenceKernels:
    return ReferenceKernels(DEVICE)


def linear(note: str, rows: int) -> Pair:
    parts = linear_parts(note)
    dense = torch.cat([decoded(part) for part in parts])
    x = fake_fp8(inputs(rows).f32(rows, dense.shape[1])).bfloat16()
    weight, quantised = kernels().prepare_linear(parts), kernels().quantize(x)

    def ours() -> Tensor:
        return kernels().quantized_linear(quantised, weight)

    return Pair(ours, lambda: x @ dense.t(), lambda: difference(ours(), x @ dense.t()))


def plain_linear(outputs: int, rows: int) -> Pair:
    i = inputs(rows)
    x, weight = i.bf16(rows, G.hidden), i.bf16_weight(outputs, G.hidden)
    prepared = kernels().prepare_linear([weight])

    def theirs() -> Tensor:
        return torch.mm(x, weight.weight.t(), out_dtype=torch.float32)

    def ours() -> Tensor:
        return kernels().linear(x, prepared, torch.float32)

    return Pair(ours, theirs, lambda: difference(ours(), theirs()))


def attention_output(rows: int) -> Pair:
    i, inner = inputs(rows), G.heads * G.head_dim // G.o_groups
    a, b = i.fp8_weight(G.o_groups * G.o_lora, inner), i.fp8_weight(G.hidden, G.o_groups * G.o_lora)
    dense_a, dense_b = decoded(a).view(G.o_groups, G.o_lora, inner), decoded(b)
    out = i.bf16(rows, G.heads, G.head_dim)
    wo_a, wo_b = kernels().prepare_linear([a]), kernels().prepare_linear([b])

    def theirs() -> Tensor:
        low = torch.bmm(out.view(rows, G.o_groups, inner).transpose(0, 1), dense_a.transpose(1, 2))
        return low.transpose(0, 1).reshape(rows, -1) @ dense_b.t()

    def ours() -> Tensor:
        return kernels().attention_output(out, wo_a, wo_b, G.o_groups)

    return Pair(ours, theirs, lambda: difference(ours(), theirs()))


def select(rows: int, alone: bool) -> Pair:
    """Scores of bfloat16 keys that lie decoded in one piece, then `torch.topk`; or `torch.topk` of scores that are there."""
    i, page = inputs(rows), 16
    sequences = rows if rows <= SAMPLED_ROWS else 1
    pages = i.pages(CacheFormat.FP4_INDEX, G.index_dim, page, CONTEXT // page, rows, sequences, True)
    query, rope, weights = i.bf16(rows, G.index_heads, G.index_dim), i.rope(rows, G.rope_dim), i.f32(rows, G.index_heads)
    visible = torch.full((rows,), CONTEXT, dtype=torch.int32, device=DEVICE)
    prepared = kernels().index_query(query, rope)
    keys = i.bf16(sequences, CONTEXT, G.index_dim)
    scores = i.f32(rows, CONTEXT) if alone else None

    def theirs() -> object:
        if scores is not None:
            return scores.topk(G.index_topk, 1)
        return torch.cat([_scored(query[a : a + CHUNK], keys, weights[a : a + CHUNK]) for a in range(0, rows, CHUNK)])

    return Pair(lambda: kernels().select_entries(prepared, weights, pages, visible, G.index_topk), theirs)


def _scored(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    if len(keys) == 1:
        products = (query.flatten(0, 1) @ keys[0].t()).view(len(query), G.index_heads, CONTEXT)
    else:
        products = torch.bmm(query, keys.transpose(1, 2))
    return torch.bmm(weights[:, None].bfloat16(), products.relu_())[:, 0].topk(G.index_topk, 1).indices


def rms_norm(rows: int) -> Pair:
    i = inputs(rows)
    x, weight = i.bf16(rows, G.hidden), i.bf16(G.hidden)

    def theirs() -> Tensor:
        return torch.nn.functional.rms_norm(x, (G.hidden,), weight, 1e-6)

    def ours() -> Tensor:
        return kernels().rms_norm(x, weight, 1e-6)

    return Pair(ours, theirs, lambda: difference(ours(), theirs()))


def eager(case: Case) -> Pair:
    """The same case on the reference kernels, on the GPU."""
    mine, other = case.prepare(kernels()), case.prepare(reference())

    def same() -> float:
        want = case.run(reference(), case.prepare(reference()))
        got = case.run(kernels(), case.prepare(kernels()))
        return max((error(got[name], value) for name, value in want.items()), default=0.0)

    return Pair(lambda: case.run(kernels(), mine), lambda: case.run(reference(), other), same)


def without_peer(rows: int) -> list[Case]:
    """Ops that no public kernel for Hopper offers."""
    i = inputs(rows)
    makers = (norm_cases, hyper_cases, cache_cases, engram_cases)
    if rows <= SAMPLED_ROWS:
        makers += (draft_cases, sampling_cases)
    elsewhere = (
        "quantize",
        "rms_norm",
        "rms_norm_quantize",
        "hc_pre",
        "hc_post",
        "hc_collapse",
        "engram_hash",
        "engram_gate",
        "index_query",
    )
    return [case for make in makers for case in make(G, i, rows) if case.op not in elsewhere]


def comparisons(rows: int) -> Iterator[Comparison]:
    """Library kernels first, then eager torch."""
    for note in LINEARS:
        yield Comparison(
            f"quantized_linear {note}", rows, "cuBLAS bf16", lambda note=note: linear(note, rows), differs="weights decoded before"
        )
    for note, outputs in (("router", G.experts), ("compressor", 2 * G.head_dim)):
        yield Comparison(f"linear {note}", rows, "cuBLAS bf16, float32 result", lambda n=outputs: plain_linear(n, rows))
    yield Comparison(
        "attention_output", rows, "cuBLAS bf16", lambda: attention_output(rows), 5e-2, "weights decoded before; no e4m3 between"
    )
    yield Comparison("select_entries", rows, "torch scores, topk", lambda: select(rows, False), differs="keys decoded before, in one piece")
    yield Comparison("select_entries", rows, "torch.topk alone", lambda: select(rows, True), differs="scores given")
    yield Comparison("rms_norm", rows, "torch rms_norm", lambda: rms_norm(rows))
    for case in without_peer(rows):
        yield Comparison(f"{case.op} {case.note}".strip(), rows, "eager torch", lambda case=case: eager(case), max(case.bound, 1e-6))
