"""Many small arrays as one buffer, so that a step costs one copy to the device and one back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ALIGN = 8
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.bool: np.bool_}


class Layout(NamedTuple):
    """Where arrays lie in a buffer."""

    arrays: Sequence[tuple[str, np.dtype, tuple[int, ...], int]]  # name, dtype, shape, first byte
    size: int  # bytes of the buffer


def layout_of(arrays: Iterable[tuple[str, np.dtype, tuple[int, ...]]]) -> Layout:
    """A layout of arrays of these names, dtypes (int64, int32 or float32) and shapes."""
    placed, end = [], 0
    for name, dtype, shape in arrays:
        placed.append((name, dtype, shape, end))
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
    # The tail keeps the buffer of a step without requests from being empty: an empty array has no views of other dtypes.
    return Layout(placed, end + _ALIGN)


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Layout]:
    """One uint8 buffer holding all `arrays`, and the layout that `unpack` needs."""
    layout = layout_of((name, array.dtype, array.shape) for name, array in arrays.items())
    buffer = np.zeros(layout.size, np.uint8)
    for name, view in unpack_array(buffer, layout).items():
        view[...] = arrays[name]
    return buffer, layout


def unpack_array(buffer: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """The arrays of `pack` as views of its buffer."""
    return {name: np.ndarray(shape, dtype, buffer, offset) for name, dtype, shape, offset in layout.arrays}


def unpack(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The arrays of `pack` as views of the uint8 tensor `buffer`."""
    typed = {dtype: buffer.view(_DTYPES[dtype]) for dtype in {dtype for _, dtype, _, _ in layout.arrays}}
    views = {}
    for name, dtype, shape, offset in layout.arrays:
        begin = offset // dtype.itemsize
        flat = typed[dtype][begin : begin + math.prod(shape)]
        views[name] = flat if len(shape) == 1 else flat.view(shape)
    return views


def pack_device(tensors: Sequence[Tensor]) -> Tensor:
    """One uint8 tensor on the device holding all `tensors` (int64, int32, float32 or bool), for one copy to the host."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack_host(buffer: np.ndarray, like: Sequence[Tensor]) -> list[np.ndarray]:
    """The tensors of `pack_device` as numpy arrays; `like` gives shapes and dtypes and is not read."""
    arrays: list[np.ndarray] = []
    offset = 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        arrays.append(np.frombuffer(buffer[offset : offset + size].tobytes(), _NUMPY[tensor.dtype]).reshape(tuple(tensor.shape)))
        offset += size
    return arrays
