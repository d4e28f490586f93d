"""The environment that the tests of this folder share."""

from __future__ import annotations

import fcntl
import os

import pytest
import third_party


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Core and example from their wheels, in an environment of their own; built once for all workers of pytest-xdist."""
    reason = third_party.why_not()
    if reason:
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "third_party"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            folder.mkdir()
            third_party.build(folder)
            (folder / "ready").touch()
    return third_party.Environment(folder / "venv", folder / "work")
