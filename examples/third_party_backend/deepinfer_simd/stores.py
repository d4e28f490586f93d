"""Everything that stores into caches, in C++."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend import CacheFormat
from deepinfer_core.backend.types import CompressorRing, CompressorRows, PagedEntries, Rope, WindowRing
from deepinfer_simd.tensors import Layout, dense_rows, layout, threads_for


class _Norm(NamedTuple):
    weight: Tensor
    eps: float


class _StoreOps(ReferenceKernels):
    def store_window(self, key: Tensor, ring: WindowRing, slots: Tensor) -> None:
        if key.shape[1] % 32:
            return super().store_window(key, ring, slots)
        data = ring.data
        code, _, scales_at, _ = layout(ring.format, key.shape[1])
        entry = data.stride(1)
        return self._store(key, slots, data, data.shape[1], Layout(code, entry, scales_at, entry))

    def store_entries(self, latent: Tensor, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        if latent.shape[1] % 32:
            return super().store_entries(latent, rope, pages, slots)
        return self._store(latent, slots, pages.data, pages.entries_per_page, page_layout(pages), rope)

    def store_index_keys(self, key: Tensor, norm_weight: Tensor, eps: float, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        if key.shape[1] % 32:
            return super().store_index_keys(key, norm_weight, eps, rope, pages, slots)
        on_grid = self._bf16 and pages.format is not CacheFormat.FP4_INDEX  # whose encoder makes the grid itself
        norm = _Norm(norm_weight, eps)
        return self._store(key, slots, pages.data, pages.entries_per_page, page_layout(pages), rope, norm, on_grid)

    def _store(
        self, x: Tensor, slots: Tensor, data: Tensor, length: int, where: Layout, rope: Rope | None = None, norm: _Norm | None = None,
        on_grid: bool = False,
    ) -> None:  # fmt: skip
        x, slots = dense_rows(x), slots.contiguous()
        rows, dim = x.shape
        weight, eps = (norm.weight.data_ptr(), norm.eps) if norm else (0, 0.0)
        table = positions = rd = 0
        if rope is not None:
            angles, of_rows = rope.table.contiguous(), rope.positions.contiguous()
            table, positions, rd = angles.data_ptr(), of_rows.data_ptr(), angles.shape[1]
        self._c.simd_store(
            x.data_ptr(), x.dtype is torch.bfloat16, x.stride(0), rows, dim, weight, eps, table, positions, rd, on_grid, data.data_ptr(),
            where.format, length, data.stride(0), where.data_stride, where.scales_at, where.scale_stride, slots.data_ptr(),
            threads_for(rows * dim),
        )  # fmt: skip

    def compress(self, rows: Tensor, ring: CompressorRing, index: CompressorRows, norm_weight: Tensor, eps: float) -> Tensor:
        data = ring.data
        slots, length, _, dim = data.shape
        if dim % 16:
            return super().compress(rows, ring, index, norm_weight, eps)
        rows, members, keep = dense_rows(rows), index.members.contiguous(), index.slots.contiguous()
        count, ratio = members.shape
        y = torch.empty(count, dim, dtype=self._dtype)
        self._c.simd_compress(
            rows.data_ptr(), rows.stride(0), count, dim, data.data_ptr(), slots, length, data.stride(0), data.stride(1),
            members.data_ptr(), ratio, keep.data_ptr(), norm_weight.data_ptr(), eps, self._bf16, y.data_ptr(), threads_for(rows.numel()),
        )  # fmt: skip
        return y


def page_layout(pages: PagedEntries) -> Layout:
    """Where the entries of a page lie."""
    return layout(pages.format, pages.dim, pages.entries_per_page if pages.sectioned else 0)
