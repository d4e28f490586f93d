"""Sampling after `log_probs`: canonical draws, verification of drafts, grammar masks. What decides is integer arithmetic.

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
from deepinfer_core.backend.types import RandomRows, Verification

_BLOCK = 4096
_WORDS = 64  # words of a token bitmask that one program handles
_MASK = tl.constexpr(0xFFFFFFFF)
_ALPHA = tl.constexpr(2147376276)  # floor(exp(-5e-5) * 2^31), DeepInfer 0.1.0's acceptance rule
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def integer_exp(log_value, table, BITS: tl.constexpr):
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
def _weights(target, draft, has_draft, ids, inside, table, VERIFY: tl.constexpr):
    """Integer weights of a block of ids: of the target, less the shrunk draft where there is one."""
    w = tl.where(inside, integer_exp(tl.load(target + ids, mask=inside, other=_NEGATIVE_INFINITY), table, 31), 0)
    if VERIFY:
        d = integer_exp(tl.load(draft + ids, mask=inside, other=_NEGATIVE_INFINITY), table, 31)
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
        passes = (word * 2 < integer_exp(ratio, table, 33)) & has_draft
        tl.store(accepted + row, tl.where(is_greedy, chosen_draft == best, passes))
        token = tl.where(is_greedy, best, token)
        mass = total.to(tl.float32) * 4.656612873077393e-10
        tl.store(estimate + row, tl.where(has_draft, tl.maximum(1.0 - mass, 0.0), 0.0))
    tl.store(tokens + row, token)


@triton.jit
def _bitmask_kernel(logits, bitmask, rows, size, stride, words, WORDS: tl.constexpr):
    """WORDS words of one row. Logits are written back by groups of 8 (32 bytes, what memory moves at once), and read only if a group is
    banned in part: writing parts of a group would make the memory read it anyway, less efficiently."""
    i = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    g, bit = tl.arange(0, 4), tl.arange(0, 8)
    word = tl.load(bitmask + i * words + w, mask=w < words, other=-1)
    group = (word[:, None] >> (8 * g)[None, :]) & 255
    ids = (w[:, None] * 32 + g[None, :] * 8)[:, :, None] + bit[None, None, :]
    at = logits + tl.load(rows + i) * stride + ids
    touched = (group != 255)[:, :, None] & (ids < size)
    kept = tl.load(at, mask=(group != 0)[:, :, None] & touched, other=_NEGATIVE_INFINITY)
    banned = ((group[:, :, None] >> bit[None, None, :]) & 1) == 0
    tl.store(at, tl.where(banned, _NEGATIVE_INFINITY, kept), mask=touched)


class SamplingOps:
    """Ops of the contract's group "sampling" that follow `log_probs`."""

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
        grid = (count, ceil_div(size, 32 * _WORDS))
        launch(_bitmask_kernel, grid, logits, bitmask.contiguous(), rows, size, logits.stride(0), words, warps=4, WORDS=_WORDS)
