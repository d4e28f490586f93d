"""Test a backend against the contract, level by level."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    backend: Annotated[str, typer.Option("--backend", "-b", help="Backend to test.")],
    level: Annotated[list[str] | None, typer.Option(help="contract, ops, model, engine or claims; may be repeated [all].")] = None,
    ops: Annotated[str, typer.Option(metavar="PATTERN", help="Op names (shell pattern) or one case id.")] = "*",
    geometry: Annotated[str, typer.Option(metavar="PATTERN", help="Geometries (shell pattern).")] = "*",
    numerics: Annotated[str | None, typer.Option(help="release or ideal [each that the backend offers].")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed of the inputs; may be repeated [0].")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the large geometries.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report: .json, .html or .md.")] = None,
    known_failures: Annotated[Path | None, typer.Option(metavar="FILE", help="Cases that may fail, with reasons.")] = None,
    device: Annotated[str, typer.Option(help="Device, as the backend names it.")] = "",
    emulate: Annotated[bool, typer.Option("--emulate", help="Test the kernels on the backend's CPU emulation.")] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds for one case.")] = 60.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the device.")] = 1,
    against: Annotated[str | None, typer.Option(metavar="OTHER", help="Compare with another backend: ops, then tokens.")] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="With --against: the first layer and op that diverge.")] = False,
) -> None:
    """Test a backend. Exit code 0: it conforms, 1: something failed, 2: nothing could be run.

    Example: deepinfer conformance --backend cpu_ref --level ops --ops 'rms_*' --report result.html
    """
    from deepinfer_core.backend.formats import Numerics
    from deepinfer_core.conformance import report as reports
    from deepinfer_core.conformance import suite
    from deepinfer_core.conformance.known import KnownFailures
    from deepinfer_core.conformance.op_level import OpFilter
    from deepinfer_core.conformance.parallel import run_on_processes
    from deepinfer_core.conformance.results import LEVELS, CaseResult, Report
    from deepinfer_core.errors import BackendError, ConfigError, nearest

    if report is not None:
        reports.check_report_path(report)
    if numerics is not None and numerics not in list(Numerics):
        raise ConfigError(f"unknown numerics {numerics!r}{nearest(numerics, list(Numerics))}")
    narrowed = ops != "*" or geometry != "*"
    plan = suite.Plan(
        levels=tuple(level or (("ops",) if narrowed else LEVELS)),
        filter=OpFilter(ops, geometry, Numerics(numerics) if numerics else None, quick),
        seeds=tuple(seed or [int(n) for n in re.findall(r"seed=(\d+)\)$", ops)] or (0,)),  # a whole case id names its seed
        time_limit=time_limit,
        known=KnownFailures.read(known_failures) if known_failures else KnownFailures(),
    )
    try:
        subject = suite.open_subject(backend, device, emulate)
    except BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        if report is not None:
            refused = CaseResult("contract", "probe", "", "failed", str(error), reproduce=f"deepinfer conformance --backend {backend}")
            reports.write_report(Report(backend, device, results=[refused]), report)
        raise typer.Exit(2) from error
    if against is not None:
        raise typer.Exit(_compare(subject, against, plan, bisect))
    if bisect:
        raise ConfigError("--bisect compares two backends: give the other one with --against NAME")
    with _Progress(len(suite.tasks(subject, plan))) as progress:
        if jobs > 1:
            result = run_on_processes((backend, device, emulate), plan, jobs, progress)
        else:
            result = suite.run(subject, plan, progress=progress)
    _print(result)
    if report is not None:
        reports.write_report(result, report)
    raise typer.Exit(0 if result.passed else 1)


def _compare(subject: Any, other_name: str, plan: Any, bisect: bool) -> int:
    """Prints where two backends differ; the exit code."""
    from deepinfer_core.conformance import differential, suite
    from deepinfer_core.conformance.op_level import op_cases
    from deepinfer_core.errors import BackendError

    try:
        other = suite.open_subject(other_name)
    except BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    numerics = [n for n in subject.numerics() if n in other.numerics()]
    wanted = [n for n in numerics if plan.filter.numerics in (None, n)]
    if bisect:
        found = [line.describe() for n in wanted for line in differential.bisect(subject, other, n)]
        print(f"first divergence: {found[0]}" if found else f"{subject.name} and {other.name} agree in every op call")
        for line in found[1:20]:
            print(f"  then: {line}")
        return int(bool(found))
    watchdog = suite.Watchdog(plan.time_limit)
    results = []
    cases = [case for seed in plan.seeds for case in op_cases(wanted, seed, plan.filter)]
    with _Progress(len(cases)) as progress:
        for case in cases:
            results.append(differential.compare_case(subject, other, case, watchdog))
            progress(results[-1])
    for result in results:
        if result.status == "failed":
            print(f"DIFFERS {result.id}\n  {result.message}")
    counts = {status: sum(r.status == status for r in results) for status in ("passed", "failed", "unsupported")}
    print(f"{subject.name} against {other.name}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    parted = 0
    for n in wanted:
        for difference in differential.compare_tokens(subject, other, n):
            print(f"greedy tokens after {difference.prompt} ({n}): {difference.describe()}")
            parted += difference.matters
    return int(counts["failed"] > 0 or parted > 0)


class _Progress:
    """A progress bar on stderr; nothing if stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        self.bar = tqdm(total=self.total, file=sys.stderr, disable=not sys.stderr.isatty(), unit="case")
        return self

    def __call__(self, result: Any) -> None:
        self.bar.set_postfix_str(result.name)
        self.bar.update()

    def __exit__(self, *error: object) -> None:
        self.bar.close()


def _print(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from deepinfer_core.conformance import report as reports

    table = Table(*reports.HEADERS, box=None, pad_edge=False)
    for row in reports.rows(result):
        table.add_row(*row)
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140).print(table)
    for line in [*reports.reasons(result), *(f"hint: {hint}" for hint in result.hints), *result.notes]:
        print(line)
    for failure in result.failures:
        print(f"\nFAILED {reports.failure_text(failure)}")
    print(f"\n{reports.summary(result)}")
