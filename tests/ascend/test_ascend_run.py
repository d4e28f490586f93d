"""The runner of these tests: it skips aloud, and never in silence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import run


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("DEEPINFER_ASCEND_TESTS", raising=False)
    monkeypatch.setattr(run.shutil, "which", lambda tool: None)
    assert run.main() == 0
    assert "SKIPPED: the CANN stub needs gcc, nm, readelf" in capsys.readouterr().out


def test_a_required_run_fails_instead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DEEPINFER_ASCEND_TESTS", "require")
    monkeypatch.setattr(run.sys, "platform", "darwin")
    assert run.main() == 1
    assert "FAILED, because they are required: torch_npu exists for Linux only" in capsys.readouterr().out


def _pip(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    monkeypatch.setattr(run.subprocess, "run", lambda command, **rest: subprocess.CompletedProcess(command, 1, "", error))


def test_a_missing_wheel_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _pip(monkeypatch, "ERROR: No matching distribution found for torch-npu==2.13.0")
    assert "no torch-npu wheel for Python" in run.install(Path("python"))


def test_other_failures_of_pip_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    _pip(monkeypatch, "ERROR: no space left on device")
    with pytest.raises(SystemExit, match="pip failed"):
        run.install(Path("python"))
