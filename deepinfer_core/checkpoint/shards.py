"""Reading safetensors headers and the shard index, without touching tensor data.

Header sizes are checked against the file before anything is allocated. Findings are collected, not raised, so that a checkpoint can
report all of them at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepinfer_core.checkpoint.schema import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PREFIX = "model."
MAX_HEADER = 512 << 20  # bytes; the release's largest header is under 3 MB

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    file: str  # shard file name
    stored_name: str  # name in the shard, perhaps with the `model.` prefix
    dtype: str  # safetensors spelling
    shape: tuple[int, ...]
    nbytes: int


def canonical(name: str) -> str:
    """`name` without the optional `model.` prefix."""
    return name.removeprefix(PREFIX)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of one shard by stored name, and what is wrong with the file (then perhaps no tensors)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                return {}, [f"{path.name} is truncated: {size} bytes cannot hold a header of {length} bytes; download the shard again"]
            header = json.loads(file.read(length))
    except FileNotFoundError:
        return {}, [f"{path.name} is missing, though the index names it; download the shard"]
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{path.name} has no readable safetensors header ({error}); download the shard again"]
    if not isinstance(header, dict):
        return {}, [f"{path.name}: its header is no JSON object; download the shard again"]
    header.pop("__metadata__", None)
    tensors, problems = {}, []
    for name, entry in header.items():
        tensor = _stored(path.name, name, entry)
        if isinstance(tensor, str):
            problems.append(tensor)
        else:
            tensors[name] = tensor
    if not problems:
        problems += _layout_problems(path.name, [entry["data_offsets"] for entry in header.values()], size - 8 - length)
    return tensors, problems


def _layout_problems(file: str, ranges: list[list[int]], size: int) -> list[str]:
    """Tensors must fill the data part of a shard without gaps or overlaps. `size`: bytes behind the header."""
    end = 0
    for begin, after in sorted(ranges):
        if begin != end:
            return [f"{file}: its tensors overlap or leave gaps at byte {min(begin, end)} of the data; download the shard again"]
        end = after
    if size < end:
        return [f"{file} is truncated: {size} bytes of data, expected {end}; download the shard again"]
    if size > end:
        return [f"{file} has {size - end} bytes that belong to no tensor; download the shard again"]
    return []


def _stored(file: str, name: str, entry: Any) -> StoredTensor | str:
    """One header entry, or what is wrong with it."""
    try:
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
        sane = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sane = False
    if not sane:
        return f"{file}: the header entry of {name} is malformed; download the shard again"
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        return f"{file}: {name} occupies {end - begin} bytes, which is not {dtype} {list(shape)}; download the shard again"
    return StoredTensor(file, name, dtype, shape, end - begin)


@dataclass
class Located:
    """The tensors of a checkpoint directory and what is wrong with its index and shards."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)  # by canonical name
    problems: list[str] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)  # canonical names without a tensor that a problem accounts for


def locate(directory: Path) -> Located:
    """Find all tensors of a checkpoint directory: an index with its shards, or one file."""
    if not (directory / INDEX_FILE).exists():
        if not (directory / SINGLE_FILE).exists():
            return Located(problems=[f"{INDEX_FILE} is missing, and there is no {SINGLE_FILE}; expected one of them; download the weights"])
        return Located(*_merge(*read_header(directory / SINGLE_FILE)))
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(_is_file_name(file) for file in weight_map.values()):
        text = f"{INDEX_FILE}: weight_map is malformed; expected an object of tensor name to shard file name; download it again"
        return Located(problems=[text])
    located = Located()
    indexed: dict[str, str] = {}
    for name, file in weight_map.items():
        if canonical(name) in indexed:
            located.problems.append(f"{INDEX_FILE} names {canonical(name)} twice, with and without {PREFIX!r}; keep one spelling")
        indexed[canonical(name)] = file
    for file in sorted(set(weight_map.values())):
        listed = {name for name, indexed_file in indexed.items() if indexed_file == file}
        _add_shard(located, *_merge(*read_header(directory / file)), file, listed)
    return located


def _add_shard(located: Located, tensors: dict[str, StoredTensor], problems: list[str], file: str, listed: set[str]) -> None:
    absent, unlisted = sorted(listed - tensors.keys()), sorted(tensors.keys() - listed)
    located.problems += problems
    if absent and tensors:
        located.problems.append(
            f"{len(absent)} tensors are listed in {INDEX_FILE} but not in {file}: {examples(absent)}; download both again"
        )
    if unlisted:
        located.problems.append(
            f"{len(unlisted)} tensors are in {file} but {INDEX_FILE} does not place them there: {examples(unlisted)}; download both again"
        )
    located.covered.update(absent, unlisted)
    located.tensors |= {name: tensor for name, tensor in tensors.items() if name in listed}


def _merge(tensors: dict[str, StoredTensor], problems: list[str]) -> tuple[dict[str, StoredTensor], list[str]]:
    """The same tensors by canonical name; two spellings of one tensor are a problem."""
    merged: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if canonical(name) in merged:
            problems.append(f"{tensor.file} holds {canonical(name)} twice, with and without {PREFIX!r}; keep one spelling")
        merged[canonical(name)] = tensor
    return merged, problems


def _is_file_name(file: Any) -> bool:
    return isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")


def examples(names: list[str], limit: int = 4) -> str:
    """The first few of `names`, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
