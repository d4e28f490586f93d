"""What the checks of request fields share."""

from __future__ import annotations

from deepinfer_core.errors import RequestError

INT_MAX = 2**31 - 1


def field_error(parameter: str, value: object, expected: str) -> RequestError:
    """The error "parameter=value: expected", with long values cut."""
    shown = repr(value)
    return RequestError(f"{parameter}={shown if len(shown) <= 80 else shown[:77] + '...'}: {expected}", parameter=parameter, value=value)


def is_token_id(value: object) -> bool:
    """True for an integer that some vocabulary could contain."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT_MAX
