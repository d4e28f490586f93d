"""What a caller gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_core.engine.request import FinishReason


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token, and the most likely tokens of its position if they were asked for."""

    token_id: int
    logprob: float
    top: Mapping[int, float] = field(default_factory=dict)  # token id -> log-probability, most likely first


@dataclass
class SampleOutput:
    """One sample of a request. Grows while the request runs; complete once `finish_reason` is set."""

    index: int  # 0 .. n-1
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token
    finish_reason: FinishReason | None = None
    error: str = ""  # why, for reasons other than stop and length
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    replayed: bool = False  # windows were rebuilt by bounded replay, for it or for what it reused: not exactly a cold run's output
    preemptions: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the tokens' log-probabilities."""
        return sum(item.logprob for item in self.logprobs)


@dataclass(frozen=True)
class Timing:
    """Seconds on the engine's monotonic clock, relative to the arrival of the request."""

    first_token: float | None  # None: no token
    finished: float


@dataclass
class RequestOutput:
    """A request and everything generated for it. `text`, `token_ids`, `logprobs` and `finish_reason` are those of the first sample."""

    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]
    samples: list[SampleOutput]
    prompt_logprobs: list[TokenLogprob] | None = None  # of prompt tokens 1 .. n-1; None: not asked for
    timing: Timing | None = None

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.samples[0].finish_reason

    @property
    def error(self) -> str:
        """Why the request failed; empty if it did not."""
        return next((sample.error for sample in self.samples if sample.error), "")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        from dataclasses import asdict

        return asdict(self)


@dataclass(frozen=True)
class Delta:
    """New output of one sample."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # set in the last delta of a sample
    error: str = ""  # why it ended, for reasons other than stop and length
