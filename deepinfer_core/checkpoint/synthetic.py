"""Random weights of any geometry, by tensor name: the same name and seed give the same bytes, whatever else is generated.

The statistics keep every branch of the model alive: no saturated gate, no dead router, activations of order one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_core.backend.types import QuantTensor
from deepinfer_core.checkpoint.names import E4M3, INT8, Component, TensorSpec, expected_tensors
from deepinfer_core.checkpoint.quantize import encode_fp4_rows, encode_fp8_blocks, encode_fp8_rows
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.structure import BLOCK
from deepinfer_core.errors import CheckpointError, nearest

CHUNK_VALUES = 1 << 23  # float32 values generated at once

# (end of the name, mean, standard deviation); the first match counts, anything else is a linear.
_STATISTICS: tuple[tuple[str, float, float], ...] = (
    ("norm.weight", 1.0, 0.1),
    ("norm1.weight", 1.0, 0.1),
    ("norm2.weight", 1.0, 0.1),
    (".q_weight", 1.0, 0.1),
    (".k_weight", 1.0, 0.1),
    ("attn_sink", 0.0, 1.0),
    ("_base", 0.0, 0.5),
    ("_scale", 0.5, 0.05),
    ("gate.bias", 0.0, 0.2),
    ("gate.bias_vl", 0.0, 0.5),
    (".bias", 0.0, 0.1),
    ("embed.weight", 0.0, 1.0),
    ("image_start", 0.0, 1.0),
    ("image_end", 0.0, 1.0),
    ("image_newline", 0.0, 1.0),
)
_GAINS = (("attn.wo_b.weight", 0.25), (".w2.weight", 0.25), ("compressor.wgate.weight", 2.0))  # times 1/sqrt(inputs)


class DummyCheckpoint:
    """Random weights behind the interface of `Checkpoint`; every call generates anew. `path` is where config and tokenizer came from."""

    def __init__(self, config: ModelConfig, seed: int = 0, path: Path | None = None) -> None:
        self.config = config
        self.seed = seed
        self.path = path
        self._specs = expected_tensors(config)

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors."""
        return tuple(self._specs)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, were they stored."""
        return sum(spec.nbytes for spec in self._specs.values())

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._specs

    def tensor(self, name: str) -> Tensor:
        """One tensor in its stored dtype. Raises: CheckpointError for an unknown name."""
        if name not in self._specs:
            raise CheckpointError(f"there is no tensor {name!r}{nearest(name, self._specs)}")
        if not name.endswith(".scale"):
            return torch.cat([chunk.weight for chunk in chunks(name, self._specs[name], self.seed)])
        weight = f"{name.removesuffix('.scale')}.weight"
        return torch.cat([chunk.scale for chunk in chunks(weight, self._specs[weight], self.seed) if chunk.scale is not None])

    def quant(self, stem: str) -> QuantTensor:
        """`stem.weight` with `stem.scale` if the release quantises it. Raises: CheckpointError."""
        scaled = self.has(f"{stem}.scale")
        return QuantTensor(self.tensor(f"{stem}.weight"), self.tensor(f"{stem}.scale") if scaled else None)

    def close(self) -> None:
        """Nothing is held."""


def chunks(name: str, spec: TensorSpec, seed: int) -> Iterator[QuantTensor]:
    """Consecutive row ranges of a tensor and, if it is quantised, of its scale. `name` is never a scale's."""
    inputs = spec.shape[-1] * (2 if spec.dtype == INT8 else 1)
    rows = math.prod(spec.shape[:-1])
    step = max(BLOCK, CHUNK_VALUES // inputs // BLOCK * BLOCK)
    mean, deviation = statistics_of(name, inputs)
    for start in range(0, rows, step):
        shape = (min(step, rows - start), inputs)
        digest = hashlib.blake2b(f"{seed}/{name}/{start}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.randn(shape, generator=generator).mul_(deviation).add_(mean)
        yield _encode(values, spec)


def statistics_of(name: str, inputs: int) -> tuple[float, float]:
    """(mean, standard deviation) of the values of tensor `name`, whose rows have `inputs` values."""
    for end, mean, deviation in _STATISTICS:
        if name.endswith(end):
            return mean, deviation
    text = not name.startswith(("vision.", "aligner."))
    gain = next((gain for end, gain in _GAINS if text and name.endswith(end)), 1.0)
    return 0.0, gain / math.sqrt(inputs)


def _encode(values: Tensor, spec: TensorSpec) -> QuantTensor:
    if spec.dtype == INT8:
        return encode_fp4_rows(values)
    if spec.dtype == E4M3:
        return encode_fp8_rows(values) if spec.component is Component.ENGRAM_TABLES else encode_fp8_blocks(values)
    return QuantTensor((values if len(spec.shape) > 1 else values.flatten()).to(spec.dtype))
