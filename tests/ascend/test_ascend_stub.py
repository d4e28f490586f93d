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

    def test_a_machine_without_npus_is_named_and_cann_10_is_not_older_than_9(self) -> None:
        out = _run("print(AscendBackend().probe().reasons)", CANN_STUB_DEVICES="0", CANN_STUB_VERSION="10.0.0")
        assert "no NPU is visible" in out

    def test_an_older_cann_is_named(self) -> None:
        out = _run("print(AscendBackend().probe().reasons)", CANN_STUB_VERSION="8.5.0", CANN_STUB_DEVICES="1")
        assert "CANN 8.5.0 is too old" in out
        assert "9.2 or later" in out

    def test_another_device_is_named(self) -> None:
        out = _run("print(AscendBackend().probe().reasons)", CANN_STUB_SOC="Ascend910_9391", CANN_STUB_DEVICES="1")
        assert "Ascend910_9391 (Atlas A3), not an Ascend 950" in out

    def test_arithmetic_that_cannot_be_checked_is_a_reason(self) -> None:
        """The stub's device computes nothing, as a CANN without its operator package would not."""
        out = _run("print(AscendBackend().probe())", CANN_STUB_DEVICES="1")
        assert "available=False" in out
        assert "npu_dynamic_mx_quant refuses" in out

    def test_runtime_speaks_torch_npu(self) -> None:
        """Events, memory, guard and graph capture through the real torch_npu; nothing is computed."""
        program = (
            "from deepinfer_core.errors import EngineError\n"
            "import math\n"
            "runtime = AscendBackend().runtime('')\n"
            "event = runtime.record(); event.wait(); assert event.done()\n"
            "assert math.isfinite(runtime.record().milliseconds_since(event))\n"
            "pending = runtime.to_host({}); assert pending.wait() == {} and pending.done()\n"
            "assert runtime.submit(lambda: {}).wait() == {}\n"
            "broken = runtime.submit(lambda: 1 / 0); assert broken.done()\n"
            "try: broken.wait()\n"
            "except ZeroDivisionError: print('handed over')\n"
            "assert runtime.memory().total == 1 << 30\n"
            "assert runtime.peak_bytes(lambda: None) == 0\n"
            "runtime.capture(lambda: None).replay()\n"
            "with runtime.forbid_sync():\n"
            "    event.wait()  # done: does not block\n"
            "    try: runtime.synchronize()\n"
            "    except EngineError as error: print(error)\n"
            "runtime.close(); runtime.close()\n"
            "try: runtime.record()\n"
            "except EngineError as error: print(error)\n"
            "from deepinfer_core.errors import BackendError\n"
            "try: AscendBackend().runtime('cuda:0')\n"
            "except BackendError as error: print(error)\n"
        )
        out = _run(program, CANN_STUB_DEVICES="1")
        assert "synchronize inside forbid_sync" in out
        assert "the Ascend runtime was closed" in out
        assert "handed over" in out
        assert "has no device 'cuda:0'" in out
