"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import Numerics, WeightFormat
from deepinfer_core.backend.types import ExpertTensors, QuantTensor, Routing
from deepinfer_core.conformance.analysis import Approx, Arithmetic, exact
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Expectation, Judged, Verdict, Within, failed, worst, wrong_form
from deepinfer_core.conformance.generate import Draw, identity_rows
from deepinfer_core.conformance.ops.shapes import EXPERT_DIM, EXPERTS, HIDDEN, dense, rows_of, spread_rows, tree_bytes
from deepinfer_core.conformance.trees import strided

Dims = Mapping[str, Any]
_FP4, _FP8, _BF16 = WeightFormat.FP4_G32, WeightFormat.FP8_B32, WeightFormat.BF16

# ------------------------------------------------------------------ moe_gate


def _make_gate(g: Dims, draw: Draw) -> Inputs:
    rows, experts, dim = g["rows"], g["experts"], g["dim"]
    bias = draw.normal(rows, experts, scale=0.3) if g.get("row_bias") else draw.normal(experts, scale=0.3)
    x, weight = draw.activation(rows, dim, scale=g.get("scale", 1.0)), draw.bf16_weight(experts, dim)
    if g.get("content") == "ties":  # equal experts, equal biases: only the expert number decides
        half = experts // 2
        x = draw.integers(-2, 3, rows, dim).to(draw.dtype)
        weight = QuantTensor(draw.integers(-1, 2, half, dim).bfloat16().repeat(2, 1) * 0.25)
        bias = draw.integers(-2, 3, half).float().repeat(2) * 0.5
    return {
        "x": strided(x) if g.get("content") == "strided" else x,
        "weight": weight,
        "bias": bias,
        "top_k": g["top_k"],
        "scale": 1.5,
    }


def _run_gate(k: Any, i: Inputs) -> Outputs:
    routing = k.moe_gate(i["x"], k.prepare_linear([i["weight"]]), i["bias"], i["top_k"], i["scale"])
    return {"ids": routing.ids, "weights": routing.weights}


def _gate_scores(a: Arithmetic, i: Inputs) -> Approx:
    logits = a.product(exact(i["x"]), dense(i["weight"]))
    return logits.monotone(lambda x: torch.nn.functional.softplus(x, threshold=1e9).sqrt(), 8)


def _expect_gate(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    scores = _gate_scores(a, i)
    biased = scores.plus(exact(i["bias"].expand(scores.value.shape)))

    def judge_ids(ids: Tensor) -> Verdict:
        if problem := wrong_form(ids, (len(i["x"]), i["top_k"]), torch.int32):
            return problem
        return _ordered(biased, ids.long())

    def judge_weights(weights: Tensor) -> Verdict:
        ids = got["ids"].long()
        if problem := wrong_form(weights, (len(i["x"]), i["top_k"]), torch.float32):
            return problem
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= scores.value.shape[1]):
            return failed("weights cannot be judged: expert ids are out of range")
        chosen = Approx(scores.value.gather(1, ids), scores.radius.gather(1, ids))
        total = chosen.value.sum(1, keepdim=True) + 1e-20
        value = chosen.value / total * i["scale"]
        spread = (chosen.radius + chosen.value * chosen.radius.sum(1, keepdim=True) / total) / total * i["scale"]
        return worst(weights.double(), Approx(value, spread).noise(8))

    return {"ids": Judged(judge_ids), "weights": Judged(judge_weights)}


def _ordered(scores: Approx, ids: Tensor) -> Verdict:
    """Whether ids are each row's best experts by falling score; equal scores of equal inputs go to the lower expert."""
    experts = scores.value.shape[1]
    for row in range(len(ids)):
        mine = ids[row]
        if len(mine.unique()) != len(mine) or int(mine.min()) < 0 or int(mine.max()) >= experts:
            return failed("expert ids repeat or are out of range", f"{len(mine)} ids in 0..{experts - 1}", mine.tolist(), (row,))
        value, low, high = scores.value[row], scores.low[row], scores.high[row]
        left = torch.ones(experts, dtype=torch.bool)
        for place, expert in enumerate(mine.tolist()):
            left[expert] = False
            better = left & (low > high[expert])
            # Experts with the same inputs have the same score, whatever the rounding: the lower id comes first.
            twin = left & (value == value[expert]) & (torch.arange(experts) < expert)
            if better.any() or twin.any():
                other = int((better | twin).nonzero()[0])
                note = (
                    "an expert with a higher score comes later or not at all"
                    if better.any()
                    else "a tie was not broken towards the lower id"
                )
                return failed(note, f"{other} ({value[other]:.6g})", f"{expert} ({value[expert]:.6g})", (row, place))
    return Verdict(0.0)


def _gate_rows(inputs: Inputs, index: Tensor) -> Inputs:
    names = ("x", "bias") if inputs["bias"].dim() == 2 else ("x",)
    return rows_of(*names)(inputs, index)


def _prepared_gate(k: Any, i: Inputs) -> Any:
    weight = k.prepare_linear([i["weight"]])
    return lambda: k.moe_gate(i["x"], weight, i["bias"], i["top_k"], i["scale"])


_G = {"experts": 16, "dim": 64, "top_k": 4}

MOE_GATE = OpDescription(
    op="moe_gate",
    bound="float32 logits: experts may swap only if their intervals overlap; exact ties go to the lower id; weights in float32",
    geometries=(
        Geometry("rows", {**_G, "rows": 33}),
        Geometry("no_rows", {**_G, "rows": 0}),
        Geometry("one_row", {**_G, "rows": 1}),
        Geometry("row_bias", {**_G, "rows": 17, "row_bias": True}, "a bias for each row (image positions)"),
        Geometry("top_1", {**_G, "rows": 9, "top_k": 1}),
        Geometry("all_experts", {**_G, "rows": 9, "top_k": 16}),
        Geometry("ties", {**_G, "rows": 33, "content": "ties"}, "experts with equal scores"),
        Geometry("strided", {**_G, "rows": 9, "content": "strided"}),
        Geometry("extreme", {**_G, "rows": 17, "scale": 40.0}, "softplus far out on both sides"),
        Geometry("released", {"rows": 9, "experts": EXPERTS, "dim": HIDDEN, "top_k": 6}),
    ),
    make=_make_gate,
    run=_run_gate,
    expect=_expect_gate,
    cost=lambda i: Cost(tree_bytes((i["x"], i["weight"])), 2.0 * len(i["x"]) * i["weight"].weight.numel()),
    rows=_gate_rows,
    presets={
        name: {"rows": rows, "experts": EXPERTS, "dim": HIDDEN, "top_k": 6}
        for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))
    },
    prepare=_prepared_gate,
)

# ------------------------------------------------------------------ moe


def _make_moe(g: Dims, draw: Draw) -> Inputs:
    rows, experts, top_k = g["rows"], g["experts"], g["top_k"]
    different = g.get("different", experts)  # benchmark on small machines: several experts may share their tensors
    tensors = [draw.expert(g["kind"], g["dim"], g["inner"]) for _ in range(different)]
    ids = torch.stack([draw.permutation(g.get("used", experts))[:top_k] for _ in range(rows)]) if rows else torch.zeros(0, top_k)
    if g.get("dropped"):
        ids[draw.uniform(rows, top_k) < 0.3] = -1
    x = spread_rows(draw, rows, g["dim"], "normal") * g.get("scale", 1.0)
    return {
        "x": x,
        "routing": Routing(ids.int(), draw.uniform(rows, top_k) + 0.1),
        "experts": [tensors[e % different] for e in range(experts)],
        "shared": draw.expert("fp8" if g["kind"] == "fp4" else g["kind"], g["dim"], g["inner"]) if g.get("shared") else None,
        "limit": g.get("limit", 10.0),
    }


def _saturated(g: Dims, draw: Draw) -> Inputs:
    """Inputs for which every intermediate is known to the last bit: gates above the limit, small integers for up."""
    inputs = _make_moe(g, draw)
    rows, dim, inner = g["rows"], g["dim"], g["inner"]
    x = torch.zeros(rows, dim)
    x[:, 0] = 4.0
    x[:, 32:] = draw.integers(-3, 4, rows, dim - 32).float()
    ones = torch.full((1, 1), 127, dtype=torch.uint8)

    def fp4(values: Tensor) -> QuantTensor:
        codes = torch.bucketize(values.abs(), torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])).to(torch.uint8)
        codes |= torch.signbit(values).to(torch.uint8) << 3
        scale = ones.expand(len(values), values.shape[1] // 32).contiguous().view(torch.float8_e8m0fnu)
        return QuantTensor((codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8), scale)

    experts = []
    for expert in inputs["experts"]:
        gate = torch.zeros(inner, dim)
        gate[:, 0] = 6.0  # gate = 24
        columns = 32 + draw.integers(0, dim - 32, inner)
        experts.append(ExpertTensors(fp4(gate), expert.w2, fp4(identity_rows(dim, columns))))
    weights = torch.exp2(draw.integers(-3, 2, *inputs["routing"].weights.shape).float())
    return {**inputs, "x": x.to(draw.dtype), "experts": experts, "routing": inputs["routing"]._replace(weights=weights)}


def _run_moe(k: Any, i: Inputs) -> Outputs:
    return {"out": _prepared_moe(k, i)()}


def _prepared_moe(k: Any, i: Inputs) -> Any:
    experts = k.prepare_experts(iter(i["experts"]), len(i["experts"]))
    shared = None if i["shared"] is None else k.prepare_experts(iter([i["shared"]]), 1)
    x = k.quantize(i["x"])
    return lambda: k.moe(x, i["routing"], experts, shared, i["limit"])


def _expert(a: Arithmetic, x: Approx, expert: ExpertTensors, weights: Tensor, limit: float) -> Approx:
    """Output of one expert for the rows x, their routing weights float64 [rows, 1]. gate, up and the result may be rounded or not."""
    gate = a.maybe_rounded(a.product(x, dense(expert.w1)))
    up = a.maybe_rounded(a.product(x, dense(expert.w3)))
    gate = gate.monotone(lambda v: v.clamp_max(limit), 0)
    up = up.monotone(lambda v: v.clamp(-limit, limit), 0)
    silu = gate.value * torch.sigmoid(gate.value)
    slope = 1.1 * gate.radius  # |silu'| <= 1.1
    act = Approx(silu, slope).noise(6 + 2 * float(gate.value.abs().amax()) if gate.value.numel() else 6)
    act = act.times(up).times(Approx(weights, torch.zeros_like(weights)))
    return a.maybe_rounded(a.product(a.fp8(a.rounded(act)), dense(expert.w2)))


def _expect_moe(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    x, ids, weights = a.fp8(exact(i["x"])), i["routing"].ids.long(), i["routing"].weights.double()
    rows, top_k = ids.shape
    parts_v = torch.zeros(top_k + 1, rows, i["x"].shape[1], dtype=torch.float64)
    parts_r = torch.zeros_like(parts_v)
    for e, expert in enumerate(i["experts"]):
        at, k = (ids == e).nonzero(as_tuple=True)
        if len(at):
            out = _expert(a, x[at], expert, weights[at, k][:, None], i["limit"])
            parts_v[k, at], parts_r[k, at] = out.value, out.radius
    if i["shared"] is not None and rows:
        out = _expert(a, x, i["shared"], torch.ones(rows, 1, dtype=torch.float64), i["limit"])
        parts_v[top_k], parts_r[top_k] = out.value, out.radius
    return {"out": Within(a.rounded(a.sum(Approx(parts_v, parts_r), 0)), a.dtype)}


def _moe_rows(inputs: Inputs, index: Tensor) -> Inputs:
    return rows_of("x", "routing")(inputs, index)


def _moe_cost(i: Inputs) -> Cost:
    used = len(i["routing"].ids.unique()) if i["routing"].ids.numel() else 0
    weights = used * tree_bytes(i["experts"][0]) + tree_bytes(i["shared"])
    dim, inner = i["x"].shape[1], i["experts"][0].w1.weight.shape[0]
    calls = float((i["routing"].ids >= 0).sum()) + (len(i["x"]) if i["shared"] is not None else 0)
    return Cost(weights + 1.5 * tree_bytes(i["x"]), calls * 6.0 * dim * inner)


_M = {"experts": 6, "top_k": 3, "dim": 64, "inner": 64, "kind": "fp4", "shared": True}
_M_RELEASED = {"experts": EXPERTS, "top_k": 6, "dim": HIDDEN, "inner": EXPERT_DIM, "kind": "fp4", "shared": True}

MOE = OpDescription(
    op="moe",
    bound="gate, up and expert outputs in float32 or rounded, the activation rounded and on the FP8 grid; float32 sums; one last rounding",
    geometries=(
        Geometry("rows", {**_M, "rows": 33}, weights=_FP4),
        Geometry("no_rows", {**_M, "rows": 0}, weights=_FP4),
        Geometry("one_row", {**_M, "rows": 1}, weights=_FP4),
        Geometry("routed_only", {**_M, "rows": 9, "shared": False}, weights=_FP4),
        Geometry("dropped", {**_M, "rows": 17, "dropped": True}, "ids of -1", weights=_FP4),
        Geometry("one_expert_takes_all", {**_M, "rows": 40, "top_k": 1, "used": 1}, "a long group, empty groups", weights=_FP4),
        Geometry("unused_experts", {**_M, "rows": 9, "experts": 12, "used": 4}, weights=_FP4),
        Geometry("clamped", {**_M, "rows": 9, "limit": 0.5}, "gate from above, up from both sides", weights=_FP4),
        Geometry("large", {**_M, "rows": 9, "scale": 2.0**6}, weights=_FP4),
        Geometry("saturated", {**_M, "rows": 12, "dim": 96, "content": "saturated", "shared": False}, "exact to the grid", weights=_FP4),
        Geometry("fp8_experts", {**_M, "rows": 9, "kind": "fp8"}, weights=_FP8),
        Geometry("bf16_experts", {**_M, "rows": 9, "kind": "bf16"}, weights=_BF16),
        Geometry(
            "released",
            {**_M_RELEASED, "experts": 2, "top_k": 1, "rows": 2, "shared": False},
            "released sizes, few experts",
            quick=False,
            numerics=Numerics.RELEASE,
            weights=_FP4,
        ),
    ),
    make=lambda g, draw: (_saturated if g.get("content") == "saturated" else _make_moe)(g, draw),
    run=_run_moe,
    expect=_expect_moe,
    cost=_moe_cost,
    rows=_moe_rows,
    presets={
        name: {**_M_RELEASED, "rows": rows, "different": 8} for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))
    },
    prepare=_prepared_moe,
    workspace=lambda g: g["different"] * 3 * g["dim"] * g["inner"] * 0.6 + 60.0 * g["rows"] * g["top_k"] * g["dim"],
)


def _make_experts(g: Dims, draw: Draw) -> Inputs:
    """Row e goes to expert e alone, with weight 1."""
    inputs = (_saturated if g["kind"] == "fp4" else _make_moe)({**g, "rows": g["experts"], "top_k": 1}, draw)
    ids = torch.arange(g["experts"], dtype=torch.int32)[:, None]
    return {**inputs, "routing": Routing(ids, torch.ones(g["experts"], 1))}


PREPARE_EXPERTS = OpDescription(
    op="prepare_experts",
    bound="as moe; the e2m1 case is exact up to one accumulation: each expert's row shows its own weights",
    geometries=(
        Geometry("fp4", {**_M, "dim": 96, "shared": False}, "nibble order, scales of each row and 32 inputs", weights=_FP4),
        Geometry("fp8", {**_M, "kind": "fp8", "shared": False}, weights=_FP8),
        Geometry("bf16", {**_M, "kind": "bf16", "shared": False}, weights=_BF16),
        Geometry("one_expert", {**_M, "dim": 96, "experts": 1, "shared": False}, weights=_FP4),
    ),
    make=_make_experts,
    run=_run_moe,
    expect=_expect_moe,
    cost=lambda i: Cost(2 * tree_bytes(i["experts"]), 0),
)

OPS = (MOE_GATE, MOE, PREPARE_EXPERTS)
