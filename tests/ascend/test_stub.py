"""The CANN stub: what it refuses, and what works on it (each in a process of its own, because it is loaded once for good)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_backends.ascend950.tools import build_cann_stub as stub
from deepinfer_backends.ascend950.tools.build_cann_stub import StubError, Survey


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub.shutil, "which", lambda tool: None if tool == "gcc" else f"/bin/{tool}")
    assert "'gcc' is not installed" in (stub.missing_prerequisite() or "")


def test_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(stub.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(stub.importlib.util, "find_spec", lambda name: None)
    assert stub.main([str(tmp_path)]) == 2
    assert "torch is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub.sys, "platform", "darwin")
    assert "needs Linux" in (stub.missing_prerequisite() or "")


def test_a_machine_with_cann_is_told_to_use_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stub, "missing_prerequisite", lambda: None)
    with pytest.raises(StubError, match="the real CANN is here, use it"):
        stub.build(tmp_path, Survey((), ("aclInit",)))


def test_symbols_that_c_cannot_spell_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stub, "missing_prerequisite", lambda: None)
    with pytest.raises(StubError, match="cannot spell"):
        stub.build(tmp_path, Survey(("libascendcl.so",), ("a-b",)))


def _run(program: str, **environment: str) -> str:
    # A device guard of torch_npu may abort a process, so nothing of this runs in the test's own.
    setup = (
        "from deepinfer_backends.ascend950.tools import build_cann_stub as stub; stub.load(stub.cached());"
        "from deepinfer_backends.ascend950.backend import AscendBackend; from deepinfer_backends.ascend950 import environment\n"
    )
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
    done = subprocess.run([sys.executable, "-c", setup + program], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("emulated_backend")
class TestOnTheStub:
    def test_it_builds_and_torch_npu_imports(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert stub.main([str(tmp_path / "stub")]) == 0
        out = capsys.readouterr().out
        assert "libascendcl.so" in out
        assert "npu operators" in out

    def test_an_npu_less_machine_is_named(self) -> None:
        assert "no NPU is visible" in _run("print(AscendBackend().probe().reasons)", CANN_STUB_DEVICES="0")

    def test_an_older_cann_is_named(self) -> None:
        out = _run("print(AscendBackend().probe().reasons)", CANN_STUB_VERSION="8.5.0", CANN_STUB_DEVICES="1")
        assert "CANN 8.5.0 is too old" in out
        assert "9.2 or later" in out

    def test_a_later_cann_with_two_digits_is_not_older(self) -> None:
        out = _run("print([c.problem for c in environment.checks() if c.name == 'CANN version'])", CANN_STUB_VERSION="10.0.0")
        assert out.strip().splitlines()[-1] == "['']"

    def test_another_device_is_named(self) -> None:
        out = _run("print(AscendBackend().probe().reasons)", CANN_STUB_SOC="Ascend910_9391", CANN_STUB_DEVICES="1")
        assert "Ascend910_9391 (Atlas A3), not an Ascend 950" in out

    def test_arithmetic_that_cannot_be_checked_is_a_reason(self) -> None:
        """The stub's device computes nothing, as a CANN without its operator package would not."""
        out = _run("print(AscendBackend().probe())", CANN_STUB_DEVICES="1")
        assert "available=False" in out
        assert "npu_dynamic_mx_quant refuses" in out

    def test_runtime_speaks_torch_npu(self) -> None:
        """Streams, events, memory, guard and graph capture through the real torch_npu; nothing is computed."""
        program = (
            "from deepinfer_core.errors import EngineError\n"
            "runtime = AscendBackend().runtime('')\n"
            "event = runtime.record(); event.wait(); assert event.done()\n"
            "pending = runtime.to_host({}); assert pending.wait() == {} and pending.done()\n"
            "assert runtime.submit(lambda: {}).wait() == {}\n"
            "assert runtime.memory().total == 1 << 30\n"
            "runtime.capture(lambda: None).replay()\n"
            "with runtime.forbid_sync():\n"
            "    for wait in (event.wait, pending.wait, runtime.synchronize):\n"
            "        try: wait()\n"
            "        except EngineError as error: print(error)\n"
            "runtime.close(); runtime.close()\n"
            "try: runtime.record()\n"
            "except EngineError as error: print(error)\n"
        )
        out = _run(program, CANN_STUB_DEVICES="1")
        assert out.count("inside forbid_sync") == 3
        assert "the Ascend runtime was closed" in out
