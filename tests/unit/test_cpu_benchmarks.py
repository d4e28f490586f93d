"""The CPU benchmarks run, small, and say what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_core.checkpoint.geometries import shipped_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--batches", "1", "2", "--steps", "1", "--rounds", "1", "--prompt", "8", "--threads", "1"]


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), str(shipped_checkpoint()), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_comparison_measures_this_engine_alone_and_says_how_to_get_the_peer(tmp_path):
    result = run("cpu_vs_mlx.py", *SMALL, "--json", tmp_path / "out.json")
    assert result.returncode == 0, result.stderr
    assert "--peer-python was not given" in result.stderr
    assert 'pip install "mlx[cpu]" mlx-vlm' in result.stderr
    table = json.loads((tmp_path / "out.json").read_text())["table"]
    assert [row["case"] for row in table] == ["decode, batch 1", "decode, batch 2", "prefill, 8 tokens"]
    assert all(row["ours_wall"] > 0 and row["ours_cpu"] > 0 and row["ratio_wall"] is None for row in table)


def test_a_peer_that_cannot_run_is_explained(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from cpu_vs_mlx import peer_problem

    assert "does not run" in peer_problem(str(tmp_path / "python"))
    assert "cannot import mlx and mlx_vlm" in peer_problem(sys.executable)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_takes_at_most_one_shard_more_than_what_stays():
    result = run("load_memory.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "largest shard" in result.stdout
