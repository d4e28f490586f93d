"""A full scan of a checkpoint's data for values that no valid checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_core.checkpoint.engram import engram_tables
from deepinfer_core.checkpoint.names import E4M3, E8M0, INT8
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.checkpoint.shards import examples
from deepinfer_core.checkpoint.tokenizer import Tokenizer
from deepinfer_core.errors import CheckpointError

PIECE = 1 << 24  # elements looked at together


class _Finding(NamedTuple):
    text: str  # what is wrong, for the message
    remedy: str


_NAN_CODE = _Finding("hold e4m3 NaN codes (0x7F or 0xFF)", "expected finite values; download the shards again")
_NAN_SCALE = _Finding("hold the scale byte 255 (NaN)", "expected exponents 0..254; download the shards again")
_NOT_FINITE = _Finding("hold NaN or infinite values", "expected finite values; download the shards again")


def verify(checkpoint: Checkpoint, on_bytes: Callable[[int], None] = lambda count: None) -> list[str]:
    """Read every byte and return all problems, empty if there are none.

    Looks for NaN codes of e4m3 weights, scale byte 255, non-finite bf16 and float32 values, a tokenizer that does not fit, and Engram
    tables that do not follow from it. `on_bytes` is called with the size of each piece that was read.
    """
    found: dict[_Finding, list[str]] = {}
    for name in checkpoint.names:
        tensor = checkpoint.tensor(name)
        bad, first = 0, -1
        for start in range(0, tensor.numel(), PIECE):
            piece = tensor.view(-1)[start : start + PIECE]
            mask = _invalid(piece)
            count = int(mask.sum()) if mask is not None else 0
            if count and first < 0:
                first = start + int(mask.to(torch.uint8).argmax())  # type: ignore[union-attr]
            bad += count
            on_bytes(piece.nbytes)
        if bad:
            where = [int(index) for index in torch.unravel_index(torch.tensor(first), tensor.shape)]
            found.setdefault(_finding(tensor.dtype), []).append(f"{name} ({bad} of {tensor.numel()}, first at {where})")
    problems = [f"{len(names)} tensors {finding.text}: {examples(names)}; {finding.remedy}" for finding, names in found.items()]
    return problems + _tokenizer_problems(checkpoint)


def _invalid(piece: Tensor) -> Tensor | None:
    """Which elements of a flat piece are invalid; None if its format has no invalid codes."""
    if piece.dtype == INT8:
        return None
    if piece.dtype == E4M3:
        return (piece.view(torch.uint8) & 0x7F) == 0x7F
    if piece.dtype == E8M0:
        return piece.view(torch.uint8) == 0xFF
    return ~piece.isfinite()


def _finding(dtype: torch.dtype) -> _Finding:
    return {E4M3: _NAN_CODE, E8M0: _NAN_SCALE}.get(dtype, _NOT_FINITE)


def _tokenizer_problems(checkpoint: Checkpoint) -> list[str]:
    try:
        Tokenizer.load(checkpoint.path, checkpoint.config)
        if checkpoint.config.text_config.engram_layer_ids:
            engram_tables(checkpoint.config, checkpoint.path)
    except CheckpointError as error:
        return list(error.problems)
    return []
