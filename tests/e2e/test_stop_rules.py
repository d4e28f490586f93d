"""Where a request ends: at EOS, a stop id, a stop string or a limit; never a token later, and exactly once."""

from __future__ import annotations

import pytest
from engine_tools import EOS, ScriptedDrafter, drain, engine, greedy, prompt, sampled

from deepinfer_core import SamplingParams

IDS = prompt(9, seed=1)
DRAFTS = 4


@pytest.fixture(scope="module")
def plain():
    with engine(num_draft_tokens=0) as llm:
        yield llm


@pytest.fixture(scope="module")
def usual(plain):
    """What greedy decoding goes on to write."""
    return plain.generate(IDS, greedy(max_tokens=30), progress=False)[0].token_ids


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def drafting(request):
    """An engine whose drafts are always the tokens of `llm.expected`."""
    with engine(num_draft_tokens=DRAFTS, async_scheduling=request.param) as llm:
        llm.expected = {}
        ScriptedDrafter(llm, llm.expected, lambda name, at: True)
        yield llm


def generate(llm, expected, params, name="x"):
    """One request, every delta and its output; drafts are `expected`."""
    if hasattr(llm, "expected"):
        llm.expected[name] = IDS + expected
    llm.submit(IDS, params, name)
    deltas, outputs = [], []
    while llm.engine.has_unfinished:
        step = llm.engine.step()
        deltas += step.deltas
        outputs += step.finished
    assert len(outputs) == 1
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [outputs[0].finish_reason]
    assert [token for delta in deltas for token in delta.token_ids] == outputs[0].token_ids
    assert "".join(delta.text for delta in deltas) == outputs[0].text
    assert len(outputs[0].logprobs) == len(outputs[0].token_ids)
    return outputs[0]


@pytest.mark.parametrize("length", range(1, 2 * DRAFTS + 4))
def test_max_tokens_at_every_draft_offset(drafting, usual, length):
    output = generate(drafting, usual, greedy(max_tokens=length))
    assert (output.token_ids, output.finish_reason) == (usual[:length], "length")


@pytest.mark.parametrize("at", range(2 * DRAFTS + 3))
def test_eos_at_every_draft_offset(drafting, usual, at):
    golden = [*usual[:at], EOS]
    output = generate(drafting, [*golden, *usual], SamplingParams(temperature=0, max_tokens=30, golden_token_ids=golden))
    assert (output.token_ids, output.finish_reason) == (golden, "stop")


@pytest.mark.parametrize("at", range(2 * DRAFTS + 3))
def test_a_stop_id_at_every_draft_offset(drafting, usual, at):
    token = usual[at]
    first = usual.index(token)
    output = generate(drafting, usual, greedy(max_tokens=30, stop_token_ids=[token]))
    assert (output.token_ids, output.finish_reason) == (usual[: first + 1], "stop")


def test_ignored_eos_goes_on(drafting, usual):
    golden = [usual[0], EOS, EOS, usual[1]]
    output = generate(drafting, [*golden, *usual], greedy(max_tokens=9, golden_token_ids=golden))
    assert output.token_ids[:4] == golden
    assert (len(output.token_ids), output.finish_reason) == (9, "length")


@pytest.mark.parametrize("least", [0, 1, 4, 6])
def test_min_tokens_forbids_eos_and_stop_ids_until_then(drafting, plain, least):
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=least, logit_bias={EOS: 500.0, 50: 400.0}, stop_token_ids=[50])
    output = generate(drafting, [EOS] * 30, params)
    assert len(output.token_ids) == least + 1
    assert output.token_ids[-1] == EOS
    assert not {EOS, 50} & set(output.token_ids[:-1])
    assert output.token_ids == generate(plain, [], params).token_ids


def test_first_n_token_no_eos_forbids_only_the_first(drafting):
    params = SamplingParams(temperature=0, max_tokens=12, first_n_token_no_eos=1, logit_bias={EOS: 500.0})
    output = generate(drafting, [EOS] * 30, params)
    assert len(output.token_ids) == 2
    assert output.token_ids[0] != EOS
    assert output.token_ids[1] == EOS


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("length", [1, 14, 15, 16])
def test_the_model_length_ends_a_request(length, drafts, asynchronous):
    ids = prompt(length, seed=2)
    with engine(max_model_len=16, num_draft_tokens=drafts, async_scheduling=asynchronous, max_num_seqs=2) as llm:
        output = llm.generate(ids, greedy(max_tokens=100), progress=False)[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 17 - length  # the last token needs no cache, as in DeepInfer 0.1.0


def test_a_prompt_beyond_the_model_length_is_refused_and_says_so():
    with engine(max_model_len=16, max_num_seqs=2) as llm:
        output = llm.generate([prompt(17), prompt(3)], greedy(max_tokens=2), progress=False)
    assert output[0].finish_reason == "prompt_length_exceeded"
    for word in ("17 tokens", "max_model_len 16", "shorten"):
        assert word in output[0].error
    assert output[1].finish_reason == "length"


SENTENCE = "the quick brown fox jumps over the lazy dog"


def written(llm, text):
    """Parameters with which a request writes `text`."""
    return {"golden_token_ids": llm.tokenizer.encode(text, add_bos=False)}


@pytest.mark.parametrize("begin", range(0, 12, 2))
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_stop_string_split_over_tokens_and_drafts(drafting, begin, length):
    forced = written(drafting, SENTENCE)
    stop = SENTENCE[begin : begin + length]
    output = generate(drafting, forced["golden_token_ids"], greedy(max_tokens=30, stop=[stop, "never to be found"], **forced))
    assert output.text == SENTENCE[: SENTENCE.index(stop)]
    assert output.finish_reason == "stop"
    assert stop in drafting.tokenizer.decode(output.token_ids)
    assert stop not in drafting.tokenizer.decode(output.token_ids[:-1])


def test_a_stop_string_completed_by_the_last_allowed_token_counts_as_stop(drafting):
    forced = written(drafting, SENTENCE)
    ids = forced["golden_token_ids"]
    for count in range(2, 8):
        text, before = (drafting.tokenizer.decode(ids[:n]) for n in (count, count - 1))
        stop = text[len(before) - 1 :]
        assert stop not in before
        output = generate(drafting, ids, greedy(max_tokens=count, stop=[stop], **forced))
        assert (output.finish_reason, output.token_ids, output.text) == ("stop", ids[:count], text.removesuffix(stop))


def test_the_first_of_several_stop_strings_ends_the_text(drafting):
    forced = written(drafting, SENTENCE)
    output = generate(drafting, forced["golden_token_ids"], greedy(max_tokens=30, stop=["fox", "quick brown fox"], **forced))
    assert output.text == "the "


def test_a_held_back_beginning_of_a_stop_string_is_shown_in_the_end(drafting, usual):
    forced = written(drafting, SENTENCE)
    text = drafting.tokenizer.decode(forced["golden_token_ids"][:6])
    output = generate(drafting, usual, greedy(max_tokens=6, stop=[text[-3:] + " never"], **forced))
    assert (output.text, output.finish_reason) == (text, "length")


def test_golden_tokens_are_forced_and_acceptance_is_agreement(drafting, usual):
    golden = prompt(12, seed=77)
    agreed = generate(drafting, [*golden, *usual], greedy(max_tokens=12, golden_token_ids=golden))
    assert agreed.token_ids == golden
    assert agreed.samples[0].drafts_accepted > 6
    other = generate(drafting, usual, sampled(max_tokens=15, golden_token_ids=golden))
    assert other.token_ids[:12] == golden
    matches = sum(a == b for a, b in zip(golden, usual, strict=False))
    assert other.samples[0].drafts_accepted <= matches + DRAFTS


def test_max_tokens_0_means_1(plain, usual):
    assert generate(plain, [], greedy(max_tokens=0)).token_ids == usual[:1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_samples_of_a_request_end_one_by_one_and_differ(asynchronous):
    with engine(async_scheduling=asynchronous, max_num_seqs=2) as llm:
        params = sampled(n=3, max_tokens=20, temperature=2.0, stop_token_ids=list(range(3, 100)))
        output = llm.generate(IDS, params, progress=False)[0]
        assert [sample.index for sample in output.samples] == [0, 1, 2]
        assert len({tuple(sample.token_ids) for sample in output.samples}) == 3
        alone = llm.generate(IDS, params.model_copy(update={"n": 1}), progress=False)[0]
        assert output.samples[0].token_ids == alone.token_ids  # the first sample uses the seed as given
        again = llm.generate(IDS, params, progress=False)[0]
        assert [sample.token_ids for sample in again.samples] == [sample.token_ids for sample in output.samples]


def test_a_request_with_samples_can_be_aborted_as_a_whole():
    with engine(max_num_seqs=2, async_scheduling=True) as llm:
        llm.submit(IDS, greedy(n=3, max_tokens=50), "many")
        other = llm.submit(IDS, greedy(max_tokens=4))
        for _ in range(3):
            llm.poll()
        assert llm.abort("many")
        assert not llm.abort("many")
        outputs = drain(llm)
        assert [sample.finish_reason for sample in outputs["many"].samples] == ["abort"] * 3
        assert outputs[other].finish_reason == "length"
        assert not llm.abort("unknown")
