"""A request as the scheduler sees it: token ids, limits, and why it ended. Sampling parameters and text are not known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np


class FinishReason(StrEnum):
    """Why a request ended. The values are what users see."""

    STOP = "stop"  # a stop id was emitted, or the front end found a stop string
    LENGTH = "length"  # max_tokens or the model length was reached
    ABORT = "abort"
    PROMPT_TOO_LONG = "prompt_length_exceeded"
    NO_RESOURCE = "insufficient_system_resource"  # the cache cannot hold it, or it was preempted and may not be recomputed
    INVALID = "invalid_request"
    ERROR = "error"  # its computation failed


class Status(IntEnum):
    """Where a request stands."""

    WAITING = 0  # queued: new, or preempted
    RUNNING = 1  # owns pages and a state slot
    FINISHED = 2


@dataclass(frozen=True)
class RequestSpec:
    """What the scheduler must know of a request. Immutable."""

    request_id: str
    prompt: Sequence[int] | np.ndarray  # token ids, at least one
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()  # ids that end the request when emitted; the caller leaves EOS out for `ignore_eos`
    min_tokens: int = 0  # stop ids count from this output token on
    prompt_logprobs: bool = False  # every prompt row must be computed: no prefix reuse, no decoder-side truncation
    recomputable: bool = True  # False: preemption ends the request
    cache_salt: bytes = b""  # requests share cached prefixes only under the same salt
    checkpoints: tuple[int, ...] = ()  # positions at which a prefill chunk must end, ascending
    atomic_spans: tuple[tuple[int, int], ...] = ()  # [begin, end) ranges that no chunk and no prefix hit may split, e.g. images
    span_digests: tuple[bytes, ...] = ()  # content digest of each atomic span: ids alone do not identify an image
    schedulable: bool = True  # False: queued until `Scheduler.set_schedulable`


@dataclass(frozen=True)
class Finished:
    """A request's end. Each request that was added gets exactly one."""

    request_id: str
    reason: FinishReason
    num_outputs: int
    detail: str = ""  # for people: what was wrong, numbers, remedy; empty for ordinary ends
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache at the (last) admission
    replayed: bool = False  # windows were rebuilt by bounded replay, for it or for what it reused: outputs may differ from a cold run
    preemptions: int = 0


@dataclass
class Request:
    """Mutable book-keeping of one request. Hot per-step numbers live in `RequestTable` while it is running."""

    spec: RequestSpec
    prompt: np.ndarray  # int32
    order: int  # arrival number
    limit: int  # total tokens at which it ends
    limit_reason: FinishReason
    status: Status = Status.WAITING
    row: int = -1  # row in the table, -1: none
    outputs: list[int] = field(default_factory=list)  # emitted tokens while it owns no row
    hashes: list[bytes] = field(default_factory=list)  # chain hashes of its complete pages, extended as pages fill
    pins: dict[int, int] = field(default_factory=dict)  # page number -> page of the prefix index with the same content as its own
    scored: int = 0  # prompt positions whose logprobs were delivered
    schedulable: bool = True
    cached_tokens: int = 0
    exact: bool = True  # what it computes since its last admission is what a cold run computes
    replayed: bool = False  # that was not so at some admission
    preemptions: int = 0

    @property
    def request_id(self) -> str:
        """The caller's name of the request."""
        return self.spec.request_id
