"""The suite as pytest tests: `pytest --pyargs deepinfer_core.conformance --deepinfer-backend NAME`.

pytest loads this module in every run of an environment that has deepinfer-core, so it imports nothing heavy by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from deepinfer_core.conformance.suite import Plan

_USED_BY = "conformance_task"  # name of the argument by which a test asks for the cases


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deepinfer", "DeepInfer conformance (pytest --pyargs deepinfer_core.conformance)")
    group.addoption("--deepinfer-backend", metavar="NAME", help="backend to test")
    group.addoption("--deepinfer-level", action="append", metavar="LEVEL", help="contract, ops, model, engine or claims; repeatable [all]")
    group.addoption("--deepinfer-ops", default="*", metavar="PATTERN", help="op or check names, or one case id")
    group.addoption("--deepinfer-geometry", default="*", metavar="PATTERN", help="geometries")
    group.addoption("--deepinfer-seed", action="append", type=int, metavar="N", help="seed of the inputs; repeatable [0]")
    group.addoption("--deepinfer-quick", action="store_true", help="leave out large geometries and long checks")
    group.addoption("--deepinfer-device", default="", metavar="DEVICE", help="device, as the backend names it")
    group.addoption("--deepinfer-emulate", action="store_true", help="test the backend's CPU emulation")
    group.addoption("--deepinfer-known-failures", type=Path, metavar="FILE", help="cases that may fail, with reasons")
    group.addoption("--deepinfer-time-limit", type=float, default=60.0, metavar="SECONDS", help="for one case")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _USED_BY not in metafunc.fixturenames:
        return
    from deepinfer_core.conformance import suite
    from deepinfer_core.errors import DeepInferError

    name = metafunc.config.getoption("--deepinfer-backend")
    if not name:
        raise pytest.UsageError("the conformance suite tests one backend: give --deepinfer-backend NAME (`deepinfer backends` lists them)")
    try:
        plan = _plan(metafunc.config)
        subject = suite.open_subject(
            name, metafunc.config.getoption("--deepinfer-device"), metafunc.config.getoption("--deepinfer-emulate")
        )
        found = suite.tasks(subject, plan)
    except DeepInferError as error:
        raise pytest.UsageError(str(error)) from error
    watchdog = suite.Watchdog(plan.time_limit)
    cases = [(task, subject, watchdog, plan.known) for task in found]
    metafunc.parametrize(_USED_BY, cases, ids=[f"{task.level}:{task.id}" for task in found])


def _plan(config: pytest.Config) -> Plan:
    from deepinfer_core.conformance.known import KnownFailures
    from deepinfer_core.conformance.op_level import OpFilter
    from deepinfer_core.conformance.suite import LEVELS, Plan

    ops, geometry = config.getoption("--deepinfer-ops"), config.getoption("--deepinfer-geometry")
    default = ("ops",) if (ops, geometry) != ("*", "*") else LEVELS
    known = config.getoption("--deepinfer-known-failures")
    return Plan(
        levels=tuple(config.getoption("--deepinfer-level") or default),
        filter=OpFilter(ops, geometry, quick=config.getoption("--deepinfer-quick")),
        seeds=tuple(config.getoption("--deepinfer-seed") or (0,)),
        time_limit=config.getoption("--deepinfer-time-limit"),
        known=KnownFailures.read(known) if known else KnownFailures(),
    )


def report(case: Any) -> None:
    """Runs one case and ends as pytest wants it: returns, fails, skips or xfails."""
    from deepinfer_core.conformance.report import failure_text

    task, subject, watchdog, known = case
    result = known.apply(task.run(subject, watchdog)[0])
    if result.status == "failed":
        pytest.fail(failure_text(result), pytrace=False)
    if result.status == "known-failure":
        pytest.xfail(result.message)
    if result.status != "passed":
        pytest.skip(f"{result.status}: {result.message}")
