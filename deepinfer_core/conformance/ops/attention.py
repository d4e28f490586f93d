"""Sparse attention and its output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat, Numerics, WeightFormat
from deepinfer_core.backend.types import SelectedEntries, WindowKeys
from deepinfer_core.conformance.analysis import U32, Approx, Arithmetic, exact
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Expectation, Within
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.ops import pools
from deepinfer_core.conformance.ops.shapes import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    O_GROUPS,
    O_RANK,
    ROPE_DIM,
    TOPK,
    WINDOW,
    dense,
    rows_of,
    spread_rows,
    tree_bytes,
)
from deepinfer_core.conformance.trees import strided

Dims = Mapping[str, Any]

# ------------------------------------------------------------------ sparse_attention


def _window(g: Dims, draw: Draw) -> tuple[WindowKeys, Tensor]:
    """(keys, float64 [slots*R + rows, dim] of the address space). Rows use random ring entries and random rows of the step."""
    rows, dim, slots, length = g["rows"], g["dim"], g["slots"], g["ring"]
    ring = pools.window_ring(slots, length, dim, g["window_format"])
    views = pools.ring_views(ring.format, dim)
    readable = draw.permutation(slots * length)[: slots * length * 2 // 3]  # the rest is never named and stays unwritten
    pools.write(ring.data, views, readable // length, readable % length, draw.encoded(len(readable), dim, ring.format, g.get("scale", 1.0)))
    a = Arithmetic(draw.numerics)
    current = a.fp8(exact(draw.activation(rows, dim, scale=g.get("scale", 1.0)))).value.to(draw.dtype)
    space = torch.full((slots * length, dim), torch.nan, dtype=torch.float64)
    space[readable] = pools.read(ring.data, views, ring.format, readable // length, readable % length)
    columns = g["columns"]
    index = readable[draw.integers(0, len(readable), rows, columns)]
    here = draw.uniform(rows, columns) < 0.4
    index = torch.where(here, slots * length + draw.integers(0, max(rows, 1), rows, columns), index)
    missing = draw.uniform(rows, columns) < g.get("missing", 0.2)
    return WindowKeys(ring, current, torch.where(missing, -1, index).int()), torch.cat([space, current.double()])


def _selected(g: Dims, draw: Draw) -> tuple[SelectedEntries | None, Tensor | None]:
    """(entries, float64 [S, longest, dim]): a few sequences of different length; the rows choose among the entries that are there."""
    if not g.get("topk"):
        return None, None
    rows, counts, n = g["rows"], list(g["counts"]), g["entries"]
    table, pages_total = pools.block_table(draw, counts, n)
    sequence = torch.arange(rows) % len(counts)
    pages = pools.paged(pages_total, n, g["dim"], g["entry_format"], False, table, sequence)
    values = pools.filled_pages(draw, pages, counts, g.get("scale", 1.0))
    index = torch.full((rows, g["topk"]), -1)
    for t in range(rows):
        count = counts[int(sequence[t])]
        chosen = draw.permutation(count)[: g["topk"] - t % 3].sort().values
        index[t, : len(chosen)] = chosen
    return SelectedEntries(pages, index.int()), values


def _make_attention(g: Dims, draw: Draw) -> Inputs:
    window, _ = _window(g, draw)
    selected, _ = _selected(g, draw)
    if g.get("empty_rows"):
        window.index[::2] = -1
        if selected is not None:
            selected.index[::2] = -1
    query = draw.activation(g["rows"], g["heads"], g["dim"], scale=g.get("scale", 1.0))
    return {
        "query": strided(query) if g.get("content") == "strided" else query,
        "window": window,
        "selected": selected,
        "sink": draw.normal(g["heads"], scale=g.get("sink", 1.0)),
        "scale": g["dim"] ** -0.5,
        "rope": draw.rope(g["rows"], g["rd"]),
    }


def _gathered(i: Inputs) -> tuple[Tensor, Tensor]:
    """(float64 [T, c, dim], bool [T, c]): keys of each row, zero where there is none."""
    window, selected, dim = i["window"], i["selected"], i["query"].shape[2]
    ring = window.ring
    slots, length, _ = ring.data.shape
    index, place = window.index.long(), torch.arange(slots * length)
    decoded = pools.read(ring.data, pools.ring_views(ring.format, dim), ring.format, place // length, place % length)
    keys = torch.cat([decoded, window.current.double()])[index.clamp_min(0)]
    valid = index >= 0
    if selected is not None:
        pages, chosen = selected.pages, selected.index.long()
        entry = chosen.clamp_min(0)
        page = pages.block_table.long()[pages.sequence.long()[:, None], entry // pages.entries_per_page]
        more = pools.read(pages.data, pools.page_views(pages), pages.format, page, entry % pages.entries_per_page)
        keys, valid = torch.cat([keys, more], 1), torch.cat([valid, chosen >= 0], 1)
    return torch.where(valid[..., None], keys, 0.0), valid


def _expect_attention(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    keys, valid = _gathered(i)
    q = a.rounded(a.rotated(exact(i["query"]), i["rope"].table, i["rope"].positions))
    dots = a.product(q, keys)  # [T, H, c]
    scores = Approx(dots.value * i["scale"], dots.radius * i["scale"]).noise(2)
    scores = Approx(scores.value.masked_fill(~valid[:, None], -torch.inf), scores.radius.masked_fill(~valid[:, None], 0.0))
    p = a.softmax_weights(scores, -1)
    top = scores.value.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    sink = (i["sink"].double()[:, None] - top).exp()
    total = p.value.sum(-1, keepdim=True) + sink
    # Where probabilities are rounded to bfloat16, the rounding depends on the running maximum: half a unit, independent for each key.
    rounding = p.value * (2.0**-8 if a.release else 0.0)
    out = a.product(Approx(p.value, p.radius + rounding), keys.transpose(1, 2))
    error = (a.accumulation(keys.shape[1]) + 16 * U32) * total + p.radius.square().sum(-1, keepdim=True).sqrt() * 4 + sink * U32 * top.abs()
    value = out.value / total
    attended = Approx(value, out.radius / total + value.abs() * error / total)
    return {"out": Within(a.rounded(a.rotated(a.rounded(attended), i["rope"].table, i["rope"].positions, inverse=True)), a.dtype)}


def _attention_rows(inputs: Inputs, index: Tensor) -> Inputs:
    window, selected, rope = inputs["window"], inputs["selected"], inputs["rope"]
    if selected is not None:
        pages = type(selected.pages)(**{**vars(selected.pages), "sequence": selected.pages.sequence[index]})
        selected = SelectedEntries(pages, selected.index[index])
    return {
        **inputs,
        "query": inputs["query"][index],
        "window": WindowKeys(window.ring, window.current, window.index[index]),
        "selected": selected,
        "rope": rope._replace(positions=rope.positions[index]),
    }


def _attention_cost(i: Inputs) -> Cost:
    rows, heads, dim = i["query"].shape
    window, selected = i["window"], i["selected"]
    columns = window.index.shape[1] + (selected.index.shape[1] if selected else 0)
    entry = window.ring.data.shape[2] * window.index.shape[1]
    more = selected.pages.format.entry_bytes(dim) * selected.index.shape[1] if selected else 0
    return Cost(2 * tree_bytes(i["query"]) + rows * (entry + more + 4 * columns), 4.0 * rows * heads * dim * columns)


_A: dict[str, Any] = {"dim": 64, "rd": 32, "heads": 4, "slots": 3, "ring": 11, "columns": 8}
_S: dict[str, Any] = {"topk": 12, "counts": (40, 7, 19), "entries": 8}
_FP8, _FP4, _BF16, _F32 = CacheFormat.FP8, CacheFormat.FP4, CacheFormat.BF16, CacheFormat.F32
_BIG: dict[str, Any] = {"dim": HEAD_DIM, "rd": ROPE_DIM, "heads": HEADS, "slots": 3, "ring": 134, "columns": WINDOW}


def _released(rows: int, counts: tuple[int, ...], slots: int) -> Dims:
    formats = {"window_format": _FP8, "entry_format": _FP4}
    return {**_BIG, "rows": rows, "slots": slots, "topk": TOPK, "counts": counts, "entries": WINDOW, **formats}


def _attention_geometry(name: str, why: str = "", quick: bool = True, **dims: Any) -> Geometry:
    """One geometry in the release's formats."""
    window, entry = dims.setdefault("window_format", _FP8), dims.setdefault("entry_format", _FP4)
    chosen = entry if dims.get("topk") else None
    return Geometry(name, {**_A, **dims}, why, quick, Numerics.RELEASE, window=window, entry=chosen)


SPARSE_ATTENTION = OpDescription(
    op="sparse_attention",
    bound="float32 scores through exp, one bfloat16 rounding of each probability (release), float32 sums, three roundings",
    geometries=(
        _attention_geometry("window_only", rows=9),
        _attention_geometry("selected", "pages of ragged sequences", rows=9, **_S),
        _attention_geometry("no_rows", rows=0, **_S),
        _attention_geometry("one_row", rows=1, **_S),
        _attention_geometry("one_key", "the sink against a single key", rows=3, columns=1, missing=0.0),
        _attention_geometry("empty_rows", "rows without any key give zeros", rows=6, empty_rows=True, **_S),
        _attention_geometry("strided", rows=7, content="strided", **_S),
        _attention_geometry("large_scores", "one key takes all: maximum subtracted", rows=7, scale=6.0, **_S),
        _attention_geometry("large_sink", "the sink dwarfs the keys", rows=7, sink=20.0, **_S),
        _attention_geometry("page_boundary", "entries around the end of a page", rows=16, topk=9, counts=(9, 8, 17), entries=8),
        _attention_geometry("fp8_entries", rows=9, entry_format=_FP8, **_S),
        _attention_geometry("bf16_caches", rows=9, window_format=_BF16, entry_format=_BF16, **_S),
        Geometry(
            "f32_caches",
            {**_A, **_S, "rows": 9, "window_format": _F32, "entry_format": _F32},
            numerics=Numerics.IDEAL,
            window=_F32,
            entry=_F32,
        ),
        Geometry("released", _released(2, (700, 600), 3), "released sizes", True, Numerics.RELEASE, window=_FP8, entry=_FP4),
    ),
    make=_make_attention,
    run=lambda k, i: {"out": k.sparse_attention(i["query"], i["window"], i["selected"], i["sink"], i["scale"], i["rope"])},
    expect=_expect_attention,
    cost=_attention_cost,
    rows=_attention_rows,
    presets={
        "decode-1": _released(1, (8192,), 2),
        "decode-64": _released(64, (2048,) * 8, 65),
        "prefill-8k": _released(8192, (8192,), 2),
    },
)

# ------------------------------------------------------------------ attention_output


def _make_output(g: Dims, draw: Draw) -> Inputs:
    width = g["heads"] * g["dim"]
    x = spread_rows(draw, g["rows"], width, g.get("content", "normal"))
    return {
        "out": x.unflatten(1, (g["heads"], g["dim"])),
        "wo_a": draw.fp8_weight(g["groups"] * g["rank"], width // g["groups"]),
        "wo_b": draw.fp8_weight(g["hidden"], g["groups"] * g["rank"]),
        "groups": g["groups"],
    }


def _expect_output(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    groups = i["groups"]
    grouped = exact(i["out"].flatten(1).unflatten(1, (groups, -1)).transpose(0, 1))  # [g, T, H*hd/g]
    z = a.product(grouped, dense(i["wo_a"]).unflatten(0, (groups, -1)))
    z = a.rounded(Approx(z.value.transpose(0, 1).flatten(1), z.radius.transpose(0, 1).flatten(1)))
    return {"out": Within(a.rounded(a.product(a.fp8(z), dense(i["wo_b"]))), a.dtype)}


def _prepared_output(k: Any, i: Inputs) -> Any:
    wo_a, wo_b = k.prepare_linear([i["wo_a"]]), k.prepare_linear([i["wo_b"]])
    return lambda: k.attention_output(i["out"], wo_a, wo_b, i["groups"])


_O: dict[str, Any] = {"heads": 4, "dim": 32, "groups": 2, "rank": 32, "hidden": 96}
_O_RELEASED: dict[str, Any] = {"heads": HEADS, "dim": HEAD_DIM, "groups": O_GROUPS, "rank": O_RANK, "hidden": HIDDEN}
_W8 = WeightFormat.FP8_B32

ATTENTION_OUTPUT = OpDescription(
    op="attention_output",
    bound="float32 products of each group, rounded, on the FP8 grid; float32 products with wo_b, rounded",
    geometries=(
        Geometry("rows", {**_O, "rows": 33}, weights=_W8),
        Geometry("no_rows", {**_O, "rows": 0}, weights=_W8),
        Geometry("one_row", {**_O, "rows": 1}, weights=_W8),
        Geometry("four_groups", {**_O, "groups": 4, "rows": 9}, "one head in each group", weights=_W8),
        Geometry("strided", {**_O, "rows": 9, "content": "strided"}, weights=_W8),
        Geometry("extreme", {**_O, "rows": 21, "content": "extreme"}, weights=_W8),
        Geometry("released", {**_O_RELEASED, "hidden": 256, "rows": 2}, "released but for the width", False, Numerics.RELEASE, weights=_W8),
    ),
    make=_make_output,
    run=lambda k, i: {"out": _prepared_output(k, i)()},
    expect=_expect_output,
    cost=lambda i: Cost(
        tree_bytes((i["out"], i["wo_a"], i["wo_b"])) + 2.0 * len(i["out"]) * len(i["wo_b"].weight),
        2.0 * len(i["out"]) * (i["wo_a"].weight.numel() + i["wo_b"].weight.numel()),
    ),
    rows=rows_of("out"),
    presets={name: {**_O_RELEASED, "rows": rows} for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))},
    prepare=_prepared_output,
)

OPS = (SPARSE_ATTENTION, ATTENTION_OUTPUT)
