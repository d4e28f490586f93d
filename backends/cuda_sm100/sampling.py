"""Sampling: the distribution of each row, canonical draws, verification of drafts. Everything that decides is integer arithmetic.

The integer definitions are those of `deepinfer_core.backend.canonical`; sums of integers do not depend on their order, so neither the
number of programs nor the batch can change a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_backends.cuda_sm100.launch import ceil_div, launch
from deepinfer_core.backend.canonical import exp_table
from deepinfer_core.backend.types import RandomRows, SamplingRows, Verification

_BLOCK = 4096
_UNLIMITED = tl.constexpr(1 << 62)
_MASK = tl.constexpr(0xFFFFFFFF)
_ALPHA = tl.constexpr(2147376276)  # floor(exp(-5e-5) * 2^31), DeepInfer 0.1.0's acceptance rule
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _integer_exp(log_value, table, BITS: tl.constexpr):
    """floor(exp(min(log_value, 0)) * 2^BITS) as int64; NaN gives 0. See canonical.integer_exp."""
    known = tl.where(log_value == log_value, log_value, -23.0)
    z = (tl.minimum(tl.maximum(known, -23.0), 0.0) * -16777216.0).to(tl.int32)
    packed = tl.load(table + (z >> 14))
    fine = z & 16383
    delta = ((fine * fine) >> 18) - (fine << 7)
    return ((packed >> 6) * (delta.to(tl.int64) + 2147483648)) >> ((packed & 63) + (62 - BITS))


@triton.jit
def _philox(seed, subsequence):
    """Words 0 and 1 of Philox4x32-10 as int64. A multiplier m is applied as m - 2^32, which keeps products inside int64."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0 = seed * 0
    c1 = c0
    c2, c3 = subsequence & _MASK, (subsequence >> 32) & _MASK
    for _ in range(10):
        product0, product1 = c0 * -766435501, c2 * -845247145  # 0xD2511F53 - 2^32, 0xCD9E8D57 - 2^32
        high0, high1 = (product0 >> 32) + c0, (product1 >> 32) + c2
        c0, c2 = high1 ^ c1 ^ key0, high0 ^ c3 ^ key1
        c1, c3 = product1 & _MASK, product0 & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return c0, c1


@triton.jit
def _draw_below(word0, word1, total):
    """(word1 * 2^32 + word0) mod total, 16 bits at a time."""
    remainder = word1 % total
    remainder = (remainder * 65536 + (word0 >> 16)) % total
    return (remainder * 65536 + (word0 & 65535)) % total


@triton.jit
def _order(x):
    """int64 keys in [0, 2^32) that order float32 values as the values do (-0 as 0)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.int64) & _MASK


@triton.jit
def _log_softmax_kernel(
    logits, temperature, threshold, ties, least, out, size, stride, FILTERED: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: log-probabilities of logits / temperature; FILTERED: of the ids above `threshold`, of its first `ties` equals, and not
    below `least`; GREEDY: rows of temperature 0 give 0 at the lowest argmax and -inf elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), _NEGATIVE_INFINITY, tl.float32)
    best_at = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, size, BLOCK):
        x = tl.load(logits + row * stride + first + lanes, mask=first + lanes < size, other=_NEGATIVE_INFINITY)
        best_at = tl.where(x > best, first + lanes, best_at)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    heat = tl.load(temperature + row)
    scale = tl.where(heat == 0.0, 1.0, heat)
    total = tl.zeros((BLOCK,), tl.float32)
    taken = 0
    for first in range(0, size, BLOCK):
        x = tl.load(logits + row * stride + first + lanes, mask=first + lanes < size, other=_NEGATIVE_INFINITY)
        z = tl.div_rn(x - top, scale)
        if FILTERED:
            keep, taken = _kept(x, z, tl.load(threshold + row), tl.load(ties + row), tl.load(least + row), taken)
            z = tl.where(keep, z, _NEGATIVE_INFINITY)
        total += tl.exp(z)
    log_total = tl.log(tl.sum(total, 0))
    winner = tl.min(tl.where(best == top, best_at, size), 0)
    taken = 0
    for first in range(0, size, BLOCK):
        inside = first + lanes < size
        x = tl.load(logits + row * stride + first + lanes, mask=inside, other=_NEGATIVE_INFINITY)
        z = tl.div_rn(x - top, scale)
        if FILTERED:
            keep, taken = _kept(x, z, tl.load(threshold + row), tl.load(ties + row), tl.load(least + row), taken)
            z = tl.where(keep, z, _NEGATIVE_INFINITY)
        z = z - log_total
        if GREEDY:
            z = tl.where(heat == 0.0, tl.where(first + lanes == winner, 0.0, _NEGATIVE_INFINITY), z)
        tl.store(out + row * size + first + lanes, z, mask=inside)


@triton.jit
def _kept(x, z, threshold, ties, least, taken):
    """(mask of the ids of a block that stay, equals of the threshold seen so far)."""
    key = _order(x)
    equal = (key == threshold).to(tl.int32)
    place = taken + tl.cumsum(equal, 0)
    keep = (key > threshold) | ((equal > 0) & (place <= ties))
    return keep & (z >= least), taken + tl.sum(equal, 0)


@triton.jit
def _threshold_kernel(
    logits, temperature, top_k, top_p, table, mass, threshold, ties, size, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: where the order of ids (by falling logit) is cut: the largest key whose ids and all above have more mass than top_p, or
    number top_k; and how many equals of it stay. Found bit by bit. -1 and 0: nothing is cut."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    p, k = tl.load(top_p + row), tl.load(top_k + row)
    limit = tl.where(p < 1.0, (p * 2147483648.0).to(tl.int64), _UNLIMITED)
    count = tl.where(k > 0, k, size)
    cut = (p < 1.0) | (k > 0)
    found = tl.full((), -1, tl.int64)
    kept_ties = tl.zeros((), tl.int32)
    if cut:
        _write_masses(logits + row * stride, tl.load(temperature + row), table, mass + row * size, size, lanes, BLOCK)
        tl.debug_barrier()
        found = tl.zeros((), tl.int64)
        for step in range(32):
            tried = found | (tl.full((), 1, tl.int64) << (31 - step))
            above, number = _mass_from(logits + row * stride, mass + row * size, tried, size, lanes, BLOCK)
            found = tl.where((above > limit) | (number >= count), tried, found)
        at_least, number_at_least = _mass_from(logits + row * stride, mass + row * size, found, size, lanes, BLOCK)
        above, number = _mass_from(logits + row * stride, mass + row * size, found + 1, size, lanes, BLOCK)
        equals = number_at_least - number
        each = (at_least - above) // tl.maximum(equals, 1)
        by_mass = tl.where(each > 0, (limit - above) // tl.maximum(each, 1) + 1, equals.to(tl.int64))
        kept_ties = tl.minimum(tl.minimum(by_mass, equals.to(tl.int64)), (count - number).to(tl.int64)).to(tl.int32)
    tl.store(threshold + row, found)
    tl.store(ties + row, kept_ties)


@triton.jit
def _write_masses(logits, heat, table, mass, size, lanes, BLOCK: tl.constexpr):
    """31-bit masses of softmax(logits / temperature)."""
    best = tl.full((BLOCK,), _NEGATIVE_INFINITY, tl.float32)
    for first in range(0, size, BLOCK):
        best = tl.maximum(best, tl.load(logits + first + lanes, mask=first + lanes < size, other=_NEGATIVE_INFINITY))
    top = tl.max(best, 0)
    scale = tl.where(heat == 0.0, 1.0, heat)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        x = tl.load(logits + first + lanes, mask=first + lanes < size, other=_NEGATIVE_INFINITY)
        total += tl.exp(tl.div_rn(x - top, scale))
    log_total = tl.log(tl.sum(total, 0))
    for first in range(0, size, BLOCK):
        x = tl.load(logits + first + lanes, mask=first + lanes < size, other=_NEGATIVE_INFINITY)
        w = _integer_exp(tl.div_rn(x - top, scale) - log_total, table, 31)
        tl.store(mass + first + lanes, tl.minimum(w, 2147483647).to(tl.int32), mask=first + lanes < size)


@triton.jit
def _mass_from(logits, mass, key, size, lanes, BLOCK: tl.constexpr):
    """(mass, number) of the ids whose key is at least `key`."""
    total = tl.zeros((BLOCK,), tl.int64)
    number = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, size, BLOCK):
        inside = first + lanes < size
        x = tl.load(logits + first + lanes, mask=inside, other=0.0)
        w = tl.load(mass + first + lanes, mask=inside, other=0)
        counted = inside & (_order(x) >= key)
        total += tl.where(counted, w, 0).to(tl.int64)
        number += counted.to(tl.int32)
    return tl.sum(total, 0), tl.sum(number, 0)


@triton.jit
def _weights(target, draft, has_draft, ids, inside, table, VERIFY: tl.constexpr):
    """Integer weights of a block of ids: of the target, less the shrunk draft where there is one."""
    w = tl.where(inside, _integer_exp(tl.load(target + ids, mask=inside, other=_NEGATIVE_INFINITY), table, 31), 0)
    if VERIFY:
        d = _integer_exp(tl.load(draft + ids, mask=inside, other=_NEGATIVE_INFINITY), table, 31)
        w = tl.maximum(w - tl.where(has_draft, (d * _ALPHA) >> 31, 0), 0)
    return w


@triton.jit
def _weigh_kernel(
    target, draft, drafts, table, sums, peaks, places, size, target_stride, draft_stride, VERIFY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one block of one row: the sum of the weights, the highest log-probability and its lowest id."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    has_draft = tl.load(drafts + row) >= 0 if VERIFY else False
    w = _weights(target + row * target_stride, draft + row * draft_stride, has_draft, ids, inside, table, VERIFY)
    at = row * tl.num_programs(1) + block
    tl.store(sums + at, tl.sum(w, 0))
    x = tl.load(target + row * target_stride + ids, mask=inside, other=_NEGATIVE_INFINITY)
    peak = tl.max(x, 0)
    tl.store(peaks + at, peak)
    tl.store(places + at, tl.min(tl.where((x == peak) & inside, ids, size), 0))


@triton.jit
def _draw_kernel(
    target, draft, drafts, seeds, positions, greedy, table, sums, peaks, places, accepted, tokens, estimate,
    size, target_stride, draft_stride, blocks, VERIFY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row: the draw, and with VERIFY whether the draft passes."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    real = b < blocks
    part = tl.load(sums + row * blocks + b, mask=real, other=0)
    peak = tl.load(peaks + row * blocks + b, mask=real, other=_NEGATIVE_INFINITY)
    place = tl.load(places + row * blocks + b, mask=real, other=size)
    best = tl.min(tl.where(peak == tl.max(peak, 0), place, size), 0).to(tl.int64)
    total = tl.sum(part, 0)
    seed, base = tl.load(seeds + row), tl.load(positions + row) * 3
    chosen_draft = tl.load(drafts + row) if VERIFY else tl.full((), -1, tl.int64)
    has_draft = chosen_draft >= 0
    word0, word1 = _philox(seed, base + has_draft.to(tl.int64))
    r = _draw_below(word0, word1, tl.maximum(total, 1))
    running = tl.cumsum(part, 0)
    block = tl.sum((running <= r).to(tl.int32), 0)
    block = tl.minimum(block, blocks - 1)
    before = tl.sum(tl.where(b < block, part, 0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    w = _weights(target + row * target_stride, draft + row * draft_stride, has_draft, ids, ids < size, table, VERIFY)
    drawn = (block * BLOCK + tl.sum((before + tl.cumsum(w, 0) <= r).to(tl.int32), 0)).to(tl.int64)
    token = tl.where(total > 0, drawn, best)
    if VERIFY:
        is_greedy = tl.load(greedy + row)
        x = tl.maximum(chosen_draft, 0)
        ratio = tl.load(target + row * target_stride + x) - tl.load(draft + row * draft_stride + x)
        word, _ = _philox(seed, base + 2)
        passes = (word * 2 < _integer_exp(ratio, table, 33)) & has_draft
        tl.store(accepted + row, tl.where(is_greedy, chosen_draft == best, passes))
        token = tl.where(is_greedy, best, token)
        mass = total.to(tl.float32) * 4.656612873077393e-10
        tl.store(estimate + row, tl.where(has_draft, tl.maximum(1.0 - mass, 0.0), 0.0))
    tl.store(tokens + row, token)


@triton.jit
def _bitmask_kernel(logits, bitmask, rows, size, stride, words, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + i * words + (ids >> 5), mask=ids < size, other=-1)
    banned = ((word >> (ids & 31)) & 1) == 0
    at = logits + tl.load(rows + i) * stride + ids
    tl.store(at, tl.full((BLOCK,), _NEGATIVE_INFINITY, tl.float32), mask=(ids < size) & banned)


class SamplingOps:
    """Ops of the contract's group "sampling"."""

    def log_probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        count, size = logits.shape
        out = torch.empty(count, size, dtype=torch.float32, device=logits.device)
        threshold = ties = least = None
        if rows.any_filtered:
            mass = torch.empty(count, size, dtype=torch.int32, device=logits.device)
            threshold = torch.empty(count, dtype=torch.int64, device=logits.device)
            ties = torch.empty(count, dtype=torch.int32, device=logits.device)
            least = rows.min_p.log()
            launch(
                _threshold_kernel, (count,), logits, rows.temperature, rows.top_k, rows.top_p, exp_table(logits.device), mass, threshold,
                ties, size, logits.stride(0), warps=8, BLOCK=_BLOCK,
            )  # fmt: skip
        launch(
            _log_softmax_kernel, (count,), logits, rows.temperature, threshold, ties, least, out, size, logits.stride(0),
            warps=8, FILTERED=rows.any_filtered, GREEDY=rows.any_greedy, BLOCK=_BLOCK,
        )  # fmt: skip
        return out

    def sample(self, log_probs: Tensor, random: RandomRows) -> Tensor:
        return self._drawn(log_probs, None, None, random, None).tokens

    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, random: RandomRows, greedy: Tensor) -> Verification:
        return self._drawn(target, draft, drafts, random, greedy)

    def _drawn(
        self, target: Tensor, draft: Tensor | None, drafts: Tensor | None, random: RandomRows, greedy: Tensor | None
    ) -> Verification:
        (count, size), device, verify = target.shape, target.device, draft is not None
        blocks = ceil_div(size, _BLOCK)
        sums = torch.empty(count, blocks, dtype=torch.int64, device=device)
        peaks = torch.empty(count, blocks, dtype=torch.float32, device=device)
        places = torch.empty(count, blocks, dtype=torch.int32, device=device)
        table, draft_stride = exp_table(device), 0 if draft is None else draft.stride(0)
        other = target if draft is None else draft
        launch(
            _weigh_kernel, (count, blocks), target, other, drafts, table, sums, peaks, places, size, target.stride(0), draft_stride,
            warps=8, VERIFY=verify, BLOCK=_BLOCK,
        )  # fmt: skip
        tokens = torch.empty(count, dtype=torch.int64, device=device)
        accepted = torch.empty(count, dtype=torch.bool, device=device)
        estimate = torch.empty(count, dtype=torch.float32, device=device)
        launch(
            _draw_kernel, (count,), target, other, drafts, random.seeds, random.positions, greedy, table, sums, peaks, places,
            accepted, tokens, estimate, size, target.stride(0), draft_stride, blocks,
            warps=8, VERIFY=verify, BLOCK=_BLOCK, BLOCKS=1 << (blocks - 1).bit_length(),
        )  # fmt: skip
        return Verification(accepted, tokens, estimate)

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        count, words = bitmask.shape
        size = logits.shape[1]
        grid = (count, ceil_div(size, 1024))
        launch(_bitmask_kernel, grid, logits, bitmask.contiguous(), rows, size, logits.stride(0), words, warps=4, BLOCK=1024)
