"""Random words, seeds and the integer exponential: known answers and exact properties."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from itertools import pairwise

import numpy as np
import pytest
import torch

from deepinfer_core.backend.canonical import (
    _draw_below_torch,
    draw_below,
    exp_table,
    integer_exp,
    philox_words,
    philox_words_numpy,
    philox_words_torch,
)
from deepinfer_core.sampling.random import SEED_MASK, draft_seed, random_words, request_seed, signed, uniform

# (seed, sampling position, case, word 0, word 1, uniform of word 0); the first one is the published vector of Philox4x32-10.
KNOWN = [
    (0, 0, 0, 0x6627E8D5, 0xE169C58D, 0.39904648),
    (42, 100, 0, 0x841351AF, 0x02DAC0ED, 0.5159198),
    (42, 100, 1, 0x334CBE60, 0xA10CE7F0, 0.20038977),
    (42, 100, 2, 0x2F6ACA86, 0x2155CCEE, 0.18522325),
    (42 + 1000000007, 101, 0, 0xD08AAB6D, 0xECF4BF39, 0.8146159),
    (2**64 - 1, 131072, 0, 0xCED2C878, 0xB08BFFEA, 0.80790377),
]


@pytest.mark.parametrize(("seed", "position", "case", "word0", "word1", "value"), KNOWN)
def test_philox_known_answers(seed: int, position: int, case: int, word0: int, word1: int, value: float) -> None:
    assert random_words(seed, position, case) == (word0, word1)
    assert uniform(word0) == pytest.approx(value, abs=6e-8)
    seeds, subsequence = torch.tensor([signed(seed)]), torch.tensor([3 * position + case])
    assert philox_words_torch(seeds, subsequence).tolist() == [[word0], [word1]]
    assert philox_words(seeds, subsequence).tolist() == [[word0], [word1]]


def test_philox_torch_equals_numpy_on_all_bit_patterns() -> None:
    rng = np.random.default_rng(1)
    seeds = rng.integers(-(2**63), 2**63 - 1, 4000, dtype=np.int64)
    subsequences = rng.integers(0, 2**50, 4000, dtype=np.int64)
    want = philox_words_numpy(seeds, subsequences)
    assert np.array_equal(philox_words_torch(torch.from_numpy(seeds), torch.from_numpy(subsequences)).numpy(), want)
    assert want.min() >= 0
    assert want.max() < 2**32


def test_draw_below_is_the_remainder_of_the_64_bit_word() -> None:
    rng = np.random.default_rng(2)
    words = rng.integers(0, 2**32, (2, 500), dtype=np.int64)
    totals = np.concatenate((rng.integers(1, 2**32, 496, dtype=np.int64), np.array([1, 2, 2**31, 2**32])))
    want = [(int(high) * 2**32 + int(low)) % int(total) for low, high, total in zip(words[0], words[1], totals, strict=True)]
    assert draw_below(torch.from_numpy(words), torch.from_numpy(totals)).tolist() == want
    assert _draw_below_torch(torch.from_numpy(words), torch.from_numpy(totals)).tolist() == want


def test_exp_table_is_the_rounded_exponential() -> None:
    getcontext().prec = 60
    table = exp_table(torch.device("cpu")).tolist()
    for i in [*range(0, 23553, 97), 23551, 23552]:
        mantissa, exponent = table[i] >> 6, table[i] & 63
        if not mantissa:
            assert (Decimal(-i) / 1024).exp() < Decimal(2) ** -33
            continue
        assert 2**30 <= mantissa <= 2**31
        assert mantissa == round((Decimal(-i) / 1024).exp() * 2 ** (31 + exponent))


@pytest.mark.parametrize("bits", [31, 33])
def test_integer_exp_follows_the_exponential(bits: int) -> None:
    values = torch.cat((torch.linspace(-24, 0, 20001), torch.tensor([-1e-9, -1e-6, -0.5, -1.0])))
    got = integer_exp(values, bits).tolist()
    for value, weight in zip(values.tolist(), got, strict=True):
        exact = math.exp(value) * 2**bits
        assert abs(weight - exact) <= exact * 1.3e-7 + 1
    assert all(a <= b for a, b in pairwise(got[:20001])), "not monotone"


def test_integer_exp_edges() -> None:
    values = torch.tensor([0.0, -0.0, 3.0, float("inf"), float("-inf"), float("nan"), -22.9, -100.0])
    assert integer_exp(values).tolist() == [2**31] * 4 + [0] * 4
    assert integer_exp(values, 33).tolist()[:4] == [2**33] * 4
    kept = values.clone()
    integer_exp(values)
    assert torch.equal(values.nan_to_num(7), kept.nan_to_num(7)), "the input was modified"
    assert int(integer_exp(values[0])) == int(integer_exp(values[0])) == 2**31, "a single number works on the shared table itself"


def test_integer_exp_reference_values() -> None:
    """Pinned, so that another implementation can check itself and this one cannot drift."""
    values = torch.tensor([-0.1, -0.6931472, -1.0, -2.5, -7.123456, -15.0, -20.0, -21.4])
    assert integer_exp(values).tolist() == PINNED_31
    assert integer_exp(values, 33).tolist() == PINNED_33


PINNED_31 = [1943123627, 1073741822, 790015084, 176276192, 1730821, 656, 4, 1]
PINNED_33 = [7772494511, 4294967288, 3160060338, 705104769, 6923285, 2627, 17, 4]


def test_request_seeds_are_distinct_and_reproducible() -> None:
    seeds = {request_seed(0, str(request), sample) for request in range(50) for sample in range(3)}
    seeds |= {request_seed(1, str(request)) for request in range(50)}
    assert len(seeds) == 200
    assert request_seed(0, "7", 1) == request_seed(0, "7", 1)
    assert all(0 <= seed <= SEED_MASK for seed in seeds)


def test_explicit_seed_is_used_as_given_and_only_its_samples_differ() -> None:
    assert request_seed(5, "a", 0, 42) == request_seed(6, "b", 0, 42) == 42
    assert request_seed(5, "a", 0, -1) == SEED_MASK
    assert request_seed(5, "a", 1, 42) == request_seed(6, "b", 1, 42) != 42


def test_seed_arithmetic_wraps_at_64_bits() -> None:
    assert signed(2**64 - 1) == -1
    assert signed(2**63) == -(2**63)
    assert draft_seed(2**64 - 1) == 1000000006
