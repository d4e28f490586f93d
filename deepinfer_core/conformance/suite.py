"""One run of the suite: which levels, in which order, with which cases."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deepinfer_core import __version__
from deepinfer_core.backend.kernels import OPS
from deepinfer_core.backend.ops import op_table
from deepinfer_core.backend.registry import Registry, discover
from deepinfer_core.conformance.checks import Check, run_check
from deepinfer_core.conformance.describe import descriptions
from deepinfer_core.conformance.known import KnownFailures
from deepinfer_core.conformance.op_level import OpCase, OpFilter, op_cases, run_op_case
from deepinfer_core.conformance.results import LEVELS, CaseResult, Report
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.watchdog import Watchdog
from deepinfer_core.errors import BackendError, ConfigError, nearest


@dataclass(frozen=True)
class Plan:
    """What to run."""

    levels: tuple[str, ...] = LEVELS
    filter: OpFilter = field(default_factory=OpFilter)
    seeds: tuple[int, ...] = (0,)
    time_limit: float = 60.0  # seconds for one case
    known: KnownFailures = field(default_factory=KnownFailures)

    def __post_init__(self) -> None:
        for level in self.levels:
            if level not in LEVELS:
                raise ConfigError(f"unknown level {level!r}{nearest(level, LEVELS)}")


@dataclass(frozen=True)
class Task:
    """One case that is ready to run."""

    level: str
    id: str
    run: Callable[[Subject, Watchdog], tuple[CaseResult, str]]  # the result, and the name of a claim that could be made


def open_subject(name: str, device: str = "", emulate: bool = False, registry: Registry | None = None) -> Subject:
    """The backend called `name`, probed. Raises BackendError if it is unknown or cannot be used here."""
    found = (registry or discover()).find(name)
    backend = found.backend()
    if emulate:
        emulated = backend.emulated()
        if emulated is None:
            raise BackendError(f"backend {name!r} has no emulation; run without --emulate on a machine that has its device")
        backend = emulated
    probe = backend.probe()
    if not probe.available:
        also = " (`--emulate` runs its kernels on the CPU)" if not emulate and backend.emulated() is not None else ""
        raise BackendError(f"backend {name!r} is not available here: {' '.join(probe.reasons)}{also}")
    return Subject(backend, device)


def tasks(subject: Subject, plan: Plan) -> list[Task]:
    """Every case of the plan. Raises ConfigError if a pattern leaves nothing of it."""
    found = [task for level in LEVELS if level in plan.levels for task in _of_level(level, subject, plan)]
    if not found:
        raise ConfigError(_nothing_matches(plan))
    return found


def run(
    subject: Subject, plan: Plan, registry: Registry | None = None, progress: Callable[[CaseResult], Any] = lambda result: None
) -> Report:
    """Runs the plan and returns the report. `progress` sees every result as it comes."""
    todo = tasks(subject, plan)
    watchdog = Watchdog(plan.time_limit)
    report = gathered(subject, plan, (task.run(subject, watchdog) for task in todo), progress, registry)
    watchdog.close()
    return report


def gathered(
    subject: Subject,
    plan: Plan,
    outcomes: Iterable[tuple[CaseResult, str]],
    progress: Callable[[CaseResult], Any] = lambda result: None,
    registry: Registry | None = None,
) -> Report:
    """The report of what tasks return, in the order in which they come."""
    report = new_report(subject, plan, registry)
    provable: dict[str, bool] = {}  # flag that is not set -> all of its proofs passed
    for found, claim in outcomes:
        result = plan.known.apply(found)
        if result.level == "claims" and result.status == "unsupported":
            provable[result.name] = provable.get(result.name, True) and bool(claim)
        report.results.append(result)
        progress(result)
    could = [name for name, passed in provable.items() if passed]
    report.hints += [f"{name} is not set, but every proof of it that was run passes: it could be claimed" for name in could]
    report.notes += plan.known.notes()
    return report


def new_report(subject: Subject, plan: Plan, registry: Registry | None = None) -> Report:
    """An empty report with what is known before the run."""
    import torch

    table = op_table(type(subject.kernels(subject.numerics()[0])), type(subject.backend), registry or discover())
    about = {
        "devices": "; ".join(subject.backend.probe().devices),
        "core": __version__,
        "torch": torch.__version__,
        "levels": ", ".join(plan.levels),
        "seeds": ", ".join(map(str, plan.seeds)),
        "numerics": ", ".join(subject.numerics()),
    }
    return Report(subject.name, str(subject.torch_device), about, origins={origin.op: origin.status for origin in table})


def checks_of(level: str) -> list[Check]:
    """The checks of a level other than `ops`."""
    module = importlib.import_module(f"deepinfer_core.conformance.{level}_level")
    return list(module.CHECKS)


def _of_level(level: str, subject: Subject, plan: Plan) -> Iterator[Task]:
    if level == "ops":
        for seed in plan.seeds:
            for case in op_cases(subject.numerics(), seed, plan.filter):
                yield Task("ops", case.id, _op_run(case))
        return
    pattern = plan.filter.ops
    for check in checks_of(level):
        if (fnmatch.fnmatchcase(check.name, pattern) or check.id == pattern) and not (plan.filter.quick and check.slow):
            yield Task(level, check.id, _check_run(check))


def _op_run(case: OpCase) -> Callable[[Subject, Watchdog], tuple[CaseResult, str]]:
    return lambda subject, watchdog: (run_op_case(subject, case, watchdog), "")


def _check_run(check: Check) -> Callable[[Subject, Watchdog], tuple[CaseResult, str]]:
    return lambda subject, watchdog: run_check(subject, check, watchdog)


def _nothing_matches(plan: Plan) -> str:
    chosen, names = plan.filter, {check.name for level in plan.levels if level != "ops" for check in checks_of(level)}
    if "ops" in plan.levels:
        names |= set(OPS)
    hit = [name for name in names if fnmatch.fnmatchcase(name, chosen.ops)]
    if not hit:
        return f"--ops {chosen.ops!r} matches nothing in level {', '.join(plan.levels)}{nearest(chosen.ops, names)}"
    known = {geometry.name for op in hit if op in OPS for geometry in descriptions()[op].geometries}
    return f"--geometry {chosen.geometry!r} matches no geometry of {', '.join(sorted(hit))} in this run{nearest(chosen.geometry, known)}"
