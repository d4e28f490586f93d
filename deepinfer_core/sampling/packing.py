"""Many small arrays as one buffer, so that a step costs one copy to the device and one back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[tuple[str, np.dtype, tuple[int, ...], int]]]:
    """One uint8 buffer holding all `arrays` (int64, int32 or float32), and the layout that `unpack` needs."""
    layout, parts, offset = [], [], 0
    for name, array in arrays.items():
        layout.append((name, array.dtype, array.shape, offset))
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        padding = np.zeros(-len(data) % _ALIGN, np.uint8)
        parts += [data, padding]
        offset += len(data) + len(padding)
    # The tail keeps the buffer of a step without requests from being empty: an empty array has no views of other dtypes.
    return np.concatenate([*parts, np.zeros(_ALIGN, np.uint8)]), layout


def unpack(buffer: Tensor, layout: Sequence[tuple[str, np.dtype, tuple[int, ...], int]]) -> dict[str, Tensor]:
    """The arrays of `pack` as views of the uint8 tensor `buffer`."""
    views = {}
    for name, dtype, shape, offset in layout:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        views[name] = buffer[offset : offset + size].view(_DTYPES[dtype]).view(shape)
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
