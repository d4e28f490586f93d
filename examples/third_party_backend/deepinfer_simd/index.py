"""The indexer in C++. An index query is its float32 values, as the reference's is."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend.types import CandidateSpec, IndexQuery, PagedEntries, Rope, Selection
from deepinfer_simd.stores import page_layout
from deepinfer_simd.tensors import address, dense_rows, threads_for


class _IndexOps(ReferenceKernels):
    def index_query(self, query: Tensor, rope: Rope) -> IndexQuery:
        rows, heads, dim = query.shape
        if dim % 32:
            return super().index_query(query, rope)
        query, table, positions = dense_rows(query), rope.table.contiguous(), rope.positions.contiguous()
        y = torch.empty(rows, heads, dim)
        self._c.simd_index_query(
            query.data_ptr(), self._bf16, query.stride(0), rows, heads, dim, table.data_ptr(), positions.data_ptr(), table.shape[1],
            y.data_ptr(), threads_for(rows * heads * dim),
        )  # fmt: skip
        return y

    def select_entries(
        self,
        query: IndexQuery,
        head_weights: Tensor,
        keys: PagedEntries,
        visible: Tensor,
        topk: int,
        candidates: Tensor | None = None,
        emit: CandidateSpec | None = None,
        block_size: int = 0,
    ) -> Selection:
        rows, heads, dim = query.shape
        if dim % 32:
            return super().select_entries(query, head_weights, keys, visible, topk, candidates, emit, block_size)
        head_weights, visible, sequence = head_weights.float().contiguous(), visible.contiguous(), keys.sequence.contiguous()
        block_table = dense_rows(keys.block_table)
        candidates = None if candidates is None else candidates.contiguous()
        width = block_table.shape[1] * keys.entries_per_page
        index = torch.empty(rows, topk, dtype=torch.int32)
        blocks = None if emit is None else torch.empty(rows, emit.blocks, dtype=torch.int32)
        code, data_stride, scales_at, scale_stride = page_layout(keys)
        self._c.simd_select(
            query.data_ptr(), head_weights.data_ptr(), rows, heads, dim, keys.data.data_ptr(), code, keys.data.stride(0), data_stride,
            scales_at, scale_stride, keys.entries_per_page, block_table.data_ptr(), block_table.stride(0), width, sequence.data_ptr(),
            visible.data_ptr(), topk, address(candidates), 0 if candidates is None else candidates.shape[1], block_size,
            index.data_ptr(), address(blocks), 0 if emit is None else emit.blocks, 0 if emit is None else emit.block_size,
            threads_for(rows * heads * dim * width),
        )  # fmt: skip
        return Selection(index, blocks)
