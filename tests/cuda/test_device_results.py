"""What can be checked without a GPU of the comparison with public kernels and of the page made of a session's results."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "cuda"))

import peer_pairs
import peers
import results

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(monkeypatch):
    """A family of comparisons on the CPU, the reference kernels in place of ours."""
    reference = ReferenceKernels(CPU)

    def family(name):
        module = importlib.import_module(f"peers_{name}")
        for at in (peer_pairs, module):
            monkeypatch.setattr(at, "DEVICE", CPU)
            monkeypatch.setattr(at, "kernels", lambda: reference)
        return module

    return family


def attend(query, keys, sink, scale):
    """Attention of [T, H, d] over [T, k, d], each key also a value; `sink` only in the denominator."""
    scores = torch.einsum("thd,tkd->thk", query.float(), keys.float()) * scale
    top = torch.maximum(scores.amax(-1), sink)
    p = torch.exp(scores - top[..., None])
    return (torch.einsum("thk,tkd->thd", p, keys.float()) / (p.sum(-1) + torch.exp(sink - top))[..., None]).bfloat16()


@pytest.fixture
def flash_mla(monkeypatch):
    """What FlashMLA documents, in plain torch."""

    def sparse(query, keys, index, scale, width, sink, use_legacy, return_log2_lse):
        assert (use_legacy, return_log2_lse, width) == (True, False, 512)
        return attend(query, keys[index[:, 0].long(), 0], sink, scale), None, None

    def with_cache(query, cache, table, lengths, width, plan, *, softmax_scale, is_fp8_kvcache, indices, attn_sink, use_legacy, kv_format):
        assert (is_fp8_kvcache, use_legacy, kv_format, cache.shape[1:]) == (True, True, "V32_NO_ROPE", (64, 1, 528))
        rows = cache.reshape(-1, 528)[indices[:, 0].long()]
        values = rows[..., :512].contiguous().view(torch.float8_e4m3fn).float()
        scales = rows[..., 512:].contiguous().view(torch.float32).repeat_interleave(128, -1)
        return attend(query[:, 0], values * scales, attn_sink, softmax_scale)[:, None], None

    module = types.ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = sparse
    module.flash_mla_with_kvcache = with_cache
    module.get_mla_metadata = lambda: (None, None)
    monkeypatch.setitem(sys.modules, "flash_mla", module)


@pytest.mark.usefixtures("flash_mla")
def test_both_sides_of_the_attention_comparison_get_the_same_keys(on_cpu):
    attention = on_cpu("attention")
    for comparison in (*attention.comparisons(2), *attention.comparisons(65)):
        if comparison.rows <= 65:
            assert comparison.build().same() < comparison.bound


def test_a_package_that_is_missing_becomes_a_row_that_says_so(on_cpu):
    row = peers.measure(next(on_cpu("tile").comparisons(2)), torch.empty(1))
    text = peers.line(row)
    assert "hc_pre | 2 |" in text
    assert "not installed or does not load: No module named 'tile" in text


def test_a_comparison_that_fails_hides_no_other(on_cpu):
    comparison = peer_pairs.Comparison("embed", 3, "nobody", lambda: peer_pairs.Pair(lambda: 1 / 0, lambda: None))
    row = peers.measure(comparison, torch.empty(1))
    assert row["failure"].startswith("ZeroDivisionError")
    assert "measure" in row["trace"]


def test_a_result_that_is_too_far_away_is_marked():
    row = {"op": "a", "rows": 1, "peer": "b", "differs": "", "ours_us": 2.0, "peer_us": 3.0, "ratio": 1.5, "launched": "eager"}
    assert "| 1.50 |  | launched eagerly |" in peers.line(row)
    assert "| 0.5 **above 0.1** |" in peers.line(row | {"difference": 0.5, "bound": 0.1})
    assert "| 0.05 |" in peers.line(row | {"difference": 0.05, "bound": 0.1})


def entry(op, rows, bandwidth, product, note=""):
    return {"op": op, "note": note, "rows": rows, "cold_us": 10.0, "warm_us": 8.0, "bandwidth_share": bandwidth, "product_share": product}


@pytest.fixture
def session(tmp_path):
    """A folder as measure_device.sh leaves it, two of its runs missing."""

    def lines(name, *values):
        (tmp_path / name).write_text("".join(json.dumps(value) + "\n" for value in values))

    limits = {"copy": 4.2e12, "product": 7.9e14, "empty_us": 2.9}
    ops = (entry("embed", 8, 0.8, 0.0), entry("hc_post", 8, 0.5, 0.0), entry("moe", 8192, 0.1, 0.55), entry("moe_gate", 8, 0.1, 0.0))
    lines("bench_ops.jsonl", limits, *ops)
    lines("bench_ops_invariant.jsonl", limits, entry("embed", 8, 0.8, 0.0) | {"cold_us": 12.0})
    ours = {"op": "hc_post", "rows": 8, "peer": "TileKernels post", "differs": "", "ours_us": 2.0, "peer_us": 1.0, "ratio": 0.5}
    lines("peers.jsonl", limits, ours)
    (tmp_path / "peers.md").write_text("| the table |\n")
    lines("device_check.jsonl", {"label": "a", "problem": ""}, {"label": "b", "problem": "is wrong"})
    (tmp_path / "device_check.log").write_text("1 passed, 1 failed, 3 left out for time, 9 s\n")
    (tmp_path / "sanitizer.log").write_text("========= ERROR SUMMARY: 0 errors\n")
    case = {"level": "ops", "id": "embed(rows)", "seconds": 2.0}
    report = [case | {"status": "passed", "message": ""}, case | {"status": "failed", "message": "off by one"}]
    report.append(case | {"status": "unsupported", "message": "no such format"})
    (tmp_path / "conformance_ops.json").write_text(json.dumps({"results": report}))
    (tmp_path / "conformance_model.status").write_text("124\n")
    forced = {"prompt": "p1", "sure": 10, "equal where sure, one step": 10, "equal where sure, token by token": 9}
    golden = {"machine": {}, "errors": {}, "compare_forced": [forced], "compare_ideal": [{"prompt": "p1", "tokens": 24, "equal": 24}]}
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    return tmp_path


def test_the_page_says_what_was_met_what_was_missed_and_what_was_not_run(session, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["results.py", str(session)])
    results.main()
    page = capsys.readouterr().out
    for text in (
        "memory-bound ops at 8 rows, at least 70% of copy: 1 of 2 meet it. Missed: hc_post 50%.",
        "moe at 8192 rows, at least 50% of the product rate: 55%, met.",
        "equal at 10 (one step) and 9 (token by token) of the 10 positions",
        "ideal numerics (the reference's ops on this GPU): 24 of 24 equal.",
        "conformance, ops | 1 passed, 1 failed, 1 unsupported, 0 skipped",
        "conformance, model | **stopped by its time limit**",
        "conformance, engine | not run",
        "1 passed, 1 failed, 3 left out",
        "0 errors",
        "`ops: embed(rows)`: off by one",
        "`b`: is wrong",
        "ops, unsupported: no such format (1)",
        "| 8 | embed | 10.0 | 8.0 | 80% | 0% | 12.0 | 1.20 |",
        "hc_post, 8 rows: 0.50 of TileKernels post",
        "## Decode and prefill\n\nNot run.",
    ):
        assert text in page
