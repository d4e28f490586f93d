"""Handing tensors to C++."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_core.backend import CacheFormat

PARALLEL_VALUES = 1 << 19
"""Multiplications or values of a call from which several threads are worth waking: about 20 microseconds of one thread."""


def dense_rows(x: Tensor) -> Tensor:
    """x itself if each of its rows lies in one piece (rows may be apart), else a copy."""
    return x if x.is_contiguous() or is_dense(x) else x.contiguous()


def is_dense(x: Tensor) -> bool:
    """True if each row of x [T, ...] is contiguous."""
    size = 1
    for length, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if stride != size and length > 1:
            return False
        size *= length
    return True


def owns_rows(x: Tensor) -> bool:
    """True if each row is contiguous and shares no memory with another row: x may be overwritten row by row."""
    return x.is_contiguous() or (is_dense(x) and (x.shape[0] < 2 or x.stride(0) >= x[0].numel()))


def address(x: Tensor | None) -> int:
    """Where its first value lies; a null pointer for None."""
    return 0 if x is None else x.data_ptr()


def threads_for(work: int) -> int:
    """How many threads a call that touches `work` values should use."""
    return torch.get_num_threads() if work >= PARALLEL_VALUES else 1


class Layout(NamedTuple):
    """How the entries of one ring slot or page lie in it, in bytes."""

    format: int  # enum Format in src/entries.hpp
    data_stride: int
    scales_at: int
    scale_stride: int


_FORMATS = (CacheFormat.FP8, CacheFormat.FP4, CacheFormat.FP4_INDEX, CacheFormat.BF16, CacheFormat.F32)


@cache
def layout(cache_format: CacheFormat, dim: int, entries: int = 0) -> Layout:
    """Entries of `dim` values one after the other; or, of `entries` > 0, the data of all before the scales of all."""
    data, scales = cache_format.data_bytes(dim), cache_format.scale_bytes(dim)
    strides = (data, entries * data, scales) if entries else (data + scales, data, data + scales)
    return Layout(_FORMATS.index(cache_format), *strides)
