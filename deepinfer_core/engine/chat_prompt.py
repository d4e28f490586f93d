"""Chat messages as a prompt, for the simple case: system, user and assistant turns of text, no tools, no images.

Source: DeepSeek's prompt encoder for V4.1:
    <BOS>[<｜System｜>{effort line}{system}]<｜User｜>{user}<｜Assistant｜><think>      thinking
    <BOS>[<｜System｜>{system}]<｜User｜>{user}<｜Assistant｜></think>                   not thinking
Earlier assistant turns are <｜Assistant｜></think>{content}<EOS>. A special token spelt in a message's text stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepinfer_core.errors import RequestError

SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}


class PromptTokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    bos_token_id: int
    eos_token_id: int

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]: ...

    def token_id(self, spelling: str) -> int | None: ...


def chat_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: PromptTokenizer, effort: str | None = None) -> list[int]:
    """Token ids of a conversation, up to where the assistant goes on.

    `effort` (a key of EFFORTS) turns thinking on; None is off. The last message is the user's, or an assistant's with `"prefix": true`,
    which is then continued. Raises: RequestError naming the message.
    """
    if effort is not None and effort not in EFFORTS:
        raise _error("reasoning_effort", effort, f"expected one of {', '.join(EFFORTS)}; leave it out for no thinking")
    if not isinstance(messages, list | tuple) or not messages:
        raise _error("messages", messages, "expected a list of at least one message")
    turns = [_turn(number, message) for number, message in enumerate(messages)]
    system = ""
    if turns[0][0] == "system":
        system = turns.pop(0)[1]
    effort_line = "" if effort is None else _effort_line(EFFORTS[effort])
    ids = [tokenizer.bos_token_id]
    if system or effort_line:
        ids += [_special(tokenizer, SYSTEM), *_text(tokenizer, effort_line + system)]
    offset = len(messages) - len(turns)
    for number, (role, content, open_ended) in enumerate(turns, offset):
        last = number == len(messages) - 1
        if role == "system":
            raise _error(f"messages[{number}].role", role, "a system message must be the first; move or merge it")
        if role == "user":
            ids += [_special(tokenizer, USER), *_text(tokenizer, content)]
            continue
        if open_ended and not last:
            raise _error(f"messages[{number}].prefix", True, "only the last message can be a prefix")
        ids += [_special(tokenizer, ASSISTANT), _special(tokenizer, END_THINK), *_text(tokenizer, content)]
        ids += [] if open_ended else [tokenizer.eos_token_id]
    if not turns or (turns[-1][0] == "assistant" and not turns[-1][2]):
        at = f"messages[{len(messages) - 1}].role"
        raise _error(at, messages[-1].get("role"), "the last message must be the user's, or the assistant's with prefix: true")
    if turns[-1][0] == "user":
        ids += [_special(tokenizer, ASSISTANT), _special(tokenizer, END_THINK if effort is None else THINK)]
    return ids


def _turn(number: int, message: Any) -> tuple[str, str, bool]:
    """Role, text, and whether it is left open."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise _error(where, message, "expected an object with role and content")
    role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
    if role not in ("system", "user", "assistant"):
        raise _error(f"{where}.role", role, "expected system, user or assistant (tool turns are not supported here)")
    if message.get("tool_calls"):
        raise _error(f"{where}.tool_calls", "…", "tool calls are not supported here; leave them out")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise _error(f"{where}.content", "…", "only parts of type text are supported here")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _error(f"{where}.content", content, "expected text")
    return role, content, role == "assistant" and message.get("prefix") is True


def _effort_line(effort: int) -> str:
    return f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def _text(tokenizer: PromptTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_bos=False) if text else []


def _special(tokenizer: PromptTokenizer, spelling: str) -> int:
    token = tokenizer.token_id(spelling)
    if token is None:
        hint = "; leave out the system message and reasoning_effort" if spelling == SYSTEM else "; send a prompt instead of messages"
        raise _error("messages", "…", f"the tokenizer of this checkpoint has no token {spelling!r}, which the chat format needs{hint}")
    return token


def _error(parameter: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{parameter}={str(value)[:80]!r}: {expected}", parameter=parameter, value=value)
