"""Streams: their text is the full text, never half a character, and they do not disturb other users of the same engine."""

from __future__ import annotations

import pytest
from engine_tools import drain, engine, greedy, prompt, sampled

from deepinfer_core.errors import RequestError

IDS = prompt(12, seed=1)


@pytest.fixture(scope="module", params=[0, 4])
def llm(request):
    with engine(async_scheduling=True, num_draft_tokens=request.param) as llm:
        yield llm


@pytest.mark.parametrize("seed", range(2))
def test_the_deltas_joined_are_the_output(llm, seed):
    """Hot sampling from random weights writes every kind of broken UTF-8."""
    params = sampled(max_tokens=30, temperature=5.0, seed=seed)
    expected = llm.generate(IDS, params, progress=False)[0]
    deltas = list(llm.stream(IDS, params))
    assert "".join(delta.text for delta in deltas) == expected.text == llm.tokenizer.decode(expected.token_ids)
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"


def test_no_delta_ends_inside_a_character(llm):
    text = "naïve café 東京 🚀 Ελλάδα"
    ids = llm.tokenizer.encode(text, add_bos=False)
    deltas = list(llm.stream(IDS, greedy(max_tokens=len(ids), golden_token_ids=ids)))
    assert "".join(delta.text for delta in deltas) == text
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert len(deltas) > 3


def test_two_streams_and_a_batch_share_an_engine(llm):
    params = greedy(max_tokens=9)
    expected = llm.generate([IDS, IDS[:5], IDS[2:]], params, progress=False)
    first, second = llm.stream(IDS, params), llm.stream(IDS[:5], params)
    texts = [next(first).text, next(second).text]
    waiting = llm.submit(IDS[2:], params)
    batch = llm.generate([IDS[2:], IDS], params, progress=False)
    texts[1] += "".join(delta.text for delta in second)
    texts[0] += "".join(delta.text for delta in first)
    assert texts == [expected[0].text, expected[1].text]
    assert [output.text for output in batch] == [expected[2].text, expected[0].text]
    outputs = drain(llm)
    assert list(outputs) == [waiting]
    assert outputs[waiting].text == expected[2].text


def test_closing_a_stream_aborts_its_request_and_nobody_else_sees_it(llm):
    stream = llm.stream(IDS, greedy(max_tokens=400))
    next(stream)
    stream.close()
    assert [output.finish_reason for output in llm.generate([IDS], greedy(max_tokens=3), progress=False)] == ["length"]
    assert not drain(llm)
    assert not llm.engine.has_unfinished


def test_a_stream_of_a_prompt_that_cannot_run_raises(llm):
    for bad, words in (
        ([], "empty"),
        ([5000], "5000.*0, 768"),
        (prompt(600), "600 tokens.*max_model_len"),
        ([1.5], "flat list of token ids"),
    ):
        with pytest.raises(RequestError, match=words):
            list(llm.stream(bad, greedy()))
    assert list(llm.stream(IDS, greedy(max_tokens=1)))


def test_a_stream_of_samples_tells_them_apart(llm):
    params = sampled(n=2, max_tokens=5, temperature=2.0)
    expected = llm.generate(IDS, params, progress=False)[0]
    deltas = list(llm.stream(IDS, params))
    for index in range(2):
        assert "".join(delta.text for delta in deltas if delta.index == index) == expected.samples[index].text
