"""Batch invariance: a row gives the same bits alone, among few and among many rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cuda_checks.inputs import RELEASED, Inputs
from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import HcConstants, Rope, Routing, SelectedEntries, WindowKeys

COUNTS = (1, 3, 17, 64, 300)


def _ops(kernels: CudaKernels, i: Inputs, most: int) -> Iterator[tuple[str, Callable[[int], list[Tensor]]]]:
    """(op, its results for the first n rows of one set of inputs)."""
    g = RELEASED
    x = i.bf16(most, g.hidden)
    fp8 = kernels.prepare_linear([i.fp8_weight(g.q_lora + g.head_dim, g.hidden)])
    bf16 = kernels.prepare_linear([i.bf16_weight(g.experts, g.hidden)])
    yield "quantized_linear", lambda n: [kernels.quantized_linear(kernels.quantize(x[:n]), fp8)]
    yield "linear", lambda n: [kernels.linear(x[:n], bf16, torch.float32)]
    heads = i.bf16(most, g.heads, g.head_dim)
    wo_a = kernels.prepare_linear([i.fp8_weight(g.o_groups * g.o_lora, g.heads * g.head_dim // g.o_groups)])
    wo_b = kernels.prepare_linear([i.fp8_weight(g.hidden, g.o_groups * g.o_lora)])
    yield "attention_output", lambda n: [kernels.attention_output(heads[:n], wo_a, wo_b, g.o_groups)]
    streams, pre, weights, norm = i.bf16(most, g.streams, g.hidden), i.pre(most, g.streams), i.hc_weights(g), i.bf16(g.hidden)

    def hc_pre(n: int) -> list[Tensor]:
        result = kernels.hc_pre(streams[:n], pre[:n], weights, norm, HcConstants(1e-20, 1e-6, 20))
        return [result.x, result.pre, result.post, result.comb]

    yield "hc_pre", hc_pre
    small = dataclasses.replace(g, experts=32)
    experts = kernels.prepare_experts((i.expert(small) for _ in range(32)), 32)
    shared = kernels.prepare_experts(iter([i.expert(small, fp4=False)]), 1)
    routing = i.routing(most, g.top_k, 32)
    yield (
        "moe",
        lambda n: [kernels.moe(kernels.quantize(x[:n]), Routing(routing.ids[:n].contiguous(), routing.weights[:n]), experts, shared, 10.0)],
    )
    ring = i.ring(8, g.window + 6, g.head_dim)
    window = i.window(most, g.window, ring, g.head_dim)
    pages = i.pages(CacheFormat.FP4, g.head_dim, 16, 96, most, 1, False)
    selected, sink, rope = i.selected(pages, most, g.index_topk), i.f32(g.heads), i.rope(most, g.rope_dim)

    def attention(n: int) -> list[Tensor]:
        keys = WindowKeys(ring, window.current, window.index[:n])
        chosen = SelectedEntries(dataclasses.replace(pages, sequence=pages.sequence[:n]), selected.index[:n])
        return [kernels.sparse_attention(heads[:n], keys, chosen, sink, g.head_dim**-0.5, Rope(rope.table, rope.positions[:n]))]

    yield "sparse_attention", attention
    keys = i.pages(CacheFormat.FP4_INDEX, g.index_dim, 16, 128, most, 1, True)
    query, share, visible = i.bf16(most, g.index_heads, g.index_dim), i.f32(most, g.index_heads), i.ints(600, 2000, most)

    def select(n: int) -> list[Tensor]:
        own = dataclasses.replace(keys, sequence=keys.sequence[:n])
        q = kernels.index_query(query[:n], Rope(rope.table, rope.positions[:n]))
        return [kernels.select_entries(q, share[:n], own, visible[:n], g.index_topk).index]

    yield "select_entries", select


def invariance_problems() -> Iterator[tuple[str, str]]:
    """(op, what differs or ""): the first row of every count against the row alone, and equal rows of any two counts."""
    kernels = CudaKernels(torch.device("cuda:0"), batch_invariant=True)
    for op, run in _ops(kernels, Inputs("cuda:0", seed=7), max(COUNTS)):
        most = run(max(COUNTS))
        different = [
            f"{int((part != whole[: len(part)]).sum())} elements at {count} rows"
            for count in COUNTS[:-1]
            for part, whole in zip(run(count), most, strict=True)
            if not torch.equal(part, whole[: len(part)])
        ]
        yield op, "; ".join(different)
