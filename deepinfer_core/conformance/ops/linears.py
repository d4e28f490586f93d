"""Embedding, norms, activation quantisation and linears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.conformance.analysis import Arithmetic, exact
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Exactly, Expectation, Within
from deepinfer_core.conformance.generate import Draw, identity_rows
from deepinfer_core.conformance.ops.shapes import EPS, HIDDEN, Q_RANK, dense, picked, rows_of, seen, spread_rows, tree_bytes, weight

Dims = Mapping[str, Any]

# ------------------------------------------------------------------ embed


def _make_embed(g: Dims, draw: Draw) -> Inputs:
    ids = draw.integers(0, g["vocab"], g["rows"])
    ids[:2] = torch.tensor([0, g["vocab"] - 1])[: g["rows"]]
    return {"ids": ids, "table": draw.normal(g["vocab"], g["dim"], dtype=torch.bfloat16)}


def _expect_embed(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    return {"out": Exactly(i["table"][i["ids"]].to(a.dtype))}


EMBED = OpDescription(
    op="embed",
    bound="exact: bfloat16 values are copied or widened",
    geometries=(
        Geometry("rows", {"rows": 33, "vocab": 130, "dim": 128}, "first and last id"),
        Geometry("no_rows", {"rows": 0, "vocab": 130, "dim": 128}),
        Geometry("one_row", {"rows": 1, "vocab": 130, "dim": 96}),
        Geometry("released", {"rows": 3, "vocab": 1000, "dim": HIDDEN}, "released width", quick=False),
    ),
    make=_make_embed,
    run=lambda k, i: {"out": k.embed(i["ids"], i["table"])},
    expect=_expect_embed,
    cost=lambda i: Cost(8 * len(i["ids"]) + 4 * len(i["ids"]) * i["table"].shape[1], 0),
    rows=rows_of("ids"),
    presets={
        "decode-1": {"rows": 1, "vocab": 16384, "dim": HIDDEN},
        "decode-64": {"rows": 64, "vocab": 16384, "dim": HIDDEN},
        "prefill-8k": {"rows": 8192, "vocab": 16384, "dim": HIDDEN},
    },
)

# ------------------------------------------------------------------ norms and quantisation


def _make_norm(g: Dims, draw: Draw) -> Inputs:
    if g.get("content") == "unit":  # the norm changes nothing: what is left are the signs and the weights, exactly
        x = (draw.integers(0, 2, g["rows"], g["dim"]) * 2 - 1).to(draw.dtype) * 4.0
        weight = draw.normal(g["dim"]) * torch.exp2(draw.integers(-14, 1, g["dim"]).float())
        return {"x": x, "weight": weight.bfloat16(), "eps": EPS}
    x = spread_rows(draw, g["rows"], g["dim"], g.get("content", "normal"))
    return {"x": x.float() if g.get("wide") else x, "weight": draw.norm_weight(g["dim"]), "eps": g.get("eps", EPS)}


def _norm(a: Arithmetic, i: Inputs) -> Any:
    return a.rounded(a.rms_norm(exact(i["x"]), i["weight"], i["eps"]))


_NORM_GEOMETRIES = (
    Geometry("rows", {"rows": 33, "dim": 128}),
    Geometry("no_rows", {"rows": 0, "dim": 128}),
    Geometry("one_row", {"rows": 1, "dim": 64}),
    Geometry("strided", {"rows": 9, "dim": 128, "content": "strided"}, "rows that do not lie one after the other"),
    Geometry("extreme", {"rows": 40, "dim": 96, "content": "extreme"}, "tiny, huge and zero rows"),
    Geometry("large_eps", {"rows": 5, "dim": 64, "eps": 0.5}, "eps inside the square root"),
    Geometry("released", {"rows": 5, "dim": HIDDEN}, "released width"),
)

_NORM_PRESETS = {
    "decode-1": {"rows": 1, "dim": HIDDEN},
    "decode-64": {"rows": 64, "dim": HIDDEN},
    "prefill-8k": {"rows": 8192, "dim": HIDDEN},
}

RMS_NORM = OpDescription(
    op="rms_norm",
    bound="float32 mean of squares and reciprocal root (4 roundings and the sum's), then the activation dtype's rounding",
    geometries=(*_NORM_GEOMETRIES, Geometry("float32_input", {"rows": 7, "dim": 128, "wide": True}, "float32 rows in either arithmetic")),
    make=_make_norm,
    run=lambda k, i: {"out": k.rms_norm(i["x"], i["weight"], i["eps"])},
    expect=lambda a, i, got: {"out": Within(_norm(a, i), a.dtype)},
    cost=lambda i: Cost(2 * tree_bytes(i["x"]), 4.0 * i["x"].numel()),
    rows=rows_of("x"),
    presets=_NORM_PRESETS,
)

RMS_NORM_QUANTIZE = OpDescription(
    op="rms_norm_quantize",
    bound="rms_norm, then the FP8 grid at both ends of its interval; seen through a picking quantized_linear, which is exact",
    geometries=(
        *_NORM_GEOMETRIES,
        Geometry("unit", {"rows": 9, "dim": 256, "content": "unit"}, "exact down to the grid: scales, saturation"),
    ),
    make=_make_norm,
    run=lambda k, i: {"out": seen(k, k.rms_norm_quantize(i["x"], i["weight"], i["eps"]), i["x"].shape[1])},
    expect=lambda a, i, got: {"out": Within(a.rounded(a.fp8(_norm(a, i))[:, picked(i["x"].shape[1])]), a.dtype)},
    cost=lambda i: Cost(1.5 * tree_bytes(i["x"]), 6.0 * i["x"].numel()),
    rows=rows_of("x"),
    presets=_NORM_PRESETS,
    prepare=lambda k, i: lambda: k.rms_norm_quantize(i["x"], i["weight"], i["eps"]),
)


def _make_quantize(g: Dims, draw: Draw) -> Inputs:
    x = spread_rows(draw, g["rows"], g["dim"], g.get("content", "normal"))
    if g.get("content") == "boundaries":
        # Blocks whose largest value sits on, just below and just above 448 * 2^k, and values halfway between grid points.
        tops = torch.tensor([448.0, 446.0, 450.0, 240.0, 1e-4, 5e-5, 0.0, 1.0])[:, None]
        ties = torch.tensor([1.0625, 1.1875, 17.0, 19.0, -21.0, 2.0**-9 * 0.5, 2.0**-9 * 1.5, -(2.0**-7)])
        x = torch.cat([tops, ties.repeat(8, 1) * (tops > 1), torch.zeros(8, 23)], 1).to(draw.dtype)
        x = torch.cat([x, x * 2.0**-20, x * 2.0**20])
    return {"x": x}


QUANTIZE = OpDescription(
    op="quantize",
    bound="exact: the scale is a power of two, the values are rounded to nearest even (identity in ideal numerics)",
    geometries=(
        Geometry("rows", {"rows": 33, "dim": 128}),
        Geometry("no_rows", {"rows": 0, "dim": 64}),
        Geometry("one_block", {"rows": 1, "dim": 32}),
        Geometry("strided", {"rows": 9, "dim": 96, "content": "strided"}),
        Geometry("extreme", {"rows": 40, "dim": 96, "content": "extreme"}, "scales over the whole range, zero rows"),
        Geometry("boundaries", {"rows": 1, "dim": 32, "content": "boundaries"}, "scale rounded down, ties to odd, amax floor"),
        Geometry("released", {"rows": 3, "dim": HIDDEN}),
    ),
    make=_make_quantize,
    run=lambda k, i: {"out": seen(k, k.quantize(i["x"]), i["x"].shape[1])},
    expect=lambda a, i, got: {"out": Within(a.rounded(a.fp8(exact(i["x"]))[:, picked(i["x"].shape[1])]), a.dtype)},
    cost=lambda i: Cost(1.5 * tree_bytes(i["x"]), 3.0 * i["x"].numel()),
    rows=rows_of("x"),
    presets=_NORM_PRESETS,
    prepare=lambda k, i: lambda: k.quantize(i["x"]),
)

# ------------------------------------------------------------------ linears


def _make_linear(g: Dims, draw: Draw) -> Inputs:
    parts = [weight(draw, g["format"], out, g["dim"]) for out in g["outs"]]
    return {"x": spread_rows(draw, g["rows"], g["dim"], g.get("content", "normal")), "parts": parts, "out_dtype": g.get("out_dtype")}


def _stacked(parts: list[Any]) -> Tensor:
    return torch.cat([dense(part) for part in parts])


def _run_linear(k: Kernels, i: Inputs) -> Outputs:
    return {"out": k.linear(i["x"], k.prepare_linear(i["parts"]), i["out_dtype"])}


def _expect_linear(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    y = a.product(exact(i["x"]), _stacked(i["parts"]))
    if i["out_dtype"] is torch.float32:
        return {"out": Within(y, torch.float32)}
    return {"out": Within(a.rounded(y), a.dtype)}


def _linear_cost(i: Inputs) -> Cost:
    out = sum(part.weight.shape[0] for part in i["parts"])
    return Cost(tree_bytes((i["x"], i["parts"])) + 2.0 * len(i["x"]) * out, 2.0 * i["x"].numel() * out)


def _prepared_linear(k: Kernels, i: Inputs) -> Any:
    prepared = k.prepare_linear(i["parts"])
    return lambda: k.linear(i["x"], prepared, i["out_dtype"])


_BF16: Dims = {"format": WeightFormat.BF16}
_FP8: Dims = {"format": WeightFormat.FP8_B32}
_F32 = torch.float32

LINEAR = OpDescription(
    op="linear",
    bound="float32 accumulation of K exact products; rounded once unless float32 is asked for",
    geometries=(
        Geometry("rows", {**_BF16, "rows": 33, "dim": 128, "outs": (72,)}),
        Geometry("no_rows", {**_BF16, "rows": 0, "dim": 64, "outs": (32,)}),
        Geometry("one_row", {**_BF16, "rows": 1, "dim": 192, "outs": (40,)}),
        Geometry("float32_out", {**_BF16, "rows": 17, "dim": 256, "outs": (8, 24), "out_dtype": _F32}, "the accumulator itself"),
        Geometry("strided", {**_BF16, "rows": 9, "dim": 96, "outs": (64,), "content": "strided"}),
        Geometry("extreme", {**_BF16, "rows": 24, "dim": 64, "outs": (32,), "content": "extreme", "out_dtype": _F32}),
        Geometry("released", {**_BF16, "rows": 5, "dim": HIDDEN, "outs": (512, 512), "out_dtype": _F32}, "compressor", quick=False),
    ),
    make=_make_linear,
    run=_run_linear,
    expect=_expect_linear,
    cost=_linear_cost,
    rows=rows_of("x"),
    presets={
        name: {**_BF16, "rows": rows, "dim": HIDDEN, "outs": (512, 512), "out_dtype": _F32}
        for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))
    },
    prepare=_prepared_linear,
)


def _run_quantized(k: Kernels, i: Inputs) -> Outputs:
    return {"out": k.quantized_linear(k.quantize(i["x"]), k.prepare_linear(i["parts"]))}


def _expect_quantized(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    return {"out": Within(a.rounded(a.product(a.fp8(exact(i["x"])), _stacked(i["parts"]))), a.dtype)}


def _prepared_quantized(k: Kernels, i: Inputs) -> Any:
    prepared, x = k.prepare_linear(i["parts"]), k.quantize(i["x"])
    return lambda: k.quantized_linear(x, prepared)


def _quantized_cost(i: Inputs) -> Cost:
    whole = _linear_cost(i)
    return Cost(whole.bytes - tree_bytes(i["x"]) + 33 / 32 * i["x"].numel(), whole.flops)


QUANTIZED_LINEAR = OpDescription(
    op="quantized_linear",
    bound="float32 accumulation of K exact products (e4m3 times e4m3 times powers of two), rounded once",
    geometries=(
        Geometry("rows", {**_FP8, "rows": 33, "dim": 128, "outs": (96,)}, weights=WeightFormat.FP8_B32),
        Geometry("no_rows", {**_FP8, "rows": 0, "dim": 64, "outs": (32,)}, weights=WeightFormat.FP8_B32),
        Geometry("one_row", {**_FP8, "rows": 1, "dim": 160, "outs": (64,)}, weights=WeightFormat.FP8_B32),
        Geometry("stacked", {**_FP8, "rows": 17, "dim": 256, "outs": (64, 32, 96)}, "parts side by side", weights=WeightFormat.FP8_B32),
        Geometry("extreme", {**_FP8, "rows": 24, "dim": 96, "outs": (64,), "content": "extreme"}, weights=WeightFormat.FP8_B32),
        Geometry("many_rows", {**_FP8, "rows": 129, "dim": 64, "outs": (32,)}, "one past a tile of 128", weights=WeightFormat.FP8_B32),
        Geometry(
            "released", {**_FP8, "rows": 3, "dim": HIDDEN, "outs": (Q_RANK, 512)}, "wq_a and wkv", quick=False, weights=WeightFormat.FP8_B32
        ),
    ),
    make=_make_linear,
    run=_run_quantized,
    expect=_expect_quantized,
    cost=_quantized_cost,
    rows=rows_of("x"),
    presets={
        name: {**_FP8, "rows": rows, "dim": HIDDEN, "outs": (Q_RANK, 512)}
        for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))
    },
    prepare=_prepared_quantized,
)


def _make_prepare(g: Dims, draw: Draw) -> Inputs:
    columns = draw.permutation(g["dim"])[:16]
    return {"x": identity_rows(g["dim"], columns).to(draw.dtype), "parts": [weight(draw, g["format"], out, g["dim"]) for out in g["outs"]]}


def _run_prepare(k: Kernels, i: Inputs) -> Outputs:
    prepared = k.prepare_linear(i["parts"])
    if i["parts"][0].scale is None:
        return {"columns": k.linear(i["x"], prepared)}
    return {"columns": k.quantized_linear(k.quantize(i["x"]), prepared)}


def _expect_prepare(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    columns = i["x"].argmax(1)
    return {"columns": Exactly(_stacked(i["parts"])[:, columns].t().contiguous().to(a.dtype))}


PREPARE_LINEAR = OpDescription(
    op="prepare_linear",
    bound="exact: one-hot rows return the weight's columns, and every decoded weight is a bfloat16 value",
    geometries=(
        Geometry("bf16", {**_BF16, "dim": 96, "outs": (40,)}, weights=WeightFormat.BF16),
        Geometry("bf16_stacked", {**_BF16, "dim": 64, "outs": (8, 24, 1)}, weights=WeightFormat.BF16),
        Geometry("fp8", {**_FP8, "dim": 128, "outs": (96,)}, "scale blocks of 32 x 32", weights=WeightFormat.FP8_B32),
        Geometry("fp8_stacked", {**_FP8, "dim": 96, "outs": (64, 32)}, "each part's own scales", weights=WeightFormat.FP8_B32),
    ),
    make=_make_prepare,
    run=_run_prepare,
    expect=_expect_prepare,
    cost=lambda i: Cost(2 * tree_bytes(i["parts"]), 0),
)

OPS = (EMBED, RMS_NORM, RMS_NORM_QUANTIZE, QUANTIZE, LINEAR, QUANTIZED_LINEAR, PREPARE_LINEAR)
