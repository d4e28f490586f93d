"""`deepinfer checkpoint`, the scan behind `verify`, the tables behind `inspect`, and model names."""

from __future__ import annotations

import json
import shutil
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deepinfer_core.checkpoint.geometries import geometry, shipped_checkpoint
from deepinfer_core.checkpoint.hub import resolve_model
from deepinfer_core.checkpoint.inspect import inspect
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.checkpoint.verify import verify
from deepinfer_core.cli.checkpoint import app, release_cache
from deepinfer_core.errors import CheckpointError, ConfigError

RELEASE = {
    "routed experts": 543_581_798_400,
    "engram tables": 196_613_849_600,
    "draft routed experts": 13_589_544_960,
    "attention": 5_064_696_320,
    "shared experts": 1_415_577_600,
    "embedding": 661_913_600,
    "head": 661_913_600,
    "vision, aligner, image vectors": 485_268_480,
    "draft, other": 463_457_890,
    "engram projections": 314_654_720,
    "draft shared experts": 106_168_320,
    "routers": 78_673_920,
    "markov head": 66_191_360,
    "indexers": 43_516_416,
    "hyper-connections": 39_323_760,
    "compressors": 18_352_128,
    "block and final norms": 414_720,
}
RELEASE_BYTES = {"I8": 278_585_671_680, "F8_E4M3": 204_015_223_296, "F8_E8M0": 23_563_015_184, "BF16": 3_952_883_712, "F32": 169_229_128}


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_tables_of_the_release():
    report = inspect(geometry("flash"))
    assert {row.name: row.parameters for row in report.components} == RELEASE
    assert {row.name: row.nbytes for row in report.formats} == RELEASE_BYTES
    assert report.total[1:] == (96_085, 763_205_315_794, 510_286_023_000)


def test_cache_of_the_release():
    assert release_cache(geometry("flash").text_config).bytes_per_token == 890


def test_inspect_command():
    text = run("inspect", str(shipped_checkpoint())).stdout
    for word in ("routed experts", "F8_E4M3", "3,979,720", "per token", "79.5", "state slot", "source layer 4"):
        assert word in text
    report = json.loads(run("inspect", str(shipped_checkpoint()), "--json").stdout)
    assert report["total"] == {"name": "total", "tensors": 801, "parameters": 3_589_300, "nbytes": 3_979_720}
    assert report["cache"]["bytes_per_token"] == 79.5


def test_make_inspect_verify(tmp_path):
    made = run("make", str(tmp_path / "new"), "--geometry", "tiny", "--layers", "2", "--seed", "4")
    assert "geometry tiny, seed 4" in made.stdout
    assert "no problems" in run("verify", str(tmp_path / "new")).stdout
    again = run("make", str(tmp_path / "again"), "--geometry", str(tmp_path / "new"), "--seed", "4")
    assert again.exit_code == 0
    first, second = (Checkpoint.open(tmp_path / name) for name in ("new", "again"))
    assert first.config == second.config
    assert torch.equal(first.tensor("embed.weight"), second.tensor("embed.weight"))


def test_make_small_uses_the_shipped_tokenizer(tmp_path):
    run("make", str(tmp_path / "small"), "--geometry", "small", "--layers", "1")
    assert (tmp_path / "small" / "tokenizer.json").read_bytes() == (shipped_checkpoint() / "tokenizer.json").read_bytes()


def test_make_refusals(tmp_path):
    with pytest.raises(ConfigError, match="geometry 'flsh' is unknown; did you mean 'flash'"):
        run("make", str(tmp_path), "--geometry", "flsh")
    assert run("make", str(tmp_path)).exit_code == 2


def test_verify_finds_every_bad_value(tmp_path):
    directory = shutil.copytree(shipped_checkpoint(), tmp_path / "copy")
    shard = directory / "model-00001-of-00004.safetensors"
    tensors = load_file(shard)
    tensors["layers.1.attn.wkv.weight"].view(torch.uint8)[3, 5] = 0x7F
    tensors["layers.1.attn.wkv.weight"].view(torch.uint8)[4, 0] = 0xFF
    tensors["layers.0.attn.wq_a.scale"].view(torch.uint8)[1, 2] = 255
    tensors["layers.0.attn_norm.weight"][7] = float("inf")
    tensors["layers.0.hc_attn_fn"][0, 0] = float("nan")
    save_file(tensors, shard)
    (directory / "tokenizer.json").write_text("{}")
    read = []
    checkpoint = Checkpoint.open(directory)
    problems = verify(checkpoint, read.append)
    assert sum(read) == checkpoint.total_bytes
    assert len(problems) == 4
    assert any("e4m3 NaN" in problem and "layers.1.attn.wkv.weight (2 of 8192, first at [3, 5])" in problem for problem in problems)
    assert any("scale byte 255" in problem and "layers.0.attn.wq_a.scale (1 of 8, first at [1, 2])" in problem for problem in problems)
    assert any(
        problem.startswith("2 tensors hold NaN or infinite") and "attn_norm.weight (1 of 128, first at [7])" in problem
        for problem in problems
    )
    assert any("tokenizer.json is no tokenizer" in problem for problem in problems)
    with pytest.raises(CheckpointError, match="has 4 problems"):
        run("verify", str(directory))


def test_bad_value_behind_the_first_piece(monkeypatch):
    monkeypatch.setattr("deepinfer_core.checkpoint.verify.PIECE", 100)
    assert verify(Checkpoint.open(shipped_checkpoint())) == []


def test_model_names(tmp_path, monkeypatch):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=r"model '/no/such/folder' is no directory; expected .* Hugging Face id"):
        resolve_model("/no/such/folder")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"'owner/name' is no directory.*huggingface_hub, which is not installed; run `pip install"):
        resolve_model("owner/name")


def test_hub_download(tmp_path, monkeypatch):
    """The library's place is taken by a fake: what is asked for, and what its failures become."""
    errors = types.ModuleType("huggingface_hub.errors")
    for name in ("HfHubHTTPError", "HFValidationError", "LocalEntryNotFoundError"):
        setattr(errors, name, type(name, (Exception,), {}))
    hub = types.ModuleType("huggingface_hub")
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        if repo_id == "owner/absent":
            raise errors.HfHubHTTPError("404 not found\nsecond line")
        return str(tmp_path)

    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    assert resolve_model("owner/name", revision="abc") == tmp_path
    assert asked == {"repo_id": "owner/name", "revision": "abc", "allow_patterns": ["*.json", "*.safetensors"]}
    with pytest.raises(CheckpointError, match=r"cannot be fetched from Hugging Face \(404 not found\); check the id"):
        resolve_model("owner/absent")
