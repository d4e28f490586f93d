"""Embedding, norms, activation quantisation and linears."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.ascend950.layout import Layout, LinearWeight, linear_weight
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.types import Activation, QuantTensor, Weight

_F32_BLOCK = 1 << 25
"""Weight values that are widened to float32 at a time (128 MiB): CANN has no bf16 product with a float32 result."""


class LinearOps(ReferenceKernels):
    """Ops of the contract's groups "weights" and "embedding, norms, linears". A quantised activation is a `calls.Mx`."""

    def __init__(self, device: torch.device, numerics: Numerics = Numerics.RELEASE, layout: Layout | None = None) -> None:
        if numerics is not Numerics.RELEASE:
            raise ValueError(f"ascend950 computes numerics 'release' only, not {numerics.value!r}: use backend cpu_ref for it")
        super().__init__(device, numerics)
        self._layout = layout or Layout()

    def prepare_linear(self, parts: Sequence[QuantTensor]) -> Weight:
        return linear_weight(parts, self.device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return calls.rms_norm(x.float(), weight.float(), eps).bfloat16()

    def rms_norm_quantize(self, x: Tensor, weight: Tensor, eps: float) -> Activation:
        return calls.quantize_fp8(self.rms_norm(x, weight, eps))

    def quantize(self, x: Tensor) -> Activation:
        return calls.quantize_fp8(x)

    def linear(self, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype is torch.float32:
            return _multiply_f32(x.float(), weight)
        return x.bfloat16() @ weight.decoded().t()

    def quantized_linear(self, x: Activation, weight: Weight) -> Tensor:
        if weight.scales is None:
            return calls.dequantize(x) @ weight.values.t()
        return calls.linear_fp8(x, weight.values, weight.scales)


def _multiply_f32(x: Tensor, weight: LinearWeight) -> Tensor:
    """float32 x [T, k] @ weight.T -> [T, n] float32; operands are bf16 values, so every product is exact."""
    values = weight.decoded()
    step = max(1, _F32_BLOCK // values.shape[1])
    blocks = [x @ values[first : first + step].float().t() for first in range(0, values.shape[0], step)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
