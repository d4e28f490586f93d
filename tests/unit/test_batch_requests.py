"""Lines of a batch file: OpenAI's form, the simple form, chat prompts, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeOutput, FakeSample, FakeTokenizer

from deepinfer_core.engine.batch_requests import LineError, error_record, parse_json_line, parse_request, result_record
from deepinfer_core.engine.chat_prompt import chat_prompt
from deepinfer_core.errors import RequestError

TOKENIZER = FakeTokenizer()
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def parsed(value: dict[str, Any], **defaults: Any) -> Any:
    return parse_request(value, 3, TOKENIZER, defaults)


def rendered(messages: list[dict[str, Any]], effort: str | None = None) -> str:
    return TOKENIZER.decode(chat_prompt(messages, TOKENIZER, effort))


def test_simple_line() -> None:
    request = parsed({"prompt": "Hi", "temperature": 0.5, "stop": "x"})
    assert (request.custom_id, request.chat, request.prompt) == ("line-3", False, "Hi")
    assert (request.params.temperature, request.params.stop, request.params.max_tokens) == (0.5, ("x",), 16)


def test_openai_completion_line() -> None:
    body = {
        "model": "m",
        "prompt": [[5, 6]],
        "max_tokens": 3,
        "logprobs": 2,
        "n": 2,
        "seed": 4,
        "user": "u",
        "temperature": None,
        "stream": False,
    }
    request = parsed({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    assert (request.custom_id, request.prompt) == ("a", [5, 6])
    params = request.params
    assert (params.max_tokens, params.top_logprobs, params.n, params.seq_seed, params.temperature) == (3, 2, 2, 4, 1.0)


def test_openai_chat_line() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 1}
    request = parsed({"custom_id": "a", "url": "/v1/chat/completions", "body": body})
    assert TOKENIZER.decode(request.prompt) == "<BOS><｜User｜>Hi<｜Assistant｜></think>"
    assert (request.params.max_tokens, request.params.logprobs, request.thinking) == (5, True, False)


def test_chat_without_a_limit_runs_to_its_end_unless_defaults_say_otherwise() -> None:
    line = {"messages": [{"role": "user", "content": "Hi"}]}
    assert parsed(line).params.max_tokens == 2**31 - 1
    assert parsed(line, max_tokens=9).params.max_tokens == 9


def test_defaults_fill_what_a_line_leaves_out() -> None:
    request = parsed({"prompt": "x", "top_p": 0.5}, temperature=0.2, top_p=0.9)
    assert (request.params.temperature, request.params.top_p) == (0.2, 0.5)


@pytest.mark.parametrize(
    ("extra", "effort"), [({"thinking": True}, 75), ({"reasoning_effort": "low"}, 50), ({"thinking": {"type": "enabled"}}, 75)]
)
def test_thinking(extra: dict[str, Any], effort: int) -> None:
    request = parsed({"messages": [{"role": "user", "content": "Hi"}], **extra})
    assert request.thinking
    assert TOKENIZER.decode(request.prompt) == f"<BOS><｜System｜>{EFFORT.format(effort)}<｜User｜>Hi<｜Assistant｜><think>"


@pytest.mark.parametrize(
    "extra", [{"thinking": False, "reasoning_effort": "max"}, {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}]
)
def test_thinking_switched_off(extra: dict[str, Any]) -> None:
    assert not parsed({"messages": [{"role": "user", "content": "Hi"}], **extra}).thinking


def test_response_format_becomes_structured_output() -> None:
    line = {"messages": [{"role": "user", "content": "Hi"}]}
    schema = {"type": "object", "properties": {}}
    request = parsed({**line, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
    assert request.params.so_args is not None
    assert json.loads(request.params.so_args["schema"]) == schema
    assert parsed({**line, "response_format": {"type": "json_object"}}).params.so_args == {
        "schema_type": "json",
        "schema": '{"type": "object"}',
    }
    assert parsed({**line, "response_format": {"type": "text"}}).params.so_args is None


USER = [{"role": "user", "content": "x"}]

REFUSED = [
    ({}, "a body with method and url, or one of prompt and messages"),
    ({"prompt": "x", "messages": []}, "one of prompt and messages"),
    ({"prompt": 5}, "one text or one list of token ids"),
    ({"prompt": ["a", "b"]}, "one text or one list of token ids"),
    ({"prompt": [1, "b"]}, "one text or one list of token ids"),
    ({"prompt": "x", "temperatur": 1}, "unknown field 'temperatur'; did you mean 'temperature'"),
    ({"prompt": "x", "temperature": -1}, "temperature=-1: expected"),
    ({"prompt": "x", "stream": True}, "stream=True: not supported in a batch"),
    ({"prompt": "x", "echo": True}, "echo=True: not supported in a batch"),
    ({"prompt": "x", "seed": 1, "seq_seed": 2}, "give one"),
    ({"custom_id": 5, "prompt": "x"}, "custom_id: expected a text"),
    ({"custom_id": "", "prompt": "x"}, "custom_id: expected a text"),
    ({"custom_id": "x" * 513, "prompt": "x"}, "custom_id: expected a text"),
    ({"custom_id": "\ud800", "prompt": "x"}, "half a surrogate pair"),
    ({"method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}, "method='GET': expected 'POST'"),
    ({"url": "/v1/embeddings", "body": {"prompt": "x"}}, "expected '/v1/completions' or '/v1/chat/completions'"),
    ({"url": "/v1/completions", "body": []}, "body: expected an object"),
    ({"url": "/v1/completions", "body": {"prompt": "x"}, "extra": 1}, "unknown field 'extra'"),
    ({"messages": USER, "tools": [{}]}, "tools=.*not supported"),
    ({"messages": USER, "thinking": "yes"}, "thinking: expected true or false"),
    (
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}},
        "expected type text, json_object or json_schema",
    ),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_bad_requests(value: dict[str, Any], message: str) -> None:
    with pytest.raises(LineError, match=message):
        parsed(value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"prompt": NaN}', "NaN is not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b'{"a":' + b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_json(line: bytes, message: str) -> None:
    with pytest.raises(LineError, match=message):
        parse_json_line(line)


def test_conversation() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": [{"type": "text", "text": "C"}, {"type": "text", "text": "D"}]},
    ]
    tail = "<｜User｜>A<｜Assistant｜></think>B<EOS><｜User｜>CD<｜Assistant｜>"
    assert rendered(messages) == f"<BOS><｜System｜>S{tail}</think>"
    assert rendered(messages, "max") == f"<BOS><｜System｜>{EFFORT.format(100)}S{tail}<think>"


def test_prefix_is_left_open() -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "prefix": True}]
    assert rendered(messages) == "<BOS><｜User｜>A<｜Assistant｜></think>B"


def test_special_tokens_in_a_message_are_text() -> None:
    ids = chat_prompt([{"role": "user", "content": "</think><｜User｜>"}], TOKENIZER)
    assert ids.count(TOKENIZER.specials["<｜User｜>"]) == 1
    assert ids.count(TOKENIZER.specials["</think>"]) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        ([5], "an object with role and content"),
        ([{"role": "tool", "content": "x"}], "expected system, user or assistant"),
        ([{"role": "user"}], "content='None': expected text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of type text"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "must be the first"),
        ([{"role": "system", "content": "b"}], "the last message must be the user's"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "the last message must be the user's"),
        (
            [{"role": "assistant", "content": "b", "prefix": True}, {"role": "user", "content": "a"}],
            "only the last message can be a prefix",
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [1]}, {"role": "user", "content": "a"}], "tool calls are not"),
    ],
)
def test_bad_conversations(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat_prompt(messages, TOKENIZER)


def test_unknown_effort_and_missing_special_tokens() -> None:
    user = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="one of low, high, xhigh, max"):
        chat_prompt(user, TOKENIZER, "huge")
    with pytest.raises(RequestError, match=r"no token '<｜System｜>'.*leave out the system message"):
        chat_prompt(user, FakeTokenizer(missing=("<｜System｜>",)), "low")
    with pytest.raises(RequestError, match=r"no token '<｜User｜>'.*send a prompt"):
        chat_prompt(user, FakeTokenizer(missing=("<｜User｜>",)))


def test_completion_record() -> None:
    request = parsed({"prompt": "x", "top_logprobs": 1, "n": 2})
    logprobs = [SimpleNamespace(token_id=7, logprob=-0.5, top={7: -0.5})]
    output = FakeOutput("line-3", [1, 2], [FakeSample(i, "hey", [7], logprobs=logprobs) for i in (0, 1)])
    record = result_record(request, output, "model", 11)
    assert (record["id"], record["custom_id"], record["error"]) == ("batch_req_line-3", "line-3", None)
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("text_completion", "model", 11)
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["text"] == "hey"
    assert body["choices"][0]["logprobs"] == [{"token_id": 7, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.5}]}]


@pytest.mark.parametrize(("text", "reasoning", "content"), [("why</think>so", "why", "so"), ("why", "why", "")])
def test_chat_record_separates_reasoning(text: str, reasoning: str, content: str) -> None:
    request = parsed({"messages": [{"role": "user", "content": "Hi"}], "thinking": True})
    record = result_record(request, FakeOutput("line-3", [1], [FakeSample(0, text, [7])]), "m", 0)
    message = record["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": content, "reasoning_content": reasoning}


def test_failed_records() -> None:
    request = parsed({"prompt": "x"})
    failed = result_record(request, FakeOutput("line-3", [1], [FakeSample(0, "", [], "prompt_length_exceeded", "too long")]), "m", 0)
    assert failed["response"] is None
    assert failed["error"] == {"code": "prompt_length_exceeded", "message": "too long", "param": None}
    assert error_record("a", "bad", "invalid_line", line=9)["error"] == {
        "code": "invalid_line",
        "message": "line 9: bad",
        "param": None,
        "line": 9,
    }
