"""Where the integer arithmetic of `model.batch` runs: torch on a device; numpy on the CPU, where a small call costs a quarter of torch's.

Both offer what the two libraries do not spell alike; indexing and operators are the arrays' own.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Array = Any
"""A tensor of the device, or a numpy array."""


class Arrays(Protocol):
    """Functions of one library. Results are int32 unless said otherwise."""

    @property
    def none(self) -> Array:
        """[]: -1."""

    def of(self, tensor: Tensor) -> Array:
        """The same memory as an array of the library."""

    def tensor(self, array: Array) -> Tensor:
        """The same memory as a tensor."""

    def arange(self, begin: int, end: int) -> Array:
        """begin .. end - 1."""

    def int32(self, array: Array) -> Array:
        """`array` as int32."""

    def int64(self, array: Array) -> Array:
        """`array` as int64."""

    def chosen(self, condition: Array, yes: Array, no: Array | int) -> Array:
        """Elementwise choice, of the arrays' type."""

    def joined(self, arrays: list[Array], axis: int) -> Array:
        """Arrays of one type behind each other."""

    def reversed(self, array: Array) -> Array:
        """[n, columns] with its columns in reverse order."""

    def repeated(self, array: Array, counts: Array, total: int) -> Array:
        """array[i] counts[i] times; the sum of counts is `total`."""

    def picked(self, table: Array, column: Array) -> Array:
        """table[i, column[i]] for every row i."""


class TorchArrays:
    """Torch on `device`; nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.none = torch.full((), -1, dtype=torch.int32, device=device)

    def of(self, tensor: Tensor) -> Tensor:
        return tensor

    def tensor(self, array: Tensor) -> Tensor:
        return array

    def arange(self, begin: int, end: int) -> Tensor:
        return torch.arange(begin, end, dtype=torch.int32, device=self._device)

    def int32(self, array: Tensor) -> Tensor:
        return array.int()

    def int64(self, array: Tensor) -> Tensor:
        return array.long()

    def chosen(self, condition: Tensor, yes: Tensor, no: Tensor | int) -> Tensor:
        return torch.where(condition, yes, no)

    def joined(self, arrays: list[Tensor], axis: int) -> Tensor:
        return torch.cat(arrays, axis)

    def reversed(self, array: Tensor) -> Tensor:
        return array.flip(1)

    def repeated(self, array: Tensor, counts: Tensor, total: int) -> Tensor:
        return torch.repeat_interleave(array, counts, output_size=total)

    def picked(self, table: Tensor, column: Tensor) -> Tensor:
        return table.gather(1, column[:, None].long())[:, 0]


class NumpyArrays:
    """Numpy on the memory of CPU tensors."""

    none = np.int32(-1)

    def of(self, tensor: Tensor) -> np.ndarray:
        return tensor.numpy()

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def arange(self, begin: int, end: int) -> np.ndarray:
        return np.arange(begin, end, dtype=np.int32)

    def int32(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.int32)

    def int64(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.int64)

    def chosen(self, condition: np.ndarray, yes: np.ndarray, no: np.ndarray | int) -> np.ndarray:
        return np.where(condition, yes, no)

    def joined(self, arrays: list[np.ndarray], axis: int) -> np.ndarray:
        return np.concatenate(arrays, axis)

    def reversed(self, array: np.ndarray) -> np.ndarray:
        return array[:, ::-1]

    def repeated(self, array: np.ndarray, counts: np.ndarray, total: int) -> np.ndarray:
        return array.repeat(counts)

    def picked(self, table: np.ndarray, column: np.ndarray) -> np.ndarray:
        return table[np.arange(len(column)), column]


def arrays_on(device: torch.device) -> Arrays:
    """The library for tensors of `device`."""
    return NumpyArrays() if device.type == "cpu" else TorchArrays(device)
