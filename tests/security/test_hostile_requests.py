"""Requests are bounded before they reach the step loop, and messages tell a client nothing about the server or other clients."""

from __future__ import annotations

import re
import time

import pytest
from engine_tools import engine, greedy, prompt

from deepinfer_core import SamplingParams
from deepinfer_core.engine.text import OutputText
from deepinfer_core.errors import RequestError


@pytest.fixture(scope="module")
def llm():
    with engine(max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"] * 65},
        {"stop": ["x" * 1025]},
        {"stop_token_ids": list(range(1025))},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"logit_bias": {5: float("inf")}},
        {"logit_bias": {5: 1e9}},
        {"top_logprobs": 1001},
        {"n": 129},
        {"n": 10**12},
        {"max_tokens": 2**31},
        {"golden_token_ids": [5] * ((1 << 20) + 1)},
        {"temperature": 1e300},
        {"seed": 1.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_list_and_count_is_bounded(fields):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert next(iter(fields)) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_limits_at_their_bounds_work(llm):
    params = SamplingParams(
        temperature=0.5,
        max_tokens=3,
        stop=["x" * 1024] * 64,
        stop_token_ids=list(range(10, 700)),
        min_tokens=3,
        logit_bias=dict.fromkeys(range(700), -10000.0),
        top_logprobs=1000,
        seed=2**64 - 1,
    )
    output = llm.generate(prompt(5), params, progress=False)[0]
    assert output.finish_reason in ("length", "stop")
    assert len(output.logprobs[0].top) == 768
    assert all(item.logprob >= -9999 for item in output.logprobs)


def test_messages_name_neither_paths_nor_addresses_nor_other_prompts(llm):
    secret = "the secret of another client"
    outputs = llm.generate([secret, [9999], prompt(65), {"a": object()}], greedy(max_tokens=2), progress=False)
    for output in outputs[1:]:
        assert output.error
        assert secret not in output.error
        assert not re.search(r"(?<![\w.])/\w+/", output.error), output.error
        assert not re.search(r"0x[0-9a-f]{6,}", output.error), output.error


def test_matching_of_stop_strings_does_not_explode(llm):
    """64 nearly matching stop strings of full length on repetitive text: linear work per token."""
    text = OutputText(llm.tokenizer, ["a" * 1023 + chr(98 + i % 20) for i in range(64)])
    token = llm.tokenizer.encode("a", add_bos=False)
    start = time.process_time()
    for _ in range(1500):
        text.feed(token)
    assert time.process_time() - start < 20
    assert text.flush() == "a" * 1023
