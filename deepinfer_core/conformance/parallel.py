"""One run of the suite on several processes that share the device: kernels compile side by side, results are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from deepinfer_core.conformance import suite
from deepinfer_core.conformance.results import CaseResult, Report
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.watchdog import Watchdog
from deepinfer_core.errors import BackendError

_here: dict[str, Any] = {}  # of a worker process: its subject, tasks and watchdog


def run_on_processes(
    opened: tuple[str, str, bool], plan: suite.Plan, jobs: int, progress: Callable[[CaseResult], Any] = lambda result: None
) -> Report:
    """Runs the plan on `jobs` processes, each with a backend of its own, opened with the arguments of `suite.open_subject`.

    Cases start in the order of the plan and are reported in it. Raises BackendError if a process dies.
    """
    subject = suite.open_subject(*opened)
    todo = suite.tasks(subject, plan)
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn"), _open, (opened, plan)) as pool:
        outcomes = pool.map(_run, range(len(todo)))
        try:
            return suite.gathered(subject, plan, outcomes, progress)
        except BrokenProcessPool as error:
            raise BackendError(
                f"backend {subject.name!r}: a process that ran cases of level {', '.join(plan.levels)} ended without an answer; "
                "run the same command without --jobs to see which case ends it"
            ) from error


def _open(opened: tuple[str, str, bool], plan: suite.Plan) -> None:
    import torch

    torch.set_num_threads(1)
    subject = suite.open_subject(*opened)
    _here.update(subject=subject, tasks=suite.tasks(subject, plan), watchdog=Watchdog(plan.time_limit))


def _run(index: int) -> tuple[CaseResult, str]:
    subject: Subject = _here["subject"]
    return _here["tasks"][index].run(subject, _here["watchdog"])
