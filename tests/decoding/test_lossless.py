"""Speculation changes no distribution: T-2 and T-3 of the model notes, through scheduler, runner and sampler together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from decoding_tools import VOCAB, Curve, ToyModel, engine, table, varlen_engine
from statistics_tools import assert_law

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.engine.verification import allocate_drafts

SIZE = 4  # ids that the made-up model knows
ALPHA = 0.9999500012499792


# ---------------------------------------------------------------------------------------------- exact: all drafts, all outcomes


def emitted_law(target: np.ndarray, draft: np.ndarray, drafts: tuple[int, ...], verified: int) -> dict[tuple[int, ...], float]:
    """Law of one step's tokens, given the values of `drafts` and how many of them are verified. alpha = 1."""
    law: dict[tuple[int, ...], float] = {}
    alive, prefix = 1.0, ()
    for x in drafts[:verified]:
        accept = min(1.0, target[x] / draft[x])
        residual = np.maximum(target - draft, 0)
        for token in np.flatnonzero(residual):
            law[*prefix, token] = law.get((*prefix, token), 0) + alive * (1 - accept) * residual[token] / residual.sum()
        alive, prefix = alive * accept, (*prefix, x)
    for token in range(len(target)):
        law[*prefix, token] = law.get((*prefix, token), 0) + alive * target[token]
    return law


def first_token_law(target, draft, plan) -> np.ndarray:
    """Law of the first token of two requests, joint [2 tokens, 2 tokens], with `plan(drafts of both) -> verified of both`."""
    joint = np.zeros((2, 2))
    for values in itertools.product(range(2), repeat=4):
        drafts = (values[:2], values[2:])
        weight = np.prod([draft[x] for x in values])
        laws = [emitted_law(target, draft, d, n) for d, n in zip(drafts, plan(drafts), strict=True)]
        for (a, p), (b, q) in itertools.product(laws[0].items(), laws[1].items()):
            joint[a[0], b[0]] += weight * p * q
    return joint


TARGET, DRAFT, SPS = np.array([0.7, 0.3]), np.array([0.5, 0.5]), (1.0, 0.5, 0.45)
SURE_AFTER = {0: 1.0, 1: 0.0}  # confidence of the second draft, given the first one's value


def survival(drafts: tuple[int, ...]) -> np.ndarray:
    return np.cumprod([np.minimum(TARGET, DRAFT).sum(), SURE_AFTER[drafts[0]]]).astype(np.float32)


def test_searching_the_budget_with_the_newest_values_would_bend_the_law():
    """The paper's counter-example: a global search over drafts whose later confidences depend on their values gives (.85, .15)."""

    def retrospective(drafts):
        expected = 1 + np.concatenate([[0], np.cumsum(survival(drafts[0]))])
        return int(np.argmax(expected * SPS)), 0

    assert first_token_law(TARGET, DRAFT, retrospective).sum(1) == pytest.approx([0.85, 0.15])


@pytest.mark.parametrize("budget", range(5))
def test_a_budget_fixed_beforehand_spread_by_the_newest_values_keeps_the_law(budget):
    """The planner's rule, by enumeration: whatever the budget, both requests' first tokens follow (.7, .3), independently."""

    def planned(drafts):
        return allocate_drafts(np.stack([survival(d) for d in drafts]), budget)

    joint = first_token_law(TARGET, DRAFT, planned)
    assert joint == pytest.approx(np.outer(TARGET, TARGET))


# ---------------------------------------------------------------------------------------------- statistics through the engine


def three_tokens(llm: LLM, count: int, params: SamplingParams) -> torch.Tensor:
    """First 3 output tokens [count, 3] of `count` requests, as 0 .. SIZE-1."""
    outputs = llm.generate([[3, 4]] * count, params, progress=False)
    return torch.tensor([output.token_ids[:3] for output in outputs]) - 3


def exact_law(target: torch.Tensor) -> torch.Tensor:
    """Of all SIZE^3 outputs."""
    step = torch.softmax(target.double(), -1)[:, 3 : 3 + SIZE]
    inner = step[3 : 3 + SIZE]
    return (step[4][:, None, None] * inner[:, :, None] * inner[None]).flatten()


def check(llm: LLM, target: torch.Tensor, count: int) -> None:
    got = three_tokens(llm, count, SamplingParams(temperature=1, max_tokens=5, ignore_eos=True))
    assert_law((got * torch.tensor([SIZE * SIZE, SIZE, 1])).sum(1), exact_law(target))


@pytest.mark.parametrize(("drafts", "asynchronous"), [(0, False), (3, False), (1, True), (3, True)])
def test_three_tokens_of_the_engine_follow_the_target(drafts, asynchronous):
    """3,000 requests: catches w^2 of 0.04 over 64 outputs."""
    target = table(SIZE, seed=1)
    llm = engine(max_num_seqs=128, max_model_len=16, num_draft_tokens=drafts, async_scheduling=asynchronous, num_pages=200)
    ToyModel(llm, target, table(SIZE, seed=2))
    check(llm, target, 3000)
    if drafts:
        assert 0.2 < llm.stats()["avg_nextn_accept_rate"] < 0.95
    llm.close()


@pytest.mark.parametrize(("asynchronous", "policy"), [(False, "mixed"), (True, "mixed"), (True, "alternate")])
def test_an_oscillating_budget_and_confidences_of_any_kind_bend_nothing(monkeypatch, asynchronous, policy):
    """T-3: the budget swings between nothing and everything; confidences depend on the drafts' own values."""
    target, draft = table(SIZE, seed=1), table(SIZE, seed=2)
    cost = Curve(0, 300, 7, 60, 1, 150, 20)
    options = {"max_num_seqs": 128, "max_model_len": 16, "num_draft_tokens": 3, "num_pages": 200}
    llm = varlen_engine(monkeypatch, cost, async_scheduling=asynchronous, policy=policy, **options)
    confidence = torch.zeros(VOCAB)
    confidence[3 : 3 + SIZE] = torch.tensor([0.99, 0.05, 0.7, 0.4])
    ToyModel(llm, target, draft, confidence)
    check(llm, target, 3000)
    assert len(cost.budgets) > 4
    stats = llm.stats()
    assert 1 < stats["avg_verified_len"] < 4
    llm.close()


def test_a_planner_that_looks_at_draft_values_would_be_caught(monkeypatch):
    """The power of the test above: verifying only drafts of one value is seen."""
    from deepinfer_core.engine import decode

    def peeking(survival, budget):
        return np.where(survival[:, -1] > 0.5, survival.shape[1], 0)

    monkeypatch.setattr(decode, "allocate_drafts", peeking)
    target = table(SIZE, seed=1)
    llm = varlen_engine(monkeypatch, Curve(300), max_num_seqs=128, max_model_len=16, num_draft_tokens=1, num_pages=200)
    model = ToyModel(llm, target, table(SIZE, seed=2), torch.full((VOCAB,), 0.9))
    draw, drafts = llm.engine.runner._draft, []

    def confidence_of_the_value(*args):
        draw(*args)
        outputs, sampled = args[-1], args[3]
        outputs.confidences[sampled] = (outputs.drafts[sampled] == 3).float()
        drafts.append(outputs)

    llm.engine.runner._draft = confidence_of_the_value
    with pytest.raises(AssertionError, match="chi-square"):
        check(llm, model.target, 5000)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hundred_thousand_requests_with_an_oscillating_budget(monkeypatch, asynchronous):
    """Catches w^2 of 0.0012 over 64 outputs: about 3.5 % in every probability."""
    target, draft = table(SIZE, seed=1), table(SIZE, seed=2)
    options = {"max_num_seqs": 256, "max_model_len": 16, "num_draft_tokens": 3, "num_pages": 400}
    llm = varlen_engine(monkeypatch, Curve(0, 600, 7, 60, 1, 150, 20), async_scheduling=asynchronous, **options)
    confidence = torch.zeros(VOCAB)
    confidence[3 : 3 + SIZE] = torch.tensor([0.99, 0.05, 0.7, 0.4])
    ToyModel(llm, target, draft, confidence)
    check(llm, target, 100_000)
    llm.close()
