"""Layouts of prepared weights.

SM100 keeps the checkpoint's bytes: its block-scaled products read them as they are. SM90 has no such products: there the bytes of a
tile of 128 inputs lie side by side, and the bits of each 32-bit word are permuted so that shifts and masks alone turn a word into
bfloat16 values (`_NIBBLE_SHIFTS`, `_BYTE_SHIFTS`; decoded by `products.decoded_part`). Decoding leaves out the factor 2^126 (e2m1) or
2^120 (e4m3); it is folded into the stored scale exponents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.types import ExpertTensors, QuantTensor

TILE = 128
"""Inputs of one tile of a packed weight: four scale groups, one int32 of scale exponents."""

_SHIFT = {WeightFormat.FP4_G32: 126, WeightFormat.FP8_B32: 120}


@dataclass(frozen=True)
class MatrixWeight:
    """`count` matrices [outputs, inputs] of one format.

    packed (SM90): data int32 [count, tiles, outputs, 16 (e2m1) or 32 (e4m3)], scales int32 [count, tiles, outputs or outputs/32].
    plain: data bf16 [count, outputs, inputs] without scales, or (SM100) uint8 bytes and uint8 scales as in the checkpoint.
    """

    format: WeightFormat
    count: int
    outputs: int
    inputs: int
    data: Tensor
    scales: Tensor | None
    packed: bool


@dataclass(frozen=True)
class ExpertWeights:
    """Gate and up projections stacked along their outputs, and the down projections, of all experts."""

    w13: MatrixWeight
    w2: MatrixWeight


def format_of(part: QuantTensor) -> WeightFormat:
    """The format of a checkpoint weight. Raises ValueError for a dtype that no kernel reads."""
    if part.weight.dtype in (torch.int8, torch.uint8):
        return WeightFormat.FP4_G32
    if part.weight.dtype == torch.float8_e4m3fn:
        return WeightFormat.FP8_B32
    if part.weight.dtype == torch.bfloat16:
        return WeightFormat.BF16
    raise ValueError(f"a weight has dtype {part.weight.dtype}; the cuda_sm100 backend reads bfloat16, float8_e4m3fn and int8 (e2m1 pairs)")


def matrix_weight(parts: Sequence[QuantTensor], arch: int) -> MatrixWeight:
    """One matrix of parts stacked along their outputs, all of one format."""
    fmt = format_of(parts[0])
    weight = torch.cat([part.weight.view(torch.uint8) if fmt is not WeightFormat.BF16 else part.weight for part in parts])
    if fmt is WeightFormat.BF16:
        return MatrixWeight(fmt, 1, weight.shape[0], weight.shape[1], weight[None].contiguous(), None, False)
    scales = torch.cat([part.scale.view(torch.uint8) for part in parts if part.scale is not None])
    outputs, inputs = weight.shape[0], weight.shape[1] * (2 if fmt is WeightFormat.FP4_G32 else 1)
    if arch >= 100:
        return MatrixWeight(fmt, 1, outputs, inputs, weight[None].contiguous(), scales[None].contiguous(), False)
    if not weight.is_meta and int(scales.max()) > 254 - _SHIFT[fmt]:  # beyond what a bfloat16 factor holds: no real checkpoint
        return MatrixWeight(WeightFormat.BF16, 1, outputs, inputs, _decoded(weight, scales, fmt)[None], None, False)
    return MatrixWeight(fmt, 1, outputs, inputs, packed_words(weight, fmt)[None], packed_scales(scales, fmt, inputs)[None], True)


def stacked(matrices: Iterable[MatrixWeight], count: int) -> MatrixWeight:
    """`count` matrices of equal shapes as one weight. Consumes the iterator one matrix at a time."""
    first: MatrixWeight | None = None
    seen = 0
    for matrix in matrices:
        if first is None:
            first = matrix
            data = matrix.data.new_empty((count, *matrix.data.shape[1:]))
            scales = None if matrix.scales is None else matrix.scales.new_empty((count, *matrix.scales.shape[1:]))
        if (matrix.format, matrix.data.shape) != (first.format, first.data.shape):
            raise ValueError(f"expert {seen} has format {matrix.format.value} or another size than expert 0 ({first.format.value})")
        if seen < count:
            data[seen] = matrix.data[0]
            if scales is not None and matrix.scales is not None:
                scales[seen] = matrix.scales[0]
        seen += 1
    if seen != count or first is None:
        raise ValueError(f"prepare_experts got {seen} experts, expected {count}")
    return MatrixWeight(first.format, count, first.outputs, first.inputs, data, scales, first.packed)


def packed_words(weight: Tensor, fmt: WeightFormat) -> Tensor:
    """int32 [tiles, outputs, 16 or 32]: word j of a tile holds inputs j + i*width (i = 0 ..), two 16-bit halves of half of them each."""
    codes = weight.view(torch.uint8)
    if fmt is WeightFormat.FP4_G32:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % TILE)).int()
    parts = 8 if fmt is WeightFormat.FP4_G32 else 4
    codes = codes.unflatten(1, (-1, parts, TILE // parts))  # [outputs, tiles, part, width]
    half = _nibble_half if fmt is WeightFormat.FP4_G32 else _byte_half
    low, high = (half(*codes[:, :, first : first + parts // 2].unbind(2)) for first in (0, parts // 2))
    return (low | (high << 16)).transpose(0, 1).contiguous()


def packed_scales(scales: Tensor, fmt: WeightFormat, inputs: int) -> Tensor:
    """int32 [tiles, rows of scales]: byte g is the biased exponent of scale group g of the tile."""
    biased = torch.nn.functional.pad(scales.int() + _SHIFT[fmt], (0, -scales.shape[1] % 4), value=127)
    a, b, c, d = biased.unflatten(1, (-1, 4)).unbind(2)
    return (a | (b << 8) | (c << 16) | (d << 24)).t().contiguous()


def _nibble_half(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """16 bits of four e2m1 codes. Sign and magnitude of a lie at bits 15, 8..6 (where bfloat16 wants them), of b three lower, of c six
    lower; d takes the four bits that are left: 14 (sign), 13, 11, 10."""
    word = sum((((x & 8) << 12) | ((x & 7) << 6)) >> (3 * i) for i, x in enumerate((a, b, c)))
    return word | ((d & 8) << 11) | ((d & 4) << 11) | ((d & 3) << 10)


def _byte_half(a: Tensor, b: Tensor) -> Tensor:
    """16 bits of two e4m3 bytes. a: sign at bit 15, the rest at 10..4 (where bfloat16 wants them). b: sign 11, top three bits 14..12,
    low four bits 3..0."""
    return ((a & 128) << 8) | ((a & 127) << 4) | ((b & 128) << 4) | ((b & 0x70) << 8) | (b & 15)


def _decoded(weight: Tensor, scales: Tensor, fmt: WeightFormat) -> Tensor:
    """bf16 [outputs, inputs] of checkpoint bytes."""
    from deepinfer_backends.cpu_ref.quant import decode_weight

    typed = weight.view(torch.int8 if fmt is WeightFormat.FP4_G32 else torch.float8_e4m3fn)
    return decode_weight(typed, scales).bfloat16()


def expert_weights(experts: Iterable[ExpertTensors], count: int, device: torch.device, arch: int) -> ExpertWeights:
    """All experts on `device`, in the kernels' layout."""
    down: list[MatrixWeight] = []

    def on_device(part: QuantTensor) -> QuantTensor:
        return QuantTensor(part.weight.to(device), None if part.scale is None else part.scale.to(device))

    def up_projections() -> Iterable[MatrixWeight]:
        for expert in experts:
            down.append(matrix_weight((on_device(expert.w2),), arch))
            yield matrix_weight((on_device(expert.w1), on_device(expert.w3)), arch)

    w13 = stacked(up_projections(), count)
    return ExpertWeights(w13, stacked(down, count))
