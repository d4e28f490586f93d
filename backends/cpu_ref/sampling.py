"""The sampling group of the reference kernels: transform, canonical draw, verification of drafts, grammar masks.

Plain PyTorch on any device, without reading anything back. A row's result is bitwise independent of the other rows and of their number:
sums that decide something are integer sums, and the only float reduction is `log_softmax`, which works row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.backend.canonical import ACCEPT_BITS, WEIGHT_BITS, draw_below, integer_exp, philox_words
from deepinfer_core.backend.types import RandomRows, SamplingRows, Verification

CASES = 3  # random streams of one sampling position
FRESH, RESIDUAL, ACCEPT = range(CASES)

# alpha = exp(-5e-5) shrinks the draft's probabilities a little, so that the residual of a rejected row never vanishes numerically.
# Source: DeepInfer 0.1.0, acceptance rule. In fixed point: floor(alpha * 2^31).
ALPHA_FIXED = 2147376276

_UNLIMITED = 1 << 62


class SamplingOps:
    """Ops `log_probs`, `sample`, `verify` and `apply_token_bitmask` of the Kernels contract."""

    def _argmax(self, x: Tensor) -> Tensor:
        """int64 [Q]: the lowest index of each row's maximum. torch promises no order on devices other than the CPU."""
        return x.argmax(-1)

    def log_probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        greedy = rows.temperature == 0
        scale = torch.where(greedy, 1.0, rows.temperature) if rows.any_greedy else rows.temperature
        scaled = (logits - logits.amax(-1, keepdim=True)).div_(scale[:, None])  # [Q, V], largest 0
        if rows.any_filtered:
            scaled.masked_fill_(~_kept(logits, scaled, rows), -torch.inf)
        result = torch.log_softmax(scaled, dim=-1)
        if rows.any_greedy:
            one_hot = torch.full_like(result, -torch.inf).scatter_(1, self._argmax(logits)[:, None], 0.0)
            result = torch.where(greedy[:, None], one_hot, result)
        return result

    def sample(self, log_probs: Tensor, random: RandomRows) -> Tensor:
        words = philox_words(random.seeds, random.positions * CASES + FRESH)
        return _draw(integer_exp(log_probs), words, self._argmax(log_probs))

    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, random: RandomRows, greedy: Tensor) -> Verification:
        has_draft = drafts >= 0
        base = random.positions * CASES
        words = philox_words(random.seeds.repeat(2), torch.cat((base + ACCEPT, base + has_draft * RESIDUAL)))
        at = drafts.clamp(min=0)[:, None]
        threshold = integer_exp((target.gather(1, at) - draft.gather(1, at))[:, 0], ACCEPT_BITS)
        best = self._argmax(target)
        accepted = torch.where(greedy, drafts == best, (words[0, : len(drafts)] * 2 < threshold) & has_draft)

        shrunk = (integer_exp(draft) * ALPHA_FIXED).bitwise_right_shift_(WEIGHT_BITS)
        residual = (integer_exp(target) - shrunk.mul_(has_draft[:, None])).clamp_(min=0)
        tokens = torch.where(greedy, best, _draw(residual, words[:, len(drafts) :], best))
        mass = residual.sum(-1).to(torch.float32) * 2.0**-WEIGHT_BITS
        return Verification(accepted, tokens, (1 - mass).clamp_(min=0) * has_draft)

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]  # [n, V]
        logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)


def _kept(logits: Tensor, scaled: Tensor, rows: SamplingRows) -> Tensor:
    """bool [Q, V]: the ids that top-k, top-p and min-p keep. Ids are ordered by falling logit, ties by lower id; masses are 31-bit."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    mass = integer_exp(torch.log_softmax(scaled, dim=-1)).gather(1, order)
    before = mass.cumsum(-1).sub_(mass)
    limit = torch.where(rows.top_p < 1, (rows.top_p * 2.0**WEIGHT_BITS).to(torch.int64), _UNLIMITED)
    count = torch.where(rows.top_k > 0, rows.top_k, logits.shape[1])
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = (before <= limit[:, None]) & (rank < count[:, None])
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return kept.logical_and_(scaled >= rows.min_p.log()[:, None])


def _draw(weights: Tensor, words: Tensor, fallback: Tensor) -> Tensor:
    """The id in whose interval of the running sum of `weights` [Q, V] the draw falls; without any mass `fallback` [Q]."""
    running = weights.cumsum(-1)
    total = running[:, -1]
    chosen = torch.searchsorted(running, draw_below(words, total.clamp(min=1))[:, None], right=True)[:, 0]
    return torch.where(total > 0, chosen, fallback)
