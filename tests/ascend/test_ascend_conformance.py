"""The cross-backend conformance suite on the emulated backend, as `deepinfer conformance --backend ascend950 --emulate` runs it.

The engine level and the proofs of batch invariance and collectives are left to that command: they take minutes, the first is about the
engine, the second is not claimed, and the third runs over gloo here as in `test_ascend_collectives`.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.conformance import suite
from deepinfer_core.conformance.op_level import OpFilter
from deepinfer_core.errors import BackendError

CLAIMS = ("device_type", "architectures", "tested_on", "numerics", "*_formats", "async_copy", "graph_capture")


@pytest.mark.parametrize(("level", "pattern"), [("contract", "*"), ("ops", "*"), ("model", "*"), *(("claims", claim) for claim in CLAIMS)])
def test_conformance(level: str, pattern: str, emulated_backend: Any) -> None:
    subject = suite.open_subject("ascend950", emulate=True)
    report = suite.run(subject, suite.Plan(levels=(level,), filter=OpFilter(pattern)))
    assert report.backend == "ascend950_emulated"
    assert [f"{result.id}: {result.message}" for result in report.failures] == []
    assert report.count("passed") > 0


def test_without_a_device_the_suite_offers_the_emulation(emulated_backend: Any) -> None:
    with pytest.raises(BackendError, match="--emulate"):
        suite.open_subject("ascend950")
