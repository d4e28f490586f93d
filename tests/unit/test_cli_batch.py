"""`deepinfer batch`: exit codes, messages, stopping. The engine is a fake."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from deepinfer_core.cli import _app
from deepinfer_core.cli import batch as batch_command


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)
    fake = FakeEngine()

    @contextmanager
    def opened(resolved: Any) -> Iterator[FakeEngine]:
        yield fake

    monkeypatch.setattr(batch_command, "open_target", opened)
    return fake


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def test_good_run(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in", '{"prompt": "a"}', '{"prompt": "b"}'), tmp_path / "out"
    assert _app.run(["batch", source, str(output)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 done, 0 skipped, 0 failed of 2 lines; 16 tokens" in captured.err
    assert _app.run(["batch", source, str(output), "--resume"]) == 0
    assert "0 done, 2 skipped, 0 failed of 2 lines" in capsys.readouterr().err


def test_a_failed_line_is_exit_code_1_also_when_resumed(engine: FakeEngine, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", '{"prompt": "a"}', "junk"), str(tmp_path / "out")
    assert _app.run(["batch", source, output]) == 1
    assert _app.run(["batch", source, output, "--resume"]) == 1


def test_usage_errors_are_exit_code_2_and_load_nothing(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", '{"prompt": "a"}')
    output = write(tmp_path / "out", '{"custom_id": "line-1", "response": {}, "error": null}')
    assert _app.run(["batch", source, output]) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert _app.run(["batch", str(tmp_path / "nothing"), output]) == 2
    assert _app.run(["batch", source]) == 2
    assert engine.submitted == []


def test_configured_defaults_reach_the_requests(engine: FakeEngine, tmp_path: Path) -> None:
    source = write(tmp_path / "in", '{"prompt": "a"}', '{"prompt": "b", "temperature": 0.5}')
    submit, seen = engine.submit, []

    def watched(prompt: Any, params: Any = None, request_id: str | None = None) -> str:
        seen.append(params.temperature)
        return submit(prompt, params, request_id)

    engine.submit = watched  # type: ignore[method-assign]
    assert _app.run(["batch", source, str(tmp_path / "out"), "-s", "sampling.temperature=0.25"]) == 0
    assert seen == [0.25, 0.5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_cleanly_with_a_hint(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int) -> None:
    source, output = write(tmp_path / "in", *(f'{{"prompt": "{i}"}}' for i in range(40))), tmp_path / "out"
    poll = engine.poll

    def interrupted() -> list[Any]:
        if engine.polls == 11:
            os.kill(os.getpid(), number)
        return poll()

    engine.poll = interrupted  # type: ignore[method-assign]
    before = signal.getsignal(number)
    assert _app.run(["batch", source, str(output)]) == 1
    assert "Stopped. Finished results are in" in (message := capsys.readouterr().err)
    assert "--resume" in message
    assert signal.getsignal(number) is before
    done = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert len(done) == 12
    assert _app.run(["batch", source, str(output), "--resume"]) == 0
    done = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert len(done) == len(set(done)) == 40


def test_a_lost_engine_is_exit_code_1_with_a_hint(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine.die_after = 1
    source = write(tmp_path / "in", '{"prompt": "a"}', '{"prompt": "b"}')
    assert _app.run(["batch", source, str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "device lost" in message
    assert "--resume" in message
    assert len((tmp_path / "out").read_text().splitlines()) == 1


def test_a_terminal_sees_progress_and_nobody_else(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in", '{"prompt": "a"}', "junk")
    _app.run(["batch", source, str(tmp_path / "quiet")])
    assert "lines/s" not in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    _app.run(["batch", source, str(tmp_path / "shown")])
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s, 1 failed" in shown
