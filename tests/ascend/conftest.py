"""Fixtures of the Ascend tests. Most of them need torch_npu on a CANN stub: `python tests/ascend/run.py` makes the environment.

Elsewhere they skip with the reason, or fail with it if DEEPINFER_ASCEND_TESTS=require.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # else `import torch` fails beside a torch_npu without CANN
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "ascend")]


@pytest.fixture(scope="session")
def emulated_backend():
    """The Ascend backend on emulated operators."""
    from deepinfer_backends.ascend950.backend import AscendBackend

    backend = AscendBackend().emulated()
    probe = backend.probe()
    if not probe.available:
        message = f"ascend950 cannot be emulated here: {probe.reasons[0]}"
        if os.environ.get("DEEPINFER_ASCEND_TESTS") == "require":
            pytest.fail(message)
        pytest.skip(message)
    import torch

    torch.set_num_threads(1)
    return backend


@pytest.fixture
def emulated(emulated_backend):
    """The Ascend kernels on emulated operators, with a fresh seed for what CANN leaves open."""
    from deepinfer_backends.ascend950 import emulation

    emulation.seed(0)
    return emulated_backend.kernels("")
