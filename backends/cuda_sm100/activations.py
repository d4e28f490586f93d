"""Norms, embedding and quantised activations.

A quantised activation is stored the way the device's matrix units want it: on SM100 as e4m3 bytes and exponent bytes for block-scaled
products, on SM90 as the bfloat16 values themselves, which are exact and need no decoding in front of a bfloat16 product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import fp8_exponent, fp8_round
from deepinfer_backends.cuda_sm100.numeric import power_of_two as exact_power
from deepinfer_core.backend.types import Activation


@dataclass(frozen=True)
class QuantizedRows:
    """A quantised activation of `size` values a row."""

    values: Tensor  # bf16 [T, size] on SM90; uint8 (e4m3) [T, size] on SM100
    scales: Tensor | None  # None on SM90; uint8 (e8m0) [T, size/32] on SM100

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device, arch: int) -> QuantizedRows:
        if arch < 100:
            return cls(torch.empty(rows, size, dtype=torch.bfloat16, device=device), None)
        scales = torch.empty(rows, size // 32, dtype=torch.uint8, device=device)
        return cls(torch.empty(rows, size, dtype=torch.uint8, device=device), scales)


@triton.jit
def store_quantized(x, values, scales, row, first, size, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """Quantises float32 x [BLOCK], columns first .. of a row of `size`, and stores it in the layout of `QuantizedRows`."""
    grouped = tl.reshape(x, (BLOCK // 32, 32))
    exponent = fp8_exponent(tl.max(tl.abs(grouped), 1))
    q = fp8_round(grouped, exponent[:, None])
    group = first // 32 + tl.arange(0, BLOCK // 32)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = values + row.to(tl.int64) * size + column
    if SCALED:
        tl.store(at, q.to(tl.uint8, bitcast=True), mask=column < size)
        tl.store(scales + row.to(tl.int64) * (size // 32) + group, exponent.to(tl.uint8), mask=group * 32 < size)
    else:
        tl.store(at, (q.to(tl.float32) * exact_power(exponent)[:, None]).to(tl.bfloat16), mask=column < size)


@triton.jit
def _norm_kernel(
    x, weight, out, values, scales, stride, size, eps,
    BLOCK: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One row: RMSNorm (NORM), the rounded result (KEEP), its quantisation (QUANTIZE)."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    f = tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(f * f, 0) / size + eps)
        f = f * rstd * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        f = f.to(tl.bfloat16).to(tl.float32)
    if KEEP:
        tl.store(out + row.to(tl.int64) * size + column, f.to(tl.bfloat16), mask=inside)
    if QUANTIZE:
        store_quantized(f, values, scales, row, 0, size, BLOCK, SCALED)


@triton.jit
def _embed_kernel(ids, table, out, size, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row) * stride + column
    tl.store(out + row * size + column, tl.load(table + source, mask=column < size), mask=column < size)


def warps_for(block: int) -> int:
    return min(8, max(1, block // 512))


class ActivationOps:
    """Ops of the contract's group "embedding, norms" and the quantiser."""

    device: torch.device
    _arch: int

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        rows, size = ids.shape[0], table.shape[1]
        out = torch.empty(rows, size, dtype=torch.bfloat16, device=ids.device)
        block = min(1024, power_of_two(size))
        launch(_embed_kernel, (rows, ceil_div(size, block)), ids, table, out, size, table.stride(0), warps=4, BLOCK=block)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        self._norm(x, weight, eps, out, None)
        return out

    def rms_norm_quantize(self, x: Tensor, weight: Tensor, eps: float) -> Activation:
        quantized = QuantizedRows.empty(x.shape[0], x.shape[1], x.device, self._arch)
        self._norm(x, weight, eps, None, quantized)
        return quantized

    def quantize(self, x: Tensor) -> Activation:
        quantized = QuantizedRows.empty(x.shape[0], x.shape[1], x.device, self._arch)
        self._norm(x, None, 0.0, None, quantized)
        return quantized

    def _norm(self, x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None, quantized: QuantizedRows | None) -> None:
        rows, size = x.shape
        block = power_of_two(size, 32)
        values, scales = (quantized.values, quantized.scales) if quantized else (None, None)
        launch(
            _norm_kernel, (rows,), x, weight, out, values, scales, x.stride(0), size, eps,
            warps=warps_for(block), BLOCK=block, NORM=weight is not None, KEEP=out is not None,
            QUANTIZE=quantized is not None, SCALED=scales is not None,
        )  # fmt: skip
