"""Hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.types import HcConstants, HcWeights
from deepinfer_core.conformance.analysis import U32, Approx, Arithmetic, exact, sigmoid
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Expectation, Within
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.ops.shapes import EPS, HIDDEN, STREAMS, picked, rows_of, seen, tree_bytes
from deepinfer_core.conformance.trees import strided

Dims = Mapping[str, Any]


def _streams(g: Dims, draw: Draw) -> Tensor:
    streams = draw.activation(g["rows"], g.get("streams", STREAMS), g["dim"])
    if g.get("content") == "extreme":
        streams = streams * torch.exp2(draw.integers(-20, 21, g["rows"], 1, 1).float()).to(streams.dtype)
    return strided(streams) if g.get("content") == "strided" else streams


def _mix(g: Dims, draw: Draw) -> Tensor:
    """Collapse weights: positive, as sigmoids are."""
    return draw.uniform(g["rows"], g.get("streams", STREAMS)) + 0.01


_SHAPES = (
    Geometry("rows", {"rows": 33, "dim": 64}),
    Geometry("no_rows", {"rows": 0, "dim": 64}),
    Geometry("one_row", {"rows": 1, "dim": 96}),
    Geometry("strided", {"rows": 9, "dim": 64, "content": "strided"}),
    Geometry("extreme", {"rows": 17, "dim": 64, "content": "extreme"}, "streams of very different size"),
    Geometry("released", {"rows": 3, "dim": HIDDEN}, "released width"),
)
_PRESETS = {name: {"rows": rows, "dim": HIDDEN} for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))}

# ------------------------------------------------------------------ hc_pre


def _make_pre(g: Dims, draw: Draw) -> Inputs:
    m, size = g.get("streams", STREAMS), g.get("streams", STREAMS) * (g.get("streams", STREAMS) + 2)
    fn = draw.normal(size, m * g["dim"], scale=(m * g["dim"]) ** -0.5 * g.get("gain", 1.0))
    weights = HcWeights(fn, draw.normal(size, scale=0.5 * g.get("gain", 1.0)), torch.tensor([0.5, 0.7, 0.9]))
    return {
        "streams": _streams(g, draw),
        "pre": _mix(g, draw),
        "weights": weights,
        "norm_weight": draw.norm_weight(g["dim"]),
        "constants": HcConstants(EPS, 1e-6, g.get("iterations", 20)),
    }


def _run_pre(k: Kernels, i: Inputs) -> Outputs:
    out = k.hc_pre(i["streams"], i["pre"], i["weights"], i["norm_weight"], i["constants"])
    return {"x": out.x, "quantized": seen(k, out.quantized, i["streams"].shape[2]), "pre": out.pre, "post": out.post, "comb": out.comb}


def _sinkhorn(logits: Approx, iterations: int, eps: float) -> Approx:
    """Scaling rows and columns is a contraction: logits off by d move a result by at most 4 d, relative, and roundings do not pile up."""
    m = logits.value.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    spread = logits.radius.flatten(1).amax(1)[:, None, None] if len(m) else logits.radius
    return Approx(m, m * (4 * torch.expm1(spread) + 64 * U32))


def _expect_pre(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    m, w, c = i["streams"].shape[1], i["weights"], i["constants"]
    flat = exact(i["streams"].flatten(1))
    mean = flat.value.square().mean(1, keepdim=True) + c.norm_eps
    rstd = Approx(mean.rsqrt(), (4 * U32 + a.accumulation(flat.value.shape[1]) / 2) * mean.rsqrt())
    scale = w.scale.double()[torch.tensor([0] * m + [1] * m + [2] * m * m)]
    mix = a.product(flat, w.fn).times(rstd).times(exact(scale)).plus(exact(w.base))
    gates = mix[:, : 2 * m].monotone(sigmoid, 6)
    comb = _sinkhorn(mix[:, 2 * m :].view(-1, m, m), c.sinkhorn_iters, c.hc_eps)
    x = a.rounded(a.rms_norm(a.rounded(_collapsed(a, i["streams"], i["pre"])), i["norm_weight"], c.norm_eps))
    out = got.get("x")
    quantized = a.fp8(exact(out)) if out is not None and out.shape == x.value.shape else a.fp8(x)
    return {
        "x": Within(x, a.dtype),
        "quantized": Within(a.rounded(quantized[:, picked(i["streams"].shape[2])]), a.dtype),
        "pre": Within(gates[:, :m].plus(exact(torch.full_like(gates.value[:, :m], c.hc_eps))), torch.float32),
        "post": Within(gates[:, m:].times(exact(torch.full_like(gates.value[:, m:], 2.0))), torch.float32),
        "comb": Within(comb, torch.float32),
    }


def _collapsed(a: Arithmetic, streams: Tensor, pre: Tensor) -> Approx:
    return a.sum(exact(streams).times(exact(pre[:, :, None].expand(streams.shape))), 1)


HC_PRE = OpDescription(
    op="hc_pre",
    bound="float32 products and sums of m*D terms through sigmoid and Sinkhorn; x: rms_norm of a rounded collapse; `quantized` exactly x's",
    geometries=(
        *_SHAPES,
        Geometry("one_iteration", {"rows": 5, "dim": 64, "iterations": 1}, "Sinkhorn iteration count"),
        Geometry("two_iterations", {"rows": 5, "dim": 64, "iterations": 2, "gain": 3.0}, "rows before columns"),
        Geometry("two_streams", {"rows": 5, "dim": 64, "streams": 2}, "m other than 4"),
        Geometry("strong", {"rows": 9, "dim": 64, "gain": 8.0}, "saturated gates, nearly one-hot mixes"),
    ),
    make=_make_pre,
    run=_run_pre,
    expect=_expect_pre,
    cost=lambda i: Cost(
        tree_bytes((i["streams"], i["weights"])) + 3.0 * i["streams"].numel() / i["streams"].shape[1],
        2.0 * i["streams"].numel() * (len(i["weights"].base) + 4),
    ),
    rows=rows_of("streams", "pre"),
    presets=_PRESETS,
    prepare=lambda k, i: lambda: k.hc_pre(i["streams"], i["pre"], i["weights"], i["norm_weight"], i["constants"]),
)

# ------------------------------------------------------------------ hc_post, hc_collapse, stream_mean


def _make_post(g: Dims, draw: Draw) -> Inputs:
    m = g.get("streams", STREAMS)
    y = draw.activation(g["rows"], g["dim"])
    return {
        "streams": _streams(g, draw),
        "y": strided(y) if g.get("content") == "strided" else y,
        "post": 2 * draw.uniform(g["rows"], m),
        "comb": draw.uniform(g["rows"], m, m),
    }


def _expect_post(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    streams, comb = exact(i["streams"]), i["comb"].double()  # comb[t, j, k] weights old stream j in new stream k
    terms = [exact(i["y"][:, None].expand(streams.value.shape)).times(exact(i["post"][:, :, None].expand(streams.value.shape)))]
    for j in range(streams.value.shape[1]):
        terms.append(streams[:, j : j + 1].times(exact(comb[:, j, :, None])))
    shape = streams.value.shape
    values = torch.stack([t.value.expand(shape) for t in terms])
    radii = torch.stack([t.radius.expand(shape) for t in terms])
    return {"out": Within(a.rounded(a.sum(Approx(values, radii), 0)), a.dtype)}


HC_POST = OpDescription(
    op="hc_post",
    bound="float32 sum of m + 1 products, rounded once",
    geometries=(*_SHAPES, Geometry("two_streams", {"rows": 5, "dim": 64, "streams": 2})),
    make=_make_post,
    run=lambda k, i: {"out": k.hc_post(i["streams"], i["y"], i["post"], i["comb"])},
    expect=_expect_post,
    cost=lambda i: Cost(2 * tree_bytes(i["streams"]) + tree_bytes((i["y"], i["post"], i["comb"])), 10.0 * i["streams"].numel()),
    mutates=frozenset({"streams"}),
    may_alias=True,
    rows=rows_of("streams", "y", "post", "comb"),
    presets=_PRESETS,
)

HC_COLLAPSE = OpDescription(
    op="hc_collapse",
    bound="float32 sum of m products, rounded once",
    geometries=_SHAPES,
    make=lambda g, draw: {"streams": _streams(g, draw), "pre": _mix(g, draw)},
    run=lambda k, i: {"out": k.hc_collapse(i["streams"], i["pre"])},
    expect=lambda a, i, got: {"out": Within(a.rounded(_collapsed(a, i["streams"], i["pre"])), a.dtype)},
    cost=lambda i: Cost(1.25 * tree_bytes(i["streams"]), 2.0 * i["streams"].numel()),
    rows=rows_of("streams", "pre"),
    presets=_PRESETS,
)


def _expect_mean(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    m = i["streams"].shape[1]
    total = a.sum(exact(i["streams"]), 1)
    return {"out": Within(a.rounded(Approx(total.value / m, total.radius / m).noise(1)), a.dtype)}


STREAM_MEAN = OpDescription(
    op="stream_mean",
    bound="float32 mean of m values, rounded once",
    geometries=(*_SHAPES, Geometry("two_streams", {"rows": 5, "dim": 64, "streams": 2})),
    make=lambda g, draw: {"streams": _streams(g, draw)},
    run=lambda k, i: {"out": k.stream_mean(i["streams"])},
    expect=_expect_mean,
    cost=lambda i: Cost(1.25 * tree_bytes(i["streams"]), float(i["streams"].numel())),
    rows=rows_of("streams"),
    presets=_PRESETS,
)

OPS = (HC_PRE, HC_POST, HC_COLLAPSE, STREAM_MEAN)
