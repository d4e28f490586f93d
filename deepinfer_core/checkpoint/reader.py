"""Opening a checkpoint: everything is checked against the config first, tensors are memory-mapped one at a time afterwards."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from deepinfer_core.backend.types import QuantTensor
from deepinfer_core.checkpoint.names import TensorSpec, expected_tensors
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.shards import DTYPE_NAMES, StoredTensor, examples, locate
from deepinfer_core.errors import CheckpointError, nearest

_TIED = re.compile(r"mtp\.\d+\.(embed|head)\.weight")  # copies of the backbone's; ignored
_EXPERT = re.compile(r"(.*\.ffn)\.experts\.(\d+)\.(w[123])\.(weight|scale)")
_REFUSED = {
    re.compile(
        r"\.hc_\w*_norm\.weight$"
    ): "separate norms of hyper-connections; expected them folded into hc_*_fn; convert the checkpoint again",
    re.compile(r"^hc_head_"): "the legacy output mix; expected the shifted hyper-connections of the release; use a released checkpoint",
}


class Checkpoint:
    """A validated checkpoint directory. Tensors are views of the mapped files: read-only, valid while referenced. Not thread safe."""

    def __init__(self, path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors
        self._files: dict[str, Any] = {}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Check config, index, shards, names, shapes and dtypes of the directory `path`; read no tensor data.

        Raises: CheckpointError with all problems; many of one kind are summarised with their count and first examples.
        """
        directory = Path(path)
        config = ModelConfig.load(directory)
        expected = expected_tensors(config)
        located = locate(directory)
        stored = {name: tensor for name, tensor in located.tensors.items() if not _TIED.fullmatch(name)}
        problems = list(located.problems)
        if stored:
            problems += _tensor_problems(expected, stored, located.covered)
        if problems:
            raise CheckpointError(problems, str(directory))
        return cls(directory, config, stored)

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors (without `model.`)."""
        return tuple(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this canonical name."""
        return name in self._tensors

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor lies. Raises: CheckpointError for an unknown name."""
        if name not in self._tensors:
            raise CheckpointError(f"there is no tensor {name!r}{nearest(name, self._tensors)}", str(self.path))
        return self._tensors[name]

    def tensor(self, name: str) -> Tensor:
        """One tensor in its stored dtype (experts int8, scales float8_e8m0fnu), memory-mapped. Raises: CheckpointError."""
        location = self.stored(name)
        if location.file not in self._files:
            self._files[location.file] = safe_open(self.path / location.file, framework="pt", device="cpu")
        tensor: Tensor = self._files[location.file].get_tensor(location.stored_name)
        return tensor

    def quant(self, stem: str) -> QuantTensor:
        """`stem.weight` with `stem.scale` if the release quantises it. Raises: CheckpointError."""
        scale = f"{stem}.scale"
        return QuantTensor(self.tensor(f"{stem}.weight"), self.tensor(scale) if self.has(scale) else None)

    def close(self) -> None:
        """Drop the file handles. Tensors handed out stay valid; a later `tensor` maps the file again."""
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _tensor_problems(expected: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor], covered: set[str]) -> list[str]:
    missing = [name for name in expected if name not in stored and name not in covered]
    unexpected = [name for name in stored if name not in expected]
    problems = []
    for pattern, text in _REFUSED.items():
        refused = [name for name in unexpected if pattern.search(name)]
        if refused:
            problems.append(f"{len(refused)} tensors are {text}: {examples(refused)}")
            unexpected = [name for name in unexpected if not pattern.search(name)]
    problems += _expert_problems(missing, unexpected)
    if missing:
        problems.append(
            f"{len(missing)} tensors that config.json asks for are missing: {examples(missing)}; expected all of them in the shards; "
            "download the weights again or correct config.json"
        )
    if unexpected:
        problems.append(
            f"{len(unexpected)} tensors have no place in the model of config.json: {examples(unexpected)}; expected none; remove them or "
            "correct config.json"
        )
    return problems + _form_problems(expected, stored)


def _expert_problems(missing: list[str], unexpected: list[str]) -> list[str]:
    """Experts that are absent or too many as a whole: one line for each layer. Removes their tensors from the two lists."""
    problems = []
    for names, text in (
        (missing, "are missing: expected ids without a gap from 0; download the weights again"),
        (unexpected, "are beyond the number of experts in config.json; remove them or correct config.json"),
    ):
        parts: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name in names:
            if match := _EXPERT.fullmatch(name):
                parts[match[1], int(match[2])].append(name)
        whole = {key: group for key, group in parts.items() if len(group) == 6}  # w1, w2, w3, each with its scale
        ids: dict[str, list[str]] = defaultdict(list)
        for prefix, expert in whole:
            ids[prefix].append(str(expert))
        problems += [f"{prefix}: experts {examples(numbers, 8)} {text}" for prefix, numbers in ids.items()]
        dropped = {name for group in whole.values() for name in group}
        names[:] = [name for name in names if name not in dropped]
    return problems


def _form_problems(expected: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]) -> list[str]:
    shapes, dtypes = [], []
    for name, spec in expected.items():
        tensor = stored.get(name)
        if tensor is None:
            continue
        if tensor.dtype != DTYPE_NAMES[spec.dtype]:
            dtypes.append(f"{name} is {tensor.dtype}, expected {DTYPE_NAMES[spec.dtype]}")
        if tensor.shape != spec.shape:
            shapes.append(f"{name} is {list(tensor.shape)}, expected {list(spec.shape)}")
    problems = []
    if shapes:
        problems.append(
            f"{len(shapes)} tensors have another shape than config.json asks for: {examples(shapes)}; correct config.json or the weights"
        )
    if dtypes:
        problems.append(
            f"{len(dtypes)} tensors are stored in another format than the release: {examples(dtypes)}; convert the weights to that format"
        )
    return problems
