"""Confidence-scheduled verification where the device completes the plan: T-18 of the model notes, and requests that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding_tools import VOCAB, Curve, ToyModel, table, varlen_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core import SamplingParams
from deepinfer_core.engine.runner import Runner
from deepinfer_core.engine.verification import allocate_drafts

UPLOAD = SimpleNamespace(_upload=lambda array: torch.from_numpy(np.array(array)))
CONFIDENCE = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0]) | st.floats(0, 1, width=32)  # many ties


def spread(confidences: np.ndarray, remap: np.ndarray, is_prefill: np.ndarray, query_len: np.ndarray, budget: int) -> list[int]:
    """Rows of each sequence as the device computes them."""
    plan = SimpleNamespace(remap=remap, is_prefill=is_prefill, query_len=query_len, reallocate_drafts=budget)
    previous = SimpleNamespace(device=SimpleNamespace(confidences=torch.from_numpy(confidences)))
    runner: Any = UPLOAD
    return Runner._spread(runner, plan, previous, {})["query_len"].tolist()


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_device_spreads_the_budget_as_the_host_does(data):
    requests, drafts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    confidences = np.array(data.draw(st.lists(CONFIDENCE, min_size=requests * drafts, max_size=requests * drafts)), np.float32)
    confidences = confidences.reshape(requests, drafts)
    order = np.array(data.draw(st.permutations(range(requests))))
    budget = data.draw(st.integers(0, requests * drafts))
    nobody = np.zeros(requests, bool)
    got = spread(confidences, order, nobody, np.ones(requests), budget)
    assert got == (1 + allocate_drafts(np.cumprod(confidences[order], axis=1), budget)).tolist()
    assert sum(got) == requests + budget
    assert all(1 <= rows <= 1 + drafts for rows in got)


def test_new_and_prefilling_sequences_get_no_drafts_while_others_have_any():
    confidences = np.array([[0.5, 0.5], [0.9, 0.1]], np.float32)
    remap, is_prefill = np.array([-1, 1, 0, -1]), np.array([False, False, False, True])
    assert spread(confidences, remap, is_prefill, np.array([1, 3, 3, 7]), 3) == [1, 2, 3, 7]
    assert spread(confidences, remap, is_prefill, np.array([3, 3, 3, 7]), 6) == [3, 3, 3, 7]


def test_a_request_that_just_ended_gets_a_row_only_if_nothing_else_is_left():
    """Its confidences are zero on the device."""
    confidences = np.array([[0.0, 0.0], [1e-6, 1e-30]], np.float32)
    both, nobody = np.array([0, 1]), np.zeros(2, bool)
    assert spread(confidences, both, nobody, np.ones(2), 2) == [1, 3]
    assert spread(confidences, both, nobody, np.ones(2), 3) == [2, 3]


@pytest.mark.parametrize("policy", ["alternate", "mixed"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_that_come_and_go_keep_their_tokens(monkeypatch, policy, asynchronous):
    """Prefill steps interrupt decoding, so that requests whose drafts the host knows decode beside those that only the device knows."""
    target = table(40, seed=3)
    options = {"max_num_seqs": 6, "max_model_len": 80, "num_draft_tokens": 3, "num_pages": 20, "chunked_prefill": True}
    intervals = {"prefill_attempt_interval": 2, "prefill_any_attempt_interval": 3}
    cost = Curve(9, 2, 5, 12, 1, 18, 0)
    llm = varlen_engine(monkeypatch, cost, async_scheduling=asynchronous, policy=policy, **options, **intervals)
    draft = target + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
    ToyModel(llm, target, draft, torch.rand(VOCAB, generator=torch.Generator().manual_seed(5)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, size=rng.integers(1, 30)).tolist() for _ in range(40)]
    counts = rng.integers(1, 25, size=40).tolist()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    for prompt, count, output in zip(prompts, counts, llm.generate(prompts, params, progress=False), strict=True):
        chain, last = [], prompt[-1]
        for _ in range(count):
            last = int(target[last].argmax())
            chain.append(last)
        assert output.token_ids == chain
    stats = llm.stats()
    assert 0.1 < stats["avg_nextn_accept_rate"] < 0.95
    llm.close()


def test_a_request_tells_how_many_of_its_drafts_the_device_verified(monkeypatch):
    target = table(40, seed=3)
    options = {"max_num_seqs": 6, "max_model_len": 80, "num_draft_tokens": 3, "num_pages": 20}
    llm = varlen_engine(monkeypatch, Curve(9, 2, 5), async_scheduling=True, **options)
    ToyModel(llm, target, target, torch.rand(VOCAB, generator=torch.Generator().manual_seed(5)))
    commit, verified = llm.engine.scheduler.commit, {}

    def watch(plan, result):
        rows = plan.query_len if result.query_len is None else result.query_len
        updates = commit(plan, result)
        for s in np.flatnonzero(updates.live & ~plan.is_prefill):
            verified[plan.requests[s]] = verified.get(plan.requests[s], 0) + int(rows[s]) - 1
        return updates

    llm.engine.scheduler.commit = watch
    outputs = llm.generate([[3 + i] for i in range(6)], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), progress=False)
    llm.engine.settle()
    assert {output.request_id: output.samples[0].drafts_verified for output in outputs} == verified
    assert len(set(verified.values())) > 1
    assert sum(verified.values()) == llm.stats()["verified_tokens"]
    llm.close()
