"""Window keys and sparse attention in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend import CacheFormat
from deepinfer_core.backend.types import Rope, SelectedEntries, WindowKeys, WindowRing
from deepinfer_simd.tensors import dense_rows, threads_for

_FORMATS = {CacheFormat.FP8: 0, CacheFormat.FP4: 1, CacheFormat.BF16: 2, CacheFormat.F32: 3}  # enum Format in src/attention.cpp

_INTEGERS = ctypes.c_int64
_ADDRESS = ctypes.c_void_p


class _Attention(ctypes.Structure):
    """`struct Attention` in src/attention.cpp, field by field."""

    _fields_ = (
        *((name, _INTEGERS) for name in ("bf16", "rows", "heads", "dim", "threads")),
        ("query", _ADDRESS), ("query_stride", _INTEGERS), ("out", _ADDRESS), ("sink", _ADDRESS), ("scale", ctypes.c_double),
        ("table", _ADDRESS), ("positions", _ADDRESS), ("rd", _INTEGERS),
        ("window_index", _ADDRESS), ("columns", _INTEGERS), ("ring", _ADDRESS),
        *((name, _INTEGERS) for name in ("ring_format", "slots", "ring_length", "slot_stride", "entry_stride")),
        ("current", _ADDRESS), ("current_stride", _INTEGERS),
        ("selected_index", _ADDRESS), ("topk", _INTEGERS), ("pages", _ADDRESS),
        *((name, _INTEGERS) for name in ("page_format", "page_stride", "entry_bytes", "entries_per_page")),
        ("block_table", _ADDRESS), ("block_table_stride", _INTEGERS), ("sequence", _ADDRESS),
    )  # fmt: skip


class _AttentionOps(ReferenceKernels):
    def window_key(self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope) -> Tensor:
        kv = dense_rows(kv)
        rows, dim = kv.shape
        key = torch.empty(rows, dim, dtype=self._dtype)
        table, positions = rope.table.contiguous(), rope.positions.contiguous()
        self._c.simd_window_key(
            kv.data_ptr(), self._bf16, kv.stride(0), norm_weight.data_ptr(), eps, table.data_ptr(), positions.data_ptr(), table.shape[1],
            rows, dim, key.data_ptr(), threads_for(rows * dim),
        )  # fmt: skip
        return key

    def store_window(self, key: Tensor, ring: WindowRing, slots: Tensor) -> None:
        if ring.format is not CacheFormat.FP8 or key.dtype is not torch.bfloat16:
            return super().store_window(key, ring, slots)
        key, slots = dense_rows(key), slots.contiguous()
        rows, dim = key.shape
        data = ring.data
        self._c.simd_store_window(
            key.data_ptr(), key.stride(0), slots.data_ptr(), rows, dim, data.data_ptr(), data.shape[1], data.stride(0), data.stride(1)
        )
        return None

    def sparse_attention(
        self, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope
    ) -> Tensor:
        rows, heads, dim = query.shape
        if dim % 32:
            return super().sparse_attention(query, window, selected, sink, scale, rope)
        out = torch.empty(rows, heads, dim, dtype=self._dtype)
        ring, columns = window.ring, window.index.shape[1]
        held = [  # tensors whose addresses are passed: alive until the call is over
            dense_rows(query), out, sink.contiguous(), rope.table.contiguous(), rope.positions.contiguous(), window.index.contiguous(),
            dense_rows(window.current),
        ]  # fmt: skip
        q, _, sink, table, positions, index, current = held
        width = columns + (selected.index.shape[1] if selected else 0)
        arguments = _Attention(
            self._bf16, rows, heads, dim, threads_for(rows * heads * dim * width),
            q.data_ptr(), q.stride(0), out.data_ptr(), sink.data_ptr(), scale,
            table.data_ptr(), positions.data_ptr(), table.shape[1],
            index.data_ptr(), columns, ring.data.data_ptr(), _FORMATS[ring.format], *ring.data.shape[:2], *ring.data.stride()[:2],
            current.data_ptr(), current.stride(0),
        )  # fmt: skip
        if selected is not None:
            held += _selected(arguments, selected)
        self._c.simd_attention(ctypes.byref(arguments))
        return out


def _selected(arguments: _Attention, selected: SelectedEntries) -> list[Tensor]:
    """Fills in the fields of the selected entries. Returns the tensors whose addresses it took."""
    pages = selected.pages
    index, sequence, block_table = selected.index.contiguous(), pages.sequence.contiguous(), dense_rows(pages.block_table)
    arguments.selected_index, arguments.topk = index.data_ptr(), index.shape[1]
    arguments.pages, arguments.page_format, arguments.page_stride = pages.data.data_ptr(), _FORMATS[pages.format], pages.data.stride(0)
    arguments.entry_bytes, arguments.entries_per_page = pages.format.entry_bytes(pages.dim), pages.entries_per_page
    arguments.block_table, arguments.block_table_stride = block_table.data_ptr(), block_table.stride(0)
    arguments.sequence = sequence.data_ptr()
    return [index, sequence, block_table]
