"""The cross-backend conformance suite on the emulated backend, as `deepinfer conformance --backend ascend950 --emulate` runs it."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.conformance import suite
from deepinfer_core.conformance.results import LEVELS


@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str, emulated_backend: Any) -> None:
    subject = suite.open_subject("ascend950", emulate=True)
    report = suite.run(subject, suite.Plan(levels=(level,)))
    assert report.backend == "ascend950_emulated"
    assert [f"{result.id}: {result.message}" for result in report.failures] == []


def test_without_a_device_the_suite_offers_the_emulation(emulated_backend: Any) -> None:
    from deepinfer_core.errors import BackendError

    if __import__("torch").npu.is_available():
        pytest.skip("there is an NPU here")
    with pytest.raises(BackendError, match="--emulate"):
        suite.open_subject("ascend950")
