"""Random checkpoints: exact format, statistics, determinism, and the refusals of the writer."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from deepinfer_core.checkpoint import writer
from deepinfer_core.checkpoint.engram import engram_tables
from deepinfer_core.checkpoint.geometries import geometry, raw_geometry, shipped_checkpoint
from deepinfer_core.checkpoint.names import Component, expected_tensors
from deepinfer_core.checkpoint.quantize import encode_fp4_rows, encode_fp8_blocks, encode_fp8_rows
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.synthetic import DummyCheckpoint
from deepinfer_core.checkpoint.tokenizer import Tokenizer
from deepinfer_core.checkpoint.vocabulary import synthetic_tokenizer
from deepinfer_core.checkpoint.writer import write_checkpoint
from deepinfer_core.errors import CheckpointError, ConfigError

ORDINARY = st.floats(-65536, 65536, width=32).map(lambda value: value if abs(value) > 1e-20 else 0.0)  # no scale byte is clamped
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A written checkpoint of the tiny geometry, cut into several shards."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "deep" / "er", geometry("tiny"), seed=5, shard_bytes=2_000_000)


def dequantised(weight, scale, block_rows):
    powers = torch.exp2(scale.view(torch.uint8).float() - 127)
    return weight * powers.repeat_interleave(block_rows, 0)[: weight.shape[0]].repeat_interleave(32, 1)[:, : weight.shape[1]]


def test_written_checkpoint_opens(tiny):
    checkpoint = Checkpoint.open(tiny)
    assert checkpoint.config.text_config.layers == geometry("tiny").text_config.layers
    assert set(checkpoint.names) == set(expected_tensors(checkpoint.config))
    shards = sorted(path.name for path in tiny.glob("*.safetensors"))
    assert len(shards) == 7
    assert shards[0] == "model-00001-of-00007.safetensors"
    assert not list(tiny.glob("*.partial"))
    tables = {checkpoint.stored(f"layers.{layer}.engram.embed.{part}").file for layer in (0, 2) for part in ("weight", "scale")}
    assert tables == set(shards[-2:])
    assert all(len(load_file(tiny / shard)) > 0 for shard in shards)


def test_dummy_weights_are_the_written_ones(tiny):
    checkpoint = Checkpoint.open(tiny)
    dummy = DummyCheckpoint(checkpoint.config, seed=5)
    assert set(dummy.names) == set(checkpoint.names)
    assert dummy.total_bytes == checkpoint.total_bytes
    for name in checkpoint.names:
        stored, generated = checkpoint.tensor(name), dummy.tensor(name)
        assert (stored.dtype, stored.shape) == (generated.dtype, generated.shape), name
        assert torch.equal(stored.view(torch.uint8), generated.view(torch.uint8)), name
    assert dummy.quant("layers.0.attn.wq_a").scale is not None
    assert dummy.quant("head").scale is None
    with pytest.raises(CheckpointError, match=r"no tensor 'heat\.weight'"):
        dummy.tensor("heat.weight")


def test_seeds_differ():
    config = geometry("tiny")
    names = ["embed.weight", "layers.0.attn.wq_a.weight", "layers.1.ffn.experts.0.w1.weight"]
    for name in names:
        one, other = (DummyCheckpoint(config, seed).tensor(name).view(torch.uint8) for seed in (0, 1))
        assert not torch.equal(one, other)


def test_chunks_do_not_change_the_format(monkeypatch):
    monkeypatch.setattr("deepinfer_core.checkpoint.synthetic.CHUNK_VALUES", 4096)
    config = geometry("tiny")
    dummy = DummyCheckpoint(config)
    for name, spec in expected_tensors(config).items():
        if name.startswith(("layers.0.", "embed", "aligner")):
            tensor = dummy.tensor(name)
            assert (tensor.shape, tensor.dtype) == (spec.shape, spec.dtype), name


def test_statistics():
    checkpoint = DummyCheckpoint(geometry("tiny"))

    def deviation(stem, rows=32):
        weight, scale = checkpoint.quant(stem)
        return float(dequantised(weight.float(), scale, rows).std())

    assert deviation("layers.0.attn.wq_a") == pytest.approx(256**-0.5, rel=0.05)
    assert deviation("layers.0.attn.wo_b") == pytest.approx(128**-0.5 / 4, rel=0.05)
    assert deviation("layers.0.engram.embed", rows=1) == pytest.approx(1, rel=0.05)
    packed, scale = checkpoint.quant("layers.0.ffn.experts.3.w2")
    codes = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], dim=-1).flatten(1)
    assert float(dequantised(E2M1[codes.int()], scale, 1).std()) == pytest.approx(64**-0.5 / 4, rel=0.1)
    norm = checkpoint.tensor("layers.0.attn_norm.weight").float()
    assert abs(float(norm.mean()) - 1) < 0.05
    assert float(checkpoint.tensor("embed.weight").float().std()) == pytest.approx(1, rel=0.05)
    assert float(checkpoint.tensor("layers.1.hc_attn_fn").std()) == pytest.approx(1024**-0.5, rel=0.05)
    assert float(checkpoint.tensor("layers.1.hc_attn_scale").mean()) == pytest.approx(0.5, abs=0.2)
    assert float(checkpoint.tensor("layers.1.attn.compressor.wgate.weight").float().std()) == pytest.approx(2 / 16, rel=0.05)
    assert not torch.equal(checkpoint.tensor("layers.1.ffn.gate.bias"), checkpoint.tensor("layers.1.ffn.gate.bias_vl"))


@given(st.lists(ORDINARY, min_size=64, max_size=64), st.sampled_from([1.0, 2.0**30]))
def test_encoders_choose_the_smallest_exact_scale(values, factor):
    """Errors are at most half a step of the code, and half the scale would overflow it."""
    row = torch.tensor(values).reshape(1, 64) * factor
    packed, scale4 = encode_fp4_rows(row)
    codes = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], dim=-1).flatten(1)
    for decoded, scale, limit, coarsest in (
        (E2M1[codes.int()], scale4, 6, 1.0),
        (encode_fp8_rows(row)[0].float(), encode_fp8_rows(row)[1], 448, 16.0),
        (encode_fp8_blocks(row)[0].float(), encode_fp8_blocks(row)[1], 448, 16.0),
    ):
        for group in range(2):
            power = Fraction(2) ** (int(scale.view(torch.uint8)[0, group]) - 127)
            exact = [Fraction(float(value)) for value in row[0, group * 32 : group * 32 + 32]]
            largest = max(abs(value) for value in exact)
            assert largest <= limit * power
            assert largest == 0 or largest > limit * power / 2
            for value, code in zip(exact, decoded[0, group * 32 : group * 32 + 32], strict=True):
                assert abs(value - Fraction(float(code)) * power) <= Fraction(coarsest) * power


def test_fp8_blocks_of_uneven_size():
    weight, scale = encode_fp8_blocks(torch.randn(40, 70, generator=torch.Generator().manual_seed(0)))
    assert (weight.shape, scale.shape) == ((40, 70), (2, 3))


def test_zero_blocks_are_exact():
    for encode in (encode_fp8_blocks, encode_fp8_rows, encode_fp4_rows):
        weight, scale = encode(torch.zeros(32, 32))
        assert not weight.view(torch.uint8).any()
        assert (scale.view(torch.uint8) == 127).all()


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_made_up_tokenizer(tmp_path, name):
    config = geometry(name)
    (tmp_path / "tokenizer.json").write_text(json.dumps(synthetic_tokenizer(config)))
    tokenizer = Tokenizer.load(tmp_path, config)
    text = "the café 日本 <｜end▁of▁sentence｜>"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
    assert tokenizer.decode([config.eos_token_id]) == "<｜end▁of▁sentence｜>"
    assert len({tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}) == tokenizer.vocab_size


def test_vocabulary_too_small_for_bytes():
    raw = raw_geometry("tiny")
    raw["text_config"] |= {"vocab_size": 260, "dspark_noise_token_id": 255}
    raw["image_token_id"] = 259
    with pytest.raises(ConfigError, match=r"vocab_size is 260; expected at least 261"):
        synthetic_tokenizer(ModelConfig.parse(raw))


def test_token_map_size_is_written(tmp_path):
    raw = raw_geometry("small", layers=1)
    directory = write_checkpoint(tmp_path, ModelConfig.parse(raw))
    config = ModelConfig.load(directory)
    assert config.text_config.engram_compressed_vocab_size not in (0, 615)
    assert int(engram_tables(config, directory).token_map.max()) + 1 == config.text_config.engram_compressed_vocab_size


def test_given_tokenizer_is_copied(tmp_path):
    write_checkpoint(tmp_path / "a", geometry("small", layers=1), tokenizer=shipped_checkpoint())
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (shipped_checkpoint() / "tokenizer.json").read_text()
    assert ModelConfig.load(tmp_path / "a").text_config.engram_compressed_vocab_size == 615
    with pytest.raises(CheckpointError, match="vocab_size = 512"):
        write_checkpoint(tmp_path / "b", geometry("tiny", layers=1), tokenizer=shipped_checkpoint())


def test_directory_in_use(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="is not an empty directory; expected a new or empty one"):
            write_checkpoint(place, geometry("tiny"))


def test_disk_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**7, 10**7 - 5, 5))
    with pytest.raises(CheckpointError, match=r"needs \d+ bytes; 5 are free"):
        write_checkpoint(tmp_path, geometry("tiny"))


def test_disk_full_while_writing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write_at", full)
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        write_checkpoint(tmp_path, geometry("tiny"))
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_written_bytes_are_reported(tmp_path):
    counts = []
    config = geometry("tiny", layers=2)
    write_checkpoint(tmp_path, config, on_bytes=counts.append)
    assert sum(counts) == sum(spec.nbytes for spec in expected_tensors(config).values())


def test_engram_tables_can_shrink():
    config = geometry("flash", layers=2, engram_vocab_size=1000)
    tables = [spec for spec in expected_tensors(config).values() if spec.component is Component.ENGRAM_TABLES]
    assert sum(spec.shape[0] for spec in tables) < 2 * 24 * 1300
