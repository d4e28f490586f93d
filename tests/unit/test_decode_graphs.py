"""Decode steps through graphs give what eager steps give, and sampling is captured where steps are plain."""

import logging

import numpy as np
import pytest
import torch
from engine_tools import engine, greedy, prompt, run, sampled

from deepinfer_core.engine.plan import StepKind, StepPlan
from deepinfer_core.engine.results import DeviceStep
from deepinfer_core.engine.sample_graphs import SampleGraphs, SampleKind
from deepinfer_core.engine.step_inputs import StepSize, completed, packed, unpacked
from deepinfer_core.sampling import RequestRows, SamplingParams, SamplingState, host_batch

PROMPTS = [prompt(n, seed=n) for n in (5, 21, 40)]
PARAMS = {
    "greedy": [greedy()] * 3,
    "drawn": [sampled(), sampled(temperature=0.7), greedy()],
    "filtered": [sampled(top_p=0.8), sampled(top_k=5), sampled(min_p=0.05)],
    "edited": [sampled(presence_penalty=0.5), greedy(logit_bias={5: 3.0}), sampled()],
    "alternatives": [greedy(top_logprobs=2), greedy(), sampled()],
}


@pytest.fixture(scope="module")
def engines():
    made = {eager: engine(**{"graphs.enforce_eager": eager, "async_scheduling": True}) for eager in (True, False)}
    yield made
    for llm in made.values():
        llm.close()


@pytest.mark.parametrize("kind", PARAMS)
def test_graphs_equal_eager_steps(engines, monkeypatch, kind):
    kinds = []
    original = SampleGraphs.run
    monkeypatch.setattr(SampleGraphs, "run", lambda self, host, size: kinds.append(SampleKind.of(host)) or original(self, host, size))
    eager, replayed = (run(engines[flag], PROMPTS, PARAMS[kind]) for flag in (True, False))
    assert replayed == eager
    expected = {"greedy": SampleKind.GREEDY, "drawn": SampleKind.DRAWN, "filtered": SampleKind.FILTERED}
    assert set(kinds) >= ({expected[kind]} if kind in expected else set())
    if kind == "alternatives":
        assert kinds == []


def test_sampling_that_cannot_be_captured_stays_eager_with_one_warning_each(monkeypatch, caplog):
    def refuse(self, tail):
        raise RuntimeError("no room")

    monkeypatch.setattr(SampleGraphs, "_run", refuse)
    with caplog.at_level(logging.WARNING, "deepinfer"):
        llm = engine(**{"graphs.enforce_eager": False, "max_num_seqs": 1})
    with llm:
        warnings = [record.getMessage() for record in caplog.records if "sample_graph_failed" in record.getMessage()]
        assert len(warnings) == len(SampleKind)
        assert "no room" in warnings[0]
        assert "action=eager" in warnings[0]
        assert len(run(llm, PROMPTS[:1], greedy())[0][2][0][0]) == 12


def plan(**arrays):
    """A plan of two decoding sequences with two drafts each; `arrays` replace its own."""
    ints = {"query_len": [3, 3], "start": [12, 20], "state_slot": [1, 2], "valid_start": [0, 4], "write_start": [0, 0], "keep_from": [0, 0]}
    ints |= {"remap": [1, -1], "pending_drafts": [2, 0], "num_drafts": [2, 2], "num_outputs": [1, 1], "logprob_start": [-1, -1]}
    fields = {name: np.array(value, np.int32) for name, value in ints.items()}
    fields |= {name: np.array([name != "is_prefill"] * 2) for name in ("is_prefill", "sample", "draft")}
    fields |= {
        "tokens": np.array([-1, -1, -1, 31, 32, 33], np.int32),
        "history": np.array([[7, 8, 9], [4, 5, 6]], np.int32),
        "block_table": np.array([[1, 2], [3, 0]], np.int32),
    }
    return StepPlan(step=1, kind=StepKind.DECODE, requests=("a", "b"), **(fields | arrays))


PREVIOUS = DeviceStep(
    tokens=torch.tensor([50, 60]),
    accepted=torch.tensor([0, 1]),
    verified=torch.tensor([[1, 2], [21, 22]]),
    drafts=torch.tensor([[51, 52], [61, -1]]),
    confidences=torch.zeros(2, 2),
)


def test_completion_takes_tokens_start_and_history_from_the_step_before():
    size = StepSize.of(plan())
    inputs, tokens = completed(unpacked(torch.from_numpy(packed(plan(), size)), size), PREVIOUS)
    assert tokens.tolist() == [60, 61, -1, 31, 32, 33]
    assert inputs.tokens.tolist() == [60, 61, 0, 31, 32, 33]
    assert inputs.start.tolist() == [11, 20]  # one of two pending drafts was accepted
    assert inputs.history.tolist() == [[8, 9, 21], [4, 5, 6]]
    assert inputs.block_table.tolist() == [[1, 2], [3, 0]]


def test_completion_follows_rows_that_the_device_spread():
    size = StepSize.of(plan())
    spread = torch.tensor([4, 2])
    inputs, tokens = completed(unpacked(torch.from_numpy(packed(plan(), size)), size), PREVIOUS, spread)
    assert inputs.query_len.tolist() == [4, 2]
    assert tokens.tolist() == [60, 61, -1, -1, 31, 32]


def test_padding_is_sequences_of_one_row_in_slot_zero():
    size = StepSize(sequences=8, rows=8, pages=3, history=3)
    inputs = unpacked(torch.from_numpy(packed(plan(), size)), size)
    assert inputs.query_len.tolist() == [3, 3, 1, 1, 0, 0, 0, 0]
    assert inputs.state_slot.tolist()[2:] == [0] * 6
    assert inputs.remap.tolist() == [1] + [-1] * 7
    assert inputs.block_table[2:].sum() == 0
    assert unpacked(torch.from_numpy(packed(None, size)), size).query_len.tolist() == [1] * 8


def test_a_plain_batch_is_padded_with_greedy_rows():
    state = SamplingState(SamplingParams(temperature=0.5, seed=3), 3)
    host = host_batch([RequestRows(state, 7)])
    padded = host.padded(3)
    assert host.is_plain
    assert padded.is_plain
    assert (padded.count, padded.greedy, SampleKind.of(padded)) == (3, 2, SampleKind.DRAWN)
    assert padded.arrays["floats"][:, 0].tolist() == host.arrays["floats"][:, 0].tolist()
    assert padded.arrays["floats"][0].tolist() == [0.5, 0.0, 0.0]
    edited = SamplingState(SamplingParams(logit_bias={3: 1.0}), 3)
    assert not host_batch([RequestRows(edited, 0)]).is_plain
