"""One command for a person with an Ascend 950 machine: runs everything there is to run, and packs a report to send back.

    python benchmarks/ascend/hardware_kit.py REPORT_DIR [--quick] [--emulate]

Writes REPORT_DIR/summary.md, one log per step, and REPORT_DIR.tar.gz. Every step runs in a process of its own with a time limit; one that
fails or hangs does not stop the next. Nothing is sent anywhere. The report holds versions, device names, the environment variables
listed in it, and results on random weights: look through it before you share it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from deepinfer_backends.ascend950 import environment
from deepinfer_backends.ascend950.backend import AscendBackend

QUESTIONS_MODULE = "deepinfer_backends.ascend950.tools.questions"
END_TO_END = Path(__file__).with_name("endtoend.py")
REPORTED_VARIABLES = (*environment.DEFAULTS, "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")
EMULATED = "REHEARSAL ON CPU EMULATION: no NPU was used, nothing below says anything about a device.\n\n"


@dataclass(frozen=True)
class Step:
    """A command whose output goes to `name`.log."""

    name: str
    command: tuple[str, ...]
    minutes: float


@dataclass(frozen=True)
class Outcome:
    step: Step
    status: str  # "ok", "failed (status N)", "stopped after N min", "not there"
    seconds: float


def steps(out: Path, quick: bool, emulate: bool) -> list[Step]:
    """Everything to run, in order."""
    from deepinfer_backends.ascend950.tools.questions import QUESTIONS

    deepinfer = (sys.executable, "-c", "from deepinfer_core.cli import main; main()")
    extra = ("--emulate",) if emulate else ()
    suite = (*deepinfer, "conformance", "--backend", "ascend950", *extra)
    asked = [
        Step(f"question_{n:02}", (sys.executable, "-m", QUESTIONS_MODULE, str(out / f"question_{n:02}.json"), "--only", str(n), *extra), 5)
        for n in range(len(QUESTIONS))
    ]
    levels = ("contract", "ops") if quick else ("contract", "ops", "model", "engine", "claims")
    checked = [
        Step(f"conformance_{name}", (*suite, "--level", name, "--report", str(out / f"conformance_{name}.json")), 60) for name in levels
    ]
    bench = (*deepinfer, "bench", "ops", "--backend", "ascend950")
    timed = [] if quick or emulate else [Step("bench_ops", (*bench, "--report", str(out / "bench_ops.json")), 60)]
    whole = Step("endtoend", (sys.executable, str(END_TO_END), str(out / "endtoend.json"), *extra), 60)
    doctor = Step("doctor", (*deepinfer, "doctor"), 5)
    return [Step("npu_smi", ("npu-smi", "info"), 1), doctor, *asked, *checked, whole, *timed]


def run(step: Step, out: Path) -> Outcome:
    """Runs one step; its output is kept whatever happens."""
    started = time.monotonic()
    with (out / f"{step.name}.log").open("w") as log:
        log.write(f"$ {' '.join(step.command)}\n")
        log.flush()
        try:
            settings = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            done = subprocess.run(step.command, stdout=log, stderr=subprocess.STDOUT, timeout=step.minutes * 60, env=settings)
            status = "ok" if done.returncode == 0 else f"failed (status {done.returncode})"
        except subprocess.TimeoutExpired:
            status = f"stopped after {step.minutes:g} min"
        except FileNotFoundError:
            status = "not there"
    return Outcome(step, status, time.monotonic() - started)


def environment_report() -> str:
    """Versions, checks and variables, as Markdown."""
    lines = [f"- {platform.platform()}, Python {platform.python_version()}"]
    for name in ("deepinfer-core", "torch", "torch-npu", "numpy"):
        lines.append(f"- {name} {environment.installed_version(name) or 'not installed'}")
    lines += [f"- {check.name}: {check.found}{f' — PROBLEM: {check.problem}' if check.problem else ''}" for check in environment.checks()]
    lines += [f"- {name}={os.environ.get(name, '(unset)')}" for name in REPORTED_VARIABLES]
    return "\n".join(lines)


def answers_report(out: Path) -> str:
    """The answers to the open questions, as a Markdown table."""
    rows = ["| question | verdict | seen | what depends on it |", "|---|---|---|---|"]
    for path in sorted(out.glob("question_*.json")):
        for answer in json.loads(path.read_text())["answers"]:
            cells = (answer["question"], answer["verdict"], answer["seen"], answer["matters"])
            rows.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(rows)


def summary(out: Path, outcomes: list[Outcome], emulate: bool) -> str:
    """The report's first page."""
    table = ["| step | outcome | seconds |", "|---|---|---|"]
    table += [f"| {o.step.name} | {o.status} | {o.seconds:.0f} |" for o in outcomes]
    return (
        f"# Ascend 950 report\n\n{EMULATED if emulate else ''}## Environment\n\n{environment_report()}\n\n## Steps\n\n"
        + "\n".join(table)
        + f"\n\n## Open questions\n\n{answers_report(out)}\n"
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line. Status 0 if every step ended well, 1 if not (the report is complete either way), 2 if there is nothing to run on."""
    parser = argparse.ArgumentParser(prog="hardware_kit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report_dir", type=Path, help="folder for the report; must not exist")
    parser.add_argument("--quick", action="store_true", help="the questions and the contract and ops levels only")
    parser.add_argument("--emulate", action="store_true", help="rehearse on CPU emulation")
    options = parser.parse_args(arguments)
    out: Path = options.report_dir
    if out.exists():
        parser.error(f"{out} exists: name a new folder")
    backend = AscendBackend()
    probe = (backend.emulated() if options.emulate else backend).probe()
    out.mkdir(parents=True)
    (out / "summary.md").write_text(summary(out, [], options.emulate))
    if not probe.available:
        print(f"hardware_kit: {probe.reasons[0]}\nThe environment is described in {out / 'summary.md'}", file=sys.stderr)
        return 2
    todo, outcomes = steps(out, options.quick, options.emulate), []
    for number, step in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {step.name} (at most {step.minutes:g} min) ...", end=" ", flush=True)
        outcomes.append(run(step, out))
        print(outcomes[-1].status, flush=True)
        (out / "summary.md").write_text(summary(out, outcomes, options.emulate))
    archive = out.with_name(out.name + ".tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(out, out.name)
    print(f"\nThe report: {out / 'summary.md'}\nTo send back: {archive}")
    return int(any(o.status not in ("ok", "not there") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
