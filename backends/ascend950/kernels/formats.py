"""Cache entries: values to bytes and back, with CANN's MX operators where the format is MX."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.ascend950.kernels.calls import Mx
from deepinfer_backends.ascend950.layout import blocks_of, paired_scales
from deepinfer_core.backend.formats import CacheFormat

_FP4_AMAX_FLOOR = 6.0 * 2.0**-9
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_ONE = 127  # exponent byte of 1.0
_LEAST = 1  # exponent byte of an index block of zeros: 2^-126 (amax is at least 6 * 2^-126)


def encode(values: Tensor, fmt: CacheFormat) -> tuple[Tensor, Tensor]:
    """(data [T, data bytes], scales [T, scale bytes]) uint8 of entries [T, dim] bf16."""
    if fmt is CacheFormat.FP4:
        return _encode_fp4(values.float())
    x = index_grid(values) if fmt is CacheFormat.FP4_INDEX else calls.quantize_fp8(values)
    return x.values.view(torch.uint8), x.scales.flatten(-2)[..., : fmt.scale_bytes(values.shape[-1])]


def decode(data: Tensor, scales: Tensor, fmt: CacheFormat) -> Tensor:
    """bf16 [..., dim] of data and scales [..., bytes] uint8. Exact in every format."""
    if fmt is CacheFormat.FP4:
        return _decode_fp4(data, scales)
    values = data.contiguous() if fmt is CacheFormat.FP4_INDEX else data.contiguous().view(torch.float8_e4m3fn)
    return calls.dequantize(Mx(values, paired_scales(scales)))


def index_grid(values: Tensor) -> Mx:
    """Index queries or keys [..., d] bf16 on their grid. CANN leaves the scale of a block of zeros open: here it is the least one."""
    x = calls.quantize_fp4(values)
    is_zero = blocks_of(values, 32).abs().amax(-1) == 0
    is_zero = torch.nn.functional.pad(is_zero, (0, is_zero.shape[-1] % 2)).view(x.scales.shape)
    return Mx(x.values, torch.where(is_zero, _LEAST, x.scales))


def _encode_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 with one e4m3 scale per 16: no CANN operator makes it. The division is not exact, so it must be a division."""
    blocks = blocks_of(values, 16)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(_FP4_AMAX_FLOOR)
    scale = (amax / _E2M1_MAX).clamp_max(_E4M3_MAX).to(torch.float8_e4m3fn)
    codes = blocks_of(_e2m1_codes(blocks / scale.float()).flatten(-2), 2)
    data = codes[..., 0] + 16.0 * codes[..., 1]
    return data.to(torch.uint8), scale.view(torch.uint8).flatten(-2)


def _e2m1_codes(x: Tensor) -> Tensor:
    """Codes 0 .. 15, as float32, of x rounded to e2m1, ties to the even code: the grid's step is 1/2 below 2, 1 below 4, then 2."""
    magnitude = x.abs().clamp_max(_E2M1_MAX)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    halves = torch.round(magnitude / step) * step * 2.0  # torch.round takes ties to even
    code = torch.where(halves < 4.0, halves, torch.where(halves < 8.0, halves * 0.5 + 2.0, halves * 0.25 + 4.0))
    return code + 8.0 * torch.signbit(x).float()


def _decode_fp4(data: Tensor, scales: Tensor) -> Tensor:
    """MX decoding with every scale 1 turns nibbles and e4m3 bytes into bf16; their product has at most six significant bits."""
    values = calls.dequantize(Mx(data.contiguous(), _ones(data.shape[:-1], data.shape[-1] * 2, data.device)))
    factors = calls.dequantize(Mx(scales.contiguous().view(torch.float8_e4m3fn), _ones(scales.shape[:-1], scales.shape[-1], data.device)))
    return (blocks_of(values, 16) * factors[..., None]).flatten(-2)


def _ones(shape: torch.Size, values: int, device: torch.device) -> Tensor:
    return torch.full((*shape, -(-values // 64), 2), _ONE, dtype=torch.uint8, device=device)
