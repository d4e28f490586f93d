"""Log-probabilities are those of the model's logits, in every mode of execution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_tools import engine, greedy, logprobs, prompt, sampled

import deepinfer_core
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.conformance.solo import SoloModel

CHECKPOINT = Path(deepinfer_core.__file__).parent / "data" / "small_v41"
IDS = prompt(40, seed=4)


@pytest.fixture(scope="module")
def solo():
    """A driver without scheduler, pages in one row."""
    return SoloModel(CHECKPOINT, ReferenceKernels(torch.device("cpu")), sequences=1, max_tokens=600)


def logits_of(solo, ids):
    solo.forget(0)
    return solo.logits(ids)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_paged_batched_decoding_equals_the_contiguous_reference(solo, length):
    ids = prompt(length, seed=6)
    solo.forget(0)
    expected = solo.greedy(ids, 5)
    with engine(async_scheduling=True, num_draft_tokens=3) as llm:
        outputs = llm.generate([ids, IDS, ids], greedy(max_tokens=5), progress=False)
    assert outputs[0].token_ids == outputs[2].token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafts", [0, 3])
def test_they_are_the_log_softmax_of_the_logits(solo, temperature, drafts):
    params = sampled(max_tokens=6, temperature=temperature, top_logprobs=5)
    with engine(num_draft_tokens=drafts, async_scheduling=True) as llm:
        out = llm.generate(IDS, params, progress=False)[0]
    rows = logits_of(solo, IDS + out.token_ids)[len(IDS) - 1 : -1]
    expected = torch.log_softmax(rows / (temperature or 1.0), -1)
    for row, item, token in zip(expected, out.logprobs, out.token_ids, strict=True):
        assert item.token_id == token
        assert item.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert list(item.top) == row.topk(5).indices.tolist()
        assert list(item.top.values()) == sorted(item.top.values(), reverse=True)
        if token in item.top:
            assert item.top[token] == item.logprob
    assert out.samples[0].cumulative_logprob == pytest.approx(sum(item.logprob for item in out.logprobs))


def test_raw_mode_reports_the_untouched_distribution(solo):
    params = sampled(max_tokens=4, temperature=0.3, top_k=2, logit_bias={9: 20.0})
    with engine(logprobs_mode="raw") as llm:
        out = llm.generate(IDS, params, progress=False)[0]
    expected = torch.log_softmax(logits_of(solo, IDS + out.token_ids)[len(IDS) - 1 : -1], -1)
    assert [item.logprob for item in out.logprobs] == pytest.approx(
        [float(row[t]) for row, t in zip(expected, out.token_ids, strict=True)], abs=1e-5
    )


@pytest.mark.parametrize("budget", [None, 1, 7, 39, 40])
def test_prompt_logprobs_across_chunks(solo, budget):
    options = {} if budget is None else {"chunked_prefill": True, "max_num_batched_tokens": budget}
    params = greedy(max_tokens=2, prompt_logprobs=True, top_logprobs=2)
    with engine(max_num_seqs=1, async_scheduling=True, **options) as llm:
        out = llm.generate(IDS, params, progress=False)[0]
    expected = torch.log_softmax(logits_of(solo, IDS), -1)
    assert [item.token_id for item in out.prompt_logprobs] == IDS[1:]
    for i, item in enumerate(out.prompt_logprobs):
        assert item.logprob == pytest.approx(float(expected[i, IDS[i + 1]]), abs=1e-5)
        assert list(item.top) == expected[i].topk(2).indices.tolist()


def test_prompt_logprobs_of_one_token_are_an_empty_list_and_unasked_ones_are_none():
    with engine() as llm:
        asked, unasked = llm.generate([[5], [5]], [greedy(max_tokens=1, prompt_logprobs=True), greedy(max_tokens=1)], progress=False)
    assert asked.prompt_logprobs == []
    assert unasked.prompt_logprobs is None


def test_prompt_logprobs_are_delivered_once_although_the_prefill_is_repeated():
    prompts, params = [prompt(n, seed=8) for n in (118, 121, 126)], greedy(max_tokens=22, prompt_logprobs=True)
    with engine() as llm:
        expected = llm.generate(prompts, params, progress=False)
    with engine(
        num_pages=4, chunked_prefill=True, max_num_batched_tokens=50, max_model_len=256, policy="mixed", async_scheduling=True
    ) as llm:
        outputs = llm.generate(prompts, params, progress=False)
    assert sum(output.samples[0].preemptions for output in outputs) > 0
    for got, wanted in zip(outputs, expected, strict=True):
        assert len(got.prompt_logprobs) == len(got.prompt_token_ids) - 1
        assert logprobs(got.prompt_logprobs) == logprobs(wanted.prompt_logprobs)


@pytest.mark.parametrize("length", [1, 40, 130])
def test_compute_logits_are_the_models(solo, length):
    ids = prompt(length, seed=12)
    with engine(chunked_prefill=True, max_num_batched_tokens=33, max_model_len=256) as llm:
        llm.generate(IDS, greedy(max_tokens=2), progress=False)
        found = llm.compute_logits([ids, ids[:1]])
        assert torch.equal(found[0], logits_of(solo, ids))
        assert torch.equal(found[1], found[0][:1])
        assert llm.generate(IDS, greedy(max_tokens=2), progress=False)[0].finish_reason == "length"
