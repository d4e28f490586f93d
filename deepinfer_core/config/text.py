"""Values of configuration keys written as text: environment variables and `--set KEY=VALUE`."""

from __future__ import annotations

import typing
from typing import Any, Literal

from pydantic.fields import FieldInfo

from deepinfer_core.config.engine_config import is_optional

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})


def parse(text: str, field: FieldInfo) -> Any:
    """`text` as a value of `field`'s type. Raises ValueError that says what was expected. Ranges are checked later, by the schema."""
    kinds = [kind for kind in typing.get_args(field.annotation) if kind is not type(None)] if is_optional(field) else [field.annotation]
    if is_optional(field) and text.strip().lower() in ("", "none", "null"):
        return None
    kind = kinds[0]
    if kind is bool:
        return parse_bool(text)
    if kind is int:
        return _number(int, text, "an integer")
    if kind is float:
        return _number(float, text, "a number")
    if typing.get_origin(kind) is tuple:
        return tuple(_number(float, part, "a number, or numbers separated by commas") for part in text.split(","))
    return text if kind is str or typing.get_origin(kind) is not Literal else text.strip()


def parse_bool(text: str) -> bool:
    """True or False; anything but the listed words is an error, unlike in DeepInfer 0.1.0, where it was true."""
    word = text.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError("expected one of 1, true, yes, on, 0, false, no, off, or nothing (false)")


def _number(kind: type[int] | type[float], text: str, expected: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {expected}") from None
