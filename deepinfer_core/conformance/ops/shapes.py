"""Sizes that several op descriptions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.types import QuantTensor
from deepinfer_core.conformance import grids, trees
from deepinfer_core.conformance.describe import Inputs
from deepinfer_core.conformance.generate import Draw, picker

OPS: tuple[Any, ...] = ()

# Released dimensions (model notes, section 1).
HIDDEN, HEADS, HEAD_DIM, ROPE_DIM, Q_RANK, O_RANK, O_GROUPS = 5120, 64, 512, 64, 1280, 1024, 8
WINDOW, TOPK, INDEX_HEADS, INDEX_DIM, STREAMS, EXPERTS, EXPERT_DIM, VOCAB = 128, 512, 32, 128, 4, 384, 2304, 129280
EPS = 1e-20


def weight(draw: Draw, fmt: WeightFormat, out: int, size: int) -> QuantTensor:
    """A linear weight as the checkpoint stores it."""
    return draw.bf16_weight(out, size) if fmt is WeightFormat.BF16 else draw.fp8_weight(out, size)


def dense(part: QuantTensor) -> Tensor:
    """float64 [out, in]."""
    return grids.weight(part)


def rows_of(*names: str):
    """A `rows` function: the named inputs have one entry per row."""

    def restrict(inputs: Inputs, index: Tensor) -> Inputs:
        return {**inputs, **{name: trees.map_tensors(inputs[name], lambda t: t[index]) for name in names}}

    return restrict


def seen(kernels: Kernels, activation: Any, dim: int) -> Tensor:
    """The values of a quantised activation, at the columns that `picker` picks."""
    part, _ = picker(dim)
    return kernels.quantized_linear(activation, kernels.prepare_linear([part.to(kernels.device)]))


def picked(dim: int) -> Tensor:
    """The columns that `seen` shows."""
    return picker(dim)[1]


def tree_bytes(tree: Any) -> float:
    """Bytes of all tensors of a tree."""
    return float(sum(t.numel() * t.element_size() for _, t in trees.tensors(tree)))


def spread_rows(draw: Draw, rows: int, dim: int, content: str) -> Tensor:
    """Activations [rows, dim] of a kind: "normal", "extreme" (magnitudes from 2^-40 to 2^40, zeros) or "strided"."""
    x = draw.activation(rows, dim)
    if content == "extreme":
        x = x * torch.exp2(draw.integers(-40, 41, rows, 1).float()).to(x.dtype)
        x[::7] = 0.0
    return trees.strided(x) if content == "strided" else x
