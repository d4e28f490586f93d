"""Argument checks, poison and controlled disorder shared by the emulated operators. Imports nothing from the backend."""

from __future__ import annotations

import torch
from torch import Tensor

BYTE_NAN = 255  # e8m0 byte of NaN
INT_POISON = -(2**31)

_generator = torch.Generator().manual_seed(0)


class OperatorError(RuntimeError):
    """A call that CANN's documentation does not allow."""


def seed(value: int) -> None:
    """Seeds what the documentation leaves open: order among ties, order of results, scales of blocks of zeros."""
    _generator.manual_seed(value)


def disorder(*shape: int) -> Tensor:
    """float32 random numbers in [0, 1) from the emulation's own seed."""
    return torch.rand(*shape, generator=_generator)


def random_bytes(*shape: int) -> Tensor:
    """uint8 random numbers below 255 from the emulation's own seed."""
    return torch.randint(0, BYTE_NAN, shape, generator=_generator, dtype=torch.uint8)


def require(condition: bool, operator: str, message: str) -> None:
    """Raises OperatorError unless `condition`."""
    if not condition:
        raise OperatorError(f"{operator}: {message}")


def expect(operator: str, name: str, x: Tensor, dtypes: set[torch.dtype], shape: tuple[int | None, ...] | None = None) -> None:
    """Raises OperatorError unless x has one of `dtypes` and the `shape` (None: any size)."""
    require(x.dtype in dtypes, operator, f"{name} has dtype {x.dtype}, supported: {', '.join(sorted(map(str, dtypes)))}")
    if shape is not None:
        fits = x.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
        require(fits, operator, f"{name} has shape {tuple(x.shape)}, expected {shape}")


def expect_contiguous(operator: str, **tensors: Tensor) -> None:
    """Raises OperatorError for a tensor that is not contiguous."""
    for name, x in tensors.items():
        require(x.is_contiguous(), operator, f"{name} must be contiguous, its strides are {x.stride()}")


def expect_not_empty(operator: str, **tensors: Tensor) -> None:
    """Raises OperatorError for a tensor without elements."""
    for name, x in tensors.items():
        require(x.numel() > 0, operator, f"{name} is empty, which is not supported")


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of NaN, of the least int32, or of bytes that read as NaN."""
    if dtype is torch.float8_e8m0fnu:
        return torch.full(shape, BYTE_NAN, dtype=torch.uint8).view(dtype)
    if dtype is torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    if dtype is torch.uint8:
        return torch.full(shape, BYTE_NAN, dtype=dtype)
    return torch.full(shape, torch.nan if dtype.is_floating_point else INT_POISON, dtype=dtype)
