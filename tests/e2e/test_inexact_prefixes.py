"""What was computed from approximately rebuilt windows never passes for exact, however it is reused."""

from __future__ import annotations

import pytest
from engine_tools import comparable, drain, engine, greedy, prompt

DOCUMENT, OTHER = prompt(300, seed=21), prompt(140, seed=22)
PARAMS = greedy(max_tokens=4, top_logprobs=3)


@pytest.fixture(scope="module")
def cold():
    with engine() as llm:
        return comparable(llm.generate(DOCUMENT, PARAMS, progress=False)[0])


def reuse(asynchronous):
    """Outputs of the document after its first page was cached and its snapshot lost: a replayed run, then one that reuses its pages."""
    with engine(prefix_caching=True, window_snapshots=1, async_scheduling=asynchronous) as llm:
        for ids in (DOCUMENT[:140], OTHER):
            llm.generate(ids, PARAMS, progress=False)
        return [llm.generate(DOCUMENT, PARAMS, progress=False)[0] for _ in range(2)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_pages_and_snapshots_of_a_replayed_request_are_marked(cold, asynchronous):
    first, second = reuse(asynchronous)
    assert (first.samples[0].cached_tokens, first.samples[0].replayed) == (128, True)
    assert second.samples[0].cached_tokens == 256
    assert second.samples[0].replayed
    assert comparable(first) != cold, "the example is too tame to show anything"


def test_a_replay_is_reported_even_if_the_request_is_preempted_and_resumed_without_one():
    """The tokens before the preemption came from the replay."""
    with engine(prefix_caching=True) as llm:
        llm.generate(DOCUMENT[:140], PARAMS, progress=False)
        name = llm.submit(DOCUMENT[:150], PARAMS)
        llm.poll()
        llm.poll()
        ledger = llm.engine.scheduler._ledger
        ledger.preempt(int(ledger.table.running()[0]))
        ledger.prefix.clear()
        sample = drain(llm)[name].samples[0]
    assert (sample.preemptions, sample.cached_tokens, sample.replayed) == (1, 0, True)
