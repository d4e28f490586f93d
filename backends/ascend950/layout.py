"""Weights in the layouts that CANN's matrix operators want, made once at load.

`tile` is the seam to the device: it turns an fp4 weight into the cube unit's tiled NZ layout. The CPU emulation leaves it plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_backends.ascend950 import codes
from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.types import QuantTensor

_BLOCK = 32
NO_SCALE = 127
"""Exponent byte of 1.0: pads an odd number of scale blocks. The padded block has no values."""


class Layout:
    """Memory formats of weights on a real NPU."""

    def tile(self, packed: Tensor) -> Tensor:
        """fp4 bytes [E, n, k/2] in the NZ layout, as the grouped product wants them."""
        return torch.ops.npu.npu_format_cast(packed, codes.NZ, customize_dtype=codes.FP8, input_dtype=codes.FP4)


class PlainLayout(Layout):
    """No tiling: for emulated operators, which know plain tensors only."""

    def tile(self, packed: Tensor) -> Tensor:
        return packed


@dataclass
class LinearWeight:
    """A prepared `prepare_linear` weight: bf16 [n, k], or e4m3 [n, k] with scales for `npu_quant_matmul`."""

    values: Tensor
    scales: Tensor | None  # uint8 [ceil(k/64), n, 2]; None for bf16
    grouped: Tensor | None = None  # bf16 [g, k, n/g], once `by_group` has been called

    def by_group(self, groups: int) -> Tensor:
        """bf16 [g, k, n/g] for the grouped output projection, decoded at its first use (the warm-up) and kept.

        The fp8 form is dropped then: it serves `quantized_linear` only, and no weight is used both ways.
        """
        if self.grouped is None:
            self.grouped = self.decoded().unflatten(0, (groups, -1)).transpose(1, 2).contiguous()
            self.values = self.values[:0]
        return self.grouped

    def decoded(self) -> Tensor:
        """bf16 [n, k]. Exact: an e4m3 value times a power of two."""
        if self.scales is None:
            return self.values
        n, k = self.values.shape
        factors = exponent_values(self.scales.transpose(0, 1).reshape(n, -1)[:, : k // _BLOCK])
        return (blocks_of(self.values.float(), _BLOCK) * factors[..., None]).flatten(1).bfloat16()


@dataclass(frozen=True)
class ExpertWeights:
    """Prepared experts: gate and up stacked along the outputs (`w13`), and down (`w2`), all [E, k, n] as CANN multiplies them."""

    count: int
    format: WeightFormat
    w13: Tensor
    w13_scales: Tensor | None  # uint8 [E, ceil(k/64), n, 2]; None for bf16
    w2: Tensor
    w2_scales: Tensor | None


def blocks_of(x: Tensor, size: int) -> Tensor:
    """x [..., n] as [..., n / size, size]. Unlike unflatten(-1, (-1, size)) it takes zero rows."""
    return x.unflatten(-1, (x.shape[-1] // size, size))


def exponent_values(exponents: Tensor) -> Tensor:
    """float32 powers of two 2^(byte - 127) of uint8 exponents; byte 0 is the subnormal 2^-127."""
    bits = exponents.int() << 23
    return torch.where(bits == 0, 0x400000, bits).view(torch.float32)


def paired_scales(scale: Tensor) -> Tensor:
    """uint8 [..., n, ceil(b/2), 2] of exponent bytes [..., n, b]: scales of blocks 2j and 2j+1 side by side."""
    odd = scale.shape[-1] % 2
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, odd), value=NO_SCALE)
    return blocks_of(padded, 2)


def row_scales(scale: Tensor, rows: int) -> Tensor:
    """uint8 [rows, k/32] of a checkpoint scale per 32x32 block [ceil(rows/32), k/32]."""
    return scale.view(torch.uint8).repeat_interleave(_BLOCK, 0)[:rows]


def linear_weight(parts: Sequence[QuantTensor], device: torch.device) -> LinearWeight:
    """`parts` stacked along their outputs. Raises ValueError for formats that linears do not have."""
    dtypes = {part.weight.dtype for part in parts}
    if dtypes == {torch.bfloat16}:
        return LinearWeight(torch.cat([part.weight.to(device) for part in parts]), None)
    if dtypes != {torch.float8_e4m3fn} or any(part.scale is None for part in parts):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"linear weight of {names}: ascend950 takes bfloat16, or float8_e4m3fn with scales, one format per weight")
    values = torch.cat([part.weight.to(device) for part in parts])
    scales = torch.cat([row_scales(_scale(part).to(device), part.weight.shape[0]) for part in parts])
    return LinearWeight(values, paired_scales(scales).transpose(0, 1).contiguous())


def _scale(part: QuantTensor) -> Tensor:
    assert part.scale is not None
    return part.scale
