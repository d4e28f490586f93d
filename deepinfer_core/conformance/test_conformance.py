"""What pytest collects from this package: one test for each case of the suite."""

from __future__ import annotations

from typing import Any

from deepinfer_core.conformance.pytest_plugin import report


def test_conforms(conformance_task: Any) -> None:
    """The backend named by --deepinfer-backend passes this case."""
    report(conformance_task)
