"""Every op in Triton's interpreter against the PyTorch reference, at small sizes, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'deepinfer-core[cuda_sm100]')")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: the interpreter's small floats need it")


def run_interpreted(tmp_path: Path, layout: int, rows: int, *op: str) -> list[dict]:
    """Errors of every case. TRITON_INTERPRET must be set before Triton is imported: hence a process of its own."""
    here, out = Path(__file__).parents[1], tmp_path / "report.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(here)}
    command = [sys.executable, "-m", "cuda_checks.interpret", str(out), str(layout), str(rows), *op]
    done = subprocess.run(command, env=environment, cwd=here, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize(("layout", "rows"), [(90, 0), (90, 1), (90, 17), (100, 0), (100, 3)])
def test_ops_equal_the_reference(tmp_path: Path, layout: int, rows: int) -> None:
    from deepinfer_core.backend.kernels import OPS

    report = run_interpreted(tmp_path, layout, rows)
    bad = [entry for entry in report if not entry["error"] <= entry["bound"]]
    assert not bad, "\n".join(f"{e['op']}({e['note']}) {e['name']}: {e['error']} > {e['bound']}" for e in bad)
    seen = {entry["op"] for entry in report} | {"prepare_linear", "prepare_experts", "prepare_engram_table"}
    assert set(OPS) - seen == set()


def test_hyper_connections_of_many_rows_equal_the_reference(tmp_path: Path) -> None:
    report = run_interpreted(tmp_path, 90, 70, "hc_pre")
    assert len(report) == 4
    assert all(entry["error"] <= entry["bound"] for entry in report), report
