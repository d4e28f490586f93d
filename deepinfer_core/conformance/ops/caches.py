"""Window keys, the compressor, and everything that stores into caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.types import CompressorRing, CompressorRows
from deepinfer_core.conformance.analysis import Approx, Arithmetic, exact, where
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Exactly, Expectation, Within
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.ops import pools
from deepinfer_core.conformance.ops.shapes import EPS, HEAD_DIM, INDEX_DIM, ROPE_DIM, WINDOW, rows_of, spread_rows, tree_bytes

Dims = Mapping[str, Any]
_RING = 134  # released ring length: window 128 and 6 rows of look-back

# ------------------------------------------------------------------ window_key


def _make_key(g: Dims, draw: Draw) -> Inputs:
    return {
        "kv": spread_rows(draw, g["rows"], g["dim"], g.get("content", "normal")),
        "norm_weight": draw.norm_weight(g["dim"]),
        "eps": EPS,
        "rope": draw.rope(g["rows"], g["rd"]),
    }


def _key(a: Arithmetic, i: Inputs, x: str) -> Approx:
    normed = a.rounded(a.rms_norm(exact(i[x]), i["norm_weight"], i["eps"]))
    return a.rounded(a.rotated(normed, i["rope"].table, i["rope"].positions))


def _rope_rows(*names: str):
    def restrict(inputs: Inputs, index: Tensor) -> Inputs:
        rope = inputs["rope"]
        return {**rows_of(*names)(inputs, index), "rope": rope._replace(positions=rope.positions[index])}

    return restrict


_KEYS = (
    Geometry("rows", {"rows": 33, "dim": 128, "rd": 64}),
    Geometry("no_rows", {"rows": 0, "dim": 128, "rd": 64}),
    Geometry("one_row", {"rows": 1, "dim": 64, "rd": 32}),
    Geometry("strided", {"rows": 9, "dim": 96, "rd": 32, "content": "strided"}, "a slice of a wider projection"),
    Geometry("extreme", {"rows": 30, "dim": 96, "rd": 32, "content": "extreme"}),
    Geometry("released", {"rows": 17, "dim": HEAD_DIM, "rd": ROPE_DIM}),
)

WINDOW_KEY = OpDescription(
    op="window_key",
    bound="norm, rotation and FP8 grid, each rounded; exact wherever no float32 error can move a rounding",
    geometries=_KEYS,
    make=_make_key,
    run=lambda k, i: {"key": k.window_key(i["kv"], i["norm_weight"], i["eps"], i["rope"])},
    expect=lambda a, i, got: {"key": Within(a.rounded(a.fp8(_key(a, i, "kv"))), a.dtype)},
    cost=lambda i: Cost(2 * tree_bytes(i["kv"]) + 4 * 64 * len(i["kv"]), 10.0 * i["kv"].numel()),
    rows=_rope_rows("kv"),
    presets={
        "decode-1": {"rows": 1, "dim": HEAD_DIM, "rd": ROPE_DIM},
        "decode-64": {"rows": 64, "dim": HEAD_DIM, "rd": ROPE_DIM},
        "prefill-8k": {"rows": 8192, "dim": HEAD_DIM, "rd": ROPE_DIM},
    },
)

# ------------------------------------------------------------------ store_window


def _slots(draw: Draw, rows: int, places: int) -> Tensor:
    """Distinct flat slots, the very last one among them; every fifth row, from the fourth on, stores nothing."""
    slots = draw.permutation(places)[:rows].int()
    if rows and places - 1 not in slots.tolist():
        slots[0] = places - 1
    slots[3::5] = -1
    return slots


def _make_store_window(g: Dims, draw: Draw) -> Inputs:
    a = Arithmetic(draw.numerics)
    ring = pools.window_ring(g["slots"], g["ring"], g["dim"], g["format"])
    key = a.fp8(exact(spread_rows(draw, g["rows"], g["dim"], g.get("content", "normal")))).value.to(draw.dtype)
    return {"key": key, "ring": ring, "slots": _slots(draw, g["rows"], g["slots"] * g["ring"])}


def _expect_store_window(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    ring = i["ring"]
    views = pools.ring_views(ring.format, i["key"].shape[1])
    return {"ring": pools.stored(a, ring.data, views, ring.format, i["slots"], exact(i["key"]))}


def _run_store_window(k: Any, i: Inputs) -> Outputs:
    k.store_window(i["key"], i["ring"], i["slots"])
    return {"ring": i["ring"].data}


_W: Dims = {"slots": 3, "ring": 11, "dim": 64}
_RELEASE, _IDEAL = Numerics.RELEASE, Numerics.IDEAL

STORE_WINDOW = OpDescription(
    op="store_window",
    bound="exact, down to the scale bytes; nothing but the named entries changes",
    geometries=(
        Geometry("fp8", {**_W, "rows": 13, "format": CacheFormat.FP8}, numerics=_RELEASE, window=CacheFormat.FP8),
        Geometry("fp8_no_rows", {**_W, "rows": 0, "format": CacheFormat.FP8}, numerics=_RELEASE, window=CacheFormat.FP8),
        Geometry("fp8_full", {**_W, "rows": 33, "format": CacheFormat.FP8}, "every slot", numerics=_RELEASE, window=CacheFormat.FP8),
        Geometry(
            "fp8_extreme", {**_W, "rows": 25, "format": CacheFormat.FP8, "content": "extreme"}, numerics=_RELEASE, window=CacheFormat.FP8
        ),
        Geometry("bf16", {**_W, "rows": 13, "format": CacheFormat.BF16}, numerics=_RELEASE, window=CacheFormat.BF16),
        Geometry("f32", {**_W, "rows": 13, "format": CacheFormat.F32}, numerics=_IDEAL, window=CacheFormat.F32),
        Geometry(
            "released",
            {"slots": 3, "ring": _RING, "dim": HEAD_DIM, "rows": 140, "format": CacheFormat.FP8},
            numerics=_RELEASE,
            window=CacheFormat.FP8,
        ),
    ),
    make=_make_store_window,
    run=_run_store_window,
    expect=_expect_store_window,
    cost=lambda i: Cost(tree_bytes(i["key"]) * 1.52, 3.0 * i["key"].numel()),
    mutates=frozenset({"ring.data"}),
    may_alias=True,
    presets={
        "decode-1": {"slots": 2, "ring": _RING, "dim": HEAD_DIM, "rows": 1, "format": CacheFormat.FP8},
        "decode-64": {"slots": 65, "ring": _RING, "dim": HEAD_DIM, "rows": 64, "format": CacheFormat.FP8},
        "prefill-8k": {"slots": 65, "ring": _RING, "dim": HEAD_DIM, "rows": 8192, "format": CacheFormat.FP8},
    },
)

# ------------------------------------------------------------------ compress


def _make_compress(g: Dims, draw: Draw) -> Inputs:
    """Row t belongs to a sequence of its own: its group is made of ring rows, of rows of this step, or of both; some rows complete none."""
    rows, r, dim, slots, length = g["rows"], g["ratio"], g["dim"], g["slots"], g["ring"]
    data = torch.full((slots, length, 2, dim), torch.nan)
    members, places = torch.full((rows, r), -1), draw.permutation(slots * length)
    used = 0
    for t in range(rows):
        if t % 3 == 1:
            continue
        old = min(t % (r + 1), r - 1, len(places) - used, t + r - 1)
        new = r - old
        if t + 1 < new:
            continue
        for c in range(old):
            place = int(places[used])
            data[place // length, place % length] = draw.normal(2, dim, scale=g.get("scale", 1.0))
            members[t, c] = place
            used += 1
        members[t, old:] = slots * length + torch.arange(t - new + 1, t + 1)
    keep = places[:rows].clone()  # also slots that are read in this very call: reads come first
    keep = torch.cat([keep, torch.full((rows - len(keep),), -1)])
    keep[2::4] = -1
    scale = g.get("scale", 1.0)
    return {
        "rows": draw.normal(rows, 2 * dim, scale=scale),
        "ring": CompressorRing(data),
        "index": CompressorRows(members.int(), keep.int()),
        "norm_weight": draw.norm_weight(dim),
        "eps": EPS,
    }


def _run_compress(k: Any, i: Inputs) -> Outputs:
    return {"latent": k.compress(i["rows"], i["ring"], i["index"], i["norm_weight"], i["eps"]), "ring": i["ring"].data}


def _expect_compress(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    slots, length, _, dim = i["ring"].data.shape
    rows = i["rows"].view(-1, 2, dim)
    pool = torch.cat([i["ring"].data.flatten(0, 1), rows]).double()
    members = i["index"].members.long()
    latent, gate = pool[members.clamp_min(0)].unbind(2)  # [T, r, dim]
    none = members[:, :1] < 0
    latent, gate = (torch.where(none[..., None], 0.0, v) for v in (latent, gate))
    p = a.softmax_weights(exact(gate), 1)
    total = a.sum(p, 1)
    pooled = a.sum(p.times(exact(latent)), 1)
    value = pooled.value / total.value
    spread = (pooled.radius + value.abs() * total.radius) / total.value
    pooled = where(none, exact(torch.zeros_like(value)), Approx(value, spread).noise(2))
    ring = i["ring"].data.clone().flatten(0, 1)
    kept = i["index"].slots >= 0
    ring[i["index"].slots[kept].long()] = rows[kept]
    return {
        "latent": Within(a.rounded(a.rms_norm(a.rounded(pooled), i["norm_weight"], i["eps"])), a.dtype),
        "ring": Exactly(ring.view(slots, length, 2, dim)),
    }


_C: Dims = {"ratio": 2, "dim": 64, "slots": 4, "ring": 7}

COMPRESS = OpDescription(
    op="compress",
    bound="float32 softmax and weighted sum of r members, rounded; rms_norm, rounded. The ring: exact",
    geometries=(
        Geometry("rows", {**_C, "rows": 24}, "groups inside the step, across it, and rows that complete none"),
        Geometry("no_rows", {**_C, "rows": 0}),
        Geometry("one_row", {**_C, "rows": 1}),
        Geometry("two_rows", {**_C, "rows": 2}),
        Geometry("ratio_4", {**_C, "ratio": 4, "rows": 18}),
        Geometry("strong_gates", {**_C, "rows": 12, "scale": 30.0}, "softmax with a maximum far above the rest"),
        Geometry("released", {"ratio": 2, "dim": HEAD_DIM, "slots": 5, "ring": 7, "rows": 33}),
    ),
    make=_make_compress,
    run=_run_compress,
    expect=_expect_compress,
    cost=lambda i: Cost(3.0 * tree_bytes(i["rows"]), 12.0 * i["rows"].numel()),
    mutates=frozenset({"ring.data"}),
    may_alias=True,
    presets={
        name: {"ratio": 2, "dim": HEAD_DIM, "slots": 65, "ring": 7, "rows": rows}
        for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))
    },
)

# ------------------------------------------------------------------ store_entries, store_index_keys


def _make_store(g: Dims, draw: Draw) -> Inputs:
    rows, n, dim = g["rows"], g["entries"], g["dim"]
    pages = pools.paged(g["pages"], n, dim, g["format"], g["sectioned"], torch.zeros(1, 1), torch.zeros(rows))
    values = {"key" if g["sectioned"] else "latent": _store_rows(g, draw)}
    norm = {"norm_weight": draw.norm_weight(dim), "eps": EPS} if g["sectioned"] else {}
    return {**values, **norm, "rope": draw.rope(rows, g["rd"]), "pages": pages, "slots": _slots(draw, rows, g["pages"] * n)}


def _store_rows(g: Dims, draw: Draw) -> Tensor:
    if g.get("content") != "ties":
        return spread_rows(draw, g["rows"], g["dim"], g.get("content", "normal"))
    # Multiples of 1/8 up to 6: with scale 1 many lie halfway between two e2m1 values; a few blocks have a maximum on a scale boundary.
    x = draw.integers(-48, 49, g["rows"], g["dim"]).float() / 8
    x[:, ::16] = 6.0 * (1 + draw.integers(0, 9, g["rows"], 1).float() / 16)
    return x.to(draw.dtype)


def _run_store_entries(k: Any, i: Inputs) -> Outputs:
    k.store_entries(i["latent"], i["rope"], i["pages"], i["slots"])
    return {"pages": i["pages"].data}


def _run_store_keys(k: Any, i: Inputs) -> Outputs:
    k.store_index_keys(i["key"], i["norm_weight"], i["eps"], i["rope"], i["pages"], i["slots"])
    return {"pages": i["pages"].data}


def _expect_stored(a: Arithmetic, i: Inputs, value: Approx) -> dict[str, Expectation]:
    pages = i["pages"]
    return {"pages": pools.stored(a, pages.data, pools.page_views(pages), pages.format, i["slots"], value)}


def _expect_store_entries(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    rotated = a.rotated(exact(i["latent"]), i["rope"].table, i["rope"].positions)
    return _expect_stored(a, i, a.rounded(rotated))


def _expect_store_keys(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    value = _key(a, i, "key")
    return _expect_stored(a, i, value if i["pages"].format is CacheFormat.FP4_INDEX else a.fp4_index(value))


def _store_geometries(base: Dims, released: Dims, formats: tuple[CacheFormat, ...], field: str) -> tuple[Geometry, ...]:
    first = formats[0]
    needs: dict[CacheFormat, dict[str, Any]] = {fmt: {field: fmt} for fmt in formats}
    small = {
        "rows": {"rows": 23},
        "no_rows": {"rows": 0},
        "one_row": {"rows": 1},
        "full": {"rows": base["pages"] * base["entries"]},
        "extreme": {"rows": 21, "content": "extreme"},
        "strided": {"rows": 9, "content": "strided"},
        "ties": {"rows": 21, "content": "ties"},
    }
    made = [
        Geometry(f"{first}_{name}", {**base, **dims, "format": first}, numerics=_RELEASE, **needs[first]) for name, dims in small.items()
    ]
    for fmt in formats[1:]:
        made.append(
            Geometry(
                f"{fmt}_rows", {**base, "rows": 23, "format": fmt}, numerics=_IDEAL if fmt is CacheFormat.F32 else _RELEASE, **needs[fmt]
            )
        )
    made.append(
        Geometry(f"{first}_released", {**released, "rows": 70, "format": first}, "released page", numerics=_RELEASE, **needs[first])
    )
    return tuple(made)


def _store_presets(released: Dims, fmt: CacheFormat) -> dict[str, Dims]:
    sizes = (("decode-1", 1, 2), ("decode-64", 64, 65), ("prefill-8k", 8192, 66))
    return {name: {**released, "rows": rows, "pages": pages * 2, "format": fmt} for name, rows, pages in sizes}


_ENTRY = {"dim": 64, "rd": 32, "entries": 8, "pages": 5, "sectioned": False}
_ENTRY_RELEASED = {"dim": HEAD_DIM, "rd": ROPE_DIM, "entries": WINDOW, "pages": 3, "sectioned": False}
_INDEX_KEY = {"dim": 64, "rd": 32, "entries": 8, "pages": 5, "sectioned": True}
_INDEX_KEY_RELEASED = {"dim": INDEX_DIM, "rd": ROPE_DIM, "entries": WINDOW, "pages": 3, "sectioned": True}

STORE_ENTRIES = OpDescription(
    op="store_entries",
    bound="rotation rounded, then the format's grid; exact wherever no float32 error can move a rounding, scale bytes included",
    geometries=_store_geometries(_ENTRY, _ENTRY_RELEASED, (CacheFormat.FP4, CacheFormat.FP8, CacheFormat.BF16, CacheFormat.F32), "entry"),
    make=_make_store,
    run=_run_store_entries,
    expect=_expect_store_entries,
    cost=lambda i: Cost(1.3 * tree_bytes(i["latent"]), 6.0 * i["latent"].numel()),
    mutates=frozenset({"pages.data"}),
    may_alias=True,
    presets=_store_presets(_ENTRY_RELEASED, CacheFormat.FP4),
)

STORE_INDEX_KEYS = OpDescription(
    op="store_index_keys",
    bound="norm and rotation rounded, then the format's grid; exact wherever no float32 error can move a rounding",
    geometries=_store_geometries(_INDEX_KEY, _INDEX_KEY_RELEASED, (CacheFormat.FP4_INDEX, CacheFormat.BF16, CacheFormat.F32), "index"),
    make=_make_store,
    run=_run_store_keys,
    expect=_expect_store_keys,
    cost=lambda i: Cost(1.3 * tree_bytes(i["key"]), 12.0 * i["key"].numel()),
    mutates=frozenset({"pages.data"}),
    may_alias=True,
    presets=_store_presets(_INDEX_KEY_RELEASED, CacheFormat.FP4_INDEX),
)

OPS = (WINDOW_KEY, STORE_WINDOW, COMPRESS, STORE_ENTRIES, STORE_INDEX_KEYS)
