"""What a checkpoint holds: components, counts, bytes and formats, without reading tensor data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from deepinfer_core.checkpoint.names import Component, TensorSpec, expected_tensors
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.shards import DTYPE_NAMES


class Row(NamedTuple):
    """One line of a table."""

    name: str  # component, or storage format
    tensors: int
    parameters: int  # packed experts count twice, scales not at all
    nbytes: int  # stored, scales included


class CheckpointReport(NamedTuple):
    """Tables of one checkpoint; both add up to `total`."""

    components: tuple[Row, ...]  # in the order of the model
    formats: tuple[Row, ...]  # by safetensors dtype
    total: Row


def inspect(config: ModelConfig) -> CheckpointReport:
    """The tables of a checkpoint with this config. Exact for an opened checkpoint, whose tensors are those of its config."""
    specs = expected_tensors(config).values()
    components = [_row(part.value, (spec for spec in specs if spec.component is part)) for part in Component]
    formats = [_row(name, (spec for spec in specs if spec.dtype == dtype)) for dtype, name in DTYPE_NAMES.items()]
    return CheckpointReport(
        components=tuple(row for row in components if row.tensors),
        formats=tuple(row for row in formats if row.tensors),
        total=_row("total", specs),
    )


def _row(name: str, specs: Iterable[TensorSpec]) -> Row:
    found = list(specs)
    return Row(name, len(found), sum(spec.parameters for spec in found), sum(spec.nbytes for spec in found))
