"""Seeded inputs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.types import ExpertTensors, QuantTensor, Rope
from deepinfer_core.conformance import grids


class Draw:
    """A generator of everything that ops take. `dtype` is the activation dtype."""

    def __init__(self, seed: int, numerics: Numerics) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.numerics = numerics
        self.dtype = torch.bfloat16 if numerics is Numerics.RELEASE else torch.float32

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normally distributed values."""
        return (torch.randn(shape, generator=self.random) * scale).to(dtype)

    def activation(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values of the activation dtype; in both numerics they lie on the bfloat16 grid."""
        return self.normal(*shape, dtype=torch.bfloat16, scale=scale).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.random, dtype=torch.int64).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self.random)

    def permutation(self, count: int) -> Tensor:
        """int64 [count]."""
        return torch.randperm(count, generator=self.random)

    def norm_weight(self, dim: int) -> Tensor:
        """bf16 [dim] around 1, some of it negative."""
        return (1 + 0.3 * torch.randn(dim, generator=self.random)).bfloat16()

    def bf16_weight(self, out: int, size: int) -> QuantTensor:
        """An unquantised weight."""
        return QuantTensor(self.normal(out, size, dtype=torch.bfloat16, scale=size**-0.5))

    def fp8_weight(self, out: int, size: int) -> QuantTensor:
        """e4m3 [out, size] with 32x32 scales that differ from block to block."""
        blocks = -(-out // 32), -(-size // 32)
        scale = self.integers(118, 123, *blocks, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        values = (torch.randn(out, size, generator=self.random) * 4).to(torch.float8_e4m3fn)
        return QuantTensor(values, scale)

    def fp8_rows(self, rows: int, channels: int) -> QuantTensor:
        """e4m3 [rows, channels] with a scale for each row and 32 channels."""
        scale = self.integers(116, 124, rows, channels // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return QuantTensor((torch.randn(rows, channels, generator=self.random) * 64).to(torch.float8_e4m3fn), scale)

    def fp4_weight(self, out: int, size: int) -> QuantTensor:
        """e2m1 pairs [out, size/2] with a scale for each row and 32 inputs."""
        scale = self.integers(119, 124, out, size // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return QuantTensor(self.integers(0, 256, out, size // 2, dtype=torch.uint8).view(torch.int8), scale)

    def expert(self, kind: str, dim: int, inner: int) -> ExpertTensors:
        """One expert; kind is "fp4", "fp8" or "bf16"."""
        make = {"fp4": self.fp4_weight, "fp8": self.fp8_weight, "bf16": self.bf16_weight}[kind]
        return ExpertTensors(make(inner, dim), make(dim, inner), make(inner, dim))

    def rope(self, rows: int, rd: int, length: int = 512) -> Rope:
        """Random positions of a table with the frequencies of base 10000; the last position of the table is used."""
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, rd, 2) / rd)
        positions = self.integers(0, length, rows)
        if rows:
            positions[-1] = length - 1
        return Rope(torch.cat((angles.cos(), angles.sin()), 1), positions)

    def encoded(self, count: int, dim: int, fmt: CacheFormat, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """(data, scales) bytes of `count` random cache entries."""
        return grids.encode(self.normal(count, dim, dtype=torch.bfloat16, scale=scale).double(), fmt)


def identity_rows(dim: int, columns: Tensor) -> Tensor:
    """float32 [len(columns), dim] that picks columns."""
    eye = torch.zeros(len(columns), dim)
    eye[torch.arange(len(columns)), columns] = 1.0
    return eye


def picker(dim: int, limit: int = 512) -> tuple[QuantTensor, Tensor]:
    """(e4m3 weight, columns): a linear that returns up to `limit` columns, spread evenly, of its input.

    1.0 and 0.0 are exact in e4m3 and each output has one term, so what comes out is the input, rounded to the activation dtype.
    """
    count = min(dim, limit) // 32 * 32
    columns = torch.arange(count) * dim // count
    ones = torch.full((count // 32, -(-dim // 32)), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return QuantTensor(identity_rows(dim, columns).to(torch.float8_e4m3fn), ones), columns
