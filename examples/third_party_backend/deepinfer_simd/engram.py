"""Engram in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend.types import Activation, EngramHashTables, Weight
from deepinfer_simd.tensors import address, dense_rows, owns_rows, threads_for


class _EngramOps(ReferenceKernels):
    def engram_hash(self, ngrams: Tensor, tables: EngramHashTables) -> Tensor:
        ngrams = ngrams.contiguous()
        multipliers, primes, offsets = (table.contiguous() for table in tables)
        rows, columns = ngrams.shape[0], primes.shape[0]
        y = torch.empty(rows, columns, dtype=torch.int64)
        self._c.simd_engram_hash(
            ngrams.data_ptr(), rows, ngrams.shape[1], multipliers.data_ptr(), primes.data_ptr(), offsets.data_ptr(), columns, y.data_ptr()
        )
        return y

    def engram_gather(self, table: Weight, rows: Tensor) -> Activation:
        values, scales = table
        dim = values.shape[1]
        if dim % 32 or not values.is_contiguous() or not scales.is_contiguous():
            return super().engram_gather(table, rows)
        rows = rows.contiguous()
        count, columns = rows.shape
        y = torch.empty(count, columns * dim)
        self._c.simd_engram_gather(
            values.data_ptr(), scales.data_ptr(), dim, rows.data_ptr(), count * columns, y.data_ptr(), threads_for(count * columns * dim)
        )
        return y

    def engram_gate(
        self, streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, mask: Tensor | None = None
    ) -> Tensor:
        rows, m, dim = streams.shape
        out = streams if owns_rows(streams) else torch.empty(rows, m, dim, dtype=self._dtype)
        streams, kv, q_weight, k_weight = dense_rows(streams), dense_rows(kv), q_weight.contiguous(), k_weight.contiguous()
        mask = None if mask is None else mask.contiguous()
        self._c.simd_engram_gate(
            streams.data_ptr(), self._bf16, streams.stride(0), kv.data_ptr(), kv.stride(0), q_weight.data_ptr(), k_weight.data_ptr(), eps,
            address(mask), rows, m, dim, out.data_ptr(), out.stride(0), threads_for(rows * m * dim),
        )  # fmt: skip
        return out
