"""Lines of a batch file: requests as people write them, results as OpenAI's batch format has them.

A request line is either OpenAI's `{"custom_id", "method", "url", "body"}` with url /v1/completions or /v1/chat/completions, or simply
`{"prompt": … or "messages": …, "custom_id": …, sampling fields}`. Fields of a body that only servers know (`model`, `user`, …) are
ignored; unknown ones are errors, so that a misspelt parameter does not silently shape a million results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepinfer_core.engine.chat_prompt import END_THINK, PromptTokenizer, chat_prompt
from deepinfer_core.errors import RequestError, nearest
from deepinfer_core.sampling import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_CUSTOM_ID = 512
UNLIMITED_TOKENS = 2**31 - 1

_ENVELOPE = ("custom_id", "method", "url", "body")
_IGNORED = frozenset({"model", "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key"})
_ONLY = {"echo": (False,), "suffix": ("",), "stream": (False,), "best_of": (1,), "tools": ([],), "tool_choice": ("none",)}
_FIELDS = frozenset(SamplingParams.model_fields)
_SUCCESS = ("stop", "length")


class Sample(Protocol):
    """One finished sample."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[Any]  # token_id, logprob, top: {token id: log-probability}
    finish_reason: Any
    error: str


class Output(Protocol):
    """One finished request."""

    request_id: str
    prompt_token_ids: list[int]
    samples: Sequence[Any]


class LineError(Exception):
    """A line that is no request. `code` is for programs, `parameter` the offending field."""

    def __init__(self, message: str, code: str = "invalid_line", parameter: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.parameter = parameter


@dataclass(frozen=True)
class BatchRequest:
    """One request of a batch file, ready to run."""

    custom_id: str
    chat: bool
    thinking: bool
    prompt: str | list[int]
    params: SamplingParams


def default_id(line: int) -> str:
    """The `custom_id` of a line that has none of its own; lines count from 1."""
    return f"line-{line}"


def parse_json_line(data: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises: LineError."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise LineError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError(f"expected a JSON object, got {type(value).__name__}")
    return value


def custom_id_of(value: Mapping[str, Any], line: int) -> str:
    """The line's `custom_id`, or its default. Raises: LineError if it is no text of sensible length."""
    given = value.get("custom_id")
    if given is None:
        return default_id(line)
    if not isinstance(given, str) or not 0 < len(given) <= MAX_CUSTOM_ID:
        raise LineError(f"custom_id: expected a text of 1 to {MAX_CUSTOM_ID} characters", parameter="custom_id")
    try:
        given.encode()
    except UnicodeEncodeError:  # a lone surrogate escape
        raise LineError("custom_id: contains half a surrogate pair", parameter="custom_id") from None
    return given


def parse_request(value: Mapping[str, Any], line: int, tokenizer: PromptTokenizer, defaults: Mapping[str, Any]) -> BatchRequest:
    """The request of one line. `defaults` fill sampling fields that it does not give. Raises: LineError."""
    custom_id = custom_id_of(value, line)
    try:
        body, chat = _body(value)
        fields = dict(body)
        for name, allowed in _ONLY.items():
            given = fields.pop(name, None)
            if given is not None and given not in allowed:
                raise LineError(f"{name}={given!r}: not supported in a batch; leave it out", "invalid_request", name)
        prompt, thinking = _prompt(fields, chat, tokenizer)
        if chat:
            _chat_fields(fields)
        else:
            _completion_fields(fields)
        unknown = [name for name in fields if name not in _FIELDS and name not in _IGNORED]
        if unknown:
            raise LineError(f"unknown field {unknown[0]!r}{nearest(unknown[0], _FIELDS)}", "invalid_request", unknown[0])
        params = SamplingParams(**{k: v for k, v in fields.items() if k in _FIELDS and v is not None}).with_defaults(defaults)
        if chat and "max_tokens" not in params.model_fields_set:
            params = params.with_defaults({"max_tokens": UNLIMITED_TOKENS})
    except RequestError as error:
        raise LineError(str(error), "invalid_request", error.parameter) from None
    return BatchRequest(custom_id, chat, thinking, prompt, params)


def result_record(request: BatchRequest, output: Output, model: str, created: int) -> dict[str, Any]:
    """The result line of a finished request: a response, or an error if any of its samples failed."""
    failed = [sample for sample in output.samples if str(sample.finish_reason) not in _SUCCESS]
    if failed:
        message = failed[0].error or f"the request ended with {failed[0].finish_reason}"
        return error_record(request.custom_id, message, str(failed[0].finish_reason))
    used, made = len(output.prompt_token_ids), sum(len(sample.token_ids) for sample in output.samples)
    body = {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(request, sample) for sample in output.samples],
        "usage": {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made},
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {"id": f"batch_req_{output.request_id}", "custom_id": request.custom_id, "response": response, "error": None}


def error_record(custom_id: str, message: str, code: str, parameter: str | None = None, line: int | None = None) -> dict[str, Any]:
    """The result line of a request that failed, or of a line that is no request."""
    error: dict[str, Any] = {"code": code, "message": message if line is None else f"line {line}: {message}", "param": parameter}
    if line is not None:
        error["line"] = line
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": None, "error": error}


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _body(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The parameters of a line, and whether they are a chat's."""
    if "body" not in value and "url" not in value:
        if ("prompt" in value) == ("messages" in value):
            raise LineError("expected a body with method and url, or one of prompt and messages")
        return {k: v for k, v in value.items() if k != "custom_id"}, "messages" in value
    unknown = [name for name in value if name not in _ENVELOPE]
    if unknown:
        raise LineError(f"unknown field {unknown[0]!r}{nearest(unknown[0], _ENVELOPE)}", parameter=unknown[0])
    if value.get("method", "POST") != "POST":
        raise LineError(f"method={value['method']!r}: expected 'POST'", parameter="method")
    if value.get("url") not in (COMPLETIONS, CHAT):
        raise LineError(f"url={value.get('url')!r}: expected {COMPLETIONS!r} or {CHAT!r}", parameter="url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError("body: expected an object", parameter="body")
    return body, value["url"] == CHAT


def _prompt(fields: dict[str, Any], chat: bool, tokenizer: PromptTokenizer) -> tuple[str | list[int], bool]:
    """Takes the prompt out of `fields`; the second value says whether the model will think."""
    if chat:
        thinking, effort = fields.pop("thinking", None), fields.pop("reasoning_effort", None)
        if isinstance(thinking, Mapping):
            thinking = thinking.get("type") == "enabled"
        if thinking not in (None, True, False):
            raise LineError("thinking: expected true or false", "invalid_request", "thinking")
        if thinking is False or effort == "none":
            effort = None
        elif thinking and effort is None:
            effort = "high"
        messages = fields.pop("messages", None)
        return chat_prompt(messages, tokenizer, effort), effort is not None
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, False
    if isinstance(prompt, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return prompt, False
    raise LineError("prompt: expected one text or one list of token ids", "invalid_request", "prompt")


def _completion_fields(fields: dict[str, Any]) -> None:
    """OpenAI's `logprobs` of a completion is the number of alternatives."""
    wanted = fields.get("logprobs")
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        fields["logprobs"] = True
        fields.setdefault("top_logprobs", wanted)


def _chat_fields(fields: dict[str, Any]) -> None:
    limit = fields.pop("max_completion_tokens", None)
    if limit is not None:
        fields["max_tokens"] = limit
    form = fields.pop("response_format", None)
    if form is None or form == {"type": "text"}:
        return
    if not isinstance(form, Mapping) or form.get("type") not in ("json_object", "json_schema"):
        raise LineError("response_format: expected type text, json_object or json_schema", "invalid_request", "response_format")
    described = form.get("json_schema")
    schema = described.get("schema", {}) if isinstance(described, Mapping) else {}
    schema = {"type": "object"} if form["type"] == "json_object" else schema
    fields["so_args"] = {"schema_type": "json", "schema": json.dumps(schema)}


def _choice(request: BatchRequest, sample: Sample) -> dict[str, Any]:
    logprobs = None
    if request.params.logprobs or request.params.top_logprobs:
        logprobs = [
            {"token_id": item.token_id, "logprob": item.logprob, "top": [{"token_id": k, "logprob": v} for k, v in item.top.items()]}
            for item in sample.logprobs
        ]
    choice: dict[str, Any] = {"index": sample.index, "finish_reason": str(sample.finish_reason), "logprobs": logprobs}
    if not request.chat:
        return {**choice, "text": sample.text, "token_ids": list(sample.token_ids)}
    message: dict[str, Any] = {"role": "assistant", "content": sample.text}
    if request.thinking:
        reasoning, closed, content = sample.text.partition(END_THINK)
        message = {"role": "assistant", "content": content if closed else "", "reasoning_content": reasoning}
    return {**choice, "message": message, "token_ids": list(sample.token_ids)}
