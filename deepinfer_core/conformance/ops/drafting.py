"""Heads of the drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_core.conformance.analysis import Approx, Arithmetic, exact, sigmoid
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Expectation, Within
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.ops.shapes import HIDDEN, VOCAB, dense, rows_of, spread_rows, tree_bytes

Dims = Mapping[str, Any]
_RANK = 256
_PRESETS = {
    "decode-1": {"rows": 1, "vocab": VOCAB, "rank": _RANK, "dim": HIDDEN},
    "decode-64": {"rows": 64, "vocab": VOCAB, "rank": _RANK, "dim": HIDDEN},
}


def _previous(g: Dims, draw: Draw) -> Inputs:
    ids = draw.integers(0, g["vocab"], g["rows"])
    ids[:2] = torch.tensor([0, g["vocab"] - 1])[: g["rows"]]
    return {"previous": ids, "embed": draw.normal(g["vocab"], g["rank"], dtype=torch.bfloat16)}


def _make_markov(g: Dims, draw: Draw) -> Inputs:
    base = draw.normal(g["rows"], g["vocab"], scale=g.get("scale", 4.0))
    return {**_previous(g, draw), "base": base, "head": draw.bf16_weight(g["vocab"], g["rank"])}


def _expect_markov(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    product = a.product(exact(i["embed"][i["previous"]]), dense(i["head"]))
    return {"out": Within(exact(i["base"]).plus(product), torch.float32)}


def _prepared_markov(k: Any, i: Inputs) -> Any:
    head = k.prepare_linear([i["head"]])
    return lambda: k.markov_logits(i["base"], i["previous"], i["embed"], head)


_SMALL = {"vocab": 70, "rank": 32, "dim": 64}

MARKOV_LOGITS = OpDescription(
    op="markov_logits",
    bound="float32 product of `rank` terms, added to the base in float32",
    geometries=(
        Geometry("rows", {**_SMALL, "rows": 17}),
        Geometry("no_rows", {**_SMALL, "rows": 0}),
        Geometry("one_row", {**_SMALL, "rows": 1}),
        Geometry("large_base", {**_SMALL, "rows": 5, "scale": 1e4}),
        Geometry("released", {"vocab": 2000, "rank": _RANK, "rows": 5}, "released rank"),
    ),
    make=_make_markov,
    run=lambda k, i: {"out": _prepared_markov(k, i)()},
    expect=_expect_markov,
    cost=lambda i: Cost(2 * tree_bytes(i["base"]) + tree_bytes(i["head"]), 2.0 * len(i["base"]) * i["head"].weight.numel()),
    rows=rows_of("base", "previous"),
    presets=_PRESETS,
    prepare=_prepared_markov,
)


def _make_confidence(g: Dims, draw: Draw) -> Inputs:
    size = g["dim"] + g["rank"]
    return {
        **_previous(g, draw),
        "hidden": spread_rows(draw, g["rows"], g["dim"], g.get("content", "normal")),
        "weight": draw.normal(1, size, dtype=torch.bfloat16, scale=g.get("gain", 1.0) * size**-0.5),
        "temperature": g.get("temperature", 1.0),
    }


def _expect_confidence(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    features = torch.cat([i["hidden"].double(), i["embed"][i["previous"]].double()], 1)
    z = a.product(exact(features), i["weight"])[:, 0]
    z = Approx(z.value / i["temperature"], z.radius / i["temperature"]).noise(2)
    z = z.monotone(lambda x: x.clamp(-60, 60), 0)
    value = sigmoid(z.value)
    relative = torch.expm1(z.radius) * (1 - value).clamp_min(2**-20)  # d sigmoid = sigmoid (1 - sigmoid) dz
    return {"out": Within(Approx(value, value * relative).noise(1, value * (8 + 2 * z.value.abs())), torch.float32)}


CONFIDENCE = OpDescription(
    op="confidence",
    bound="float32 product through a clamp and a sigmoid",
    geometries=(
        Geometry("rows", {**_SMALL, "rows": 17}),
        Geometry("no_rows", {**_SMALL, "rows": 0}),
        Geometry("one_row", {**_SMALL, "rows": 1}),
        Geometry("temperature", {**_SMALL, "rows": 17, "temperature": 0.25, "gain": 2.0}),
        Geometry("clamped", {**_SMALL, "rows": 33, "gain": 100.0}, "arguments beyond 60"),
        Geometry("strided", {**_SMALL, "rows": 9, "content": "strided"}),
        Geometry("released", {"vocab": 100, "rank": _RANK, "dim": HIDDEN, "rows": 5}),
    ),
    make=_make_confidence,
    run=lambda k, i: {"out": k.confidence(i["hidden"], i["previous"], i["embed"], i["weight"], i["temperature"])},
    expect=_expect_confidence,
    cost=lambda i: Cost(tree_bytes((i["hidden"], i["weight"])), 2.0 * len(i["hidden"]) * i["weight"].numel()),
    rows=rows_of("hidden", "previous"),
    presets=_PRESETS,
)

OPS = (MARKOV_LOGITS, CONFIDENCE)
