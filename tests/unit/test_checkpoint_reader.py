"""Opening checkpoints: what is read, and every way in which one can be broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepinfer_core.checkpoint.geometries import geometry, shipped_checkpoint
from deepinfer_core.checkpoint.names import expected_tensors
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.checkpoint.shards import INDEX_FILE
from deepinfer_core.errors import CheckpointError

FIRST, LAST = "model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"


@pytest.fixture
def copied(tmp_path):
    """A private copy of the shipped checkpoint."""
    return shutil.copytree(shipped_checkpoint(), tmp_path / "copy")


def edit(directory, file, change):
    """Rewrite one shard with `change(tensors)` applied, and the index with it."""
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] = {name: place for name, place in index["weight_map"].items() if place != file} | dict.fromkeys(tensors, file)
    (directory / INDEX_FILE).write_text(json.dumps(index))


def problems(directory):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    return caught.value.problems


def the_problem(directory, *words):
    found = problems(directory)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found[0]


def test_release_counts():
    specs = expected_tensors(geometry("flash"))
    assert len(specs) == 96_085
    assert sum(spec.nbytes for spec in specs.values()) == 510_286_023_000


def test_tensors_in_their_stored_dtypes():
    with Checkpoint.open(shipped_checkpoint()) as checkpoint:
        assert len(checkpoint.names) == 801
        assert checkpoint.total_bytes == 3_979_720
        assert checkpoint.tensor("layers.1.attn.wkv.weight").dtype == torch.float8_e4m3fn
        assert checkpoint.tensor("layers.1.attn.wkv.scale").dtype == torch.float8_e8m0fnu
        assert checkpoint.tensor("layers.1.ffn.experts.0.w1.weight").dtype == torch.int8
        assert checkpoint.tensor("layers.1.hc_attn_fn").dtype == torch.float32
        weight, scale = checkpoint.quant("layers.2.ffn.experts.7.w2")
        assert (weight.shape, scale.shape) == ((128, 32), (128, 2))
        assert checkpoint.quant("embed").scale is None
        assert checkpoint.has("norm.weight")
        assert not checkpoint.has("model.norm.weight")
        for name, spec in expected_tensors(checkpoint.config).items():
            assert (checkpoint.tensor(name).shape, checkpoint.tensor(name).dtype) == (spec.shape, spec.dtype)


def test_data_is_that_of_the_file():
    checkpoint = Checkpoint.open(shipped_checkpoint())
    with safe_open(shipped_checkpoint() / FIRST, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the handle is no dict
            assert torch.equal(checkpoint.tensor(name).view(torch.uint8), file.get_tensor(name).view(torch.uint8))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the memory map of Linux")
def test_tensors_are_mapped_and_outlive_the_checkpoint():
    checkpoint = Checkpoint.open(shipped_checkpoint())
    tensor = checkpoint.tensor("embed.weight")
    total = tensor.float().sum()
    checkpoint.close()
    assert tensor.float().sum() == total
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            assert line.endswith(checkpoint.stored("embed.weight").file)
            return
    pytest.fail("the tensor lies in no mapping")


def test_unknown_name():
    with pytest.raises(CheckpointError, match=r"no tensor 'norm.wight'; did you mean 'norm.weight'"):
        Checkpoint.open(shipped_checkpoint()).tensor("norm.wight")


def test_prefix_and_single_file(copied):
    tensors = {}
    for shard in copied.glob("*.safetensors"):
        tensors |= {f"model.{name}": tensor for name, tensor in load_file(shard).items()}
        shard.unlink()
    (copied / INDEX_FILE).unlink()
    save_file(tensors, copied / "model.safetensors")
    single, plain = Checkpoint.open(copied), Checkpoint.open(shipped_checkpoint())
    assert set(single.names) == set(plain.names)
    assert torch.equal(single.tensor("norm.weight"), plain.tensor("norm.weight"))


def test_prefix_in_the_index_only(copied):
    index = json.loads((copied / INDEX_FILE).read_text())
    index["weight_map"] = {f"model.{name}": place for name, place in index["weight_map"].items()}
    (copied / INDEX_FILE).write_text(json.dumps(index))
    assert Checkpoint.open(copied).has("norm.weight")


def test_both_spellings_are_refused(copied):
    index = json.loads((copied / INDEX_FILE).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["norm.weight"]
    (copied / INDEX_FILE).write_text(json.dumps(index))
    the_problem(copied, INDEX_FILE, "norm.weight twice", "'model.'")


def test_both_spellings_in_a_shard_are_refused(copied):
    name = "layers.0.engram.embed.scale"
    edit(copied, LAST, lambda tensors: tensors.update({f"model.{name}": tensors[name].clone()}))
    assert any(LAST in problem and f"{name} twice" in problem for problem in problems(copied))


def test_tied_copies_are_ignored(copied):
    edit(copied, LAST, lambda tensors: tensors.update({"mtp.0.embed.weight": torch.zeros(3), "mtp.1.head.weight": torch.zeros(3)}))
    assert not Checkpoint.open(copied).has("mtp.0.embed.weight")


def test_missing_shard(copied):
    (copied / LAST).unlink()
    the_problem(copied, LAST, "is missing", "download")


def test_truncated_shard(copied):
    content = (copied / LAST).read_bytes()
    (copied / LAST).write_bytes(content[:-10])
    the_problem(copied, LAST, "truncated", "download")
    (copied / LAST).write_bytes(content[:100])
    the_problem(copied, LAST, "truncated", "100 bytes cannot hold a header")
    (copied / LAST).write_bytes(b"")
    the_problem(copied, LAST, "truncated", "0 bytes")


def test_shard_with_more_bytes(copied):
    with (copied / LAST).open("ab") as file:
        file.write(b"123")
    the_problem(copied, LAST, "3 bytes that belong to no tensor")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: "{", ["no readable safetensors header"]),
        (lambda header: "[]", ["no JSON object"]),
        (lambda header: header | {"layers.0.engram.embed.scale": {"dtype": "F8_E8M0"}}, ["layers.0.engram.embed.scale", "malformed"]),
        (lambda header: header | {"x": header["layers.0.engram.embed.scale"]}, ["overlap or leave gaps"]),
        (
            lambda header: header | {"layers.0.engram.embed.scale": header["layers.0.engram.embed.scale"] | {"shape": [7]}},
            ["layers.0.engram.embed.scale occupies 630 bytes", "F8_E8M0 [7]"],
        ),
    ],
)
def test_malformed_header(copied, change, words):
    content = (copied / LAST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    changed = change(json.loads(content[8 : 8 + length]))
    encoded = (changed if isinstance(changed, str) else json.dumps(changed)).encode()
    (copied / LAST).write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])
    found = problems(copied)
    assert any(LAST in problem and all(word in problem for word in words) for problem in found), found


def test_header_larger_than_the_file(copied):
    (copied / LAST).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    the_problem(copied, LAST, "truncated", str(1 << 60))


@pytest.mark.parametrize(
    "weight_map", [None, [], {"norm.weight": 3}, {"norm.weight": "../model.safetensors"}, {"norm.weight": "model.bin"}]
)
def test_malformed_index(copied, weight_map):
    (copied / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    the_problem(copied, INDEX_FILE, "weight_map is malformed")


def test_no_weights_at_all(copied):
    (copied / INDEX_FILE).unlink()
    the_problem(copied, INDEX_FILE, "model.safetensors", "download the weights")


def test_index_that_disagrees_with_the_shards(copied):
    index = json.loads((copied / INDEX_FILE).read_text())
    index["weight_map"]["norm.weight"] = LAST
    (copied / INDEX_FILE).write_text(json.dumps(index))
    found = problems(copied)
    assert len(found) == 2
    assert any("1 tensors are listed" in problem and f"not in {LAST}: norm.weight" in problem for problem in found)
    assert any("does not place them there: norm.weight" in problem for problem in found)


def test_missing_and_unexpected_together(copied):
    def change(tensors):
        del tensors["layers.1.attn.wkv.scale"]
        tensors["layers.1.attn.wkv.bias"] = torch.zeros(64)
        tensors["layers.1.hc_attn_norm.weight"] = torch.zeros(512)
        tensors["hc_head_fn"] = torch.zeros(4, 512)

    edit(copied, FIRST, change)
    found = problems(copied)
    assert len(found) == 4
    assert any("1 tensors that config.json asks for are missing: layers.1.attn.wkv.scale" in problem for problem in found)
    assert any("no place in the model of config.json: layers.1.attn.wkv.bias" in problem for problem in found)
    assert any("separate norms of hyper-connections" in problem and "layers.1.hc_attn_norm.weight" in problem for problem in found)
    assert any("legacy output mix" in problem and "hc_head_fn" in problem for problem in found)


def test_experts_must_be_complete(copied):
    def change(tensors):
        for name in [name for name in tensors if ".1.ffn.experts.0." in name]:
            del tensors[name]
        for name in [name for name in tensors if ".1.ffn.experts.1." in name]:
            tensors[name.replace("experts.1.", "experts.8.")] = tensors[name].clone()

    edit(copied, FIRST, change)
    found = problems(copied)
    assert len(found) == 2
    assert any("layers.1.ffn: experts 0 are missing" in problem and "without a gap from 0" in problem for problem in found)
    assert any("layers.1.ffn: experts 8 are beyond the number of experts" in problem for problem in found)


def test_wrong_shape_and_format(copied):
    def change(tensors):
        tensors["layers.1.attn.wkv.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
        tensors["layers.1.attn.wkv.scale"] = torch.ones(1, 4, dtype=torch.float32)

    edit(copied, FIRST, change)
    found = problems(copied)
    assert len(found) == 2
    assert any("another shape" in problem and "layers.1.attn.wkv.scale is [1, 4], expected [2, 4]" in problem for problem in found)
    assert any(
        "2 tensors are stored in another format" in problem and "wkv.weight is BF16, expected F8_E4M3" in problem for problem in found
    )


def test_many_problems_are_summarised(copied):
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 96
    (copied / "config.json").write_text(json.dumps(config))
    found = problems(copied)
    assert len(found) == 1
    assert "have another shape" in found[0]
    assert "more" in found[0]
    assert len(found[0]) < 700
