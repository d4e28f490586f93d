"""Index queries and the selection of entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.types import CandidateSpec, PagedEntries
from deepinfer_core.conformance import grids
from deepinfer_core.conformance.analysis import Approx, Arithmetic, exact
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Expectation, Judged, Verdict, failed, ranking
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.ops import pools
from deepinfer_core.conformance.ops.shapes import INDEX_DIM, INDEX_HEADS, ROPE_DIM, TOPK, WINDOW, tree_bytes
from deepinfer_core.conformance.trees import strided

Dims = Mapping[str, Any]


def _small_integers(draw: Draw, *shape: int) -> Tensor:
    """Values 0, 1, 2, -1, -2 with a 4 in every block of 32: exact under either FP4 rule (scale 1), and full of ties."""
    x = draw.integers(-2, 3, *shape).double()
    x[..., ::32] = 4.0
    return x


def _make_select(g: Dims, draw: Draw) -> Inputs:
    rows, counts, n, dim = g["rows"], list(g["counts"]), g["entries"], g["dim"]
    table, total = pools.block_table(draw, counts, n)
    sequence = (torch.arange(rows) * len(counts)) // max(rows, 1)
    keys = pools.paged(total, n, dim, g["format"], True, table, sequence)
    pools.filled_pages(draw, keys, counts)
    query = draw.activation(rows, g["heads"], dim)
    head_weights = draw.normal(rows, g["heads"], scale=dim**-0.5)
    if g.get("content") == "ties":
        for s, count in enumerate(counts):
            j = torch.arange(count)
            page = table[s, j // n].long()
            pools.write(keys.data, pools.page_views(keys), page, j % n, grids.encode(_small_integers(draw, count, dim), keys.format))
        query = _small_integers(draw, rows, g["heads"], dim).to(draw.dtype)
        head_weights = draw.integers(-2, 3, rows, g["heads"]).float()
    count = torch.tensor(counts)[sequence] if rows else torch.zeros(0, dtype=torch.int64)
    visible = torch.minimum(draw.integers(0, max(counts) + 1, rows), count)
    if rows:
        visible[-1] = count[-1]
        visible[0] = min(g.get("first_visible", 0), int(count[0]))
    rope = draw.rope(rows, g["rd"])
    if g.get("content") == "ties":
        rope = rope._replace(positions=torch.zeros_like(rope.positions))  # angle 0: the integers stay what they are
    return {
        "query": strided(query) if g.get("content") == "strided" else query,
        "rope": rope,
        "head_weights": head_weights,
        "keys": keys,
        "visible": visible.int(),
        "topk": g["topk"],
        "candidates": _candidates(g, draw, rows, max(counts)),
        "emit": CandidateSpec(g["emit"], g["block"]) if g.get("emit") else None,
        "block_size": g.get("block", 0) if g.get("candidates") or g.get("emit") else 0,
    }


def _candidates(g: Dims, draw: Draw, rows: int, longest: int) -> Tensor | None:
    """Ascending block numbers, -1 padded; one row has none at all."""
    if not g.get("candidates"):
        return None
    blocks = -(-longest // g["block"])
    chosen = torch.full((rows, g["candidates"]), -1)
    for t in range(rows):
        some = draw.permutation(blocks)[: g["candidates"] - t % 2].sort().values
        chosen[t, : len(some)] = some
    if rows > 2:
        chosen[2] = -1
    return chosen.int()


def _run_select(k: Any, i: Inputs) -> Outputs:
    query = k.index_query(i["query"], i["rope"])
    args = (i["keys"], i["visible"], i["topk"], i["candidates"], i["emit"], i["block_size"])
    index, candidates = k.select_entries(query, i["head_weights"], *args)
    return {"index": index} if i["emit"] is None else {"index": index, "candidates": candidates}


def key_values(keys: PagedEntries, width: int) -> Tensor:
    """float64 [T, width, dim]: entries 0 .. width-1 of each row's sequence, NaN where nothing was written."""
    entry = torch.arange(width)
    table = keys.block_table.long()[keys.sequence.long()]
    page = table[:, entry // keys.entries_per_page]
    return pools.read(keys.data, pools.page_views(keys), keys.format, page, (entry % keys.entries_per_page).expand(page.shape))


def _scores(a: Arithmetic, i: Inputs, width: int) -> Approx:
    """[T, width]: sum over heads of weight * relu(q . k)."""
    query = a.fp4_index(a.rounded(a.rotated(exact(i["query"]), i["rope"].table, i["rope"].positions)))
    dots = a.product(query, key_values(i["keys"], width).nan_to_num(0.0))  # [T, heads, width]
    relu = Approx(dots.value.clamp_min(0), torch.where(dots.value + dots.radius > 0, dots.radius, 0.0))
    return a.sum(relu.times(exact(i["head_weights"][:, :, None])) if not a.exact_sums else _exact_times(relu, i["head_weights"]), 1)


def _exact_times(x: Approx, weights: Tensor) -> Approx:
    return Approx(x.value * weights.double()[:, :, None], x.radius * weights.double().abs()[:, :, None])


def _expect_select(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    keys, visible = i["keys"], i["visible"].long()
    width = max(keys.block_table.shape[1] * keys.entries_per_page, 1)
    scores = _scores(a, i, width)
    if a.exact_sums:
        scores = Approx(scores.value, torch.zeros_like(scores.radius))
    seen = torch.arange(width) < visible[:, None]
    allowed = seen
    if i["candidates"] is not None:
        block = torch.arange(width) // i["block_size"]
        allowed = seen & (i["candidates"].long()[:, :, None] == block).any(1)
    count = allowed.sum(1).clamp_max(i["topk"])
    expected: dict[str, Expectation] = {"index": _list_of("index", scores, allowed, count, i["topk"])}
    if i["emit"] is not None:
        blocks, offered, most = _blocks(scores, seen, visible, i["emit"])
        expected["candidates"] = _list_of("candidates", blocks, offered, most, i["emit"].blocks)
    return expected


def _blocks(scores: Approx, seen: Tensor, visible: Tensor, spec: CandidateSpec) -> tuple[Approx, Tensor, Tensor]:
    """(block scores, offered blocks, how many are kept). The last visible block has the score infinity."""
    pad = -scores.value.shape[1] % spec.block_size
    low, high = (
        torch.nn.functional.pad(torch.where(seen, v, -torch.inf), (0, pad), value=-torch.inf).unflatten(1, (-1, spec.block_size)).amax(-1)
        for v in (scores.low, scores.high)
    )
    offered = high > -torch.inf
    last = (visible - 1).clamp_min(0) // spec.block_size
    pinned = (torch.arange(low.shape[1]) == last[:, None]) & (visible > 0)[:, None]
    value = torch.where(offered, (low + high) / 2, 0.0).masked_fill(pinned, 1e300)
    radius = torch.where(offered, (high - low) / 2, 0.0).masked_fill(pinned, 0.0)
    return Approx(value, radius), offered, offered.sum(1).clamp_max(spec.blocks)


def _list_of(what: str, scores: Approx, allowed: Tensor, count: Tensor, width: int) -> Judged:
    """int32 [T, width]: the best allowed ids, ascending, -1 padded at the end."""

    def judge(got: Tensor) -> Verdict:
        if got is None or tuple(got.shape) != (len(count), width) or got.dtype != torch.int32:
            form = "None" if got is None else f"{got.dtype} {list(got.shape)}"
            return failed(f"wrong shape or dtype of {what}", f"int32 {[len(count), width]}", form)
        ids = got.long()
        for row in range(len(ids)):
            listed = ids[row][ids[row] >= 0]
            padded = torch.cat([listed, torch.full((width - len(listed),), -1)])
            if not torch.equal(padded, ids[row]) or (len(listed) > 1 and not (listed.diff() > 0).all()):
                return failed(f"{what} is not ascending with -1 at the end", "", ids[row].tolist()[:24], (row,))
        return ranking(scores, ids, allowed, count)

    return Judged(judge)


def _select_rows(inputs: Inputs, index: Tensor) -> Inputs:
    keys, rope = inputs["keys"], inputs["rope"]
    kept = {name: inputs[name][index] for name in ("query", "head_weights", "visible")}
    candidates = None if inputs["candidates"] is None else inputs["candidates"][index]
    pages = type(keys)(**{**vars(keys), "sequence": keys.sequence[index]})
    return {**inputs, **kept, "keys": pages, "candidates": candidates, "rope": rope._replace(positions=rope.positions[index])}


def _select_cost(i: Inputs) -> Cost:
    rows, heads, dim = i["query"].shape
    seen = float(i["visible"].sum())
    entry = i["keys"].format.entry_bytes(dim)
    distinct = float(len(i["keys"].block_table) * i["visible"].max()) if rows else 0.0
    return Cost(tree_bytes(i["query"]) + distinct * entry + 4.0 * rows * i["topk"], 2.0 * seen * heads * dim)


def _prepared_select(k: Any, i: Inputs) -> Any:
    query = k.index_query(i["query"], i["rope"])
    rest = (i["head_weights"], i["keys"], i["visible"], i["topk"], i["candidates"], i["emit"], i["block_size"])
    return lambda: k.select_entries(query, *rest)


_I = {"heads": 4, "dim": 64, "rd": 32, "entries": 8, "counts": (40, 3, 19), "topk": 8}
_FP4, _BF16, _F32 = CacheFormat.FP4_INDEX, CacheFormat.BF16, CacheFormat.F32
_RELEASED = {"heads": INDEX_HEADS, "dim": INDEX_DIM, "rd": ROPE_DIM, "entries": WINDOW, "topk": TOPK, "format": _FP4}


def _geometry(name: str, why: str = "", quick: bool = True, exact_sums: bool = False, **dims: Any) -> Geometry:
    return Geometry(name, {**_I, "format": _FP4, **dims}, why, quick, Numerics.RELEASE, exact_sums, index=_FP4)


_SHAPES = (
    _geometry("rows", "ragged sequences over shuffled pages", rows=21),
    _geometry("no_rows", rows=0),
    _geometry("one_row", rows=1, first_visible=40),
    _geometry("all_fit", "topk above everything visible", rows=9, topk=64),
    _geometry("topk_edge", "visible = topk and one more", rows=4, counts=(9, 8), first_visible=8),
    _geometry("page_boundary", "one past a page", rows=9, counts=(9, 8, 17, 16)),
    _geometry("strided", rows=9, content="strided"),
    _geometry("ties", "equal scores: the lower entry wins", rows=24, exact_sums=True, content="ties", topk=5),
    _geometry("candidates", "only entries of candidate blocks", rows=17, candidates=3, block=4),
    _geometry("candidates_ties", rows=17, candidates=3, block=4, exact_sums=True, content="ties", topk=3),
    _geometry("emit", "block scores, last block pinned, fewer blocks than asked for", rows=21, emit=3, block=4),
    _geometry("emit_ties", "equal blocks: the lower block wins", rows=24, emit=4, block=4, exact_sums=True, content="ties"),
    _geometry("emit_restricted", "candidates do not restrict what is emitted", rows=13, candidates=3, emit=3, block=4),
    Geometry("bf16_keys", {**_I, "rows": 11, "format": _BF16}, numerics=Numerics.RELEASE, index=_BF16),
    Geometry("f32_keys", {**_I, "rows": 11, "format": _F32}, numerics=Numerics.IDEAL, index=_F32),
    Geometry("f32_emit", {**_I, "rows": 11, "format": _F32, "emit": 3, "block": 4}, numerics=Numerics.IDEAL, index=_F32),
    Geometry(
        "released",
        {**_RELEASED, "rows": 4, "counts": (1100, 513), "emit": 40, "block": 8},
        "released sizes",
        numerics=Numerics.RELEASE,
        index=_FP4,
    ),
)

_PRESETS = {
    "decode-1": {**_RELEASED, "rows": 1, "counts": (8192,), "first_visible": 8192},
    "decode-64": {**_RELEASED, "rows": 64, "counts": (2048,) * 8},
    "prefill-8k": {**_RELEASED, "rows": 8192, "counts": (8192,)},
}

SELECT_ENTRIES = OpDescription(
    op="select_entries",
    bound="float32 scores: an entry may be swapped for another only if their intervals overlap; exact, ties included, on small integers",
    geometries=_SHAPES,
    make=_make_select,
    run=_run_select,
    expect=_expect_select,
    cost=_select_cost,
    rows=_select_rows,
    presets=_PRESETS,
    prepare=_prepared_select,
    workspace=lambda g: 8.0 * g["rows"] / len(g["counts"]) * g["heads"] * max(g["counts"]),
)

# ------------------------------------------------------------------ index_query


def _make_query(g: Dims, draw: Draw) -> Inputs:
    """One entry per dim and sign, one-hot: the selection ranks the query's own quantised values, and its ties show the grid."""
    dim = g["dim"]
    inputs = _make_select({**_I, **g, "counts": (2 * dim,), "topk": g["topk"]}, draw)
    hot = torch.cat([torch.eye(dim), -torch.eye(dim)]).double()
    j, n, keys = torch.arange(2 * dim), inputs["keys"].entries_per_page, inputs["keys"]
    page = keys.block_table[0, j // n].long()
    pools.write(keys.data, pools.page_views(keys), page, j % n, grids.encode(hot, keys.format))
    weights = torch.zeros_like(inputs["head_weights"])
    if len(weights):
        weights[torch.arange(len(weights)), torch.arange(len(weights)) % g["heads"]] = 1.0
        if g.get("mixed"):  # heads against each other: their scales become visible
            weights = draw.integers(1, 5, *weights.shape).float()
    return {**inputs, "head_weights": weights, "visible": torch.full((g["rows"],), 2 * dim, dtype=torch.int32)}


def _query_geometry(name: str, why: str = "", **dims: Any) -> Geometry:
    base = {"heads": 4, "dim": 64, "rd": 32, "entries": 16, "topk": 20, "format": _FP4}
    return Geometry(name, {**base, **dims}, why, numerics=Numerics.RELEASE, exact_sums=True, index=_FP4)


INDEX_QUERY = OpDescription(
    op="index_query",
    bound="rotation rounded, FP4 grid; seen through select_entries over one-hot keys, whose scores are single products",
    geometries=(
        _query_geometry("rows", rows=24),
        _query_geometry("few", "the largest values only", rows=12, topk=3),
        _query_geometry("many", "values near zero", rows=12, topk=60),
        _query_geometry("no_rows", rows=0),
        _query_geometry("one_row", rows=1),
        _query_geometry("strided", rows=9, content="strided"),
        Geometry(
            "mixed_heads",
            {"heads": 3, "dim": 64, "rd": 32, "entries": 16, "topk": 24, "format": _FP4, "rows": 20, "mixed": True},
            "each head and block has its own scale",
            numerics=Numerics.RELEASE,
            index=_FP4,
        ),
        Geometry(
            "ideal",
            {"heads": 4, "dim": 64, "rd": 32, "entries": 16, "topk": 20, "format": _F32, "rows": 12},
            numerics=Numerics.IDEAL,
            index=_F32,
        ),
        _query_geometry("released", rows=5, heads=INDEX_HEADS, dim=INDEX_DIM, rd=ROPE_DIM, entries=128, topk=50),
    ),
    make=_make_query,
    run=_run_select,
    expect=_expect_select,
    cost=lambda i: Cost(1.3 * tree_bytes(i["query"]), 8.0 * i["query"].numel()),
    rows=_select_rows,
    presets={name: {**_RELEASED, "rows": rows} for name, rows in (("decode-1", 1), ("decode-64", 64), ("prefill-8k", 8192))},
    prepare=lambda k, i: lambda: k.index_query(i["query"], i["rope"]),
)

OPS = (SELECT_ENTRIES, INDEX_QUERY)
