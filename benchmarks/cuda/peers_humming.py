"""FP8 linears and MXFP4 experts against Humming (`humming-kernels`), which compiles its kernels with nvcc when they are first used."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from cuda_checks.inputs import RELEASED
from peer_pairs import DEVICE, Comparison, Pair, difference, inputs, kernels
from torch import Tensor

from deepinfer_backends.cpu_ref.quant import fake_fp8
from deepinfer_core.backend.types import ExpertTensors, QuantTensor, Routing

G = RELEASED
LIMIT = 10.0
DISTINCT = 16  # different experts; the others are copies of them at addresses of their own
LINEARS = {
    "wq_a+wkv": ((G.q_lora, G.head_dim), G.hidden),
    "wq_b": ((G.heads * G.head_dim,), G.q_lora),
    "wo_b": ((G.hidden,), G.o_groups * G.o_lora),
}
BF16 = {"dtype": "bfloat16"}
FP8_32 = {"dtype": "float8e4m3", "group_size": 32}
FP8_128 = {"dtype": "float8e4m3", "group_size": 128}
SWIGLU = f"fminf(a, {LIMIT}f) / (1.0f + __expf(-fminf(a, {LIMIT}f))) * fminf(fmaxf(b, -{LIMIT}f), {LIMIT}f)"


def layer(weight: dict[str, Any], activation: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int], experts: int) -> Any:
    """A Humming layer of [experts,] outputs x inputs in the layout of its kernels."""
    from humming.layer import HummingLayer

    with DEVICE:
        made = HummingLayer(
            shape_n=shape[0],
            shape_k=shape[1],
            weight_config=dict(weight),
            input_config=dict(activation),
            num_experts=experts or None,
            torch_dtype=torch.bfloat16,
        )
    made.load_from_tensors(tensors)
    made.transform()
    return made


@cache
def linear_parts(note: str) -> list[QuantTensor]:
    """Random weights of one of `LINEARS`."""
    parts, size = LINEARS[note]
    return [inputs(5).fp8_weight(n, size) for n in parts]


def tuned(made: Any, rows: int, kind: str) -> dict[str, Any]:
    """Humming's own choice of tiles for `rows` rows: by default it compiles a kernel for every range of rows."""
    from humming.tune import get_heuristics_config

    return {
        "compute_config": {"gemm_type": kind},
        "tuning_config": get_heuristics_config(made.humming_config, shape_m=rows, gemm_type=kind, device=DEVICE),
    }


def linear(note: str, rows: int, activation: dict[str, Any]) -> Pair:
    """A dense FP8 linear. Humming wants one scale per row and 32 inputs: ours are repeated 32 times."""
    parts = linear_parts(note)
    outputs, size = sum(part.weight.shape[0] for part in parts), parts[0].weight.shape[1]
    codes = torch.cat([part.weight.view(torch.int32) for part in parts])
    scales = torch.cat([part.scale.view(torch.uint8).repeat_interleave(32, 0) for part in parts])  # type: ignore[union-attr]
    tensors = {"weight": codes, "weight_scale": scales.view(torch.float8_e8m0fnu)}
    fp8 = {"dtype": "float8e4m3", "group_size": 32, "scale_dtype": "float8e8m0"}
    theirs = layer(fp8, activation, tensors, (outputs, size), 0)
    x = fake_fp8(inputs(rows).f32(rows, size)).bfloat16()
    weight = kernels().prepare_linear(parts)
    quantised = kernels().quantize(x)

    def ours() -> Tensor:
        return kernels().quantized_linear(quantised if activation is BF16 else kernels().quantize(x), weight)

    chosen = tuned(theirs, rows, "dense")
    return Pair(ours, lambda: theirs(x, **chosen), lambda: difference(theirs(x, **chosen), ours()))


@cache
def expert_tensors() -> list[ExpertTensors]:
    i = inputs(6)
    return [i.expert(G) for _ in range(DISTINCT)]


@cache
def our_experts() -> Any:
    """All routed experts, prepared."""
    few = expert_tensors()
    return kernels().prepare_experts((few[e % DISTINCT] for e in range(G.experts)), G.experts)


@cache
def their_experts(kind: str) -> tuple[Any, Any]:
    """(gate and up, down) of all routed experts for `kind` of activations: bf16 or fp8."""
    few = expert_tensors()
    order = torch.arange(G.experts, device=DEVICE) % DISTINCT
    activation = BF16 if kind == "bf16" else FP8_128

    def stacked(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).view(torch.uint8)[order]

    up = {
        "weight": stacked([torch.cat((e.w1.weight, e.w3.weight)) for e in few]),
        "weight_scale": stacked([torch.cat((e.w1.scale.view(torch.uint8), e.w3.scale.view(torch.uint8))) for e in few]),  # type: ignore[union-attr]
    }
    down = {
        "weight": stacked([e.w2.weight for e in few]),
        "weight_scale": stacked([e.w2.scale.view(torch.uint8) for e in few]),  # type: ignore[union-attr]
    }
    mxfp4 = {"quant_method": "mxfp4"}
    return (
        layer(mxfp4, activation, up, (2 * G.intermediate, G.hidden), G.experts),
        layer(mxfp4, activation, down, (G.hidden, G.intermediate), G.experts),
    )


def swiglu(config: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Humming's clamped SwiGLU with the quantisation that the next layer's activations need: (values, their scales)."""
    from humming.forward import may_process_input

    values, groups, tokens = may_process_input(config, x, activation_type="binary_split", activation_impl=SWIGLU)
    return values, groups if groups is not None else tokens


def experts(rows: int, kind: str) -> Pair:
    """Gate and up, SwiGLU, down and the weighted sum over the chosen experts."""
    up, down = their_experts(kind)
    weights = our_experts()
    x = fake_fp8(inputs(rows).f32(rows, G.hidden)).bfloat16()
    routing: Routing = inputs(rows + 1).routing(rows, G.top_k, G.experts)
    quantised = kernels().quantize(x)
    flat = routing.ids.flatten().long()
    order = flat.argsort(stable=True)
    back, source = order.argsort().view(rows, G.top_k), order // G.top_k
    layout = torch.cat((torch.zeros(1, device=DEVICE, dtype=torch.int64), flat.bincount(minlength=G.experts).cumsum(0)))
    up_choice, down_choice = (tuned(made, rows * G.top_k, "grouped_contiguous") for made in (up, down))

    def theirs() -> Tensor:
        hidden, scales = swiglu(down.humming_config, up(x[source], expert_layout=layout, **up_choice))
        out = down(hidden, input_scale=scales, expert_layout=layout, **down_choice)
        return (out[back] * routing.weights.bfloat16()[..., None]).sum(1)

    def ours() -> Tensor:
        return kernels().moe(quantised, routing, weights, None, LIMIT)

    return Pair(ours, theirs, lambda: difference(theirs(), ours()))


def comparisons(rows: int) -> Iterator[Comparison]:
    """Linears with activations as they are and quantised inside; experts with bf16 and with e4m3 activations."""
    for note in LINEARS:
        yield Comparison(
            f"quantized_linear {note}",
            rows,
            "Humming W8A16",
            lambda note=note: linear(note, rows, BF16),
            differs="one weight scale per row; activations are bf16 values on the e4m3 grid",
        )
        yield Comparison(
            f"quantize, quantized_linear {note}",
            rows,
            "Humming W8A8",
            lambda note=note: linear(note, rows, FP8_32),
            5e-2,
            differs="activation scales are not powers of two",
        )
    given = "rows grouped by expert beforehand (ours groups them)"
    yield Comparison("moe", rows, "Humming W4A16", lambda: experts(rows, "bf16"), 5e-2, f"{given}; no e4m3 between the products")
    yield Comparison("moe", rows, "Humming W4A8", lambda: experts(rows, "fp8"), 8e-2, f"{given}; e4m3 scales for 128 values")
