"""Captured draft passes give what eager ones give, at every bucket boundary and beside it."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from decoding_tools import VOCAB, engine

from deepinfer_core import SamplingParams
from deepinfer_core.engine.draft_graphs import DraftGraphs
from deepinfer_core.engine.sample_graphs import SampleKind
from deepinfer_core.model.drafter import DraftInputs
from deepinfer_core.sampling import RequestRows, SamplingState, host_batch

PARAMS = {
    SampleKind.GREEDY: [{"temperature": 0}],
    SampleKind.DRAWN: [{"temperature": 0.8}, {"temperature": 0}],
    SampleKind.FILTERED: [{"temperature": 0.9, "top_p": 0.7}, {"temperature": 1.2, "top_k": 9}, {"temperature": 0}],
}


@pytest.fixture(scope="module")
def llm():
    made = engine(max_num_seqs=5, num_draft_tokens=3, enforce_eager=False, batch_size_interval=2)
    made.generate([[5, 6, 7]] * 5, SamplingParams(max_tokens=4, ignore_eos=True), progress=False)  # windows with main keys
    yield made
    made.close()


def replayed(runner, host, inputs, accepted):
    """Drafts of the runner's graphs as numpy arrays, None if there is no graph; on the runtime's thread, where steps run."""

    def work():
        drafts = runner.draft_graphs.run(host, inputs, accepted)
        return {} if drafts is None else drafts._asdict()

    return runner.runtime.submit(work).wait() or None


@torch.inference_mode()
@pytest.mark.parametrize("kind", SampleKind)
@pytest.mark.parametrize("count", range(1, 6))
def test_replayed_passes_equal_eager_ones_bit_for_bit(llm, count, kind):
    """Buckets 1 2 4 5; positions, accepted drafts, seeds and distributions differ from sequence to sequence."""
    runner = llm.engine.runner
    variants = [PARAMS[kind][i % len(PARAMS[kind])] for i in range(count)]
    states = [SamplingState(SamplingParams(seed=i, **variant), 3) for i, variant in enumerate(variants)]
    host = host_batch([RequestRows(state, 3 + i) for i, state in enumerate(states)])
    assert SampleKind.of(host) is kind
    lanes = torch.arange(count)
    inputs = DraftInputs(20 + lanes, 2 + lanes % 2, 1 + lanes, torch.zeros_like(lanes))
    got = replayed(runner, host, inputs, lanes % 3)
    assert got is not None
    kept = None if kind is SampleKind.GREEDY else runner._draft_log_probs[1 : 1 + count].clone()
    want = runner._drafted(inputs, runner.sampler.prepared(host), lanes % 3)
    assert np.array_equal(got["ids"], want.ids)
    assert np.array_equal(got["confidences"], want.confidences)
    if kept is not None:
        assert torch.equal(kept, runner._draft_log_probs[1 : 1 + count])


@torch.inference_mode()
def test_padding_touches_slot_zero_only(llm):
    runner = llm.engine.runner
    state = SamplingState(SamplingParams(temperature=1.0), 3)
    one = torch.ones(3, dtype=torch.int64)
    runner._draft_log_probs[4:].fill_(7.0)
    replayed(runner, host_batch([RequestRows(state, 3)] * 3), DraftInputs(one, one, torch.arange(1, 4), 0 * one), 0 * one)
    assert bool((runner._draft_log_probs[4:] == 7.0).all())
    assert not bool((runner._draft_log_probs[1:4] == 7.0).any())


def test_larger_passes_run_eagerly(llm):
    state = SamplingState(SamplingParams(temperature=0), 3)
    assert llm.engine.runner.draft_graphs.sizes == [1, 2, 4, 5]
    none = torch.zeros(6, dtype=torch.int64)
    assert replayed(llm.engine.runner, host_batch([RequestRows(state, 3)] * 6), DraftInputs(none, none, none, none), none) is None


@pytest.mark.parametrize("drafts", [2, 5])
def test_engine_with_draft_graphs_equals_the_eager_engine(monkeypatch, drafts):
    """Greedy, drawn, filtered and edited requests that join and leave; tokens and log-probabilities bit for bit."""
    results, used = [], []
    original = DraftGraphs.run

    def recording(self, host, inputs, accepted):
        drafted = original(self, host, inputs, accepted)
        used.append(drafted is not None)
        return drafted

    monkeypatch.setattr(DraftGraphs, "run", recording)
    for eager in (True, False):
        llm = engine(max_num_seqs=4, num_draft_tokens=drafts, enforce_eager=eager, batch_size_interval=2, async_scheduling=True)
        prompts = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 20, 7, 12, 5)]
        kinds = [{"temperature": 0}, {"temperature": 1}, {"top_p": 0.8}, {"logit_bias": {9: 2.0}}, {"temperature": 0, "top_logprobs": 2}]
        params = [SamplingParams(seq_seed=i, max_tokens=3 + i, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]
        outputs = llm.generate(prompts, params, progress=False)
        results.append([(output.token_ids, [item.logprob for item in output.logprobs]) for output in outputs])
        llm.close()
    assert results[0] == results[1]
    assert used
    assert all(used)


def test_a_pass_that_cannot_be_captured_stays_eager_with_one_warning_each(monkeypatch, caplog):
    monkeypatch.setattr(DraftGraphs, "_run", lambda self, bucket: dataclasses.replace(bucket, nothing=1))
    with caplog.at_level(logging.WARNING, "deepinfer"):
        llm = engine(max_num_seqs=1, num_draft_tokens=1, enforce_eager=False)
    with llm:
        warnings = [record.getMessage() for record in caplog.records if "draft_graph_failed" in record.getMessage()]
        assert len(warnings) == len(SampleKind)
        assert "sequences=1" in warnings[0]
        assert "action=eager" in warnings[0]
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len(llm.generate([[3, 4]], params, progress=False)[0].token_ids) == 4
