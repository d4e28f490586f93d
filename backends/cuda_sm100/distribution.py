"""`log_probs`: temperature, top-k, top-p and min-p over a whole vocabulary, one row spread over many programs.

The cut of top-k and top-p is found digit by digit on the ordered bits of the logits: the mass and the number of ids of every digit are
summed with integer atomics, whose result does not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.launch import ceil_div, launch, power_of_two
from deepinfer_backends.cuda_sm100.sampling import integer_exp
from deepinfer_core.backend.canonical import exp_table
from deepinfer_core.backend.types import SamplingRows

_BLOCK = 2048
_DIGITS = (12, 10, 10)  # bits of a key, from the highest: the first digit splits octaves, so that few ids meet in one counter
_UNLIMITED = tl.constexpr(1 << 62)
_MASK = tl.constexpr(0xFFFFFFFF)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _order(x):
    """int64 keys in [0, 2^32) that order float32 values as the values do (-0 as 0)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.int64) & _MASK


@triton.jit
def _scale(temperature, row):
    heat = tl.load(temperature + row)
    return tl.where(heat == 0.0, 1.0, heat)


@triton.jit
def _peak_kernel(logits, temperature, peaks, places, totals, size, stride, BLOCK: tl.constexpr):
    """Of one block of one row: the highest logit, its lowest id, and the sum of exp((logit - highest) / temperature)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < size, other=_NEGATIVE_INFINITY)
    peak = tl.max(x, 0)
    at = row * tl.num_programs(1) + block
    tl.store(peaks + at, peak)
    tl.store(places + at, tl.min(tl.where((x == peak) & (ids < size), ids, size), 0))
    base = tl.where(peak == _NEGATIVE_INFINITY, 0.0, peak)
    tl.store(totals + at, tl.sum(tl.exp(tl.div_rn(x - base, _scale(temperature, row))), 0))


@triton.jit
def _row_sums(peaks, places, totals, scale, row, blocks, size, BLOCKS: tl.constexpr):
    """(highest logit, its lowest id, log of the sum of exponentials) of a row, from those of its blocks."""
    b = tl.arange(0, BLOCKS)
    at = row * blocks + b
    peak = tl.load(peaks + at, mask=b < blocks, other=_NEGATIVE_INFINITY)
    top = tl.max(peak, 0)
    place = tl.load(places + at, mask=b < blocks, other=size)
    winner = tl.min(tl.where(peak == top, place, size), 0)
    parts = tl.load(totals + at, mask=b < blocks, other=0.0)
    parts = tl.where(peak == _NEGATIVE_INFINITY, 0.0, parts * tl.exp(tl.div_rn(peak - top, scale)))
    return top, winner, tl.log(tl.sum(parts, 0))


@triton.jit
def _mass_kernel(
    logits, temperature, peaks, places, totals, table, mass, size, stride, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """31-bit masses of softmax(logits / temperature)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = _scale(temperature, row)
    top, _, log_total = _row_sums(peaks, places, totals, scale, row, blocks, size, BLOCKS)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < size, other=_NEGATIVE_INFINITY)
    w = integer_exp(tl.div_rn(x - top, scale) - log_total, table, 31)
    tl.store(mass + row * size + ids, tl.minimum(w, 2147483647).to(tl.int32), mask=ids < size)


@triton.jit
def _digit_kernel(
    logits, mass, prefix, masses, numbers, top_k, top_p, size, stride,
    SHIFT: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds each id that has the row's prefix to the mass and the number of its next BITS bits, as far as the row's cut depends on them."""
    row = tl.program_id(0).to(tl.int64)
    found = tl.load(prefix + row)
    by_mass, by_number = tl.load(top_p + row) < 1.0, tl.load(top_k + row) > 0
    if FIRST:
        found = tl.where(by_mass | by_number, 0, -1)
    if found >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        key = _order(tl.load(logits + row * stride + ids, mask=ids < size, other=0.0))
        counted = (ids < size) & ((key >> (SHIFT + BITS)) == found)
        digit = (key >> SHIFT) & ((1 << BITS) - 1)
        if by_mass:
            w = tl.load(mass + row * size + ids, mask=counted, other=0).to(tl.int64)
            tl.atomic_add(masses + (row << BITS) + digit, w, mask=counted & (w > 0), sem="relaxed")
        if by_number | (SHIFT == 0):  # the last digit's number tells how many ids are equal
            tl.atomic_add(numbers + (row << BITS) + digit, tl.full((BLOCK,), 1, tl.int32), mask=counted, sem="relaxed")


@triton.jit
def _pick_kernel(
    prefix, above_mass, above_number, masses, numbers, top_k, top_p, ties, size,
    BITS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Extends the row's prefix by the digit where the order of ids is cut: the largest with which mass or number passes its limit."""
    row = tl.program_id(0).to(tl.int64)
    p, k = tl.load(top_p + row), tl.load(top_k + row)
    limit = tl.where(p < 1.0, (p * 2147483648.0).to(tl.int64), _UNLIMITED)
    count = tl.where(k > 0, k, size)
    digit = tl.arange(0, 1 << BITS)
    m, n = tl.load(masses + (row << BITS) + digit), tl.load(numbers + (row << BITS) + digit)
    more_mass, more_number = tl.load(above_mass + row), tl.load(above_number + row)
    from_mass = more_mass + tl.sum(m, 0) - tl.cumsum(m, 0) + m
    from_number = more_number + tl.sum(n, 0) - tl.cumsum(n, 0) + n
    passed = (from_mass > limit) | (from_number >= count)
    best = tl.max(tl.where(passed, digit, -1), 0)
    found = tl.load(prefix + row)
    if FIRST:
        found = tl.where((p < 1.0) | (k > 0), found, -1)
    cut = (found >= 0) & (best >= 0)
    here = digit == best
    above = tl.sum(tl.where(here, from_mass - m, 0), 0)
    number = tl.sum(tl.where(here, from_number - n, 0), 0)
    tl.store(prefix + row, tl.where(cut, (found << BITS) + best, -1))
    tl.store(above_mass + row, above)
    tl.store(above_number + row, number)
    if LAST:
        equals = tl.sum(tl.where(here, n, 0), 0)
        each = tl.sum(tl.where(here, m, 0), 0) // tl.maximum(equals, 1)
        by_mass = tl.where(each > 0, (limit - above) // tl.maximum(each, 1) + 1, equals.to(tl.int64))
        kept = tl.minimum(tl.minimum(by_mass, equals.to(tl.int64)), (count - number).to(tl.int64))
        tl.store(ties + row, tl.where(cut, kept, 0).to(tl.int32))


@triton.jit
def _equal_kernel(logits, threshold, equals, size, stride, BLOCK: tl.constexpr):
    """Number of ids of one block whose key is the row's threshold."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    key = _order(tl.load(logits + row * stride + ids, mask=ids < size, other=0.0))
    same = (key == tl.load(threshold + row)) & (ids < size)
    tl.store(equals + row * tl.num_programs(1) + block, tl.sum(same.to(tl.int32), 0))


@triton.jit
def _kept(x, z, inside, threshold, ties, least, equals, row, block, blocks, BLOCKS: tl.constexpr):
    """Which ids of a block stay: above the threshold, or among the first `ties` of its equals; and not below `least`."""
    b = tl.arange(0, BLOCKS)
    earlier = tl.sum(tl.load(equals + row * blocks + b, mask=b < block, other=0), 0)
    key, bound = _order(x), tl.load(threshold + row)
    same = ((key == bound) & inside).to(tl.int32)
    keep = (key > bound) | ((same > 0) & (earlier + tl.cumsum(same, 0) <= tl.load(ties + row)))
    return keep & inside & (z >= tl.load(least + row))


@triton.jit
def _filtered_sum_kernel(
    logits, temperature, peaks, threshold, ties, least, equals, totals, size, stride, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Sum of exp((logit - highest) / temperature) over the ids of one block that stay."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(peaks + row * blocks + b, mask=b < blocks, other=_NEGATIVE_INFINITY), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    x = tl.load(logits + row * stride + ids, mask=inside, other=_NEGATIVE_INFINITY)
    z = tl.div_rn(x - top, _scale(temperature, row))
    keep = _kept(x, z, inside, threshold, ties, least, equals, row, block, blocks, BLOCKS)
    tl.store(totals + row * blocks + block, tl.sum(tl.where(keep, tl.exp(z), 0.0), 0))


@triton.jit
def _log_kernel(
    logits, temperature, peaks, places, totals, threshold, ties, least, equals, out, size, stride, blocks,
    FILTERED: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of one block. GREEDY: rows of temperature 0 give 0 at the lowest argmax and -inf elsewhere."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = _scale(temperature, row)
    top, winner, log_total = _row_sums(peaks, places, totals, scale, row, blocks, size, BLOCKS)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    x = tl.load(logits + row * stride + ids, mask=inside, other=_NEGATIVE_INFINITY)
    z = tl.div_rn(x - top, scale)
    if FILTERED:
        b = tl.arange(0, BLOCKS)
        log_total = tl.log(tl.sum(tl.load(totals + row * blocks + b, mask=b < blocks, other=0.0), 0))
        z = tl.where(_kept(x, z, inside, threshold, ties, least, equals, row, block, blocks, BLOCKS), z, _NEGATIVE_INFINITY)
    z = z - log_total
    if GREEDY:
        is_greedy = tl.load(temperature + row) == 0.0
        z = tl.where(is_greedy, tl.where(ids == winner, 0.0, _NEGATIVE_INFINITY), z)
    tl.store(out + row * size + ids, z, mask=inside)


class DistributionOps:
    """The op `log_probs`."""

    def log_probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        count, size = logits.shape
        device, blocks = logits.device, ceil_div(size, _BLOCK)
        grid, shape = (count, blocks), {"BLOCK": _BLOCK, "BLOCKS": power_of_two(blocks)}
        peaks, totals = torch.empty(2, count, blocks, device=device)
        places = torch.empty(count, blocks, dtype=torch.int32, device=device)
        out = torch.empty(count, size, device=device)
        cut: tuple[Tensor | None, ...] = (None, None, None, None)
        launch(_peak_kernel, grid, logits, rows.temperature, peaks, places, totals, size, logits.stride(0), warps=4, BLOCK=_BLOCK)
        if rows.any_filtered:
            threshold, ties = _cut(logits, rows, (peaks, places, totals))
            equals = torch.empty(count, blocks, dtype=torch.int32, device=device)
            cut = (threshold, ties, rows.min_p.log(), equals)
            launch(_equal_kernel, grid, logits, threshold, equals, size, logits.stride(0), warps=4, BLOCK=_BLOCK)
            launch(
                _filtered_sum_kernel, grid, logits, rows.temperature, peaks, *cut, totals, size, logits.stride(0), blocks, warps=4, **shape
            )
        launch(
            _log_kernel, grid, logits, rows.temperature, peaks, places, totals, *cut, out, size, logits.stride(0), blocks,
            warps=4, FILTERED=rows.any_filtered, GREEDY=rows.any_greedy, **shape,
        )  # fmt: skip
        return out


def _cut(logits: Tensor, rows: SamplingRows, sums: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(threshold int64 [Q]: key at which the order of ids is cut, -1 for no cut; ties int32 [Q]: equals of it that stay)."""
    count, size = logits.shape
    device, blocks, stride = logits.device, ceil_div(size, _BLOCK), logits.stride(0)
    mass = torch.empty(count, size, dtype=torch.int32, device=device)
    launch(
        _mass_kernel, (count, blocks), logits, rows.temperature, *sums, exp_table(device), mass, size, stride, blocks,
        warps=4, BLOCK=_BLOCK, BLOCKS=power_of_two(blocks),
    )  # fmt: skip
    padded = ceil_div(max(count, 1), 4) * 4  # 16 bytes: tensors that are aligned alike need no second compilation
    bins = sum(1 << bits for bits in _DIGITS)
    sizes = [padded, padded, padded, padded * bins, padded * bins // 2]
    prefix, above_mass, pair, masses, numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    above_number, ties = pair.view(torch.int32).split(padded)
    numbers = numbers.view(torch.int32)
    shift, begin = 32, 0
    for bits in _DIGITS:
        first, shift = shift == 32, shift - bits
        launch(
            _digit_kernel, (count, blocks), logits, mass, prefix, masses[begin:], numbers[begin:], rows.top_k, rows.top_p, size, stride,
            warps=4, SHIFT=shift, BITS=bits, FIRST=first, BLOCK=_BLOCK,
        )  # fmt: skip
        launch(
            _pick_kernel, (count,), prefix, above_mass, above_number, masses[begin:], numbers[begin:], rows.top_k, rows.top_p, ties, size,
            warps=4, BITS=bits, FIRST=first, LAST=shift == 0,
        )  # fmt: skip
        begin += count << bits
    return prefix, ties
