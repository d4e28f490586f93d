"""The `ops` level: one case of one op."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from deepinfer_core.backend.formats import Numerics
from deepinfer_core.conformance import trees
from deepinfer_core.conformance.analysis import Arithmetic
from deepinfer_core.conformance.describe import Geometry, Inputs, OpDescription, Outputs, descriptions
from deepinfer_core.conformance.expect import Verdict
from deepinfer_core.conformance.poison import PoisonedAllocations
from deepinfer_core.conformance.results import CaseResult
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.watchdog import TimeLimitError, Watchdog


@dataclass(frozen=True)
class OpCase:
    """One op, one geometry, one arithmetic, one seed."""

    description: OpDescription
    geometry: Geometry
    numerics: Numerics
    seed: int

    @property
    def case(self) -> str:
        return f"{self.geometry.name},{self.numerics},seed={self.seed}"

    @property
    def id(self) -> str:
        return f"{self.description.op}({self.case})"

    def reproduce(self, backend: str) -> str:
        """The command that runs this case alone."""
        return (
            f"deepinfer conformance --backend {backend} --level ops --ops '{self.description.op}' --geometry {self.geometry.name} "
            f"--numerics {self.numerics} --seed {self.seed}"
        )


@dataclass(frozen=True)
class OpFilter:
    """Which cases of the `ops` level to run."""

    ops: str = "*"  # shell pattern for op names or for whole ids
    geometry: str = "*"  # shell pattern
    numerics: Numerics | None = None
    quick: bool = False

    def takes(self, case: OpCase) -> bool:
        """True if the case is to be run."""
        named = fnmatch.fnmatchcase(case.description.op, self.ops) or case.id == self.ops
        wanted = fnmatch.fnmatchcase(case.geometry.name, self.geometry) and self.numerics in (None, case.numerics)
        return named and wanted and (case.geometry.quick or not self.quick)


def op_cases(numerics: list[Numerics], seed: int, chosen: OpFilter) -> Iterator[OpCase]:
    """Every case that the filter takes, op by op."""
    for description in descriptions().values():
        for geometry in description.geometries:
            for arithmetic in numerics:
                case = OpCase(description, geometry, arithmetic, seed)
                if geometry.numerics in (None, arithmetic) and chosen.takes(case):
                    yield case


def run_op_case(subject: Subject, case: OpCase, watchdog: Watchdog) -> CaseResult:
    """Runs and judges one case. Never raises because of the backend."""
    result = CaseResult("ops", case.description.op, case.case, "passed")
    reason = case.geometry.unsupported(subject.claims)
    if reason:
        return replace(result, status="unsupported", message=reason)
    started = time.perf_counter()
    try:
        verdicts = watchdog.run(lambda: judge(subject, case))
    except (TimeLimitError, Exception) as error:  # noqa: BLE001 a backend may raise anything: this case fails, the run goes on
        text = str(error) if isinstance(error, TimeLimitError) else f"{type(error).__name__}: {error}"
        verdicts = {"call": Verdict(float("inf"), note=f"the op raised or hung: {text}")}
    name, verdict = max(verdicts.items(), key=lambda item: item[1].ratio)
    result = replace(result, ratio=verdict.ratio, seconds=time.perf_counter() - started)
    if verdict.passed:
        return result
    return replace(result, status="failed", message=f"output {name!r}: {verdict.describe()}", reproduce=case.reproduce(subject.name))


def judge(subject: Subject, case: OpCase) -> dict[str, Verdict]:
    """The verdict on every output and on every input of one call."""
    kernels = subject.kernels(case.numerics)
    inputs = case.description.inputs(case.geometry, case.numerics, case.seed)
    given = trees.copy_to(inputs, kernels.device)
    with torch.no_grad(), PoisonedAllocations():
        raw = case.description.run(kernels, given)
    verdicts = {} if case.description.may_alias else _aliases(raw, given)
    got = {name: value.cpu().clone() if isinstance(value, torch.Tensor) else value for name, value in raw.items()}
    verdicts |= _modified(inputs, given, case.description.mutates)
    arithmetic = Arithmetic(case.numerics, case.geometry.exact_sums)
    with _one_thread():
        for name, expectation in case.description.expect(arithmetic, inputs, got).items():
            verdicts[name] = expectation.compare(got[name])
    return verdicts


@contextmanager
def _one_thread() -> Iterator[None]:
    """The reference works on small tensors: waking other threads would cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _modified(before: Inputs, after: Inputs, mutates: frozenset[str]) -> dict[str, Verdict]:
    """A failed verdict for every input that changed although it may not."""
    wrong = {}
    for (path, old), (_, new) in zip(trees.tensors(before), trees.tensors(after), strict=True):
        a, b = trees.storage_bytes(old), trees.storage_bytes(new)
        if path in mutates:  # the op may write to the view it was given, not to what lies between and behind its rows
            for whole in (a, b):
                trees.over(whole, old).zero_()
        if not torch.equal(a, b):
            place = "memory around an input" if path in mutates else "an input"
            wrong[f"input {path}"] = Verdict(float("inf"), note=f"{place} was modified that the op may not modify")
    return wrong


def _aliases(outputs: Outputs, inputs: Inputs) -> dict[str, Verdict]:
    """A failed verdict for every output that shares memory with an input."""
    owned = {t.untyped_storage().data_ptr(): path for path, t in trees.tensors(inputs) if t.numel()}
    wrong = {}
    for name, t in trees.tensors(outputs):
        path = owned.get(t.untyped_storage().data_ptr()) if t.numel() else None
        if path is not None:
            wrong[name] = Verdict(float("inf"), note=f"the result shares memory with input {path!r}; a later step would overwrite it")
    return wrong
