"""Linear layers: bfloat16 and FP8 weights, grouped output projection.

Few rows: a matrix is split along its inputs so that every multiprocessor streams a part of it; the last program of a tile adds the parts
in order. How often it is split depends on the weight, and unless batch invariance is asked for on whether there are more than 8 rows. Many
rows: the weight is decoded once and multiplied by cuBLAS, unless batch invariance is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.activations import QuantizedRows
from deepinfer_backends.cuda_sm100.launch import INTERPRETED, ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.numeric import fp8_exponent, fp8_round
from deepinfer_backends.cuda_sm100.numeric import power_of_two as exact_power
from deepinfer_backends.cuda_sm100.products import FORMAT_CODE, decoded_bytes, scale_factor, tile_product
from deepinfer_backends.cuda_sm100.weights import TILE, MatrixWeight, matrix_weight
from deepinfer_core.backend.formats import WeightFormat
from deepinfer_core.backend.types import Activation, QuantTensor, Weight

LIBRARY_ROWS = 256
"""Rows from which decoding a weight to bfloat16 and calling cuBLAS beats reading it encoded (the decoded copy costs 4 bytes of traffic
for each weight, a row 2 operations for each weight)."""

_PROGRAMS = 264  # two for each multiprocessor of an H200: enough loads in flight to saturate its memory
_SMALL_PROGRAMS = 528  # the same for programs of at most 8 rows


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, x_scales, weight, scales, base, out, out_scales, partial, arrived, rows, outputs, inputs, x_stride, base_stride, group_outputs,
    group_inputs, split_tiles,
    N: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr,
    X_SCALED: tl.constexpr, EVEN: tl.constexpr, EVEN_N: tl.constexpr, GROUPED: tl.constexpr, BASE: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """out [rows, outputs] = x @ weight.T, plus base (BASE), quantised (QUANTIZE).

    GROUPED: outputs of group g read inputs g*group_inputs .. of x only.
    """
    n_tile, r_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = n_tile * N + tl.arange(0, N)
    n_read = n if EVEN_N else tl.minimum(n, outputs - 1)
    r = r_tile * R + tl.arange(0, R)
    x_mask = r < rows
    x_rows = x + r.to(tl.int64) * x_stride
    if GROUPED:
        x_rows += (n_tile * N // group_outputs) * group_inputs
    scale_rows = x_scales + r.to(tl.int64) * (inputs // 32) if X_SCALED else x
    tiles = tl.cdiv(inputs, 128)
    acc = tl.zeros((N, R), tl.float32)
    for tile in range(split * split_tiles, tl.minimum((split + 1) * split_tiles, tiles)):
        acc = tile_product(acc, weight, scales, tile, n_read, outputs, x_rows, scale_rows, x_mask, inputs, FORMAT, PACKED, X_SCALED, EVEN)
    result = tl.trans(acc)  # [R, N]
    at = r.to(tl.int64)[:, None] * outputs + n[None, :]
    mask = x_mask[:, None] & (n < outputs)[None, :]
    if SPLITS > 1:
        part = rows.to(tl.int64) * outputs
        tl.store(partial + split * part + at, result, mask=mask)
        tl.debug_barrier()
        counter = arrived + r_tile * tl.num_programs(0) + n_tile
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg")
            for i in range(1, SPLITS):
                total += tl.load(partial + i * part + at, mask=mask, other=0.0, cache_modifier=".cg")
            _store_result(total, base, out, out_scales, r, n, mask, outputs, base_stride, N, R, BASE, QUANTIZE)
            tl.store(counter, 0)
    else:
        _store_result(result, base, out, out_scales, r, n, mask, outputs, base_stride, N, R, BASE, QUANTIZE)


@triton.jit
def _store_result(
    result, base, out, out_scales, r, n, mask, outputs, base_stride,
    N: tl.constexpr, R: tl.constexpr, BASE: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Rounds float32 result [R, N], plus base, to the type of out; or quantises what bfloat16 leaves of it (layout of QuantizedRows)."""
    row = r.to(tl.int64)
    at = row[:, None] * outputs + n[None, :]
    if BASE:
        result += tl.load(base + row[:, None] * base_stride + n[None, :], mask=mask, other=0.0)
    if QUANTIZE:
        grouped = tl.reshape(result.to(tl.bfloat16).to(tl.float32), (R, N // 32, 32))
        exponent = fp8_exponent(tl.max(tl.abs(grouped), 2))
        q = fp8_round(grouped, exponent[:, :, None])
        if out.dtype.element_ty == tl.uint8:
            tl.store(out + at, tl.reshape(q.to(tl.uint8, bitcast=True), (R, N)), mask=mask)
            g = tl.min(tl.reshape(n, (N // 32, 32)), 1) // 32
            scale_mask = tl.max(tl.reshape(mask.to(tl.int32), (R, N // 32, 32)), 2) > 0
            tl.store(out_scales + row[:, None] * (outputs // 32) + g[None, :], exponent.to(tl.uint8), mask=scale_mask)
        else:
            values = (q.to(tl.float32) * exact_power(exponent)[:, :, None]).to(tl.bfloat16)
            tl.store(out + at, tl.reshape(values, (R, N)), mask=mask)
    else:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _decode_kernel(weight, scales, out, outputs, inputs, N: tl.constexpr):
    """bf16 [outputs, inputs] of a packed e4m3 weight: one tile of 128 inputs for N outputs."""
    tile = tl.program_id(0)
    n = tl.program_id(1) * N + tl.arange(0, N)
    j = tl.arange(0, 32)
    inside = n < outputs
    word = tl.load(weight + (tile * outputs + n)[:, None] * 32 + j[None, :], mask=inside[:, None], other=0)
    exponents = tl.load(scales + tile * tl.cdiv(outputs, 32) + n // 32, mask=inside, other=0)
    decoded = decoded_bytes(word)
    for i in tl.static_range(4):
        k = tile * 128 + i * 32 + j
        value = decoded[i] * scale_factor(exponents, i)[:, None]
        tl.store(out + n.to(tl.int64)[:, None] * inputs + k[None, :], value, mask=inside[:, None] & (k < inputs)[None, :])


def splits_of(outputs: int, inputs: int, programs: int = _PROGRAMS) -> int:
    """Parts a matrix is cut into along its inputs: about `programs` programs, at least four tiles of work for each."""
    return max(1, min(programs // ceil_div(outputs, 64), ceil_div(inputs, TILE) // 4))


def row_block(rows: int) -> int:
    return min(128, power_of_two(rows, 16))


def product_warps(block_n: int, block_r: int, one_instruction: bool) -> int:
    """Warps of a tile of block_n outputs and block_r rows.

    Two warps cannot use wgmma, which waits for every product whose operand comes from registers; the older instruction does not, which is
    what a few rows need. Batch invariance wants one instruction for any number of rows.
    """
    if block_n * block_r >= 128 * 128:
        return 8
    return 4 if block_r > 32 or one_instruction else 2


class LinearOps:
    """Ops of the contract's group "linears"."""

    device: torch.device
    _arch: int
    _invariant: bool
    _counters: Tensor | None = None

    def prepare_linear(self, parts: Sequence[QuantTensor]) -> Weight:
        placed = [QuantTensor(p.weight.to(self.device), None if p.scale is None else p.scale.to(self.device)) for p in parts]
        return matrix_weight(placed, self._arch)

    def linear(self, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        if self._library(x.shape[0]):
            return _library_product(x, decoded_weight(weight), out_dtype or torch.bfloat16)
        return self._product(QuantizedRows(x, None), weight, out_dtype or torch.bfloat16)

    def quantized_linear(self, x: Activation, weight: Weight) -> Tensor:
        if x.scales is None and self._library(x.values.shape[0]):
            return _library_product(x.values, decoded_weight(weight), torch.bfloat16)
        return self._product(x, weight, torch.bfloat16)

    def attention_output(self, out: Tensor, wo_a: Weight, wo_b: Weight, groups: int) -> Tensor:
        flat = out.flatten(1)
        if self._library(flat.shape[0]):
            decoded = decoded_weight(wo_a).view(groups, -1, wo_a.inputs)
            grouped = torch.bmm(flat.view(-1, groups, wo_a.inputs).transpose(0, 1), decoded.transpose(1, 2))
            return self.quantized_linear(self.quantize(grouped.transpose(0, 1).reshape(len(flat), -1)), wo_b)  # type: ignore[attr-defined]
        z = QuantizedRows.empty(len(flat), wo_a.outputs, flat.device, self._arch)
        self._product(QuantizedRows(flat, None), wo_a, torch.bfloat16, groups, quantized=z)
        return self.quantized_linear(z, wo_b)

    def _library(self, rows: int) -> bool:
        return rows >= LIBRARY_ROWS and not self._invariant and self._arch < 100 and not INTERPRETED

    def _product(
        self, x: QuantizedRows, weight: MatrixWeight, dtype: torch.dtype, groups: int = 1, base: Tensor | None = None,
        quantized: QuantizedRows | None = None,
    ) -> Tensor:  # fmt: skip
        """x @ weight.T as [T, outputs]; with groups, outputs/groups rows of the weight for each slice of the inputs.

        base: float32 [T, outputs], added before rounding. quantized: receives the bfloat16 result, quantised, and is what is returned.
        """
        rows, outputs, inputs = x.values.shape[0], weight.outputs, weight.inputs
        values = x.values if x.values.stride(-1) == 1 else x.values.contiguous()
        out = torch.empty(rows, outputs, dtype=dtype, device=values.device) if quantized is None else quantized.values
        few = rows <= 8 and self._arch < 100 and not self._invariant
        block_r = 8 if few else row_block(rows)
        block_n = 128 if x.scales is not None or block_r >= 128 or (block_r == 64 and outputs >= 1024) else 64
        if groups > 1:
            block_n = min(block_n, 1 << ((outputs // groups) & -(outputs // groups)).bit_length() - 1)
        splits, tiles = splits_of(outputs, inputs, _SMALL_PROGRAMS if few else _PROGRAMS), ceil_div(inputs, TILE)
        split_tiles = ceil_div(tiles, splits)
        splits = ceil_div(tiles, split_tiles)
        grid = (ceil_div(outputs, block_n), ceil_div(rows, block_r), splits)
        partial = torch.empty(splits, rows, outputs, dtype=torch.float32, device=values.device) if splits > 1 else out
        launch(
            _linear_kernel, grid, values, x.scales, weight.data, weight.scales, base, out,
            None if quantized is None else quantized.scales, partial, self._zeros(grid[0] * grid[1]), rows, outputs, inputs,
            values.stride(0), 0 if base is None else base.stride(0), outputs // groups, inputs, split_tiles,
            warps=product_warps(block_n, block_r, self._invariant or self._arch >= 100), stages=4 if block_r <= 32 else 3,
            N=block_n, R=block_r, SPLITS=splits, FORMAT=FORMAT_CODE[weight.format], PACKED=weight.packed, X_SCALED=x.scales is not None,
            EVEN=inputs % TILE == 0, EVEN_N=outputs % block_n == 0, GROUPED=groups > 1, BASE=base is not None,
            QUANTIZE=quantized is not None,
        )  # fmt: skip
        return out

    def _zeros(self, count: int) -> Tensor:
        """int32 counters that are zero between launches: each kernel leaves them as it found them."""
        if self._counters is None or self._counters.numel() < count:
            self._counters = torch.zeros(power_of_two(count, 1 << 16), dtype=torch.int32, device=self.device)
        return self._counters


def decoded_weight(weight: MatrixWeight) -> Tensor:
    """bf16 [outputs, inputs] of a bf16 or packed e4m3 weight, for a library product."""
    if weight.format is WeightFormat.BF16:
        return weight.data[0]
    out = torch.empty(weight.outputs, weight.inputs, dtype=torch.bfloat16, device=weight.data.device)
    grid = (ceil_div(weight.inputs, TILE), ceil_div(weight.outputs, 64))
    launch(_decode_kernel, grid, weight.data, weight.scales, out, weight.outputs, weight.inputs, warps=4, N=64)
    return out


def _library_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x, weight.t())
