"""The errors a user can meet. Every message says what is wrong, where, what was expected and what to do.

Two families at the boundary: `RequestError` is the caller's fault (one request), everything else is the engine's or its set-up's.
Nothing here imports anything heavy, so that any module may use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class DeepInferError(Exception):
    """Base of all errors that DeepInfer raises on purpose. The command line prints the message alone and ends with `exit_code`."""

    exit_code = 1  # 1: failure, 2: usage


class RequestError(DeepInferError):
    """One request cannot be served as asked. `parameter` names the offending field, `value` is what was given."""

    exit_code = 2

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class EngineError(DeepInferError):
    """The engine cannot go on: a device failed, memory does not suffice, an internal invariant broke."""


class ConfigError(DeepInferError):
    """The configuration cannot be used; the message lists every problem found. `problems` holds them one by one."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(listing("the configuration", self.problems))


class CheckpointError(DeepInferError):
    """A checkpoint (weights, config.json, tokenizer) cannot be used. `problems` holds every problem found."""

    def __init__(self, problems: str | Sequence[str], where: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.where = where
        super().__init__(listing(f"checkpoint {where!r}" if where else "the checkpoint", self.problems))


class BackendError(DeepInferError):
    """A backend is unknown, ambiguous, broken, not available here, or lacks a feature that the configuration asks for."""


class UnknownBackendError(BackendError):
    """No installed backend has the name."""

    exit_code = 2


def listing(subject: str, problems: Sequence[str]) -> str:
    """One line for one problem, else "`subject` has N problems:" and one indented line each."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{subject} has {len(problems)} problems:", *problems])


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: "; did you mean 'x'?" if a valid name is close, else "; valid: …"."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if names else ""
