"""The suite fails every mutant, and passes the reference."""

from __future__ import annotations

import mutants_attention  # noqa: F401 registers its mutants
import mutants_dense  # noqa: F401
import mutants_rest
import pytest
from mutants import MUTANTS, Mutant, backend_of

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.kernels import OPS
from deepinfer_core.conformance.op_level import OpFilter
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.suite import Plan, tasks
from deepinfer_core.conformance.watchdog import Watchdog


def first_failure(mutant: Mutant) -> str:
    """The message of the first case of the mutant's op, at its level, that fails; "" if none does."""
    subject, watchdog = Subject(backend_of(mutant.kernels)), Watchdog(120)
    try:
        for task in tasks(subject, Plan(levels=(mutant.level,), filter=OpFilter(mutant.op, quick=mutant.level == "ops"))):
            result, _ = task.run(subject, watchdog)
            if result.status == "failed":
                return result.message
    finally:
        watchdog.close()
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_fails(mutant, record_property):
    message = first_failure(mutant)
    record_property("mutant_caught", bool(message))
    assert message, f"nothing at level {mutant.level} noticed {mutant.name} ({mutant.op})"
    assert "Error: " not in message, f"{mutant.name} was not judged but broke: {message}"


@pytest.mark.parametrize(("op", "level"), sorted({(mutant.op, mutant.level) for mutant in MUTANTS}))
def test_what_catches_a_mutant_passes_the_same_backend_without_the_fault(op, level):
    assert first_failure(Mutant(ReferenceKernels, op, level)) == ""


def test_there_are_enough_mutants_and_every_op_has_one():
    assert len(MUTANTS) >= 30
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert set(OPS) - {mutant.op for mutant in MUTANTS} == set()


def test_mutants_that_belong_to_another_level_pass_the_ops_level():
    """A fault that shows only in company is not noticed by single calls: that is why the level `claims` exists."""
    subject, watchdog = Subject(backend_of(mutants_rest.LargeBatchesInHalfPrecision)), Watchdog(60)
    results = [task.run(subject, watchdog)[0] for task in tasks(subject, Plan(levels=("ops",), filter=OpFilter("rms_norm")))]
    watchdog.close()
    assert all(result.status == "passed" for result in results)
