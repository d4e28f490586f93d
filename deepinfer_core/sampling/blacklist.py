"""The list of token ids that must never be generated (`DEEPINFER_DECODE_TOKEN_BLACKLIST`)."""

from __future__ import annotations

import re

from deepinfer_core.errors import ConfigError

VARIABLE = "DEEPINFER_DECODE_TOKEN_BLACKLIST"
_SEGMENT = re.compile(r"\s*(\d{1,18})\s*(?:\.\.\s*(\d{1,18})\s*)?", re.ASCII)


def parse_blacklist(text: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of `text`, such as "0..3,7,10..12": ids or inclusive ranges, strictly increasing, in [0, vocab_size). "" gives none.

    Raises: ConfigError that names the variable and the first bad segment.
    """
    ids: list[int] = []
    if not text.strip():
        return ()
    for segment in text.split(","):
        match = _SEGMENT.fullmatch(segment)
        if match is None:
            raise _error(text, segment, "expected an id or a range a..b")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if first > last:
            raise _error(text, segment, "the range ends before it starts")
        if last >= vocab_size:
            raise _error(text, segment, f"ids must lie in [0, {vocab_size})")
        if ids and first <= ids[-1]:
            raise _error(text, segment, f"ids must increase strictly, the previous one is {ids[-1]}")
        ids.extend(range(first, last + 1))
    if len(ids) == vocab_size:
        raise _error(text, text, "it forbids the whole vocabulary")
    return tuple(ids)


def _error(text: str, segment: str, reason: str) -> ConfigError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return ConfigError(f"{VARIABLE}={shown!r}: segment {segment.strip()[:40]!r}: {reason}. Example of a valid list: '0..3,7,10..12'")
