"""Engram: hashes, gathered rows, gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.types import EngramHashTables
from deepinfer_core.conformance import grids
from deepinfer_core.conformance.analysis import U32, Approx, Arithmetic, exact, sigmoid
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Exactly, Expectation, Within
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.ops.shapes import EPS, HIDDEN, STREAMS, picked, rows_of, seen, tree_bytes
from deepinfer_core.conformance.trees import strided

Dims = Mapping[str, Any]
_FP8 = WeightFormat.FP8_G32

# ------------------------------------------------------------------ engram_hash

# Constants of layer 1 of the release and the rows of its first token, whose history is all padding (model notes, section 14).
_RELEASED_MULTIPLIERS = (76632096046245, 4839876093313, 35959672319349, 73987337458391)
_RELEASED_PRIMES = tuple(
    16000000 + p
    for p in (57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409, 447, 463)
)
_KNOWN = {
    (0, 2, 2, 2): "5702652 24393184 39183301 61503783 78984481 90144770 103724983 121476532 131476717 152385926 164143652 191599181 "
    "198145581 217419202 238329687 247482304 257520185 283540304 288689443 315264704 322314652 348890037 367865216 380066193",
    (5, 4, 3, 0): "22259 23259088 41371678 58272182 67624233 92075454 96301072 117124931 142558994 150547688 162989874 181633912 "
    "192289736 213618501 237612242 249163395 257158353 275816573 297148738 315815167 328259509 346926106 353147228 370926102",
}


def _make_hash(g: Dims, draw: Draw) -> Inputs:
    if g.get("known"):
        primes = torch.tensor(_RELEASED_PRIMES)
        ngrams, multipliers = torch.tensor(list(_KNOWN)), torch.tensor(_RELEASED_MULTIPLIERS)
    else:
        size, columns = g["ngram"], (g["ngram"] - 1) * g["heads"]
        primes = draw.integers(90, 200, columns) * 2 + 1
        ngrams = draw.integers(0, g["vocab"], g["rows"], size)
        ngrams[2::5, 0] = -1
        multipliers = draw.integers(0, (2**63 - 1) // g["vocab"] // 2, size) * 2 + 1
    return {"ngrams": ngrams, "tables": EngramHashTables(multipliers, primes, primes.cumsum(0) - primes)}


def _expect_hash(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    tables, rows = i["tables"], []
    heads = len(tables.primes) // (i["ngrams"].shape[1] - 1)
    for ngram in i["ngrams"].tolist():
        h, row = ngram[0] * int(tables.multipliers[0]), []
        for n in range(1, len(ngram)):
            h ^= ngram[n] * int(tables.multipliers[n])
            for column in range((n - 1) * heads, n * heads):
                row.append(h % int(tables.primes[column]) + int(tables.offsets[column]))
        rows.append(row if ngram[0] >= 0 else [-1] * len(tables.primes))
    want = torch.tensor(rows, dtype=torch.int64).view(len(i["ngrams"]), len(tables.primes))
    if len(tables.primes) == len(_RELEASED_PRIMES) and int(tables.primes[0]) == _RELEASED_PRIMES[0]:
        want = torch.tensor([[int(v) for v in text.split()] for text in _KNOWN.values()])
    return {"rows": Exactly(want)}


ENGRAM_HASH = OpDescription(
    op="engram_hash",
    bound="exact 64-bit integers",
    geometries=(
        Geometry("rows", {"rows": 33, "ngram": 4, "heads": 2, "vocab": 99092}, "products close to 2^63, rows without a lookup"),
        Geometry("no_rows", {"rows": 0, "ngram": 4, "heads": 2, "vocab": 1000}),
        Geometry("bigrams", {"rows": 9, "ngram": 2, "heads": 3, "vocab": 1000}),
        Geometry("known_answers", {"known": True}, "the release's constants and published rows"),
    ),
    make=_make_hash,
    run=lambda k, i: {"rows": k.engram_hash(i["ngrams"], i["tables"])},
    expect=_expect_hash,
    cost=lambda i: Cost(tree_bytes(i["ngrams"]) + 8.0 * len(i["ngrams"]) * len(i["tables"].primes), 0),
    rows=rows_of("ngrams"),
    presets={
        name: {"rows": rows, "ngram": 4, "heads": 8, "vocab": 99092}
        for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))
    },
)

# ------------------------------------------------------------------ engram_gather, prepare_engram_table


def _make_gather(g: Dims, draw: Draw) -> Inputs:
    rows = draw.integers(0, g["table"], g["rows"], g["columns"])
    rows[2::5] = -1
    if g["rows"]:
        rows[0, :2] = torch.tensor([0, g["table"] - 1])[: g["columns"]]
    return {"table": draw.fp8_rows(g["table"], g["channels"]), "rows": rows}


def _run_gather(k: Any, i: Inputs) -> Outputs:
    width = i["rows"].shape[1] * i["table"].weight.shape[1]
    return {"values": seen(k, k.engram_gather(k.prepare_engram_table(i["table"]), i["rows"]), width)}


def _expect_gather(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    table, rows = grids.weight(i["table"]), i["rows"]
    values = torch.where(rows[..., None] >= 0, table[rows.clamp_min(0)], 0.0).flatten(1)
    return {"values": Exactly(values[:, picked(values.shape[1])].to(a.dtype))}


def _prepared_gather(k: Any, i: Inputs) -> Any:
    table = k.prepare_engram_table(i["table"])
    return lambda: k.engram_gather(table, i["rows"])


_GATHER_PRESETS = {
    name: {"rows": rows, "columns": 24, "channels": 256, "table": 200_000}
    for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))
}

ENGRAM_GATHER = OpDescription(
    op="engram_gather",
    bound="exact: stored rows are e4m3 times powers of two; seen through a picking quantized_linear",
    geometries=(
        Geometry("rows", {"rows": 17, "columns": 6, "channels": 32, "table": 101}, weights=_FP8),
        Geometry("no_rows", {"rows": 0, "columns": 6, "channels": 32, "table": 101}, weights=_FP8),
        Geometry("one_row", {"rows": 1, "columns": 3, "channels": 64, "table": 5}, weights=_FP8),
        Geometry("released", {"rows": 3, "columns": 24, "channels": 256, "table": 997}, weights=_FP8),
    ),
    make=_make_gather,
    run=_run_gather,
    expect=_expect_gather,
    cost=lambda i: Cost(tree_bytes(i["rows"]) + 2.06 * i["rows"].numel() * i["table"].weight.shape[1], 0),
    rows=rows_of("rows"),
    presets=_GATHER_PRESETS,
    prepare=_prepared_gather,
)

PREPARE_ENGRAM_TABLE = OpDescription(
    op="prepare_engram_table",
    bound="exact: every row of the table is gathered",
    geometries=(
        Geometry("every_row", {"rows": 0, "columns": 1, "channels": 64, "table": 37}, weights=_FP8),
        Geometry("narrow", {"rows": 0, "columns": 1, "channels": 32, "table": 1}, weights=_FP8),
    ),
    make=lambda g, draw: {**_make_gather(g, draw), "rows": torch.arange(g["table"])[:, None]},
    run=_run_gather,
    expect=_expect_gather,
    cost=lambda i: Cost(2 * tree_bytes(i["table"]), 0),
)

# ------------------------------------------------------------------ engram_gate


def _make_gate(g: Dims, draw: Draw) -> Inputs:
    m, dim = g.get("streams", STREAMS), g["dim"]
    streams, kv = draw.activation(g["rows"], m, dim, scale=g.get("scale", 1.0)), draw.activation(g["rows"], m + 1, dim)
    if g.get("content") == "aligned":  # keys along the streams: gates far from one half
        kv[:, :m] = (streams * draw.integers(-1, 2, g["rows"], m, 1).to(streams.dtype)).to(streams.dtype)
    return {
        "streams": strided(streams) if g.get("content") == "strided" else streams,
        "kv": strided(kv) if g.get("content") == "strided" else kv,
        "q_weight": draw.normal(m, dim, dtype=torch.bfloat16),
        "k_weight": draw.normal(m, dim, dtype=torch.bfloat16),
        "eps": g.get("eps", EPS),
        "mask": draw.uniform(g["rows"]) < 0.6 if g.get("masked") else None,
    }


def _expect_gate(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    m, dim = i["streams"].shape[1:]
    h, k, v = i["streams"].double(), i["kv"][:, :m].double(), exact(i["kv"][:, m:])
    norms = ((h.square().mean(-1) + i["eps"]) * (k.square().mean(-1) + i["eps"])).rsqrt() * dim**-0.5
    terms = h * k * i["q_weight"].double() * i["k_weight"].double()
    size = (terms.abs().sum(-1) * (a.accumulation(dim) + 3 * U32)) * norms
    value = terms.sum(-1) * norms
    d = Approx(value, size + value.abs() * (8 * U32 + a.accumulation(dim)))
    gate = d.monotone(lambda x: sigmoid(torch.copysign(x.abs().clamp_min(1e-6).sqrt(), x)), 8)
    gate = Approx(gate.value[..., None], gate.radius[..., None])
    out = a.rounded(exact(i["streams"]).plus(gate.times(v)))
    if i["mask"] is not None:
        keep = i["mask"][:, None, None]
        out = Approx(torch.where(keep, out.value, h), torch.where(keep, out.radius, 0.0))
    return {"out": Within(out, a.dtype)}


def _gate_rows(inputs: Inputs, index: Any) -> Inputs:
    return rows_of("streams", "kv", *(["mask"] if inputs["mask"] is not None else []))(inputs, index)


ENGRAM_GATE = OpDescription(
    op="engram_gate",
    bound="float32 dot product of D terms and two norms through a square root and a sigmoid; one rounding of the stream",
    geometries=(
        Geometry("rows", {"rows": 17, "dim": 64}),
        Geometry("no_rows", {"rows": 0, "dim": 64}),
        Geometry("one_row", {"rows": 1, "dim": 96}),
        Geometry("aligned", {"rows": 17, "dim": 64, "content": "aligned"}, "gates of both signs, and d = 0"),
        Geometry("masked", {"rows": 17, "dim": 64, "masked": True}, "rows that keep their streams"),
        Geometry("strided", {"rows": 9, "dim": 64, "content": "strided"}),
        Geometry("large_eps", {"rows": 9, "dim": 64, "eps": 0.5}),
        Geometry("large", {"rows": 9, "dim": 64, "scale": 2.0**20}, "large streams"),
        Geometry("released", {"rows": 3, "dim": HIDDEN}),
    ),
    make=_make_gate,
    run=lambda k, i: {"out": k.engram_gate(i["streams"], i["kv"], i["q_weight"], i["k_weight"], i["eps"], i["mask"])},
    expect=_expect_gate,
    cost=lambda i: Cost(2 * tree_bytes(i["streams"]) + tree_bytes(i["kv"]), 9.0 * i["streams"].numel()),
    mutates=frozenset({"streams"}),
    may_alias=True,
    rows=_gate_rows,
    presets={name: {"rows": rows, "dim": HIDDEN} for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))},
)

OPS = (ENGRAM_HASH, ENGRAM_GATHER, PREPARE_ENGRAM_TABLE, ENGRAM_GATE)
