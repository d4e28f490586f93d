"""The run: results, time limits, reports, known failures, the two doors, comparison and benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from mutants import backend_of
from mutants_attention import InverseRotaryForgotten
from mutants_dense import LastRowNotWritten
from mutants_rest import GateAndUpSwapped

from deepinfer_backends.cpu_ref.backend import CpuReference
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.capabilities import Probe
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.registry import get_backend
from deepinfer_core.cli._app import run as command
from deepinfer_core.conformance import bench, differential, parallel, pytest_plugin, suite
from deepinfer_core.conformance.engine_level import registered
from deepinfer_core.conformance.known import KnownFailures
from deepinfer_core.conformance.op_level import OpFilter, op_cases
from deepinfer_core.conformance.parallel import run_on_processes
from deepinfer_core.conformance.report import check_report_path, write_report
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.errors import BackendError, ConfigError


class Raises(ReferenceKernels):
    def embed(self, ids, table):
        raise RuntimeError("no such kernel")


class Hangs(ReferenceKernels):
    def embed(self, ids, table):
        while True:
            time.sleep(0.005)


class NotHere(CpuReference):
    name = "not_here"

    def probe(self):
        return Probe(available=False, reasons=("Plug the card in.",))


@pytest.fixture(scope="module")
def reference():
    return Subject(get_backend("cpu_ref"))


def plan(ops, levels=("ops",), **more):
    return suite.Plan(levels=levels, filter=OpFilter(ops, quick=True), **more)


# ------------------------------------------------------------------ runs


def test_contract_level_passes_on_the_reference(reference):
    report = suite.run(reference, plan("*", ("contract",)))
    assert report.failures == []
    assert report.passed


def test_an_op_that_raises_fails_its_cases_only():
    report = suite.run(Subject(backend_of(Raises)), plan("e*"))
    failed = {result.name for result in report.failures}
    assert failed == {"embed"}
    assert report.count("passed") > 10
    first = report.failures[0]
    assert "RuntimeError: no such kernel" in first.message
    assert first.reproduce.startswith("deepinfer conformance --backend faulty --level ops --ops 'embed' --geometry rows")
    assert "--seed 0" in first.reproduce


def test_an_op_that_hangs_fails_by_the_time_limit_and_the_run_goes_on():
    report = suite.run(Subject(backend_of(Hangs)), plan("em*", time_limit=0.3))
    assert {result.name for result in report.failures} == {"embed"}
    assert all("time limit" in result.message for result in report.failures)


def test_failure_names_the_worst_element():
    report = suite.run(Subject(backend_of(LastRowNotWritten)), plan("linear"))
    message = next(r.message for r in report.failures if r.case.startswith("rows,release"))
    assert "[32, " in message
    assert "expected" in message
    assert "got nan" in message


def test_unsupported_formats_are_reported_with_the_reason():
    class Narrow(CpuReference):
        name = "narrow"

        def capabilities(self):
            return super().capabilities().model_copy(update={"entry_formats": frozenset({"fp4"})})

    report = suite.run(Subject(Narrow()), plan("store_entries"))
    reasons = {result.message for result in report.results if result.status == "unsupported"}
    assert reasons == {"entry_formats does not name fp8", "entry_formats does not name bf16", "entry_formats does not name f32"}


def test_a_claim_without_proof_fails_and_an_unclaimed_one_is_a_hint():
    class Careful(CpuReference):
        name = "careful"

        def capabilities(self):
            update = {"async_copy": False, "expert_parallel": frozenset({"native"})}
            return super().capabilities().model_copy(update=update)

    report = suite.run(Subject(Careful()), plan("a*", ("claims",)))
    assert any("async_copy is not set" in hint for hint in report.hints)
    report = suite.run(Subject(Careful()), plan("expert_parallel", ("claims",)))
    assert "no proof of it" in report.failures[0].message


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_case_is_flaky(reference, seed):
    report = suite.run(reference, suite.Plan(levels=("ops",), seeds=(seed,)))
    assert report.failures == []


@pytest.mark.slow
def test_every_level_passes_on_the_reference(reference):
    assert suite.run(reference, suite.Plan()).failures == []


# ------------------------------------------------------------------ reports and known failures


@pytest.mark.parametrize("suffix", [".json", ".html", ".md"])
def test_reports_hold_the_failures(tmp_path, suffix):
    report = suite.run(Subject(backend_of(Raises)), plan("em*"))
    path = tmp_path / f"report{suffix}"
    check_report_path(path)
    write_report(report, path)
    text = path.read_text()
    assert "no such kernel" in text
    assert "deepinfer conformance --backend faulty" in text
    if suffix == ".json":
        value = json.loads(text)
        assert value["passed"] is False
        assert value["results"][0]["id"].startswith("embed(")


def test_report_paths_are_checked_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"\.json, \.html, \.md"):
        check_report_path(tmp_path / "report.txt")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_report_path(tmp_path / "missing" / "report.json")


def test_known_failures_need_reasons_and_must_match(tmp_path):
    path = tmp_path / "known.txt"
    path.write_text("# ours\nembed(rows,*) the card cannot\nembed(one_row,release,seed=0) not true\nnothing(*) old\n")
    report = suite.run(Subject(backend_of(Raises)), plan("embed", known=KnownFailures.read(path)))
    known = [result for result in report.results if result.status == "known-failure"]
    assert len(known) == 3
    assert known[0].message.startswith("the card cannot")
    assert any("'nothing(*)' matches no case" in note for note in report.notes)
    passing = suite.run(Subject(CpuReference()), plan("embed", known=KnownFailures.read(path)))
    assert any("passes now" in note for note in passing.notes)
    path.write_text("embed(rows,*)\n")
    with pytest.raises(ConfigError, match="has no reason"):
        KnownFailures.read(path)


# ------------------------------------------------------------------ bad input


def test_unknown_level_and_patterns_that_match_nothing(reference):
    with pytest.raises(ConfigError, match="did you mean 'ops'"):
        suite.Plan(levels=("op",))
    with pytest.raises(ConfigError, match="matches nothing in level ops; did you mean 'embed'"):
        suite.tasks(reference, plan("embedd"))
    with pytest.raises(ConfigError, match="--geometry 'rowz' matches no geometry of embed"):
        suite.tasks(reference, suite.Plan(levels=("ops",), filter=OpFilter("embed", "rowz")))


def test_backends_that_cannot_run_are_refused():
    with registered(Subject(NotHere())), pytest.raises(BackendError, match="not available here: Plug the card in"):
        suite.open_subject("not_here")
    with pytest.raises(BackendError, match="no emulation"):
        suite.open_subject("cpu_ref", emulate=True)


def test_exit_codes_of_the_command(tmp_path, capsys):
    assert command(["conformance", "--backend", "cpu_ref", "--ops", "embed", "--quick", "--report", str(tmp_path / "r.md")]) == 0
    out = capsys.readouterr().out
    assert "cpu_ref conforms: 6 passed" in out
    assert "native" in out
    with registered(Subject(backend_of(Raises))):
        assert command(["conformance", "--backend", "faulty", "--ops", "embed", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "FAILED ops: embed(rows,release,seed=0)" in out
    assert "reproduce: deepinfer conformance --backend faulty" in out
    for arguments, words in (
        (["--backend", "cpu_reff"], "did you mean 'cpu_ref'"),
        (["--backend", "cpu_ref", "--ops", "no_such"], "matches nothing"),
        (["--backend", "cpu_ref", "--report", str(tmp_path / "no" / "r.json")], "cannot be written"),
        (["--backend", "cpu_ref", "--numerics", "exact"], "unknown numerics"),
        (["--backend", "cpu_ref", "--bisect"], "--against"),
    ):
        assert command(["conformance", *arguments]) == 2
        assert words in capsys.readouterr().err
    with registered(Subject(NotHere())):
        assert command(["conformance", "--backend", "not_here", "--report", str(tmp_path / "r.json")]) == 2
    assert "Plug the card in." in capsys.readouterr().err
    assert "Plug the card in." in (tmp_path / "r.json").read_text()


def test_a_case_id_is_a_filter(capsys):
    assert command(["conformance", "--backend", "cpu_ref", "--ops", "embed(one_row,ideal,seed=7)"]) == 0
    assert "cpu_ref conforms: 1 passed" in capsys.readouterr().out


def test_the_pytest_door(tmp_path):
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "deepinfer_core.conformance"]
    good = subprocess.run(
        [*base, "--deepinfer-backend", "cpu_ref", "--deepinfer-ops", "embed"], capture_output=True, text=True, cwd=tmp_path
    )
    assert good.returncode == 0, good.stdout
    assert "8 passed" in good.stdout


def test_the_pytest_door_needs_a_backend():
    options = SimpleNamespace(getoption=lambda name: None)
    with pytest.raises(pytest.UsageError, match="give --deepinfer-backend NAME"):
        pytest_plugin.pytest_generate_tests(SimpleNamespace(fixturenames=["conformance_task"], config=options))


# ------------------------------------------------------------------ comparison and benchmark


def test_bisect_finds_the_first_diverging_op(reference):
    assert differential.bisect(reference, reference, Numerics.RELEASE) == []
    found = differential.bisect(reference, Subject(backend_of(InverseRotaryForgotten)), Numerics.RELEASE)
    assert (found[0].layer, found[0].op) == (0, "sparse_attention")
    assert "layer 0, op sparse_attention" in found[0].describe()
    assert {divergence.op for divergence in found} == {"sparse_attention"}


def test_comparison_names_the_backend_that_is_off(reference):
    faulty = Subject(backend_of(InverseRotaryForgotten))
    case = next(op_cases([Numerics.RELEASE], 0, OpFilter("sparse_attention")))
    watchdog = suite.Watchdog(60)
    assert differential.compare_case(reference, reference, case, watchdog).status == "passed"
    result = differential.compare_case(reference, faulty, case, watchdog)
    assert result.message.startswith("faulty: output 'out'")
    differences = differential.compare_tokens(reference, Subject(backend_of(GateAndUpSwapped)), Numerics.RELEASE, 4)
    assert any(d.position >= 0 for d in differences)


def test_against_on_the_command_line(capsys):
    assert command(["conformance", "--backend", "cpu_ref", "--against", "cpu_ref", "--ops", "embed", "--numerics", "ideal"]) == 0
    assert "cpu_ref against cpu_ref: 4 passed" in capsys.readouterr().out
    with registered(Subject(backend_of(InverseRotaryForgotten))):
        assert command(["conformance", "--backend", "cpu_ref", "--against", "faulty", "--bisect", "--numerics", "release"]) == 1
    assert "first divergence: layer 0, op sparse_attention" in capsys.readouterr().out


def test_benchmark_times_ops_and_skips_what_is_too_large(reference):
    ceilings = bench.Ceilings(1e10, 1e11, "assumed")
    timing = next(bench.run_benchmark(reference, ["decode-1"], "stream_mean", ceilings, 5.0))
    assert timing.seconds > 0
    assert timing.share(ceilings) > 0
    slow = bench.Ceilings(1e10, 1.0, "assumed")
    skipped = next(bench.run_benchmark(reference, ["decode-1"], "moe_gate", slow, 5.0))
    assert "--max-seconds" in skipped.skipped
    assert skipped.seconds == 0


def test_benchmark_refuses_unknown_presets_and_ops(capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: bench.Ceilings(1e10, 1e11, "assumed"))
    assert command(["bench", "ops", "--backend", "cpu_ref", "--preset", "decode-2"]) == 2
    assert "did you mean 'decode-1'" in capsys.readouterr().err
    assert command(["bench", "ops", "--backend", "cpu_ref", "--ops", "nothing"]) == 2
    assert command(["bench", "ops", "--backend", "cpu_ref", "--preset", "decode-1", "--ops", "stream_mean"]) == 0
    assert "of the ceiling" in capsys.readouterr().out


def test_ceilings_are_measured_on_the_device():
    assert bench._median(lambda: torch.ones(10) + 1, torch.device("cpu")) > 0


def test_several_processes_give_the_report_of_one(reference):
    narrow = suite.Plan(levels=("contract", "ops"), filter=OpFilter("embed", quick=True))
    alone = suite.run(reference, narrow)
    shared = run_on_processes(("cpu_ref", "", False), narrow, 2)
    assert [(r.id, r.status, r.ratio) for r in shared.results] == [(r.id, r.status, r.ratio) for r in alone.results]


def test_a_process_that_dies_is_said_to_have_died(monkeypatch):
    monkeypatch.setattr(parallel, "_run", os._exit)
    with pytest.raises(BackendError, match=r"backend 'cpu_ref': a process that ran cases of level contract .* without --jobs"):
        run_on_processes(("cpu_ref", "", False), suite.Plan(levels=("contract",)), 2)
