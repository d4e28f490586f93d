"""The hardware kit: rehearsed on emulation in parts, because a whole rehearsal takes minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hardware_kit as kit
import pytest
from hardware_kit import Step

from deepinfer_backends.ascend950.tools import questions
from deepinfer_core.backend import Probe

PYTHON = sys.executable


@pytest.mark.parametrize(
    ("command", "minutes", "status"),
    [
        ((PYTHON, "-c", "print('hello')"), 1, "ok"),
        ((PYTHON, "-c", "import sys; print('hello'); sys.exit(3)"), 1, "failed (status 3)"),
        ((PYTHON, "-u", "-c", "import time; print('hello'); time.sleep(60)"), 0.05, "stopped after 0.05 min"),
        (("no-such-command",), 1, "not there"),
    ],
)
def test_every_end_of_a_step_is_told_and_its_output_kept(command: tuple[str, ...], minutes: float, status: str, tmp_path: Path) -> None:
    assert kit.run(Step("step", command, minutes), tmp_path).status == status
    log = (tmp_path / "step.log").read_text()
    assert log.startswith(f"$ {command[0]}")
    assert ("hello" in log) == (status != "not there")


def test_all_levels_all_questions_bench_and_end_to_end_are_run(tmp_path: Path) -> None:
    names = [step.name for step in kit.steps(tmp_path, quick=False, emulate=False)]
    wanted = ["npu_smi", "doctor", "bench_ops", "endtoend", *(f"conformance_{n}" for n in ("contract", "ops", "model", "engine", "claims"))]
    assert set(wanted) <= set(names)
    assert len([name for name in names if name.startswith("question_")]) == len(questions.QUESTIONS)


def test_a_rehearsal_says_so_in_every_command_and_on_the_first_page(tmp_path: Path) -> None:
    steps = [step for step in kit.steps(tmp_path, quick=False, emulate=True) if step.name not in ("npu_smi", "doctor")]
    assert all("--emulate" in step.command for step in steps)
    assert "no NPU was used" in kit.summary(tmp_path, [], emulate=True)
    assert "no NPU was used" not in kit.summary(tmp_path, [], emulate=False)


def test_answers_become_a_table(tmp_path: Path) -> None:
    answer = {"question": "Is a|b?", "verdict": "differs", "seen": "two\nlines", "matters": "much"}
    (tmp_path / "question_00.json").write_text(json.dumps({"answers": [answer]}))
    assert "| Is a/b? | differs | two lines | much |" in kit.answers_report(tmp_path)


def test_without_a_device_the_environment_is_reported_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit.AscendBackend, "probe", lambda self: Probe(available=False, reasons=("no NPU is visible",)))
    assert kit.main([str(tmp_path / "report")]) == 2
    assert "no NPU is visible" in capsys.readouterr().err
    assert "- torch " in (tmp_path / "report" / "summary.md").read_text()


def test_an_existing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kit.main([str(tmp_path)])
    assert "name a new folder" in capsys.readouterr().err


def test_a_whole_run_of_two_steps_packs_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit.AscendBackend, "probe", lambda self: Probe(available=True, devices=("npu:0",)))
    two = [Step("good", (PYTHON, "-c", ""), 1), Step("bad", (PYTHON, "-c", "import sys; sys.exit(1)"), 1)]
    monkeypatch.setattr(kit, "steps", lambda out, quick, emulate: two)
    assert kit.main([str(tmp_path / "report")]) == 1
    summary = (tmp_path / "report" / "summary.md").read_text()
    assert "| good | ok |" in summary
    assert "| bad | failed (status 1) |" in summary
    assert (tmp_path / "report.tar.gz").exists()
    assert "To send back" in capsys.readouterr().out


def test_questions_on_emulation(emulated_backend: Any) -> None:
    """The answers are the emulation's own; operators it lacks are refused, and say so."""
    emulated_backend.kernels("")
    answers = {answer.question: answer for answer in questions.ask("cpu")}
    assert len(answers) == len(questions.QUESTIONS)
    verdicts = [answer.verdict for answer in answers.values()]
    assert verdicts.count("as expected") >= 8
    assert all(len(answer.seen) < 300 for answer in answers.values())
    refused = [answer for answer in answers.values() if "npu_moe_gating_top_k" in answer.question]
    assert refused[0].verdict == "refused"


@pytest.mark.usefixtures("emulated_backend")
def test_one_question_by_number(tmp_path: Path) -> None:
    out = tmp_path / "answer.json"
    subprocess.run([PYTHON, "-m", kit.QUESTIONS_MODULE, str(out), "--emulate", "--only", "0"], check=True, capture_output=True)
    record = json.loads(out.read_text())
    assert record["backend"] == "ascend950_emulated"
    assert [answer["verdict"] for answer in record["answers"]] == ["as expected"]
