"""Heads of the drafter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.activations import QuantizedRows
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_core.backend.types import Weight


@triton.jit
def _confidence_kernel(
    hidden, previous, embed, weight, out, temperature, size, rank, stride, C: tl.constexpr, BLOCKS: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((C,), tl.float32)
    for block in tl.static_range(BLOCKS):
        c = block * C + tl.arange(0, C)
        h = tl.load(hidden + row * stride + c, mask=c < size, other=0.0).to(tl.float32)
        total += h * tl.load(weight + c, mask=c < size, other=0.0).to(tl.float32)
    r = tl.arange(0, RANK)
    e = tl.load(embed + tl.load(previous + row) * rank + r, mask=r < rank, other=0.0).to(tl.float32)
    z = tl.sum(total, 0) + tl.sum(e * tl.load(weight + size + r, mask=r < rank, other=0.0).to(tl.float32), 0)
    z = tl.minimum(tl.maximum(z / temperature, -60.0), 60.0)
    tl.store(out + row, 1.0 / (1.0 + tl.exp(-z)))


class DraftOps:
    """The ops `markov_logits` and `confidence`."""

    def markov_logits(self, base: Tensor, previous: Tensor, embed: Tensor, head: Weight) -> Tensor:
        return self._product(QuantizedRows(self.embed(previous, embed), None), head, torch.float32, base=base)  # type: ignore[attr-defined]

    def confidence(self, hidden: Tensor, previous: Tensor, embed: Tensor, weight: Tensor, temperature: float) -> Tensor:
        rows, size = hidden.shape
        out = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        c = min(1024, power_of_two(size))
        launch(
            _confidence_kernel, (rows,), hidden, previous, embed, weight, out, float(temperature), size, embed.shape[1], hidden.stride(0),
            warps=4, C=c, BLOCKS=ceil_div(size, c), RANK=power_of_two(embed.shape[1]),
        )  # fmt: skip
        return out
