"""The reference sampling ops against their definition: transform edges, the canonical draw, verification, masks, row invariance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.sampling import ALPHA_FIXED, SamplingOps
from deepinfer_core.backend.canonical import integer_exp
from deepinfer_core.backend.types import RandomRows, SamplingRows
from deepinfer_core.sampling.random import random_words

OPS = SamplingOps()


def rows(count: int, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> SamplingRows:
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
    )


def probabilities(weights: list[float]) -> Tensor:
    """Logits [1, V] of the distribution proportional to `weights`."""
    return torch.tensor([weights], dtype=torch.float64).log().float()


def kept_ids(logits: Tensor, **settings: float) -> list[int]:
    result = OPS.log_probs(logits, rows(1, **settings))  # type: ignore[arg-type]
    assert result.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    return [i for i, value in enumerate(result[0].tolist()) if value > -math.inf]


def test_plain_temperature_is_the_softmax() -> None:
    logits = torch.randn(5, 33) * 4
    got = OPS.log_probs(logits, rows(5, temperature=0.7))
    want = torch.log_softmax(logits.double() / 0.7, -1)
    assert (got - want).abs().max() < 1e-5


def test_top_p_keeps_the_shortest_prefix_with_more_mass_than_top_p() -> None:
    logits = probabilities([0.5, 0.25, 0.125, 0.125])
    assert kept_ids(logits, top_p=0.4) == [0]
    assert kept_ids(logits, top_p=0.5) == [0, 1], "mass equal to top_p is not enough: strictly greater"
    assert kept_ids(logits, top_p=0.6) == [0, 1]
    assert kept_ids(logits, top_p=0.76) == [0, 1, 2]
    assert kept_ids(logits, top_p=1.0) == [0, 1, 2, 3]
    assert kept_ids(logits, top_p=1e-30) == [0]


def test_ties_across_the_cut_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 8)
    assert kept_ids(logits, top_k=3) == [0, 1, 2]
    assert kept_ids(logits, top_p=0.3) == [0, 1, 2]
    signed_zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert kept_ids(signed_zeros, top_k=2) == [0, 1], "+0 and -0 tie"


def test_top_k_edges() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    assert kept_ids(logits, top_k=1) == [1]
    assert kept_ids(logits, top_k=2) == [1, 3]
    assert kept_ids(logits, top_k=4) == kept_ids(logits, top_k=1000) == kept_ids(logits) == [0, 1, 2, 3]


def test_top_p_is_measured_before_top_k_and_the_shorter_prefix_wins() -> None:
    logits = probabilities([0.4, 0.3, 0.2, 0.1])
    assert kept_ids(logits, top_p=0.65, top_k=3) == [0, 1]
    assert kept_ids(logits, top_p=0.65, top_k=1) == [0]
    # 0.4 / 0.7 alone would exceed 0.5 if top-p were measured after top-k.
    assert kept_ids(logits, top_p=0.5, top_k=2) == [0, 1]


def test_min_p_drops_ids_far_below_the_best() -> None:
    logits = probabilities([0.5, 0.25, 0.2, 0.05])
    assert kept_ids(logits, min_p=0.3) == [0, 1, 2]
    assert kept_ids(logits, min_p=0.45) == [0, 1]
    assert kept_ids(logits, min_p=1.0) == [0]
    assert kept_ids(logits, min_p=0.3, top_p=0.6) == [0, 1]


def test_masked_ids_stay_masked_and_one_id_is_always_kept() -> None:
    logits = torch.tensor([[-math.inf, 2.0, -math.inf, 1.0]])
    assert kept_ids(logits, top_k=3) == [1, 3]
    assert kept_ids(logits, top_p=1e-9, min_p=1.0) == [1]


def test_temperature_zero_is_one_hot_at_the_lowest_argmax() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [0.0, -1.0, 0.0, -2.0]])
    got = OPS.log_probs(logits, rows(2, temperature=0.0))
    assert got.tolist() == [[-math.inf, 0.0, -math.inf, -math.inf], [0.0, -math.inf, -math.inf, -math.inf]]


def test_tiny_temperature_does_not_lose_precision() -> None:
    logits = torch.tensor([[1000.0, 1000.0001, 999.0]])
    got = OPS.log_probs(logits, rows(1, temperature=1e-5))
    want = torch.log_softmax((logits.double() - logits.max().double()) / 1e-5, -1)
    assert (got - want)[0, :2].abs().max() < 1e-3


def test_promises_of_the_host_change_no_bit() -> None:
    logits = torch.randn(7, 100) * 3
    settings = rows(7, temperature=0.6)
    full = OPS.log_probs(logits, settings)
    assert torch.equal(full, OPS.log_probs(logits, settings._replace(any_filtered=False, any_greedy=False)))


def mixed_rows(count: int) -> SamplingRows:
    return SamplingRows(
        torch.tensor([0.0, 0.3, 1.0, 1.7])[torch.arange(count) % 4],
        torch.tensor([-1, 5, 40], dtype=torch.int32)[torch.arange(count) % 3],
        torch.tensor([1.0, 0.9, 0.5, 0.99, 1.0])[torch.arange(count) % 5],
        torch.tensor([0.0, 0.0, 0.05])[torch.arange(count) % 3],
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [8, 257, 5000])
def test_rows_are_bitwise_independent_of_the_batch(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(vocab)
        logits = torch.randn(37, vocab, generator=generator) * 3
        draft_logits = torch.randn(37, vocab, generator=generator) * 3
        drafts = torch.randint(-1, vocab, (37,), generator=generator)
        settings = mixed_rows(37)
        random = RandomRows(torch.arange(37) * 7919 - 5, torch.arange(37) + 100)

        def run(pick: Tensor) -> list[Tensor]:
            part = SamplingRows(*(x[pick] for x in settings[:4]))
            keys = RandomRows(random.seeds[pick], random.positions[pick])
            target, draft = OPS.log_probs(logits[pick], part), OPS.log_probs(draft_logits[pick], part)
            return [target, OPS.sample(target, keys), *OPS.verify(target, draft, drafts[pick], keys, part.temperature == 0)]

        whole = run(torch.arange(37))
        for pick in [torch.tensor([i]) for i in range(37)] + [torch.randperm(37, generator=generator), torch.arange(5, 23)]:
            assert all(torch.equal(got, want[pick]) for got, want in zip(run(pick), whole, strict=True))
    finally:
        torch.set_num_threads(before)


def drawn(weights: list[int], words: tuple[int, int]) -> int:
    """The canonical draw in Python integers."""
    position = (words[1] << 32 | words[0]) % sum(weights)
    for index, weight in enumerate(weights):
        if position < weight:
            return index
        position -= weight
    raise AssertionError


def test_sample_is_the_canonical_draw() -> None:
    log_probs = OPS.log_probs(torch.randn(200, 50) * 3, rows(200, top_p=0.95))
    random = RandomRows(torch.arange(200), torch.arange(200) * 3 + 1)
    got = OPS.sample(log_probs, random).tolist()
    weights = integer_exp(log_probs).tolist()
    assert got == [drawn(weights[i], random_words(i, 3 * i + 1, 0)) for i in range(200)]


def test_ids_without_weight_are_never_drawn_and_no_weight_at_all_gives_the_argmax() -> None:
    log_probs = torch.tensor([[-math.inf, -0.7, -30.0, -0.7, -math.inf]]).repeat(500, 1)
    got = OPS.sample(log_probs, RandomRows(torch.zeros(500, dtype=torch.int64), torch.arange(500)))
    assert set(got.tolist()) == {1, 3}
    empty = torch.tensor([[-40.0, -30.0, -30.0, -math.inf]])
    assert OPS.sample(empty, RandomRows(torch.tensor([1]), torch.tensor([1]))).tolist() == [1]


def test_verify_is_its_definition() -> None:
    count, vocab = 300, 12
    target = torch.log_softmax(torch.randn(count, vocab) * 2, -1)
    draft = torch.log_softmax(torch.randn(count, vocab) * 2, -1)
    drafts = torch.randint(-1, vocab, (count,))
    random = RandomRows(torch.arange(count) + 9, torch.arange(count) * 11)
    got = OPS.verify(target, draft, drafts, random, torch.zeros(count, dtype=torch.bool))
    target_weights, draft_weights = integer_exp(target).tolist(), integer_exp(draft).tolist()
    for i, x in enumerate(drafts.tolist()):
        if x < 0:
            assert got.tokens[i] == drawn(target_weights[i], random_words(i + 9, 11 * i, 0))
            assert got.estimate[i] == 0
            continue
        word = random_words(i + 9, 11 * i, 2)[0]
        threshold = int(integer_exp(target[i, x] - draft[i, x], 33))
        assert bool(got.accepted[i]) == (2 * word + 1 <= threshold)
        residual = [max(t - (d * ALPHA_FIXED >> 31), 0) for t, d in zip(target_weights[i], draft_weights[i], strict=True)]
        assert got.tokens[i] == drawn(residual, random_words(i + 9, 11 * i, 1))
        exact = max(
            1 - sum(max(t - math.exp(-5e-5) * d, 0) for t, d in zip(target[i].exp().tolist(), draft[i].exp().tolist(), strict=True)), 0
        )
        assert float(got.estimate[i]) == pytest.approx(exact, abs=1e-5)


def test_verify_extremes() -> None:
    sure, other = torch.tensor([[0.0, -math.inf]]), torch.tensor([[-math.inf, 0.0]])
    keys, greedy = RandomRows(torch.tensor([3]), torch.tensor([5])), torch.tensor([False])
    equal = OPS.verify(sure, sure, torch.tensor([0]), keys, greedy)
    assert equal.accepted.tolist() == [True]
    assert float(equal.estimate[0]) == pytest.approx(math.exp(-5e-5), abs=1e-6)
    disjoint = OPS.verify(sure, other, torch.tensor([1]), keys, greedy)
    assert disjoint.accepted.tolist() == [False]
    assert disjoint.tokens.tolist() == [0]
    assert float(disjoint.estimate[0]) == 0


def test_verify_without_residual_mass_falls_back_to_the_argmax() -> None:
    target = torch.tensor([[-40.0, -35.0, -35.0]])
    got = OPS.verify(
        target, torch.tensor([[-0.1, -3.0, -3.0]]), torch.tensor([0]), RandomRows(*torch.ones(2, 1).long()), torch.tensor([False])
    )
    assert got.tokens.tolist() == [1]


def test_greedy_rows_accept_the_argmax_only() -> None:
    target = OPS.log_probs(torch.tensor([[1.0, 4.0, 4.0]]).repeat(4, 1), rows(4, temperature=0.0))
    drafts = torch.tensor([0, 1, 2, -1])
    keys = RandomRows(torch.zeros(4, dtype=torch.int64), torch.arange(4))
    got = OPS.verify(target, torch.full((4, 3), -1.1), drafts, keys, torch.ones(4, dtype=torch.bool))
    assert got.accepted.tolist() == [False, True, False, False]
    assert got.tokens.tolist() == [1, 1, 1, 1]


def test_garbage_in_the_draft_of_a_row_without_one_is_ignored() -> None:
    target = torch.log_softmax(torch.randn(3, 9), -1)
    keys = RandomRows(torch.arange(3), torch.arange(3))
    none, greedy = torch.full((3,), -1), torch.zeros(3, dtype=torch.bool)
    clean = OPS.verify(target, torch.zeros(3, 9), none, keys, greedy)
    dirty = OPS.verify(target, torch.full((3, 9), math.nan), none, keys, greedy)
    assert torch.equal(clean.tokens, dirty.tokens)
    assert torch.equal(clean.tokens, OPS.sample(target, keys))
    assert dirty.estimate.tolist() == [0, 0, 0]


@pytest.mark.parametrize("vocab", [31, 32, 70])
def test_token_bitmask(vocab: int) -> None:
    allowed = torch.rand(2, vocab) < 0.5
    words = torch.zeros(2, (vocab + 31) // 32, dtype=torch.int64)
    for row in range(2):
        for token in range(vocab):
            words[row, token // 32] |= int(allowed[row, token]) << (token % 32)
    bitmask = words.to(torch.int32)  # bit 31 wraps into the sign
    logits = torch.randn(4, vocab)
    want = logits.clone()
    want[[3, 1]] = want[[3, 1]].masked_fill(~allowed, -math.inf)
    OPS.apply_token_bitmask(logits, bitmask, torch.tensor([3, 1]))
    assert torch.equal(logits, want)


def test_zero_rows() -> None:
    empty = torch.zeros(0, 16)
    keys = RandomRows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert OPS.log_probs(empty, rows(0)).shape == (0, 16)
    assert OPS.sample(empty, keys).shape == (0,)
    got = OPS.verify(empty, empty, torch.zeros(0, dtype=torch.int64), keys, torch.zeros(0, dtype=torch.bool))
    assert [x.shape for x in got] == [(0,)] * 3
    OPS.apply_token_bitmask(empty, torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))


def test_rows_with_nan_still_give_an_id_in_range() -> None:
    logits = torch.tensor([[math.nan] * 4, [1.0, math.nan, 0.0, 2.0], [-math.inf] * 4])
    log_probs = OPS.log_probs(logits, rows(3, top_p=0.9))
    got = OPS.sample(log_probs, RandomRows(torch.arange(3), torch.arange(3)))
    assert all(0 <= x < 4 for x in got.tolist())
