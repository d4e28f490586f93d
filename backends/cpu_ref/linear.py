"""Embedding, norms, activation quantisation and linears."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import quant
from deepinfer_backends.cpu_ref.scalars import scalar
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.types import Activation, QuantTensor, Weight

EXPANDED_LIMIT = 16 << 20
"""Bytes of float32 up to which a prepared weight is kept decoded. Larger ones stay in the checkpoint's format and are decoded a
block of rows at a time when used: slower, but a layer of released size then fits into a laptop. Results are the same."""

_BLOCK_ROWS = 1024

_NARROW = 32
"""Outputs from which on a decoded weight lies in memory as [in, out]. When x has few rows, BLAS then reads it in order: 1.5 times as fast.
For very few outputs BLAS has other routines, with another order of additions, and nothing to gain."""

ROW_MULTIPLE = 8


def pad_rows(x: Tensor) -> Tensor:
    """x [T, k] with zero rows up to a multiple of 8.

    BLAS libraries pick another routine, and with it another order of additions, for matrix-vector products and for very few rows.
    With 8 rows at least, in multiples of 8, a row's result does not depend on how many rows there are.
    """
    missing = -x.shape[0] % ROW_MULTIPLE
    return torch.cat((x, _zero_rows(missing, x.shape[1], x.device))) if missing else x


@lru_cache
def _zero_rows(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, columns, device=device)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, k] @ weight [n, k].T in float32, each row bitwise independent of the others."""
    rows = x.shape[0]
    product = torch.mm(pad_rows(x), weight.t())
    return product[:rows] if rows % ROW_MULTIPLE else product


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of float32 x [..., d]: [..., 1]."""
    return (x * x).sum(-1, True).div_(scalar(float(x.shape[-1]))).add_(scalar(eps)).rsqrt_()


@dataclass(frozen=True)
class LinearWeight:
    """A prepared weight: stacked parts, decoded (`expanded`) or as stored."""

    rows: int  # outputs
    parts: tuple[QuantTensor, ...]  # as stored; empty if expanded
    expanded: Tensor | None  # float32 [out, in]

    @classmethod
    def of(cls, parts: Sequence[QuantTensor]) -> LinearWeight:
        rows = sum(part.weight.shape[0] for part in parts)
        columns = parts[0].weight.shape[1] * (2 if parts[0].weight.dtype == torch.int8 else 1)
        if rows * columns * 4 > EXPANDED_LIMIT:
            return cls(rows, tuple(parts), None)
        weight = torch.cat([quant.decode_weight(*part) for part in parts])
        return cls(rows, (), weight if rows < _NARROW else weight.t().contiguous().t())

    def decoded(self) -> Tensor:
        """float32 [out, in]."""
        return self.expanded if self.expanded is not None else torch.cat([quant.decode_weight(*part) for part in self.parts])

    def multiply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [T, in] float32 @ weight.T -> [T, out] float32. With `out`, T is a multiple of `ROW_MULTIPLE`."""
        if self.expanded is None:
            y = torch.cat([matmul(x, block) for part in self.parts for block in _decoded_blocks(part)], 1)
            return y if out is None else out.copy_(y)
        return matmul(x, self.expanded) if out is None else torch.mm(x, self.expanded.t(), out=out)


def _decoded_blocks(part: QuantTensor) -> Iterator[Tensor]:
    weight, scale = part
    per_row = scale is not None and scale.shape[0] == weight.shape[0]
    for first in range(0, weight.shape[0], _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, weight.shape[0])
        rows = None if scale is None else scale[first:last] if per_row else scale[first // 32 : -(-last // 32)]
        yield quant.decode_weight(weight[first:last], rows)


class LinearOps:
    """Ops of the contract's group "embedding, norms, linears". A quantised activation is its dequantised float32 value."""

    device: torch.device
    numerics: Numerics

    @cached_property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.numerics is Numerics.RELEASE else torch.float32

    def _round(self, x: Tensor) -> Tensor:
        return x.to(dtype=self._dtype)

    def prepare_linear(self, parts: Sequence[QuantTensor]) -> Weight:
        return LinearWeight.of([part.to(self.device) for part in parts])

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return self._round(table[ids])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        f = x.float()
        return self._round((f * inverse_rms(f, eps)).mul_(weight))

    def rms_norm_quantize(self, x: Tensor, weight: Tensor, eps: float) -> Activation:
        return self.quantize(self.rms_norm(x, weight, eps))

    def quantize(self, x: Tensor) -> Activation:
        return quant.fake_fp8(x.float()) if self.numerics is Numerics.RELEASE else x

    def linear(self, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        y = weight.multiply(x.float())
        return y if out_dtype is torch.float32 else self._round(y)

    def quantized_linear(self, x: Activation, weight: Weight) -> Tensor:
        return self._round(weight.multiply(x))
