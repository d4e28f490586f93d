"""The `deepinfer` command: names, exit codes, streams, and the commands config, backends and doctor."""

import json

import pytest

from deepinfer_core import __version__
from deepinfer_core.backend.kernels import OPS
from deepinfer_core.backend.registry import PluginProblem, discover
from deepinfer_core.cli import _app
from deepinfer_core.errors import EngineError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    """The commands read the environment; the tests decide what is in it."""
    import os

    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)


def test_help_lists_every_command_in_one_screen(capsys):
    assert _app.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in _app.command_names())
    assert {"config", "backends", "doctor"} <= set(_app.command_names())
    assert len(out.splitlines()) <= 40
    assert "..." not in out.split("Commands:")[1]  # every line fits


@pytest.mark.parametrize("name", _app.command_names())
def test_each_command_has_help_with_an_example(name, capsys):
    assert _app.run([name, "--help"]) == 0
    assert "deepinfer" in capsys.readouterr().out


def test_version(capsys):
    assert _app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"deepinfer-core {__version__}\n"


@pytest.mark.parametrize("arguments", [["nope"], ["config", "--nope"], ["config", "extra"], ["backends", "--ops"]])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    assert _app.run(arguments) == 2
    assert "Error" in capsys.readouterr().err


def test_config_errors_are_usage_errors_without_traceback(capsys):
    assert _app.run(["config", "--set", "max_num_seq=3"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: unknown key 'max_num_seq' (flag); did you mean 'scheduler.max_num_seqs'?\n"
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["--debug", "config", "-s", "x=1"], ["config", "-s", "x=1", "--debug"]])
def test_debug_shows_the_traceback(arguments, capsys):
    assert _app.run(arguments) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_behind_a_lone_dashes_is_text():
    assert _app._take_debug(["generate", "--", "--debug"]) == (False, ["generate", "--", "--debug"])
    assert _app._take_debug(["generate", "--debug", "--", "x"]) == (True, ["generate", "--", "x"])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (EngineError("the device failed"), 1, "error: the device failed\n"),
        (ZeroDivisionError("division by zero"), 1, "internal error: ZeroDivisionError: division by zero\n"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_failures_are_exit_code_1(error, code, text, monkeypatch, capsys):
    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr("deepinfer_core.cli.config.resolve_from_options", failing)
    assert _app.run(["config"]) == code
    assert capsys.readouterr().err.startswith(text)


def test_config_prints_values_and_sources(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "2")
    monkeypatch.setenv("DEEPINFER_SHOW_EPLB_DETAIL", "1")
    file = tmp_path / "engine.yaml"
    file.write_text("scheduler: {max_num_seqs: 4}", encoding="utf-8")
    assert _app.run(["config", "-c", str(file), "-b", "cpu_ref", "-s", "model.seed=7"]) == 0
    captured = capsys.readouterr()
    lines = {tuple(line.split("#")[0].split()): line.split("# ")[-1] for line in captured.out.splitlines() if "#" in line}
    assert lines[("num_draft_tokens:", "2")] == "env DEEPINFER_USE_NEXTN_DECODE"
    assert lines[("max_num_seqs:", "4")] == f"file {file}"
    assert lines[("name:", '"cpu_ref"')] == lines[("seed:", "7")] == "flag"
    assert lines[("max_model_len:", "4096")] == "default"
    assert "note: DEEPINFER_SHOW_EPLB_DETAIL is set but has no effect" in captured.err


def test_config_json(capsys):
    assert _app.run(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["model.seed"] == {"value": 0, "source": "default"}


def test_backends_lists_each_with_its_state_and_claims(capsys):
    assert _app.run(["backends"]) == 0
    out = capsys.readouterr().out
    assert "cpu_ref: available (deepinfer-core" in out
    assert "capability" in out
    assert "batch_invariant" in out


def test_backends_json(capsys):
    assert _app.run(["backends", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    reference = {entry["name"]: entry for entry in report["backends"]}["cpu_ref"]
    assert reference["available"] is True
    assert reference["capabilities"]["numerics"] == ["ideal", "release"]


def test_backends_reports_plugin_problems_with_a_traceback_after_debug(capsys, monkeypatch):
    problem = PluginProblem("acme-backend", "acme = acme.plugin", "ImportError: no driver", "Traceback: here")
    monkeypatch.setattr(discover(), "problems", [problem])
    assert _app.run(["backends"]) == 0
    out = capsys.readouterr().out
    assert "plugin problem: acme-backend (entry point 'acme = acme.plugin'): ImportError: no driver" in out
    assert "Traceback: here" not in out
    assert _app.run(["backends", "--debug"]) == 0
    assert "Traceback: here" in capsys.readouterr().out


def test_backends_ops(capsys):
    assert _app.run(["backends", "--ops", "cpu_ref"]) == 0
    out = capsys.readouterr().out
    assert all(op in out for op in OPS)
    assert out.splitlines()[-1] == f"cpu_ref: {len(OPS)} ops, {len(OPS)} native, 0 inherited, 0 missing"
    assert _app.run(["backends", "--ops", "cpu_ref", "--json"]) == 0
    assert {entry["status"] for entry in json.loads(capsys.readouterr().out)} == {"native"}
    assert _app.run(["backends", "--ops", "cpu_rf"]) == 2
    assert "did you mean 'cpu_ref'" in capsys.readouterr().err


def test_doctor_reports_what_a_bug_report_needs(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert _app.run(["doctor", "--json", "--model", str(tmp_path), "-b", "cpu_ref"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["deepinfer-core"] == __version__
    assert report["selected"] == {"name": "cpu_ref", "why": "named by the configuration"}
    assert {plugin["distribution"] for plugin in report["plugins"]} >= {"deepinfer-core"}
    assert report["config"]["changed"] == {"model.path": "flag", "backend.name": "flag"}
    assert "0 shards" in report["checkpoint"]
    assert "missing: tokenizer.json, model.safetensors.index.json" in report["checkpoint"]
    assert report["limits"]["physical memory bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["-b", "no_such"], "selected: None (unknown backend 'no_such'"),
        (["-s", "max_num_seqs=0"], "configuration: scheduler.max_num_seqs = 0 (from flag)"),
    ],
)
def test_doctor_survives_what_it_reports(arguments, pattern, capsys):
    assert _app.run(["doctor", *arguments]) == 1
    assert pattern in capsys.readouterr().out


def test_doctor_hides_the_home_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _app.run(["doctor", "--model", str(tmp_path / "secret")]) == 0
    out = capsys.readouterr().out
    assert "~/secret: no such folder" in out
    assert str(tmp_path) not in out
