"""The example backend as an installed third party: its wheel beside the core's, in a fresh environment. Takes a minute: it compiles,
installs and runs the conformance suite there."""

from __future__ import annotations

import json

import pytest
from third_party import EXAMPLE

from deepinfer_core.backend.kernels import OPS

INHERITED = {
    "apply_token_bitmask", "confidence", "log_probs", "markov_logits", "prepare_engram_table", "sample", "verify",
}  # fmt: skip
NATIVE = set(OPS) - INHERITED


def test_everything_comes_from_the_wheels(installed):
    modules = "deepinfer_core, deepinfer_backends.cpu_ref, deepinfer_simd"
    code = f"import sys, {modules}; print(*(sys.modules[name].__file__ for name in '{modules}'.split(', ')))"
    files = installed.run("python", "-c", code).stdout.split()
    assert len(files) == 3
    assert all(file.startswith(str(installed.root)) for file in files)


def test_the_entry_point_is_found(installed):
    report = json.loads(installed.run("deepinfer", "backends", "--json").stdout)
    found = {entry["name"]: entry for entry in report["backends"]}
    assert found["cpu_simd"]["available"]
    assert found["cpu_simd"]["distribution"] == "deepinfer-backend-simd"
    assert found["cpu_ref"]["distribution"] == "deepinfer-core"
    assert not report["problems"]
    assert list(found)[-2:] == ["cpu_simd", "cpu_ref"]  # what "auto" takes where there is no accelerator


def test_native_and_inherited_ops_are_told_apart(installed):
    lines = installed.run("deepinfer", "backends", "--ops", "cpu_simd").stdout.splitlines()
    status = {op: (where, module) for op, where, module in map(str.split, lines[:-1])}
    assert {op for op, (where, _) in status.items() if where == "native"} == NATIVE
    assert all(module.startswith("deepinfer_simd." if op in NATIVE else "deepinfer_backends.cpu_ref") for op, (_, module) in status.items())
    assert f"{len(NATIVE)} native" in lines[-1]
    assert "0 missing" in lines[-1]


def test_inherited_ops_can_be_refused(installed):
    done = installed.run("deepinfer", "generate", "x", "--backend", "cpu_simd", "--set", "backend.native_only=true", status=1)
    assert "backend 'cpu_simd' inherits" in done.stderr
    assert "log_probs" in done.stderr


def test_it_conforms(installed):
    done = installed.run("deepinfer", "conformance", "--backend", "cpu_simd", "--quick")
    assert "cpu_simd conforms" in done.stdout
    assert " 0 failed" in done.stdout


def test_the_pytest_door(installed):
    arguments = ("--pyargs", "deepinfer_core.conformance", "--deepinfer-backend", "cpu_simd", "--deepinfer-ops", "hc_*")
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "--deepinfer-quick")
    assert " passed" in done.stdout
    assert "hc_pre" not in done.stdout  # nothing to complain about


def test_its_own_tests(installed):
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(installed.work), str(EXAMPLE / "tests"))
    assert " passed" in done.stdout


def test_it_generates_what_the_reference_generates(installed):
    arguments = ("--max-tokens", "24", "--temperature", "0", "--ignore-eos", "--json", "--set", "model.numerics=ideal")
    tokens = []
    for backend in ("cpu_simd", "cpu_ref"):
        done = installed.run("deepinfer", "generate", "Once upon a time", "--backend", backend, *arguments)
        assert f"backend {backend}: named by the configuration" in done.stderr
        tokens.append(json.loads(done.stdout)["samples"][0]["token_ids"])
    assert len(tokens[0]) == 24
    assert tokens[0] == tokens[1]


@pytest.mark.slow  # the whole suite: every geometry, all levels
def test_it_conforms_in_full(installed):
    done = installed.run("deepinfer", "conformance", "--backend", "cpu_simd", "--report", "report.json")
    assert json.loads((installed.work / "report.json").read_text())
    assert " 0 failed" in done.stdout


@pytest.mark.slow  # times ops: what is claimed in the example's README, with a wide margin
def test_its_ops_are_faster_than_the_reference(installed):
    done = installed.run("python", "-P", str(EXAMPLE / "benchmark.py"), "--threads", "1", "--sizes", "small")
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("x")]
    assert {row[0] for row in rows} == {op for op in NATIVE if not op.startswith("prepare")}
    assert sum(float(row[-1][:-1]) > 1 for row in rows) >= 20
