"""Checks that are not about one op: what they are, how they end, how one is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from deepinfer_core.conformance.results import CaseResult
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.watchdog import TimeLimitError, Watchdog


class CheckError(Exception):
    """The backend is wrong; the message says what was expected and what was seen."""


class UnsupportedError(Exception):
    """The check does not apply: the backend declares that it has no such thing."""


class SkippedError(Exception):
    """The check could not be run here; the message says why."""


@dataclass(frozen=True)
class Check:
    """One check of a level. `run` returns nothing, or the name of a claim that could be made, or raises one of the errors above."""

    level: str
    name: str
    run: Callable[[Subject], str | None]
    case: str = ""
    slow: bool = False  # left out by `--quick`
    patience: float = 1.0  # times the time limit of an op case

    @property
    def id(self) -> str:
        return f"{self.name}({self.case})" if self.case else self.name

    def reproduce(self, backend: str) -> str:
        """The command that runs this check alone."""
        return f"deepinfer conformance --backend {backend} --level {self.level} --ops '{self.id}'"


def expect(condition: object, message: str) -> None:
    """Raises CheckError with `message` unless `condition` holds."""
    if not condition:
        raise CheckError(message)


def run_check(subject: Subject, check: Check, watchdog: Watchdog) -> tuple[CaseResult, str]:
    """(result, name of a claim that could be made) of one check. Never raises because of the backend."""
    result, hint = CaseResult(check.level, check.name, check.case, "passed"), ""
    started = time.perf_counter()
    try:
        hint = watchdog.run(lambda: check.run(subject), check.patience) or ""
    except UnsupportedError as error:
        result = replace(result, status="unsupported", message=str(error))
    except SkippedError as error:
        result = replace(result, status="skipped", message=str(error))
    except (CheckError, TimeLimitError) as error:
        result = replace(result, status="failed", message=str(error), ratio=float("inf"), reproduce=check.reproduce(subject.name))
    except Exception as error:  # noqa: BLE001 a backend may raise anything: this check fails, the run goes on
        text = f"{type(error).__name__}: {error}"
        result = replace(result, status="failed", message=text, ratio=float("inf"), reproduce=check.reproduce(subject.name))
    if hint:
        result = replace(result, status="unsupported", message=f"{hint} is not claimed (its proof passes)")
    return replace(result, seconds=time.perf_counter() - started), hint


def named(level: str, functions: Iterable[Callable[[Subject], str | None]], **options: object) -> list[Check]:
    """Checks named after their functions, without the leading underscore."""
    return [Check(level, function.__name__.lstrip("_"), function, **options) for function in functions]  # type: ignore[arg-type]
