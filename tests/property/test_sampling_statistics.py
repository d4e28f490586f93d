"""Statistics of the draw and of verification: chi-square tests with fixed seeds and stated power.

Every test draws n times and compares observed counts with exact expectations. The critical value is the 99.9 % quantile of chi-square
(Wilson-Hilferty), so a correct sampler fails one test in a thousand; the seeds are fixed, so these never do. Power: with n draws and d
degrees of freedom, a law that differs by w^2 = sum (p - q)^2 / p is caught with probability above 0.999 once n w^2 > 6.4 sqrt(2 d) + 50;
each test names the deviation that this is.
"""

from __future__ import annotations

import math

import pytest
import torch
from statistics_tools import assert_law
from torch import Tensor

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.types import RandomRows, SamplingRows
from deepinfer_core.sampling import RequestRows, Sampler, SamplingParams, SamplingState

KERNELS = ReferenceKernels(torch.device("cpu"))
ALPHA = math.exp(-5e-5)


def draws(log_probs: Tensor, count: int, seed: int, chunk: int = 1 << 22) -> Tensor:
    """`count` draws from one distribution, at consecutive positions of one seed."""
    step = max(chunk // len(log_probs), 1)
    parts = []
    for start in range(0, count, step):
        rows = min(step, count - start)
        random = RandomRows(torch.full((rows,), seed), torch.arange(start, start + rows))
        parts.append(KERNELS.sample(log_probs.expand(rows, -1), random))
    return torch.cat(parts)


def law(name: str, vocab: int) -> Tensor:
    """A distribution in float64."""
    ids = torch.arange(vocab, dtype=torch.float64)
    generator = torch.Generator().manual_seed(vocab)
    weights = {
        "uniform": torch.ones(vocab, dtype=torch.float64),
        "softmax-normal": (torch.randn(vocab, generator=generator, dtype=torch.float64) * 2).exp(),
        "zipf": 1 / (ids + 1),
        "geometric": 0.8**ids,
        "sparse": (torch.rand(vocab, generator=generator, dtype=torch.float64) < 0.2).double() + (ids == 3),
    }[name]
    return weights / weights.sum()


@pytest.mark.parametrize("name", ["uniform", "softmax-normal", "zipf", "geometric", "sparse"])
@pytest.mark.parametrize(("vocab", "count"), [(8, 40000), (257, 20000), (2048, 6000)])
def test_the_draw_follows_the_distribution(name: str, vocab: int, count: int) -> None:
    """Catches w^2 of 0.0019 at vocab 8 (about 4 % in every probability), of 0.01 at 257 and of 0.06 at 2048."""
    probabilities = law(name, vocab)
    assert_law(draws(probabilities.log().float(), count, seed=vocab), probabilities)


def test_the_draw_over_the_full_vocabulary() -> None:
    probabilities = law("softmax-normal", 129280)
    assert_law(draws(probabilities.log().float(), 600, seed=1), probabilities)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uniform", "softmax-normal", "zipf"])
def test_a_million_draws(name: str) -> None:
    """Catches w^2 of 7.4e-5: below 1 % in every probability."""
    probabilities = law(name, 8)
    assert_law(draws(probabilities.log().float(), 1_000_000, seed=5), probabilities)


def test_consecutive_positions_and_neighbouring_seeds_are_independent() -> None:
    """Pairs of draws of adjacent positions, and of adjacent seeds, are uniform over all 64 pairs."""
    flat = torch.full((8,), -math.log(8))
    for seeds in ((9, 9), (9, 10)):
        pairs = draws(flat, 30001, seeds[0])[:-1] * 8 + draws(flat, 30001, seeds[1])[1 if seeds[0] == seeds[1] else 0 :][:30000]
        assert_law(pairs, torch.full((64,), 1 / 64, dtype=torch.float64))


def settings(rows: int, temperature: float, top_k: int = -1, top_p: float = 1.0) -> SamplingRows:
    return SamplingRows(
        torch.full((rows,), temperature), torch.full((rows,), top_k, dtype=torch.int32), torch.full((rows,), top_p), torch.zeros(rows)
    )


def verified_law(target: Tensor, draft: Tensor) -> Tensor:
    """The exact law of the token that one verify row emits, in float64."""
    residual = (target - ALPHA * draft).clamp(min=0)
    accept = torch.minimum(draft, target)
    return accept + (1 - accept.sum()) * residual / residual.sum()


TINY = torch.tensor([1e-10, 1e-8, 1e-6, 1e-4, 0.3, 0.2, 0.25, 0.2499], dtype=torch.float64)
PAIRS = {
    "close": (law("zipf", 8), law("geometric", 8)),
    "draft far above target": (torch.tensor([0.9, 0.02, 0.08]).double(), torch.tensor([0.01, 0.98, 0.01]).double()),
    "draft far below target": (torch.tensor([0.98, 0.01, 0.01]).double(), torch.tensor([0.001, 0.5, 0.499]).double()),
    "disjoint": (torch.tensor([0.5, 0.5, 0, 0]).double(), torch.tensor([0, 0, 0.3, 0.7]).double()),
    "equal": (law("softmax-normal", 8), law("softmax-normal", 8)),
    "tiny target": (TINY / TINY.sum(), law("uniform", 8)),
    "tiny draft": (law("uniform", 8), TINY / TINY.sum()),
    "two tokens": (torch.tensor([0.7, 0.3]).double(), torch.tensor([0.5, 0.5]).double()),
}


def speculate(target: Tensor, draft: Tensor, count: int, seed: int) -> Tensor:
    """Tokens of `count` independent rows: a draft from the draft stream, verified against the target."""
    target_logs, draft_logs = target.log().float().expand(count, -1), draft.log().float().expand(count, -1)
    positions = torch.arange(count)
    drafts = KERNELS.sample(draft_logs, RandomRows(torch.full((count,), seed + 1000000007), positions + 1))
    greedy = torch.zeros(count, dtype=torch.bool)
    result = KERNELS.verify(target_logs, draft_logs, drafts, RandomRows(torch.full((count,), seed), positions), greedy)
    return torch.where(result.accepted, drafts, result.tokens)


@pytest.mark.parametrize("name", PAIRS)
def test_verification_has_the_law_of_the_target(name: str) -> None:
    """100,000 rows: catches w^2 of 0.00074 (3 % in every probability); the law itself is within 5e-5 of the target."""
    target, draft = PAIRS[name]
    exact = verified_law(target, draft)
    assert ((exact - target) <= 5.1e-5 * target + 1e-12).all(), "A <= (1 + eps) q"
    assert ((target - exact) <= 5.1e-5 * (1 + target)).all(), "A >= q - eps / (1 + eps)"
    tokens = speculate(target, draft, 100_000, seed=17)
    assert_law(tokens, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_verification_a_million_rows(name: str) -> None:
    target, draft = PAIRS[name]
    tokens = torch.cat([speculate(target, draft, 250_000, seed) for seed in (1, 2, 3, 4)])
    assert_law(tokens, verified_law(target, draft))
    frequency = torch.bincount(tokens, minlength=len(target)).double() / len(tokens)
    noise = 4 * (target * (1 - target) / len(tokens)).sqrt() + 5 / len(tokens)
    assert (frequency <= (1 + 5.1e-5) * target + noise).all()


def test_a_wrong_acceptance_rule_would_be_caught() -> None:
    """The power of the test above, shown: a law that is 3 % of the way towards the draft's is seen."""
    target, draft = PAIRS["two tokens"]
    biased = target + 0.03 * (draft - target)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(speculate(biased, draft, 100_000, seed=17), verified_law(target, draft))


def model(tokens: Tensor, vocab: int, kind: int) -> Tensor:
    """Logits [n, V] of a made-up model after `tokens` [n]: target is kind 0, drafter is kind 1."""
    generator = torch.Generator().manual_seed(99 + kind)
    return torch.randn(vocab + 1, vocab, generator=generator)[tokens] * 1.2


def generate(params: SamplingParams, count: int, drafts: int, vocab: int) -> Tensor:
    """First 3 tokens [count, 3] of `count` requests, through the sampler, with `drafts` drafts a step (0: no speculation)."""
    sampler = Sampler(KERNELS, vocab)
    states = [SamplingState(params, seed * 7919) for seed in range(count)]
    tokens, filled = torch.full((count, 12), vocab), torch.zeros(count, dtype=torch.int64)
    rows = torch.arange(count)
    pending = torch.full((count, drafts), -1)
    pending_logs = torch.zeros(count, drafts, vocab)
    while int(filled.min()) < 3:
        batch = sampler.prepare([RequestRows(s, 10 + int(f), drafts) for s, f in zip(states, filled, strict=True)])
        last = torch.where(filled > 0, tokens[rows, (filled - 1).clamp(min=0)], vocab)
        inputs = torch.cat((last[:, None], pending.clamp(min=0)), 1).flatten()
        checked = torch.cat((pending, torch.full((count, 1), -1)), 1).flatten()
        logs = torch.cat((pending_logs, torch.zeros(count, 1, vocab)), 1).flatten(0, 1)
        if drafts:
            result = sampler.verify(model(inputs, vocab, 0), batch, checked, logs)
            emitted, accepted, last = result.emitted.view(count, drafts + 1), result.accepted, result.tokens
        else:
            last = sampler.sample(model(inputs, vocab, 0), batch).tokens
            emitted, accepted = last[:, None], torch.zeros(count, dtype=torch.int64)
        for column in emitted.T:
            room = (column >= 0) & (filled < 12)
            tokens[rows[room], filled[room]] = column[room]
            filled += room
        for i in range(drafts):
            last, log_probs = sampler.draft(model(last, vocab, 1), batch, i + 1, accepted)
            pending[:, i], pending_logs[:, i] = last, log_probs
    return tokens[:, :3]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(top_k=3, temperature=1.5)])
def test_three_tokens_with_speculation_have_the_law_without(params: SamplingParams) -> None:
    """All 125 sequences of 3 tokens over 5 ids, 6,000 requests: catches w^2 of 0.025."""
    vocab, count = 5, 6000
    rows = settings(vocab + 1, params.temperature, params.top_k, params.top_p)
    step = KERNELS.log_probs(model(torch.arange(vocab + 1), vocab, 0), rows).double().exp()
    exact = (step[vocab][:, None, None] * step[:vocab, :, None] * step[None, :vocab, :]).flatten()
    for drafts in (0, 2):
        got = generate(params, count, drafts, vocab)
        assert_law(got[:, 0] * 25 + got[:, 1] * 5 + got[:, 2], exact)


def test_greedy_tokens_with_speculation_equal_those_without() -> None:
    plain = generate(SamplingParams(temperature=0), 3, 0, 5)
    for drafts in (1, 2, 5):
        assert torch.equal(generate(SamplingParams(temperature=0), 3, drafts, 5), plain)
