"""Every op in Triton's interpreter against the PyTorch reference, at small sizes. Runs on a CPU; a process of its own interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'deepinfer-core[cuda_sm100]')")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: the interpreter's small floats need it")

ROWS = (0, 1, 5, 19)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Errors of every case, by layout ("90", "100"). TRITON_INTERPRET must be set before Triton is imported: hence the process."""
    root = Path(__file__).parents[3]
    out = tmp_path_factory.mktemp("interp") / "report.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root / "tests")}
    command = [sys.executable, "-m", "cuda.interp.run", str(out), *map(str, ROWS)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("layout", ["90", "100"])
@pytest.mark.parametrize("rows", ROWS)
def test_ops_equal_the_reference(reports: dict[str, list[dict]], layout: str, rows: int) -> None:
    bad = [entry for entry in reports[layout] if entry["rows"] == rows and not entry["error"] <= entry["bound"]]
    assert not bad, "\n".join(f"{e['op']}({e['note']}) rows={e['rows']} {e['name']}: {e['error']} > {e['bound']}" for e in bad)


def test_every_op_of_the_contract_was_run(reports: dict[str, list[dict]]) -> None:
    from deepinfer_core.backend.kernels import OPS

    seen = {entry["op"] for entry in reports["90"]} | {"prepare_linear", "prepare_experts", "prepare_engram_table"}
    assert set(OPS) - seen == set()
