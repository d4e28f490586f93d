"""Prefix reuse in the whole engine: exact with a window snapshot, flagged when the windows are replayed."""

from __future__ import annotations

import pytest
import torch
from decoding_tools import engine

from deepinfer_core import SamplingParams

PAGE = 128
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, top_logprobs=2)


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(3, 700, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(output):
    return (output.token_ids, output.logprobs, output.finish_reason)


@pytest.fixture(scope="module")
def cold():
    llm = engine()
    yield lambda prompt: plain(llm.generate([prompt], GREEDY, progress=False)[0])
    llm.close()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hit_with_a_snapshot_equals_a_cold_run_bit_for_bit(cold, drafts, asynchronous):
    llm = engine(prefix_caching=True, window_snapshots=4, num_draft_tokens=drafts, async_scheduling=asynchronous)
    shared = ids(1, 300)
    for suffix, hit in (([], 0), ([], 2 * PAGE), (ids(2, 5), 2 * PAGE), (ids(3, 100), 2 * PAGE)):
        (output,) = llm.generate([shared + suffix], GREEDY, progress=False)
        assert (output.samples[0].cached_tokens, output.samples[0].replayed) == (hit, False)
        assert plain(output) == cold(shared + suffix)
    assert llm.stats()["cached_tokens"] == 6 * PAGE
    assert llm.stats()["replayed_tokens"] == 0
    llm.close()


def test_the_end_of_an_output_can_be_reused_like_a_prompt(cold):
    """A conversation: the next turn's prompt is the last one's prompt and output."""
    llm = engine(prefix_caching=True, window_snapshots=4)
    first = ids(4, 125)
    (output,) = llm.generate([first], GREEDY, progress=False)
    turn = first + output.token_ids + ids(5, 20)
    (output,) = llm.generate([turn], GREEDY, progress=False)
    assert output.samples[0].cached_tokens in (0, PAGE)  # a snapshot exists only where a chunk ended
    if not output.samples[0].replayed:
        assert plain(output) == cold(turn)
    llm.close()


def test_a_hit_without_a_snapshot_is_replayed_and_says_so(cold):
    llm = engine(prefix_caching=True)
    shared = ids(1, 300)
    (first,) = llm.generate([shared], GREEDY, progress=False)
    assert (first.samples[0].cached_tokens, first.samples[0].replayed) == (0, False)
    assert plain(first) == cold(shared)
    (second,) = llm.generate([shared + ids(2, 9)], GREEDY, progress=False)
    assert (second.samples[0].cached_tokens, second.samples[0].replayed) == (2 * PAGE, True)
    assert llm.stats()["replayed_tokens"] == 8  # one window
    (short,) = llm.generate([shared[:100]], GREEDY, progress=False)
    assert (short.samples[0].cached_tokens, short.samples[0].replayed) == (0, False)
    llm.close()


def test_requests_of_one_step_share_pages_and_get_their_own_outputs(cold):
    llm = engine(prefix_caching=True, window_snapshots=4, async_scheduling=True, num_pages=12)
    shared = ids(6, 260)
    prompts = [shared + ids(i, 3 + i) for i in range(4)]
    llm.generate([shared], GREEDY, progress=False)
    outputs = llm.generate(prompts, GREEDY, progress=False)
    assert [output.samples[0].cached_tokens for output in outputs] == [2 * PAGE] * 4
    assert [plain(output) for output in outputs] == [cold(prompt) for prompt in prompts]
    llm.close()


def test_snapshot_slots_are_reused_and_old_snapshots_forgotten(cold):
    """More prefixes than snapshots: hits on forgotten ones are replayed, those on kept ones exact."""
    llm = engine(prefix_caching=True, window_snapshots=2)
    documents = [ids(10 + i, 140) for i in range(4)]
    for document in documents:
        llm.generate([document], GREEDY, progress=False)
    replayed = []
    for document in reversed(documents):
        (output,) = llm.generate([document + ids(9, 4)], GREEDY, progress=False)
        replayed.append(output.samples[0].replayed)
        if not output.samples[0].replayed:
            assert plain(output) == cold(document + ids(9, 4))
    assert replayed == [False, False, True, True]
    llm.close()
