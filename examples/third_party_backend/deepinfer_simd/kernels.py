"""`SimdKernels`: the reference's ops, some of them replaced by C++."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.backend import Numerics
from deepinfer_core.backend.types import Activation, HcConstants, HcInput, HcWeights
from deepinfer_simd import _library
from deepinfer_simd.attention import _AttentionOps
from deepinfer_simd.engram import _EngramOps
from deepinfer_simd.experts import _ExpertOps
from deepinfer_simd.index import _IndexOps
from deepinfer_simd.stores import _StoreOps
from deepinfer_simd.tensors import address, dense_rows, owns_rows, threads_for

MAX_STREAMS = 8
"""Streams that `simd_hc_post` keeps in registers."""


class SimdKernels(_AttentionOps, _IndexOps, _StoreOps, _EngramOps, _ExpertOps):
    """Zero-copy: C++ reads the tensors where they lie. A shape that a function does not know goes to the reference, by its dimensions
    only, never by the number of rows: so a row's bits are the same in every batch."""

    def __init__(self, device: torch.device, numerics: Numerics = Numerics.RELEASE) -> None:
        super().__init__(device, numerics)
        self._c = _library.load()
        self._bf16 = numerics is Numerics.RELEASE

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        if table.dtype is not torch.bfloat16 or not table.is_contiguous():
            return super().embed(ids, table)
        ids = ids.contiguous()
        rows, dim = ids.shape[0], table.shape[1]
        y = torch.empty(rows, dim, dtype=self._dtype)
        self._c.simd_embed(ids.data_ptr(), rows, table.data_ptr(), dim, self._bf16, y.data_ptr(), threads_for(rows * dim))
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = dense_rows(x)
        rows, dim = x.shape
        y = torch.empty(rows, dim, dtype=self._dtype)
        self._c.simd_rms_norm(
            x.data_ptr(), x.dtype is torch.bfloat16, x.stride(0), weight.data_ptr(), eps, rows, dim, y.data_ptr(), self._bf16,
            threads_for(rows * dim),
        )  # fmt: skip
        return y

    def quantize(self, x: Tensor) -> Activation:
        return self._quantized(x, None, 0.0) if self._bf16 else super().quantize(x)

    def rms_norm_quantize(self, x: Tensor, weight: Tensor, eps: float) -> Activation:
        if not self._bf16 or x.dtype is not torch.bfloat16:
            return self.quantize(self.rms_norm(x, weight, eps))
        return self._quantized(x, weight, eps)

    def _quantized(self, x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
        """Activations are float32 values on the FP8 grid, as the reference's linears take them."""
        x = dense_rows(x)
        rows, dim = x.shape
        y = torch.empty(rows, dim)
        self._c.simd_quantize(x.data_ptr(), x.stride(0), address(norm_weight), eps, rows, dim, y.data_ptr(), threads_for(rows * dim))
        return y

    def hc_pre(self, streams: Tensor, pre: Tensor, weights: HcWeights, norm_weight: Tensor, constants: HcConstants) -> HcInput:
        rows, m, dim = streams.shape
        if m * dim % 16:
            return super().hc_pre(streams, pre, weights, norm_weight, constants)
        streams, pre = dense_rows(streams), pre.contiguous()
        x = torch.empty(rows, dim, dtype=self._dtype)
        quantized = torch.empty(rows, dim) if self._bf16 else x
        new_pre, post, comb = torch.empty(rows, m), torch.empty(rows, m), torch.empty(rows, m, m)
        self._c.simd_hc_pre(
            streams.data_ptr(), self._bf16, streams.stride(0), pre.data_ptr(), weights.fn.data_ptr(), weights.base.data_ptr(),
            weights.scale.data_ptr(), norm_weight.data_ptr(), constants.norm_eps, constants.hc_eps, constants.sinkhorn_iters, rows, m, dim,
            x.data_ptr(), quantized.data_ptr() if self._bf16 else 0, new_pre.data_ptr(), post.data_ptr(), comb.data_ptr(),
            threads_for(rows * m * dim),
        )  # fmt: skip
        return HcInput(x, quantized, new_pre, post, comb)

    def hc_post(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        rows, m, dim = streams.shape
        if m > MAX_STREAMS:
            return super().hc_post(streams, y, post, comb)
        out = streams if owns_rows(streams) else torch.empty(rows, m, dim, dtype=self._dtype)  # in place where nobody else looks on
        streams, y, post, comb = dense_rows(streams), dense_rows(y), post.contiguous(), comb.contiguous()
        self._c.simd_hc_post(
            streams.data_ptr(), self._bf16, streams.stride(0), y.data_ptr(), y.stride(0), post.data_ptr(), comb.data_ptr(), rows, m, dim,
            out.data_ptr(), out.stride(0), threads_for(rows * m * dim),
        )  # fmt: skip
        return out

    def hc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        streams, pre = dense_rows(streams), pre.contiguous()
        rows, m, dim = streams.shape
        y = torch.empty(rows, dim, dtype=self._dtype)
        self._c.simd_hc_collapse(
            streams.data_ptr(), self._bf16, streams.stride(0), pre.data_ptr(), rows, m, dim, y.data_ptr(), threads_for(rows * m * dim)
        )
        return y

    def stream_mean(self, streams: Tensor) -> Tensor:
        streams = dense_rows(streams)
        rows, m, dim = streams.shape
        y = torch.empty(rows, dim, dtype=self._dtype)
        self._c.simd_stream_mean(streams.data_ptr(), self._bf16, streams.stride(0), rows, m, dim, y.data_ptr(), threads_for(rows * m * dim))
        return y
