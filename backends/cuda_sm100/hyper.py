"""Hyper-connections: coefficients, collapse and mixing of the residual streams.

`hc_pre` reads the streams once. A first kernel takes a slice of the channels of all streams: its part of the product with `fn`, of the
sums of squares, and its columns of the collapsed input. A second one adds the parts up in order, and normalises.
The product is exact in float32 although it runs on bfloat16 tensor cores: streams are bfloat16, `fn` is split into three such terms, by
every program where there are few rows, once and for all where there are many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.activations import QuantizedRows, store_quantized
from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_core.backend.types import HcConstants, HcInput, HcWeights

_CHANNELS = 64  # channels of one slice
_PIECES = 10  # with many rows a slice is this many times as wide: fewer partial sums
_ROWS = 64  # rows of one program where there are many
_BLOCK = 1024  # columns of a row that one program norms


@triton.jit
def _truncated(x):
    """(bfloat16 of the upper half of x's bits, the exact rest). Three of them hold all 24 bits of a float32; no conversion unit is used."""
    bits = x.to(tl.int32, bitcast=True)
    upper = bits & -65536
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - upper.to(tl.float32, bitcast=True)


@triton.jit
def _store_sums(parts, mix, squares, x_squares, r, rows, COLUMNS: tl.constexpr, W: tl.constexpr):
    """One slice's share of a row's sums."""
    column = tl.arange(0, W)
    mix = tl.where((column == COLUMNS)[:, None], squares[None, :], mix)
    mix = tl.where((column == COLUMNS + 1)[:, None], x_squares[None, :], mix)
    at = parts + (tl.program_id(1).to(tl.int64) * rows + r)[None, :] * W + column[:, None]
    tl.store(at, mix, mask=(r < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _mix_kernel(
    streams, pre, fn, parts, x, rows, size, stride, COLUMNS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Few rows: one slice of C channels. parts [slices, rows, W]: mix columns, then sum of f^2, then sum of x^2."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    channel, column = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, W)
    inside = (r < rows)[:, None] & (channel < size)[None, :]
    loaded = ()  # everything is asked for before the first use: latency is all there is
    for j in tl.static_range(M):
        at = fn + column[:, None] * (M * size) + j * size + channel[None, :]
        weight = tl.load(at, mask=(column < COLUMNS)[:, None] & (channel < size)[None, :], other=0.0)
        s = tl.load(streams + r.to(tl.int64)[:, None] * stride + j * size + channel[None, :], mask=inside, other=0.0)
        loaded += ((weight, s, tl.load(pre + r * M + j, mask=r < rows, other=0.0)),)  # type: ignore[assignment]
    mix = tl.zeros((W, R), tl.float32)
    squares = tl.zeros((R, C), tl.float32)
    collapsed = tl.zeros((R, C), tl.float32)
    for j in tl.static_range(M):
        weight, s, share = loaded[j]  # type: ignore[var-annotated]
        f = s.to(tl.float32)  # type: ignore[var-annotated]
        squares += f * f
        collapsed += share[:, None] * f
        high, rest = _truncated(weight)
        middle, rest = _truncated(rest)
        low, _ = _truncated(rest)
        turned = tl.trans(s)
        mix = tl.dot(low, turned, mix)
        mix = tl.dot(middle, turned, mix)
        mix = tl.dot(high, turned, mix)
    rounded = collapsed.to(tl.bfloat16)
    tl.store(x + r.to(tl.int64)[:, None] * size + channel[None, :], rounded, mask=inside)
    f = rounded.to(tl.float32)
    _store_sums(parts, mix, tl.sum(squares, 1), tl.sum(f * f, 1), r, rows, COLUMNS, W)


@triton.jit
def _terms_kernel(fn, terms, size, COLUMNS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """terms [3, W, size]: fn as three bfloat16 terms, the lowest first; rows behind its own are zero."""
    column, k = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(fn + column * size + k, mask=(k < size) & (column < COLUMNS), other=0.0)
    high, rest = _truncated(weight)
    middle, rest = _truncated(rest)
    low, _ = _truncated(rest)
    tl.store(terms + column * size + k, low, mask=k < size)
    tl.store(terms + (W + column) * size + k, middle, mask=k < size)
    tl.store(terms + (2 * W + column) * size + k, high, mask=k < size)


@triton.jit(do_not_specialize=["rows"])
def _mix_many_kernel(
    streams, pre, terms, parts, x, rows, size, stride, COLUMNS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Many rows: one slice of PIECES times C channels; `fn` was split into terms beforehand."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    row_at = streams + r.to(tl.int64)[:, None] * stride
    mix = tl.zeros((W, R), tl.float32)
    squares = tl.zeros((R,), tl.float32)
    x_squares = tl.zeros((R,), tl.float32)
    for piece in range(PIECES):
        channel = (tl.program_id(1) * PIECES + piece) * C + tl.arange(0, C)
        inside = (r < rows)[:, None] & (channel < size)[None, :]
        f_squares = tl.zeros((R, C), tl.float32)
        collapsed = tl.zeros((R, C), tl.float32)
        for j in tl.static_range(M):
            s = tl.load(row_at + (j * size + channel)[None, :], mask=inside, other=0.0)
            f = s.to(tl.float32)
            f_squares += f * f
            collapsed += tl.load(pre + r * M + j, mask=r < rows, other=0.0)[:, None] * f
            turned = tl.trans(s)
            for t in tl.static_range(3):
                at = terms + (t * W + column)[:, None] * (M * size) + (j * size + channel)[None, :]
                mix = tl.dot(tl.load(at, mask=(channel < size)[None, :], other=0.0), turned, mix)
        rounded = collapsed.to(tl.bfloat16)
        tl.store(x + r.to(tl.int64)[:, None] * size + channel[None, :], rounded, mask=inside)
        f = rounded.to(tl.float32)
        squares += tl.sum(f_squares, 1)
        x_squares += tl.sum(f * f, 1)
    _store_sums(parts, mix, squares, x_squares, r, rows, COLUMNS, W)


@triton.jit(do_not_specialize=["rows"])
def _finish_kernel(
    parts, base, scale, norm_weight, x, values, scales, pre, post, comb, rows, size, slices, norm_eps, hc_eps,
    COLUMNS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The first programs: coefficients of GROUP rows each; they take longest. The others: norm and quantisation of BLOCK columns of a row
    of the collapsed x, in place; BLOCKS of them make a row."""
    program, groups = tl.program_id(0), tl.cdiv(rows, GROUP)
    if program < groups:
        some = program * GROUP + tl.arange(0, GROUP)
        _coefficients(
            parts, base, scale, pre, post, comb, some, rows, size, slices, norm_eps, hc_eps, COLUMNS, M, W, P, GROUP, ITERATIONS
        )  # fmt: skip
    else:
        row, first = (program - groups) // BLOCKS, (program - groups) % BLOCKS * BLOCK
        piece = tl.arange(0, P)
        at = parts + (piece.to(tl.int64) * rows + row) * W + COLUMNS + 1
        mean = tl.sum(tl.load(at, mask=piece < slices, other=0.0), 0) / size
        c = first + tl.arange(0, BLOCK)
        f = tl.load(x + row.to(tl.int64) * size + c, mask=c < size, other=0.0).to(tl.float32)
        f = f * tl.rsqrt(mean + norm_eps) * tl.load(norm_weight + c, mask=c < size, other=0.0).to(tl.float32)
        rounded = f.to(tl.bfloat16)
        tl.store(x + row.to(tl.int64) * size + c, rounded, mask=c < size)
        store_quantized(rounded.to(tl.float32), values, scales, row, first, size, BLOCK, SCALED)


@triton.jit
def _coefficients(
    parts, base, scale, pre, post, comb, row, rows, size, slices, norm_eps, hc_eps,
    COLUMNS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """pre, post and comb of GROUP rows, from the sums over slices. STEP slices are read at once."""
    STEP: tl.constexpr = P if GROUP == 1 else 8
    column, j = tl.arange(0, W), tl.arange(0, M)
    cell = 2 * M + j[:, None] * M + j[None, :]
    sums = tl.zeros((GROUP, W), tl.float32)
    matrix = tl.zeros((GROUP, M, M), tl.float32)
    real = row < rows
    for first in range(0, slices, STEP):
        piece = first + tl.arange(0, STEP)
        at = parts + (piece.to(tl.int64)[:, None] * rows + row[None, :]) * W
        inside = (piece < slices)[:, None] & real[None, :]
        sums += tl.sum(tl.load(at[:, :, None] + column[None, None, :], mask=inside[:, :, None], other=0.0), 0)
        cells = at[:, :, None, None] + cell[None, None, :, :]
        matrix += tl.sum(tl.load(cells, mask=inside[:, :, None, None], other=0.0), 0)
    rstd = tl.rsqrt(tl.sum(tl.where(column[None, :] == COLUMNS, sums, 0.0), 1) / (M * size) + norm_eps)
    z = sums * rstd[:, None] * tl.load(scale + tl.minimum(column // M, 1))[None, :]
    g = 1.0 / (1.0 + tl.exp(-(z + tl.load(base + column, mask=column < COLUMNS, other=0.0)[None, :])))
    tl.store(pre + row[:, None] * M + column[None, :], g + hc_eps, mask=real[:, None] & (column < M)[None, :])
    tl.store(post + row[:, None] * M + column[None, :] - M, 2.0 * g, mask=real[:, None] & ((column >= M) & (column < 2 * M))[None, :])
    matrix = matrix * rstd[:, None, None] * tl.load(scale + 2) + tl.load(base + cell)[None, :, :]
    matrix = _sinkhorn(matrix, hc_eps, ITERATIONS)
    tl.store(comb + row[:, None, None] * (M * M) + (cell - 2 * M)[None, :, :], matrix, mask=real[:, None, None])


@triton.jit
def _sinkhorn(logits, eps, ITERATIONS: tl.constexpr):
    """[rows, m, m]: softmax of the last dim, then columns, then rows and columns in turn. One reciprocal for each sum."""
    e = tl.exp(logits - tl.max(logits, 2)[:, :, None])
    m = e * (1.0 / tl.sum(e, 2))[:, :, None] + eps
    m = m * (1.0 / (tl.sum(m, 1) + eps))[:, None, :]
    for _ in range(ITERATIONS - 1):
        m = m * (1.0 / (tl.sum(m, 2) + eps))[:, :, None]
        m = m * (1.0 / (tl.sum(m, 1) + eps))[:, None, :]
    return m


@triton.jit
def _post_kernel(streams, y, post, comb, out, size, stride, M: tl.constexpr, C: tl.constexpr):
    """out[row, k] = post[k] * y + sum_j comb[j, k] * streams[row, j], terms added in that order."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < size
    value = tl.load(y + row * size + channel, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(M):
        mixed = tl.load(post + row * M + k) * value
        for j in tl.static_range(M):
            s = tl.load(streams + row * stride + j * size + channel, mask=inside, other=0.0).to(tl.float32)
            mixed += tl.load(comb + row * (M * M) + j * M + k) * s
        tl.store(out + row * (M * size) + k * size + channel, mixed.to(tl.bfloat16), mask=inside)


@triton.jit
def _collapse_kernel(streams, pre, out, size, stride, M: tl.constexpr, C: tl.constexpr, MEAN: tl.constexpr):
    """Weighted sum of the streams, or their mean."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < size
    total = tl.zeros((C,), tl.float32)
    for j in tl.static_range(M):
        s = tl.load(streams + row * stride + j * size + channel, mask=inside, other=0.0).to(tl.float32)
        total += s if MEAN else tl.load(pre + row * M + j) * s
    if MEAN:
        total = total / M
    tl.store(out + row * size + channel, total.to(tl.bfloat16), mask=inside)


class HyperOps:
    """Ops of the contract's group "hyper-connections", and `stream_mean`."""

    _arch: int
    _invariant: bool

    def hc_pre(self, streams: Tensor, pre: Tensor, weights: HcWeights, norm_weight: Tensor, constants: HcConstants) -> HcInput:
        rows, m, size = streams.shape
        columns = m * (m + 2)
        x, parts = self._mixed(streams, pre.contiguous(), weights.fn, columns)
        slices, _, width = parts.shape
        coefficients = torch.empty(rows * m * (m + 2), dtype=torch.float32, device=streams.device)
        next_pre, post, comb = coefficients.split([rows * m, rows * m, rows * m * m])
        quantized = QuantizedRows.empty(rows, size, streams.device, self._arch)
        block = min(_BLOCK, power_of_two(size, 32))
        blocks, group = ceil_div(size, block), 16 if self._many(rows) else 1
        launch(
            _finish_kernel, (rows * blocks + ceil_div(rows, group),), parts, weights.base, weights.scale, norm_weight, x, quantized.values,
            quantized.scales, next_pre, post, comb, rows, size, slices, constants.norm_eps, constants.hc_eps,
            warps=4, COLUMNS=columns, M=m, W=width, P=power_of_two(slices), GROUP=group, ITERATIONS=constants.sinkhorn_iters,
            BLOCK=block, BLOCKS=blocks, SCALED=quantized.scales is not None,
        )  # fmt: skip
        return HcInput(x, quantized, next_pre.view(rows, m), post.view(rows, m), comb.view(rows, m, m))

    def _many(self, rows: int) -> bool:
        return rows > 64 and not self._invariant

    def _mixed(self, streams: Tensor, pre: Tensor, fn: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """(collapsed x bf16 [T, D], not yet normed; sums of slices of channels float32 [slices, T, W], see `_mix_kernel`)."""
        rows, m, size = streams.shape
        many = self._many(rows)
        width, slices = power_of_two(columns + 2, 16), ceil_div(size, _CHANNELS * (_PIECES if many else 1))
        parts = torch.empty(slices, rows, width, dtype=torch.float32, device=streams.device)
        x = torch.empty(rows, size, dtype=torch.bfloat16, device=streams.device)
        shape = {"COLUMNS": columns, "M": m, "W": width}
        if many:
            terms = torch.empty(3, width, m * size, dtype=torch.bfloat16, device=streams.device)
            launch(_terms_kernel, (width, ceil_div(m * size, 1024)), fn, terms, m * size, COLUMNS=columns, W=width, BLOCK=1024)
            launch(
                _mix_many_kernel, (ceil_div(rows, _ROWS), slices), streams, pre, terms, parts, x, rows, size, streams.stride(0),
                warps=8, stages=2, R=_ROWS, C=_CHANNELS, PIECES=_PIECES, **shape,
            )  # fmt: skip
        else:
            block = 16 if rows <= 16 or self._invariant else 64
            launch(
                _mix_kernel, (ceil_div(rows, block), slices), streams, pre, fn, parts, x, rows, size,
                streams.stride(0), warps=4 if block == 16 else 8, stages=2, R=block, C=_CHANNELS, **shape,
            )  # fmt: skip
        return x, parts

    def hc_post(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        rows, m, size = streams.shape
        out = torch.empty(rows, m, size, dtype=torch.bfloat16, device=streams.device)
        c = min(1024, power_of_two(size))
        grid = (rows, ceil_div(size, c))
        launch(_post_kernel, grid, streams, y.contiguous(), post, comb, out, size, streams.stride(0), warps=4, M=m, C=c)
        return out

    def hc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        return self._collapsed(streams, pre.contiguous())

    def stream_mean(self, streams: Tensor) -> Tensor:
        return self._collapsed(streams, None)

    def _collapsed(self, streams: Tensor, pre: Tensor | None) -> Tensor:
        rows, m, size = streams.shape
        out = torch.empty(rows, size, dtype=torch.bfloat16, device=streams.device)
        c = min(1024, power_of_two(size))
        grid = (rows, ceil_div(size, c))
        launch(_collapse_kernel, grid, streams, pre, out, size, streams.stride(0), warps=4, M=m, C=c, MEAN=pre is None)
        return out
