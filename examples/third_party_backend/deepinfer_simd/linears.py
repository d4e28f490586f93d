"""Linears in C++, on weights in the checkpoint's formats."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import ReferenceKernels, quant
from deepinfer_core.backend.types import Activation, QuantTensor, Weight
from deepinfer_simd._library import PackedWeight
from deepinfer_simd.tensors import address, dense_rows, threads_for

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}  # enum Format in src/products.hpp


@dataclass(frozen=True)
class SimdWeight:
    """A weight packed for `src/products.hpp`: the checkpoint's bytes in another order."""

    packed: PackedWeight
    tensors: tuple[Tensor, ...]  # keeps the memory alive

    @cached_property
    def address(self) -> int:
        return ctypes.addressof(self.packed)

    @cached_property
    def rows(self) -> int:
        return self.packed.outputs

    @cached_property
    def work(self) -> int:
        """Multiplications for one row."""
        return self.packed.outputs * self.packed.inputs


class _LinearOps(ReferenceKernels):
    def prepare_linear(self, parts: Sequence[QuantTensor]) -> Weight:
        values = torch.cat([part.weight for part in parts])
        stored = [part.scale.view(torch.uint8) for part in parts if part.scale is not None]
        scales = torch.cat(stored) if stored else None
        if values.dtype is torch.float8_e4m3fn and _has_nan(values):  # the packed format has none
            values, scales = torch.cat([quant.decode_weight(*part) for part in parts]), None
        outputs, columns = values.shape
        row_bytes = columns * values.element_size()
        inputs = columns * 2 if values.dtype is torch.int8 else columns
        form = _FORMATS[values.dtype]
        tiles, blocks = -(-outputs // 16), -(-inputs // 32)
        data = torch.zeros(tiles * blocks * 16 * 32 * row_bytes // inputs, dtype=torch.uint8)
        scale = None if scales is None else torch.zeros(tiles * blocks * 16, dtype=torch.uint8)
        self._c.simd_pack(
            form, outputs, inputs, values.data_ptr(), row_bytes, address(scales),
            1 if scales is None or scales.shape[0] == outputs else 32, data.data_ptr(), address(scale),
            threads_for(outputs * inputs),
        )  # fmt: skip
        packed = PackedWeight(form, outputs, inputs, data.data_ptr(), address(scale))
        return SimdWeight(packed, (data,) if scale is None else (data, scale))

    def linear(self, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._product(x, weight, out_dtype or self._dtype)

    def quantized_linear(self, x: Activation, weight: Weight) -> Tensor:
        return self._product(x, weight, self._dtype)

    def _product(self, x: Tensor, weight: SimdWeight, dtype: torch.dtype) -> Tensor:
        x = dense_rows(x)
        rows = x.shape[0]
        y = torch.empty(rows, weight.rows, dtype=dtype)
        self._c.simd_linear(
            x.data_ptr(), x.dtype is torch.bfloat16, x.stride(0), rows, weight.address, y.data_ptr(), dtype is torch.bfloat16,
            threads_for(rows * weight.work),
        )  # fmt: skip
        return y

    def attention_output(self, out: Tensor, wo_a: Weight, wo_b: Weight, groups: int) -> Tensor:
        out = dense_rows(out)
        rows = out.shape[0]
        y = torch.empty(rows, wo_b.rows, dtype=self._dtype)
        self._c.simd_attention_output(
            out.data_ptr(), self._bf16, out.stride(0), rows, groups, wo_a.address, wo_b.address, y.data_ptr(),
            threads_for(rows * wo_a.work),
        )  # fmt: skip
        return y


def _has_nan(values: Tensor) -> bool:
    return bool((values.view(torch.uint8).bitwise_and(0x7F) == 0x7F).any())
