"""Checks of `so_args`, the structured-output part of a request, before any grammar is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepinfer_core.errors import nearest
from deepinfer_core.sampling.checks import field_error, is_token_id

SCHEMA_TYPES = ("ebnf", "json", "regex")
KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
MAX_SCHEMA_LENGTH = 1 << 20
MAX_TRIGGER_TOKENS = 64


def checked_so_args(value: Any) -> dict[str, Any]:
    """`value` as a plain dict with the keys of `KEYS` that were given.

    `schema_type` (json, regex or ebnf) and `schema` (text) are required; `trigger_token_ids` is the token sequence after which the
    grammar applies, `bound_token_id` the token that ends free text and needs a trigger. Meanings as in DeepInfer 0.1.0.
    Raises: RequestError naming the key.
    """
    if not isinstance(value, Mapping):
        raise field_error("so_args", value, "expected an object with schema_type and schema")
    for key in value:
        if key == "serialized":
            raise field_error("so_args.serialized", value[key], "serialised grammars are not accepted; give schema_type and schema")
        if key == "bound_token_ids":
            raise field_error("so_args.bound_token_ids", value[key], "only one bound token is supported; use bound_token_id")
        if key not in KEYS:
            raise field_error(f"so_args.{key}", value[key], f"unknown key{nearest(str(key), KEYS)}")
    _check_schema(value)
    trigger, bound = value.get("trigger_token_ids"), value.get("bound_token_id")
    if trigger is not None and not (isinstance(trigger, list | tuple) and all(is_token_id(item) for item in trigger)):
        raise field_error("so_args.trigger_token_ids", trigger, "expected a list of token ids: integers that are not negative")
    if trigger is not None and len(trigger) > MAX_TRIGGER_TOKENS:
        raise field_error("so_args.trigger_token_ids", f"{len(trigger)} ids", f"expected at most {MAX_TRIGGER_TOKENS} ids")
    if bound is not None and not is_token_id(bound):
        raise field_error("so_args.bound_token_id", bound, "expected one token id: an integer that is not negative")
    if bound is not None and not trigger:
        raise field_error("so_args.bound_token_id", bound, "a bound token needs trigger_token_ids, which it will force; give both")
    return {key: list(item) if isinstance(item, tuple) else item for key, item in value.items() if item is not None}


def _check_schema(value: Mapping[str, Any]) -> None:
    kind, schema = value.get("schema_type"), value.get("schema")
    if kind not in SCHEMA_TYPES:
        raise field_error("so_args.schema_type", kind, f"expected one of {', '.join(SCHEMA_TYPES)}")
    if not isinstance(schema, str) or not schema:
        raise field_error("so_args.schema", schema, "expected a text that is not empty")
    if len(schema) > MAX_SCHEMA_LENGTH:
        raise field_error("so_args.schema", f"{len(schema)} characters", f"expected at most {MAX_SCHEMA_LENGTH} characters")
    if kind == "json":
        try:
            json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise field_error("so_args.schema", schema, f"expected the text of a JSON schema, but it is not JSON ({error})") from None
