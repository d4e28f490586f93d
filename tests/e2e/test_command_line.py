"""`deepinfer generate`, from the command line to the exit code."""

from __future__ import annotations

import io
import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from deepinfer_core.checkpoint.geometries import shipped_checkpoint
from deepinfer_core.cli._app import run

SMALL = ["--set", "max_model_len=64", "--backend", "cpu_ref"]


def generate(capsys, *arguments):
    """(exit code, standard output, standard error) of `deepinfer generate`."""
    code = run(["generate", *SMALL, *arguments])
    return code, *capsys.readouterr()


def test_text_goes_to_standard_output_and_everything_else_to_standard_error(capsys):
    code, out, err = generate(capsys, "def main", "--max-tokens", "5", "--temperature", "0")
    assert code == 0
    assert "weights are random" in err
    assert "backend cpu_ref" in err
    assert "[5 tokens, finish reason: length]" in err
    code, again, _ = generate(capsys, "def main", "--max-tokens", "5", "--temperature", "0", "--json")
    found = json.loads(again)
    assert code == 0
    assert found["samples"][0]["text"] + "\n" == out
    assert found["samples"][0]["finish_reason"] == "length"
    assert len(found["samples"][0]["logprobs"]) == 5


def test_the_prompt_can_come_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("def main"))
    _, out, _ = generate(capsys, "-", "--max-tokens", "3", "--temperature", "0")
    _, same, _ = generate(capsys, "def main", "--max-tokens", "3", "--temperature", "0")
    assert out == same


def test_standard_input_that_is_no_text_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    code, out, err = generate(capsys, "-")
    assert (code, out) == (2, "")
    assert "standard input is not UTF-8 (byte 2" in err
    assert "internal error" not in err


USAGE = {
    "empty prompt": ([""], ["empty", "at least one token"]),
    "long prompt": (["word " * 200], ["tokens", "max_model_len 64", "shorten"]),
    "temperature": (["x", "--temperature", "-1"], ["temperature=-1", "at least 0"]),
    "nan": (["x", "--temperature", "nan"], ["temperature=nan", "finite"]),
    "top_k": (["x", "--top-k", "0"], ["top_k=0"]),
    "negative tokens": (["x", "--max-tokens", "-3"], ["max_tokens=-3"]),
    "unknown option": (["x", "--temprature", "1"], ["--temprature"]),
    "unknown setting": (["x", "--set", "max_num_sqs=3"], ["max_num_sqs", "max_num_seqs"]),
    "unknown backend": (["x", "--backend", "cpu_reff"], ["cpu_reff", "cpu_ref"]),
    "contradiction": (["x", "--set", "max_num_batched_tokens=1"], ["max_num_batched_tokens = 1", "raise"]),
    "half a character": (["a\udcff"], ["surrogate"]),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("case", USAGE)
def test_usage_errors_end_with_2_one_message_and_no_traceback(case, as_json, capsys):
    arguments, words = USAGE[case]
    code, out, err = generate(capsys, *arguments, *(["--json"] if as_json else []))
    assert code == 2
    assert "Traceback" not in err
    assert "internal error" not in err
    for word in words:
        assert word in err
    if out:
        assert json.loads(out)["samples"][0]["error"]


def damage(folder, case):
    """Breaks a copy of the checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    shard = folder / "model-00001-of-00004.safetensors"
    if case == "another architecture":
        config["architectures"], config["model_type"] = ["LlamaForCausalLM"], "llama"
    elif case == "unsupported value":
        config["text_config"]["scoring_func"] = "softmax"
    elif case == "incomplete":
        shard.unlink()
    elif case == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif case == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif case == "a tokenizer of another size":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:-5])
        (folder / "tokenizer.json").write_text(json.dumps(content))
    elif case == "bad defaults":
        (folder / "generation_config.json").write_text('{"temperature": -3}')
    elif case == "defaults that are no JSON":
        (folder / "generation_config.json").write_text("temperature: 1")
    (folder / "config.json").write_text(json.dumps(config))


CHECKPOINTS = {
    "another architecture": ["LlamaForCausalLM", "DeepseekV41ForCausalLM"],
    "unsupported value": ["scoring_func", "softmax", "sqrtsoftplus"],
    "incomplete": ["model-00001-of-00004.safetensors", "download"],
    "truncated": ["model-00001-of-00004.safetensors"],
    "no tokenizer": ["tokenizer.json", "does not exist"],
    "a tokenizer of another size": ["tokenizer.json"],
    "bad defaults": ["generation_config.json", "temperature=-3"],
    "defaults that are no JSON": ["generation_config.json", "JSON"],
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_bad_checkpoint_is_explained(case, capsys, tmp_path):
    folder = shutil.copytree(shipped_checkpoint(), tmp_path / "model")
    damage(folder, case)
    code, out, err = generate(capsys, "x", "--max-tokens", "1", "--model", str(folder))
    assert (code, out) == (1 if case != "bad defaults" else 2, "")
    assert "Traceback" not in err
    assert "internal error" not in err
    for word in CHECKPOINTS[case]:
        assert word in err, err


def test_a_request_that_outgrows_the_cache_shows_its_text_and_fails(capsys):
    settings = ("--set", "num_pages=2", "--set", "max_model_len=512")
    code, out, err = generate(capsys, "word " * 20, "--max-tokens", "200", "--temperature", "0", "--ignore-eos", *settings)
    assert code == 1
    assert len(out) > 1
    assert "insufficient_system_resource" in err
    assert "more memory" in err


def test_a_device_that_fails_is_a_failure_with_its_reason(capsys, monkeypatch):
    from deepinfer_core.model.graph import Model

    def broken(*arguments):
        raise RuntimeError("the memory of the device is gone")

    monkeypatch.setattr(Model, "forward", broken)
    for extra in ((), ("--json",)):
        code, _, err = generate(capsys, "x", *extra)
        assert code == 1
        assert "memory of the device is gone" in err
        assert "Traceback" not in err
    code, _, err = generate(capsys, "x", "--debug")
    assert code == 1
    assert "Traceback" in err


def test_a_reader_that_goes_away_is_no_defect(capsys, monkeypatch):
    def gone(*arguments):
        raise BrokenPipeError(32, "Broken pipe")

    stdout = SimpleNamespace(write=gone, flush=gone, isatty=lambda: False, fileno=lambda: 1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        code = run(["generate", *SMALL, "x", "--max-tokens", "2"])
    assert code == 1
    assert "internal error" not in capsys.readouterr().err
