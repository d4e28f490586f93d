"""Writing random checkpoints of any geometry in the exact release format: shards, index, config, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from deepinfer_core.checkpoint.engram import token_map_of
from deepinfer_core.checkpoint.names import Component, TensorSpec, expected_tensors
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.shards import DTYPE_NAMES, INDEX_FILE
from deepinfer_core.checkpoint.synthetic import chunks
from deepinfer_core.checkpoint.tokenizer import load_tokenizer_file
from deepinfer_core.checkpoint.vocabulary import synthetic_tokenizer
from deepinfer_core.errors import CheckpointError, ConfigError

SHARD_BYTES = 5_000_000_000


@dataclass
class _Shard:
    """Tensors that go to one file; a scale is always beside its weight."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())


def write_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    seed: int = 0,
    *,
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Path:
    """Write a checkpoint with random weights to `directory`, which must be new or empty; returns the directory.

    `tokenizer`: a tokenizer.json (or its directory) to copy; None makes a byte-level one of `vocab_size` tokens. The written config
    gets the real size of its Engram token map unless the geometry switches the map off. `on_bytes` is called with the number of
    bytes of each piece written. Files appear under their final names only when complete, the index last.
    Raises: ConfigError if the directory is in use, CheckpointError if the tokenizer does not fit or the disk is full.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not an empty directory; expected a new or empty one; choose another or remove its files")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        specs = expected_tensors(config)
        total = sum(spec.nbytes for spec in specs.values())
        free = shutil.disk_usage(directory).free
        if total > free:
            raise CheckpointError(f"the checkpoint needs {total} bytes; {free} are free at {directory}; use another disk or fewer layers")
        _write_tokenizer(directory, config, tokenizer)
        _write_config(directory, config)
        _write_weights(directory, _shards(specs, shard_bytes), seed, on_bytes)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written ({error.strerror}); free space or choose another directory") from error
    return directory


def _write_tokenizer(directory: Path, config: ModelConfig, tokenizer: str | Path | None) -> None:
    if tokenizer is None:
        content = json.dumps(synthetic_tokenizer(config), ensure_ascii=False)
    else:
        file = Path(tokenizer)
        load_tokenizer_file(file, config.text_config.vocab_size)
        content = (file / "tokenizer.json" if file.is_dir() else file).read_text(encoding="utf-8")
    _write_text(directory / "tokenizer.json", content)
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_text(directory / "tokenizer_config.json", json.dumps(settings, indent=2))


def _write_config(directory: Path, config: ModelConfig) -> None:
    raw = config.model_dump(mode="json", exclude_unset=True)
    if config.text_config.engram_layer_ids and config.text_config.engram_compressed_vocab_size:
        token_map = token_map_of(load_tokenizer_file(directory, config.text_config.vocab_size))
        raw["text_config"]["engram_compressed_vocab_size"] = int(token_map.max()) + 1
    _write_text(directory / "config.json", json.dumps(raw, indent=2))
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "do_sample": False}
    _write_text(directory / "generation_config.json", json.dumps(generation, indent=2))


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _shards(specs: dict[str, TensorSpec], limit: int) -> list[_Shard]:
    """Tensors in model order, cut where `limit` bytes would be exceeded; each Engram table comes last, in a shard of its own."""
    shards, tables = [_Shard()], []
    for name, spec in specs.items():
        if name.endswith(".scale"):
            continue
        scale = f"{name.removesuffix('.weight')}.scale"
        group = {name: spec} | ({scale: specs[scale]} if name.endswith(".weight") and scale in specs else {})
        if spec.component is Component.ENGRAM_TABLES:
            tables.append(_Shard(group))
            continue
        if shards[-1].specs and shards[-1].nbytes + sum(part.nbytes for part in group.values()) > limit:
            shards.append(_Shard())
        shards[-1].specs.update(group)
    return shards + tables


def _write_weights(directory: Path, shards: list[_Shard], seed: int, on_bytes: Callable[[int], None]) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        partial = directory / f"{name}.partial"
        with partial.open("wb") as file:
            _write_shard(file, shard, seed, on_bytes)
        os.replace(partial, directory / name)
        weight_map |= dict.fromkeys(shard.specs, name)
    index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": dict(sorted(weight_map.items()))}
    _write_text(directory / INDEX_FILE, json.dumps(index, indent=1))


def _write_shard(file: BinaryIO, shard: _Shard, seed: int, on_bytes: Callable[[int], None]) -> None:
    """One safetensors file: widest dtypes first, so that every tensor is aligned to its element size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in sorted(shard.specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    data = 8 + len(encoded)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    file.truncate(data + end)
    for name, spec in shard.specs.items():
        if name.endswith(".scale"):
            continue
        at = data + header[name]["data_offsets"][0]
        scale_name = f"{name.removesuffix('.weight')}.scale"
        scale_at = data + header[scale_name]["data_offsets"][0] if scale_name in header else 0
        for chunk in chunks(name, spec, seed):
            at = _write_at(file, at, chunk.weight, on_bytes)
            if chunk.scale is not None:
                scale_at = _write_at(file, scale_at, chunk.scale, on_bytes)


def _write_at(file: BinaryIO, at: int, tensor: Tensor, on_bytes: Callable[[int], None]) -> int:
    content = tensor.contiguous().view(torch.uint8).numpy().data
    file.seek(at)
    file.write(content)
    on_bytes(content.nbytes)
    return at + content.nbytes
