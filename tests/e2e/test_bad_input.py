"""Every bad input gives one clear error: what, which value, what was expected, what to do. The engine lives on."""

from __future__ import annotations

import numpy as np
import pytest
from engine_tools import engine, greedy, prompt

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.errors import BackendError, CheckpointError, ConfigError, DeepInferError, EngineError, RequestError

GOOD = prompt(5)


@pytest.fixture(scope="module")
def llm():
    with engine(max_model_len=64, async_scheduling=True, num_draft_tokens=2) as llm:
        yield llm


BAD_PROMPTS = {
    "empty text": ("", ["empty", "at least one token"]),
    "no ids": ([], ["empty", "at least one token"]),
    "no ids in an array": (np.zeros(0, np.int64), ["empty"]),
    "too long": (prompt(65), ["65 tokens", "max_model_len 64", "shorten"]),
    "negative id": ([3, -1], ["-1", "[0, 768)"]),
    "id outside": ([3, 768], ["768", "[0, 768)"]),
    "id of 70 bits": ([3, 2**70], [str(2**70), "[0, 768)"]),
    "floats": ([1.0, 2.0], ["flat list of token ids"]),
    "booleans": ([True, False], ["flat list of token ids"]),
    "nothing": (None, ["NoneType", "flat list of token ids"]),
    "a number": (5, ["int", "flat list of token ids"]),
    "a mapping": ({"prompt": "x"}, ["dict", "flat list of token ids"]),
    "bytes": (b"abc", ["bytes", "flat list of token ids"]),
    "nested": ([[1, 2], [3, 4]], ["flat list of token ids"]),
    "ragged": ([[1, 2], [3]], ["flat list of token ids"]),
    "words": (["a", "b"], ["flat list of token ids"]),
    "half a character": ("ab\ud800", ["surrogate", "character 2", "encoding"]),
    "a matrix": (np.ones((2, 2), np.int64), ["flat list of token ids"]),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_gets_a_result_with_the_reason_and_the_others_run(llm, case):
    bad, words = BAD_PROMPTS[case]
    outputs = llm.generate([GOOD, bad, "text"], greedy(max_tokens=2), progress=False)
    assert [output.finish_reason for output in outputs] == [
        "length",
        "prompt_length_exceeded" if case == "too long" else "invalid_request",
        "length",
    ]
    for word in words:
        assert word in outputs[1].error
    assert (outputs[1].token_ids, outputs[1].text) == ([], "")
    outputs[1].as_dict()


@pytest.mark.parametrize("bad", [None, 5, b"abc", {"a": 1}, object()])
def test_prompts_that_are_no_list_are_refused(llm, bad):
    with pytest.raises(RequestError, match="expected text, token ids, or a list") as caught:
        llm.generate(bad, progress=False)
    assert caught.value.parameter == "prompts"


@pytest.mark.parametrize("bad", [{"temperature": 0}, "greedy", [{"temperature": 0}], [None], 5])
def test_params_of_another_type_are_refused(llm, bad):
    with pytest.raises(RequestError, match="expected SamplingParams") as caught:
        llm.generate([GOOD], bad, progress=False)
    assert caught.value.parameter == "params"


def test_a_list_of_params_of_another_length_is_refused(llm):
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate([GOOD], [greedy(), greedy()], progress=False)
    assert llm.generate([], progress=False) == []


BAD_PARAMS = {
    "stop_token_ids": ({"stop_token_ids": [768]}, ["stop_token_ids", "768", "[0, 768)"]),
    "golden_token_ids": ({"golden_token_ids": [5, 900]}, ["golden_token_ids", "900"]),
    "logit_bias": ({"logit_bias": {1000: 1.0}}, ["logit_bias", "1000"]),
    "so_args": ({"so_args": {"schema_type": "regex", "schema": "a*"}}, ["so_args", "grammar plugin"]),
}


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_params_that_do_not_fit_the_model_end_that_request(llm, case):
    fields, words = BAD_PARAMS[case]
    outputs = llm.generate([GOOD, GOOD], [SamplingParams(**fields), greedy(max_tokens=1)], progress=False)
    assert [output.finish_reason for output in outputs] == ["invalid_request", "length"]
    for word in words:
        assert word in outputs[0].error


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, ["temperature=-1", "at least 0"]),
        ({"temperature": float("nan")}, ["temperature=nan", "finite"]),
        ({"top_p": 0}, ["top_p=0", "more than 0"]),
        ({"top_k": 0}, ["top_k=0", "-1 (off)"]),
        ({"max_tokens": -5}, ["max_tokens=-5", "at least 1"]),
        ({"max_tokens": 3, "min_tokens": 4}, ["min_tokens=4", "max_tokens=3", "lower"]),
        ({"seed": 1, "seq_seed": 2}, ["seed=1", "seq_seed=2", "give one"]),
        ({"temprature": 1}, ["temprature", "did you mean 'temperature'"]),
        ({"stop": [""]}, ["stop", "1 to"]),
        ({"n": 0}, ["n=0", "at least 1"]),
        ({"seed": "7"}, ["seed='7'", "integer"]),
    ],
)
def test_contradictory_or_out_of_range_params(fields, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


START = {
    "unknown backend": ({"backend": "cpu_reff"}, BackendError, ["cpu_reff", "did you mean 'cpu_ref'"], 2),
    "unavailable backend": ({"backend": "ascend950"}, BackendError, ["ascend950", "not available"], 1),
    "unknown key": ({"max_num_seq": 3}, ConfigError, ["max_num_seq", "max_num_seqs"], 2),
    "out of range": ({"max_num_seqs": 0}, ConfigError, ["scheduler.max_num_seqs", "0"], 2),
    "too many drafts": ({"num_draft_tokens": 6}, ConfigError, ["speculative.num_draft_tokens = 6", "5"], 2),
    "too long": ({"max_model_len": 100_000}, ConfigError, ["model.max_model_len = 100000", "4096"], 2),
    "small budget": ({"max_num_batched_tokens": 3}, ConfigError, ["max_num_batched_tokens = 3", "raise"], 2),
    "parallel": ({"expert_parallel_size": 2}, ConfigError, ["parallel.expert_parallel_size = 2", "1"], 2),
    "no memory": ({"memory_bytes": 20_000}, EngineError, ["cache memory", "cache.memory_bytes", "max_model_len"], 1),
    "bad blacklist": ({"token_blacklist": "9..3"}, DeepInferError, ["9..3"], 2),
    "no such model": ({"model": "/nowhere/at/all"}, CheckpointError, ["is no directory", "check the path"], 1),
}


@pytest.mark.parametrize("case", START)
def test_an_engine_that_cannot_start_says_why(case):
    options, kind, words, code = START[case]
    with pytest.raises(kind) as caught:
        LLM(**{"backend": "cpu_ref", "max_num_seqs": 4, "max_model_len": 512, **options})
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert caught.value.exit_code == code


def test_a_prompt_that_no_cache_can_hold_is_refused_with_the_arithmetic():
    with engine(num_pages=2) as llm:
        outputs = llm.generate([prompt(200), prompt(100)], greedy(max_tokens=200), progress=False)
    assert outputs[0].finish_reason == "prompt_length_exceeded"
    for word in ("200 tokens", "1 cache pages hold", "more memory"):
        assert word in outputs[0].error
    assert outputs[1].finish_reason == "insufficient_system_resource"  # it ran until the only page was full
    assert len(outputs[1].token_ids) > 20
    for word in ("1 pages", "max_tokens", "more memory"):
        assert word in outputs[1].error


@pytest.mark.parametrize("bad", [[], [768], [-1], [1.5], [[1], [2, 3]], "text", None])
def test_compute_logits_of_no_token_ids(llm, bad):
    with pytest.raises(RequestError, match="compute_logits: expected a list of at least one token id"):
        llm.compute_logits([bad])


def test_compute_logits_of_too_many_tokens_or_beside_requests(llm):
    with pytest.raises(RequestError, match=r"compute_logits: 65 tokens.*max_model_len = 64"):
        llm.compute_logits([prompt(65)])
    llm.submit(GOOD, greedy(max_tokens=3))
    with pytest.raises(EngineError, match="requests are running"):
        llm.compute_logits([GOOD])
    while llm.engine.has_unfinished:
        llm.poll()
    assert len(llm.compute_logits([GOOD])[0]) == 5
