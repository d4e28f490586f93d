"""Which kind of step comes next when prefill and decode steps must not mix (policy `alternate`)."""

from __future__ import annotations

from collections.abc import Sequence


def prefill_vote(decode_steps: int, wants: Sequence[bool], all_interval: int = 70, any_interval: int = 100) -> bool:
    """Whether the next step is a prefill step, the same answer on every data-parallel rank.

    decode_steps counts decode steps since the last prefill step; wants says, per rank, whether it could start a prefill. Every
    `any_interval` decode steps one willing rank suffices; every `all_interval` steps, and right after a prefill, all must be willing.
    Source: DeepInfer 0.1.0, step-kind vote.
    """
    if decode_steps and decode_steps % any_interval == 0:
        return any(wants)
    if decode_steps % all_interval == 0:
        return all(wants)
    return False


def is_vote_point(decode_steps: int, all_interval: int = 70, any_interval: int = 100) -> bool:
    """Whether `prefill_vote` looks at `wants` at all: ranks need to exchange theirs only then."""
    return decode_steps % all_interval == 0 or (decode_steps > 0 and decode_steps % any_interval == 0)
