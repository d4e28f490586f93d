"""Planted faults: mistakes that are easy to make with these operators. The emulated ops (or the meta run) must catch each one."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend_cases import CASES, SMALL, Source
from test_ascend_ops import problems_of
from torch import Tensor

from deepinfer_backends.ascend950 import layout
from deepinfer_backends.ascend950.kernels import attention, caches, calls, engram, formats, hyper, indexer, moe, rows
from deepinfer_core.conformance import suite
from deepinfer_core.conformance.op_level import OpFilter


def _rewrite(module: ModuleType, name: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Replaces text in the source of a function (or of Class.method) of `module`: a fault as a person would type it."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        owner, _, attribute = name.rpartition(".")
        holder: Any = getattr(module, owner) if owner else module
        function = inspect.getattr_static(holder, attribute)
        source = textwrap.dedent(inspect.getsource(getattr(function, "__func__", function)))
        assert source.count(old) >= 1, f"{name} no longer contains {old!r}: adapt this fault"
        scope: dict[str, Any] = {}
        lines = "from __future__ import annotations\n" + source.replace(old, new)
        exec(compile(lines, f"<fault in {name}>", "exec"), module.__dict__, scope)
        monkeypatch.setattr(holder, attribute, scope[attribute])

    return plant


def _in_calls(name: str, old: str, new: str) -> Callable[[pytest.MonkeyPatch], None]:
    return _rewrite(calls, name, old, new)


def _unpaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """First half of the scales in one column, second half in the other."""

    def halves(scale: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, scale.shape[-1] % 2), value=127)
        return padded.unflatten(-1, (2, padded.shape[-1] // 2)).transpose(-1, -2)

    monkeypatch.setattr(layout, "paired_scales", halves)
    monkeypatch.setattr(moe, "paired_scales", halves)


def _paired_along_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(scale: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, scale.shape[-1] % 2), value=127)
        count, blocks = padded.shape
        return padded.view(count // 2, 2, blocks).transpose(1, 2).reshape(count, blocks // 2, 2)

    monkeypatch.setattr(layout, "paired_scales", wrong)


def _swapped_nibbles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.PlainLayout, "tile", lambda self, packed: (packed << 4) | (packed >> 4))


def _causal_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows as one sequence under a lower-right mask, which counts tokens where this model counts groups."""
    real = calls.lightning_indexer

    def one_sequence(query: Tensor, keys: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, count: int) -> Tensor:
        operator = torch.ops.npu.npu_lightning_indexer
        ends = torch.tensor([len(query)], dtype=torch.int32)
        layouts = {"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": count, "sparse_mode": 3}
        lengths = lengths.amax()[None]
        tables = {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": lengths, "block_table": table[:1]}
        return operator(query, keys[:, :, None], weights, **tables, **layouts)[0][:, 0]

    assert real is not None
    monkeypatch.setattr(calls, "lightning_indexer", one_sequence)


def _unshifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's own collapse, which uses this sub-layer's weights."""

    def hc_collapse(self: Any, streams: Tensor, pre: Tensor) -> Tensor:
        m = streams.shape[1]
        parts = torch.zeros(m * (m + 2), m * streams.shape[2]), torch.zeros(3), torch.zeros(m * (m + 2))
        return torch.ops.npu.npu_mhc_pre(streams, *parts)[0]

    monkeypatch.setattr(hyper.HyperOps, "hc_collapse", hc_collapse, raising=False)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "scale_alg left at 0 for fp8": ("quantized_linear", _in_calls("quantize_fp8", "scale_alg=1, max_low_bound=FP8_FLOOR", "scale_alg=0")),
    "scale_alg left at 0 for fp4": ("store_index_keys", _in_calls("quantize_fp4", "scale_alg=2", "scale_alg=0")),
    "max_low_bound forgotten": ("quantized_linear", _in_calls("quantize_fp8", ", max_low_bound=FP8_FLOOR", "")),
    "scale pairs not interleaved": ("quantized_linear", _unpaired),
    "scale pairs along the outputs": ("quantized_linear", _paired_along_outputs),
    "weight scale of fp4 as scale": ("moe", _in_calls("experts_fp4", "antiquant_scale=[scale]", "scale=[scale], scale_dtype=293")),
    "nibbles swapped": ("moe", _swapped_nibbles),
    "expert weights not transposed": (
        "moe",
        _rewrite(moe, "_Stacks.finish", "kept[name] = stacked.transpose(1, 2)", "kept[name] = stacked"),
    ),
    "gate and up swapped": ("moe", _rewrite(moe, "_Stacks.add", "(expert.w1, expert.w3)", "(expert.w3, expert.w1)")),
    "plain counts as running sums": ("moe", _in_calls("_groups", '"group_list_type": 1', '"group_list_type": 0')),
    "running sums as plain counts": ("moe", _in_calls("route", "expert_tokens_num_type=1", "expert_tokens_num_type=0")),
    "choice-major places": ("moe", _rewrite(moe, "MoeOps.moe", "place.view(rows, top_k)", "place.view(top_k, rows).t().contiguous()")),
    "routing weight applied twice": ("moe", _rewrite(moe, "_feed_forward", "hidden * weights[:, None]", "hidden * weights[:, None] ** 2")),
    "routing weight forgotten": ("moe", _rewrite(moe, "_feed_forward", "hidden * weights[:, None]", "hidden")),
    "SwiGLU of another model": ("moe", _in_calls("clipped_swiglu", "alpha=1.0, limit=limit, bias=0.0, interleaved=False", "limit=limit")),
    "SwiGLU halves interleaved": ("moe", _in_calls("clipped_swiglu", "interleaved=False", "interleaved=True")),
    "SwiGLU rounded before the weight": ("moe", _rewrite(moe, "_feed_forward", ".float(), limit)", ", limit)")),
    "undefined rows multiplied by zero": (
        "moe",
        _rewrite(
            moe,
            "MoeOps.moe",
            "torch.where((place >= 0)[:, None], out[place.clamp_min(0)].float(), 0.0)",
            "out[place].float() * (place >= 0)[:, None]",
        ),
    ),
    "dropped choices given to expert 0": ("moe", _rewrite(moe, "MoeOps.moe", "routing.ids < 0, experts.count", "routing.ids < 0, 0")),
    "padded scale left undefined": ("moe_odd", _rewrite(moe, "_whole_pairs", "torch.where(last, NO_SCALE, x.scales)", "x.scales")),
    "-1 before valid indices": (
        "sparse_attention",
        _in_calls("sparse_attention", "index[:, None, None]", "index.flip(1).contiguous()[:, None, None]"),
    ),
    "sink missing": ("sparse_attention", _in_calls("sparse_attention", "sinks=sink", "sinks=None")),
    "sink scaled": ("sparse_attention", _in_calls("sparse_attention", "sinks=sink", "sinks=sink * scale")),
    "rotary parts not zero": ("sparse_attention", _in_calls("sparse_attention", "new_zeros", "new_ones")),
    "row without keys left undefined": (
        "sparse_attention",
        _rewrite(attention, "_attend", "torch.where(some[:, None, None], out, 0.0)", "out"),
    ),
    "window keys of this step forgotten": ("sparse_attention", _rewrite(attention, "_window_keys", "if len(window.current):", "if False:")),
    "query lengths not running sums": (
        "select_entries",
        _in_calls("lightning_indexer", "torch.arange(1, query.shape[0] + 1, dtype", "torch.ones(query.shape[0], dtype"),
    ),
    "key lengths as running sums": ("select_entries", _in_calls("lightning_indexer", "lengths,", "lengths.cumsum(0).int(),")),
    "indexer causal by sequence": ("select_entries", _causal_by_sequence),
    "row that sees nothing": ("select_entries", _rewrite(indexer, "_narrow", "visible.clamp_min(1)", "visible")),
    "ties to the higher entry": (
        "select_ties",
        _rewrite(indexer, "_best", "stable=True", "stable=True).__class__(scores.flip(1).sort(dim=1, descending=True, stable=True)"),
    ),
    "last block not pinned": ("select_entries_and_blocks", _rewrite(indexer, "_best_blocks", "(block == last)", "(block == -1)")),
    "unshifted collapse": ("hc_pre", _unshifted),
    "nineteen Sinkhorn iterations": ("hc_pre", _in_calls("sinkhorn", "num_iters=iterations", "num_iters=iterations - 19")),
    "another Sinkhorn result": ("hc_pre", _in_calls("sinkhorn", "out_flag=0)[0]", "out_flag=0)[1]")),
    "comb before Sinkhorn": (
        "hc_pre",
        _rewrite(hyper, "HyperOps.hc_pre", "calls.sinkhorn(logits, constants.hc_eps, constants.sinkhorn_iters)", "logits"),
    ),
    "comb transposed": (
        "hc_post",
        _rewrite(hyper, "HyperOps.hc_post", "(streams, comb, y, post)", "(streams, comb.transpose(1, 2), y, post)"),
    ),
    "coefficients without out_flag": ("hc_pre", _in_calls("mhc_coefficients", "out_flag=1", "out_flag=0")),
    "cos and sin in halves": ("window_key", _rewrite(caches, "rotate", ".repeat_interleave(2, dim=1)", ".repeat(1, 2)")),
    "half rotation": ("window_key", _in_calls("rotate_pairs", '"interleave"', '"half"')),
    "sign of the inverse rotation": ("sparse_attention", _rewrite(attention, "rotate", "-sin if inverse else sin", "sin")),
    "norm rounded twice": (
        "rms_norm",
        _in_calls("rms_norm", "npu_rms_norm(x, weight, eps)", "npu_rms_norm(x.bfloat16(), weight.bfloat16(), eps)"),
    ),
    "padding rows write slot 0": (
        "store_one_padding",
        _rewrite(rows, "RowTable.store", "keep = slots >= 0", "slots = slots.clamp_min(0); keep = slots >= 0"),
    ),
    "padding rows collide": (
        "store_window",
        _rewrite(rows, "RowTable.store", "keep = slots >= 0", "slots = slots.clamp_min(0); keep = slots >= 0"),
    ),
    "page stride ignored": (
        "store_entries",
        _rewrite(rows, "RowTable.of", "stride // unit if groups > 1 else 0", "entries * width // unit"),
    ),
    "block table ignored": (
        "select_entries_and_blocks",
        _rewrite(indexer, "page_slots", "pages.block_table.long()", "pages.block_table.long().flip(1)"),
    ),
    "block of zeros left undefined": (
        "store_index_keys",
        _rewrite(formats, "index_grid", "torch.where(is_zero, _LEAST, x.scales)", "x.scales"),
    ),
    "entries rounded half up": (
        "store_entries",
        _rewrite(formats, "_e2m1_codes", "torch.round(magnitude / step)", "(magnitude / step + 0.5).floor()"),
    ),
    "sign of small entries lost": ("store_entries", _rewrite(formats, "_e2m1_codes", "torch.signbit(x)", "(x <= -0.25)")),
    "Engram rows of no token": (
        "engram_gather",
        _rewrite(engram, "EngramOps.engram_gather", "torch.where((rows >= 0)[..., None], values[index], 0)", "values[index]"),
    ),
    "ring kept before it is read": (
        "compress",
        _rewrite(
            caches,
            "CacheOps.compress",
            "old = table.load(members.clamp(0, kept - 1))",
            "table.store(index.slots, rows); old = table.load(members.clamp(0, kept - 1))",
        ),
    ),
}


def _moe_odd(kernels: Any, source: Source, dims: Any) -> dict[str, Any]:
    import dataclasses

    return CASES["moe"](kernels, source, dataclasses.replace(dims, ff=96, hidden=160))


def _store_one_padding(kernels: Any, source: Source, dims: Any) -> dict[str, Any]:
    from deepinfer_core.backend.formats import CacheFormat
    from deepinfer_core.backend.types import WindowRing

    data = source.pool(2, dims.ring * CacheFormat.FP8.entry_bytes(dims.head), 0).unflatten(1, (dims.ring, -1))
    kernels.store_window(source.normal(2, dims.head), WindowRing(data, CacheFormat.FP8), torch.tensor([3, -1], dtype=torch.int32))
    return {"exact": data}


def _select_ties(kernels: Any, source: Source, dims: Any) -> dict[str, Any]:
    """All entries alike, as many as the operator returns: only the tie rule decides."""
    query = kernels.index_query(torch.zeros(3, dims.index_heads, dims.index_head, dtype=torch.bfloat16), source.rope(dims, 3))
    pages = source.pages(dims.__class__(rows=3, pages=2), _index_format(), dims.index_head, sectioned=True)
    visible = torch.tensor([30, 9, 3], dtype=torch.int32)
    return {"exact": kernels.select_entries(query, source.floats(3, dims.index_heads), pages, visible, dims.topk).index}


def _index_format() -> Any:
    from deepinfer_core.backend.formats import CacheFormat

    return CacheFormat.FP4_INDEX


EXTRA = {"moe_odd": _moe_odd, "store_one_padding": _store_one_padding, "select_ties": _select_ties}


@pytest.fixture(autouse=True)
def _extra_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in EXTRA.items():
        monkeypatch.setitem(CASES, name, function)


@pytest.mark.parametrize("name", EXTRA)
def test_without_a_fault(name: str, emulated: Any) -> None:
    assert problems_of(name, emulated, SMALL, 0) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    plant(monkeypatch)
    try:
        problems = problems_of(name, emulated, SMALL, 0)
    except (RuntimeError, TypeError, IndexError) as error:
        problems = [str(error)]
    assert problems


OP_OF_CASE = {
    "moe_odd": "moe",
    "select_ties": "select_entries",
    "select_entries_and_blocks": "select_entries",
    "store_one_padding": "store_window",
}
SAME_VALUES = {"block of zeros left undefined", "sign of small entries lost"}
"""Faults that change stored bytes but no value: only a comparison of bytes sees them, and the suite compares values."""


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in SAME_VALUES])
def test_the_conformance_suite_catches_it(fault: str, emulated_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    plant(monkeypatch)
    chosen = OpFilter(OP_OF_CASE.get(name, name), "*", None, quick=True)
    assert not suite.run(suite.Subject(emulated_backend), suite.Plan(levels=("ops",), filter=chosen)).passed


def test_host_list_in_a_captured_region_is_caught(monkeypatch: pytest.MonkeyPatch, emulated_backend: Any) -> None:
    from deepinfer_backends.ascend950.kernels import AscendKernels

    _in_calls("_groups", '"group_list": counts', '"group_list": torch.tensor(counts.tolist())')(monkeypatch)
    kernels = AscendKernels(torch.device("meta"), layout=layout.PlainLayout())
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|item"):
        CASES["moe"](kernels, Source("meta"), SMALL)
