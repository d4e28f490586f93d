"""A batch target without a model: answers are a hash of prompt and seed, requests finish out of order, failures on demand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from deepinfer_core.engine.chat_prompt import ASSISTANT, END_THINK, SYSTEM, THINK, USER
from deepinfer_core.errors import EngineError, RequestError


class FakeTokenizer:
    """One id per character, special tokens above them."""

    bos_token_id, eos_token_id = 0, 1

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        specials = [SYSTEM, USER, ASSISTANT, THINK, END_THINK]
        self.specials = {name: 1_200_000 + i for i, name in enumerate(specials) if name not in missing}

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [0] * bool(add_bos) + [2 + ord(c) for c in text]

    def token_id(self, spelling: str) -> int | None:
        return self.specials.get(spelling)

    def decode(self, ids: list[int]) -> str:
        names = {0: "<BOS>", 1: "<EOS>", **{v: k for k, v in self.specials.items()}}
        return "".join(names.get(i) or chr(i - 2) for i in ids)


@dataclass
class FakeSample:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str = "stop"
    error: str = ""
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class FakeOutput:
    request_id: str
    prompt_token_ids: list[int]
    samples: list[FakeSample]


def answer(request_id: str, prompt: Any) -> str:
    """What the fake says to a prompt."""
    return hashlib.sha256(f"{request_id}/{prompt}".encode()).hexdigest()[:8]


class FakeEngine:
    """Finishes the newest and the oldest request alternately, one a poll. Prompts steer it: "refuse", "fail", "long"; see `submit`."""

    def __init__(self, die_after: int | None = None) -> None:
        self.tokenizer = FakeTokenizer()
        self.waiting: list[tuple[str, Any, Any]] = []
        self.submitted: list[str] = []
        self.most_in_flight = 0
        self.polls = 0
        self.die_after = die_after
        self.dead = False

    def submit(self, prompt: Any, params: Any = None, request_id: str | None = None) -> str:
        if self.dead:
            raise EngineError("device lost")
        if prompt == "refuse":
            raise RequestError("prompt: refused", parameter="prompt")
        assert request_id is not None
        self.waiting.append((request_id, prompt, params))
        self.submitted.append(request_id)
        self.most_in_flight = max(self.most_in_flight, len(self.waiting))
        return request_id

    def poll(self) -> list[FakeOutput]:
        self.polls += 1
        if self.dead:
            raise EngineError("device lost")
        if self.die_after is not None and self.polls > self.die_after:
            self.dead = True
            lost, self.waiting = self.waiting, []
            return [FakeOutput(name, [], [FakeSample(0, "", [], "error", "device lost")]) for name, _, _ in lost]
        if not self.waiting:
            return []
        name, prompt, params = self.waiting.pop(0 if self.polls % 2 else -1)
        if prompt == "fail":
            return [FakeOutput(name, [5], [FakeSample(0, "", [], "error", "NaN in the logits")])]
        if prompt == "long":
            return [FakeOutput(name, [5], [FakeSample(0, "", [], "prompt_length_exceeded", "prompt of 9 tokens, limit 8")])]
        text = answer(name, prompt)
        return [FakeOutput(name, [5, 6], [FakeSample(i, text, [7] * len(text)) for i in range(params.n)])]
