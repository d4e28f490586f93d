"""Window keys and sparse attention in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend.types import Rope, SelectedEntries, WindowKeys
from deepinfer_simd.stores import page_layout
from deepinfer_simd.tensors import dense_rows, layout, threads_for

_NOTHING_SELECTED = (0,) * 12


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

    def sparse_attention(
        self, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope
    ) -> Tensor:
        rows, heads, dim = query.shape
        if dim % 32:
            return super().sparse_attention(query, window, selected, sink, scale, rope)
        out = torch.empty(rows, heads, dim, dtype=self._dtype)
        query, current = dense_rows(query), dense_rows(window.current)
        sink, table, positions, index = sink.contiguous(), rope.table.contiguous(), rope.positions.contiguous(), window.index.contiguous()
        ring, columns = window.ring, index.shape[1]
        slots, length, _ = ring.data.shape
        slot_stride, entry_stride, _ = ring.data.stride()
        ring_layout = layout(ring.format, dim)
        chosen, width = _NOTHING_SELECTED, columns
        if selected is not None:
            pages = selected.pages
            listed, sequence, block_table = selected.index.contiguous(), pages.sequence.contiguous(), dense_rows(pages.block_table)
            width += listed.shape[1]
            code, data_stride, scales_at, scale_stride = page_layout(pages)
            chosen = (
                listed.data_ptr(), listed.shape[1], pages.data.data_ptr(), code, pages.data.stride(0), data_stride, scales_at, scale_stride,
                pages.entries_per_page, block_table.data_ptr(), block_table.stride(0), sequence.data_ptr(),
            )  # fmt: skip
        self._c.simd_attention(
            self._bf16, rows, heads, dim, threads_for(rows * heads * dim * width), query.data_ptr(), query.stride(0), out.data_ptr(),
            sink.data_ptr(), scale, table.data_ptr(), positions.data_ptr(), table.shape[1], index.data_ptr(), columns, ring.data.data_ptr(),
            ring_layout.format, slots, length, slot_stride, entry_stride, ring_layout.scales_at, current.data_ptr(), current.stride(0),
            *chosen,
        )  # fmt: skip
        return out
