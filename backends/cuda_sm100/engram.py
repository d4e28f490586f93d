"""Engram: hashing, gathering stored rows, the gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.activations import QuantizedRows
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import power_of_two as exact_power
from deepinfer_core.backend.types import Activation, EngramHashTables, QuantTensor, Weight

_ROWS = 8  # stored rows of one program of `engram_gather`


@dataclass(frozen=True)
class EngramTable:
    """The bytes of an Engram table, in device memory or in pinned host memory that the device reads through the bus."""

    weight: Tensor  # uint8 [rows, c]
    scale: Tensor  # uint8 [rows, c/32]


@triton.jit
def _hash_kernel(ngrams, multipliers, primes, offsets, out, columns, per_size, SIZE: tl.constexpr, C: tl.constexpr):
    """All columns of one token. The n-gram of size i+1 mixes the first i+1 products."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C)
    inside = column < columns
    own = tl.load(ngrams + row * SIZE)
    h = own * tl.load(multipliers)
    mixed = tl.zeros((C,), tl.int64)
    for i in tl.static_range(1, SIZE):
        h = h ^ (tl.load(ngrams + row * SIZE + i) * tl.load(multipliers + i))
        mixed = tl.where(column // per_size == i - 1, h, mixed)
    prime = tl.load(primes + column, mask=inside, other=1)
    result = mixed % prime + tl.load(offsets + column, mask=inside, other=0)
    tl.store(out + row * columns + column, tl.where(own < 0, -1, result), mask=inside)


@triton.jit
def _gather_kernel(
    weight, scale, rows, values, scales, count, size, N: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """N stored rows, copied as they are (SCALED) or decoded to bfloat16. Row -1 gives zeros."""
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row = tl.load(rows + place, mask=place < count, other=-1)
    g, c = tl.arange(0, BLOCK // 32), tl.arange(0, 32)
    column = g[:, None] * 32 + c[None, :]
    found, at = row >= 0, tl.maximum(row, 0)
    real, inside = (place < count)[:, None, None], (column < size)[None, :, :]
    q = tl.load(weight + (at * size)[:, None, None] + column[None, :, :], mask=inside & found[:, None, None], other=0)
    has_scale = (g * 32 < size)[None, :]
    exponent = tl.load(scale + (at * (size // 32))[:, None] + g[None, :], mask=has_scale & found[:, None], other=127)
    out = (place * size)[:, None, None] + column[None, :, :]
    if SCALED:
        tl.store(values + out, q, mask=real & inside)
        tl.store(scales + (place * (size // 32))[:, None] + g[None, :], exponent, mask=(place < count)[:, None] & has_scale)
    else:
        value = q.to(tl.float8e4nv, bitcast=True).to(tl.float32) * exact_power(exponent)[:, :, None]
        tl.store(values + out, value.to(tl.bfloat16), mask=real & inside)


@triton.jit
def _gate_kernel(
    streams, kv, q_weight, k_weight, mask, out, eps, root, size, stride, M: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One stream of one row. Reads it twice: for the gate, then for the update."""
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h_at = streams + row * stride + j * size
    k_at = kv + row * ((M + 1) * size) + j * size
    v_at = kv + row * ((M + 1) * size) + M * size
    dot = tl.zeros((C,), tl.float32)
    h_squares = tl.zeros((C,), tl.float32)
    k_squares = tl.zeros((C,), tl.float32)
    for block in tl.static_range(BLOCKS):
        c = block * C + tl.arange(0, C)
        h = tl.load(h_at + c, mask=c < size, other=0.0).to(tl.float32)
        k = tl.load(k_at + c, mask=c < size, other=0.0).to(tl.float32)
        w = tl.load(q_weight + j * size + c, mask=c < size, other=0.0).to(tl.float32)
        w *= tl.load(k_weight + j * size + c, mask=c < size, other=0.0).to(tl.float32)
        dot += h * k * w
        h_squares += h * h
        k_squares += k * k
    d = tl.sum(dot, 0) * tl.rsqrt(tl.sum(h_squares, 0) / size + eps) * tl.rsqrt(tl.sum(k_squares, 0) / size + eps) * root
    strength = tl.sqrt_rn(tl.maximum(tl.abs(d), 1e-6))
    gate = 1.0 / (1.0 + tl.exp(-tl.where(d.to(tl.int32, bitcast=True) < 0, -strength, strength)))
    if MASKED:
        gate = tl.where(tl.load(mask + row), gate, 0.0)
    for block in tl.static_range(BLOCKS):
        c = block * C + tl.arange(0, C)
        h = tl.load(h_at + c, mask=c < size, other=0.0).to(tl.float32)
        v = tl.load(v_at + c, mask=c < size, other=0.0).to(tl.float32)
        tl.store(out + row * (M * size) + j * size + c, tl.where(gate > 0.0, h + gate * v, h).to(tl.bfloat16), mask=c < size)


class EngramOps:
    """Ops of the contract's group "Engram"."""

    device: torch.device
    _arch: int

    def prepare_engram_table(self, table: QuantTensor) -> Weight:
        assert table.scale is not None
        weight, scale = table.weight.view(torch.uint8), table.scale.view(torch.uint8)
        if not (weight.is_pinned() and scale.is_pinned()):
            weight, scale = weight.to(self.device), scale.to(self.device)
        return EngramTable(weight, scale)

    def engram_hash(self, ngrams: Tensor, tables: EngramHashTables) -> Tensor:
        rows, size = ngrams.shape
        columns = tables.primes.shape[0]
        out = torch.empty(rows, columns, dtype=torch.int64, device=ngrams.device)
        launch(
            _hash_kernel, (rows,), ngrams.contiguous(), tables.multipliers, tables.primes, tables.offsets, out, columns,
            columns // (size - 1), warps=1, SIZE=size, C=power_of_two(columns),
        )  # fmt: skip
        return out

    def engram_gather(self, table: Weight, rows: Tensor) -> Activation:
        count, columns = rows.shape
        size = table.weight.shape[1]
        out = QuantizedRows.empty(count, columns * size, rows.device, self._arch)
        launch(
            _gather_kernel, (ceil_div(count * columns, _ROWS),), table.weight, table.scale, rows.contiguous(), out.values, out.scales,
            count * columns, size, warps=4, N=_ROWS, BLOCK=power_of_two(size, 32), SCALED=out.scales is not None,
        )  # fmt: skip
        return out

    def engram_gate(
        self, streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, mask: Tensor | None = None
    ) -> Tensor:
        rows, m, size = streams.shape
        out = torch.empty(rows, m, size, dtype=torch.bfloat16, device=streams.device)
        c = min(1024, power_of_two(size))
        launch(
            _gate_kernel, (rows, m), streams, kv.contiguous(), q_weight, k_weight, mask, out, eps, size**-0.5, size, streams.stride(0),
            warps=4, M=m, MASKED=mask is not None, C=c, BLOCKS=-(-size // c),
        )  # fmt: skip
        return out
