"""Decode graphs replay what eager execution computes (T-5 of the model notes): at every bucket boundary and beside it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding_tools import VOCAB, engine

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cpu_ref.runtime import CpuRuntime
from deepinfer_core import SamplingParams
from deepinfer_core.checkpoint.geometries import shipped_checkpoint
from deepinfer_core.conformance.solo import SoloModel
from deepinfer_core.engine.graphs import DecodeGraphs, GraphOptions, bucket_sizes
from deepinfer_core.errors import EngineError


@pytest.mark.parametrize(
    ("largest", "interval", "sizes"),
    [(6, 8, [1, 2, 4, 6]), (24, 8, [1, 2, 4, 8, 16, 24]), (1, 8, [1]), (9, 4, [1, 2, 4, 8, 9]), (8, 8, [1, 2, 4, 8])],
)
def test_bucket_sizes(largest, interval, sizes):
    assert bucket_sizes(largest, interval) == sizes


def test_bucket_counts_of_the_release():
    assert len(bucket_sizes(1536, 8)) == 195
    assert len(bucket_sizes(256, 8)) == 35


@pytest.fixture(scope="module")
def twins():
    """Two models with the same caches, one for graphs, one for eager execution; and the graphs of the first."""
    graphed, eager = (SoloModel(shipped_checkpoint(), ReferenceKernels(torch.device("cpu")), 4, 160, draft_tokens=2) for _ in range(2))
    graphs = DecodeGraphs(CpuRuntime(inline=True), lambda inputs: forward(graphed, inputs), [1, 2, 4, 8, 9], GraphOptions(3, 3, 4, 5))
    assert graphs.capture() == []
    prompts = {i: torch.randint(3, 700, (n,), generator=torch.Generator().manual_seed(i)).tolist() for i, n in enumerate((5, 126, 1, 9))}
    for model in (graphed, eager):
        model.step(prompts)
    return graphed, eager, graphs


@pytest.mark.parametrize("rows", range(1, 10))
def test_replayed_steps_equal_eager_ones_bit_for_bit(twins, rows):
    """`rows` rows over 1 to 4 sequences; padding touches neither the rows nor any cache byte outside page 0 and slot 0."""
    graphed, eager, graphs = twins
    extra = max(rows - 4, 0)
    new = {i: list(range(3 + rows, 4 + rows + extra * (i == 1))) for i in range(min(rows, 4))}
    got = graphs.run(plan_of(graphed.inputs(new)), graphs.size_for(rows) or 0).forward
    expected = forward(eager, eager.inputs(new))
    assert torch.equal(got.hidden[:rows], expected.hidden)
    assert torch.equal(got.features[:rows], expected.features)
    ours, theirs = graphed.loaded.caches, eager.loaded.caches
    assert torch.equal(ours.pages[1:], theirs.pages[1:])
    assert torch.equal(ours.slots[1:], theirs.slots[1:])


def plan_of(inputs):
    """A plan of which the host knows everything."""
    count = len(inputs.query_len)
    arrays = {name: getattr(inputs, name).numpy() for name in ("query_len", "start", "state_slot", "valid_start", "write_start")}
    arrays |= {name: getattr(inputs, name).numpy() for name in ("history", "tokens", "block_table")}
    nothing = np.zeros(count, np.int64)
    return SimpleNamespace(requests=("r",) * count, keep_from=nothing, remap=nothing - 1, pending_drafts=nothing, **arrays)


@torch.inference_mode()
def forward(solo, inputs):
    batch = solo.loaded.batch(inputs)
    result = solo.loaded.model.forward(batch, solo.loaded.caches)
    solo.loaded.drafter.feed(result.features, batch.rows, solo.loaded.caches)
    return result


def test_larger_steps_and_wider_tables_are_not_squeezed_in(twins):
    graphed, _, graphs = twins
    assert graphs.size_for(10) is None
    narrow = DecodeGraphs(CpuRuntime(inline=True), lambda inputs: forward(graphed, inputs), [2], GraphOptions(1, 3, 4, 5))
    with pytest.raises(EngineError, match=r"block table of 2 pages; the buffers hold 1"):
        narrow.run(plan_of(graphed.inputs({0: [5]})), 2)


@pytest.mark.parametrize("drafts", [0, 1])
def test_engine_with_graphs_equals_the_eager_engine(drafts):
    """Batches of 1 to 5 requests that join and leave, rows across the buckets 1 2 4 6 8 10; tokens and log-probabilities bit for bit."""
    results = []
    for eager in (True, False):
        llm = engine(max_num_seqs=5, num_draft_tokens=drafts, enforce_eager=eager, batch_size_interval=2, async_scheduling=True)
        assert (llm.engine.runner.graphs is None) == eager
        prompts = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 20, 7, 126, 12, 5)]
        params = [SamplingParams(temperature=i % 2, seq_seed=i, max_tokens=2 + i, ignore_eos=True) for i in range(6)]
        outputs = llm.generate(prompts, params, progress=False)
        results.append([(output.token_ids, [item.logprob for item in output.logprobs]) for output in outputs])
        llm.close()
    assert results[0] == results[1]


def test_a_bucket_that_cannot_be_captured_stays_eager(caplog):
    llm = engine(max_num_seqs=2, batch_size_interval=1)
    graphs = llm.engine.runner.use_graphs([1, 2], 64)
    capture, asked = llm.parts.runtime.capture, []

    def refuse(work):
        asked.append(work)
        if len(asked) == 1:
            raise RuntimeError("no memory for graphs")
        return capture(work)

    llm.parts.runtime.capture = refuse
    assert graphs.capture() == [2]
    assert "graph_capture_failed rows=2" in caplog.text
    outputs = llm.generate([[3, 4], [5]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), progress=False)
    assert [len(output.token_ids) for output in outputs] == [3, 3]
    llm.close()
