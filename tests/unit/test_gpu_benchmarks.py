"""The GPU benchmarks run on a CPU too, small; and their arithmetic reproduces the figures of the released model."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "cuda"))

import end_to_end
from released_model import Shape, model_config, released_layers
from traffic import Traffic, bound_ms

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.checkpoint.geometries import geometry

TINY = "--geometry tiny --backend cpu_ref --device cpu --batches 1,3 --context 40 --steps 3 --eager-steps 2 --pretend-graphs"


def run(monkeypatch, tmp_path, arguments):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *arguments.split()])
    end_to_end.main()
    return json.loads((tmp_path / "end_to_end.json").read_text()), (tmp_path / "end_to_end.md").read_text()


def test_all_speed_parts_run_and_fill_the_page(monkeypatch, tmp_path):
    results, page = run(monkeypatch, tmp_path, f"{TINY} --parts ceilings,decode,prefill")
    assert results["errors"] == {}
    assert results["capture"] == {"captured": True, "failed": []}
    for batch in ("1", "3"):
        row = results[f"decode {batch}"]
        assert row["failures"] == []
        assert 2 <= row["distinct experts"] <= 8
        assert row["graph ms"] > 0
        assert row["eager ms"] > 0
    assert "## Decode, context 40" in page
    assert "## Prefill of 40 tokens" in page


def test_a_part_that_fails_leaves_its_traceback_and_the_others_run(monkeypatch, tmp_path):
    monkeypatch.setattr(end_to_end, "admit", lambda *args: 1 / 0)
    results, page = run(monkeypatch, tmp_path, f"{TINY} --parts decode,prefill")
    assert "ZeroDivisionError" in results["errors"]["decode 1"]
    assert results["prefill"]["tokens"] == 40
    assert "**decode 3**" in page


def test_nothing_begins_after_the_deadline(monkeypatch, tmp_path):
    results, _ = run(monkeypatch, tmp_path, f"{TINY} --seconds -1")
    assert set(results["errors"].values()) == {"left out: no time"}


def test_forty_layers_are_the_release():
    config, release = released_layers(40).text_config, geometry("flash").text_config
    assert config.model_copy(update={"engram_compressed_vocab_size": release.engram_compressed_vocab_size}) == release


@pytest.mark.parametrize("layers", [5, 18, 20])
def test_fewer_layers_keep_every_kind(layers):
    specs = model_config(Shape(layers=layers)).text_config.layers
    assert {spec.ratio for spec in specs} == {0, 1, 2}
    assert any(spec.is_candidate_source for spec in specs)
    assert any(spec.uses_candidates for spec in specs) or layers < 8
    assert sum(spec.engram is not None for spec in specs) == 2


@pytest.mark.parametrize(("batch", "gigabytes", "experts", "milliseconds"), [(1, 13.1, 6, 3.04), (8, 43, 45, 10), (32, 124, 152, 28.8)])
def test_traffic_of_a_decode_step_is_that_of_the_model_notes(batch, gigabytes, experts, milliseconds):
    config = released_layers(40)
    layout = CacheLayout.of(config.text_config, CacheFormat.FP8, CacheFormat.FP4, CacheFormat.FP4_INDEX, 0)
    traffic = Traffic(config, layout)
    nbytes = traffic.decode_bytes(batch, 8192)
    assert nbytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert traffic.expected_experts(batch) == pytest.approx(experts, abs=0.5)
    ceilings = {"copy": 4.3e12, "product": 7.9e14}
    assert bound_ms(nbytes, traffic.operations(batch, 8192, batch), ceilings) == pytest.approx(milliseconds, rel=0.01)
    assert traffic.operations(1, 8192, 1) / 1e9 == pytest.approx(35.9, rel=0.01)
