"""What one request asks of the sampler, checked completely when it is built.

Names and meanings are those of DeepInfer 0.1.0's `SamplingParams`, plus the fields that users of other engines expect. Nothing that a
request says reaches the step loop unchecked: numbers are finite and in range, lists are bounded, ids are checked against the
vocabulary by `check_vocabulary` before the request is queued.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer_core.errors import RequestError, listing, nearest
from deepinfer_core.sampling.checks import INT_MAX, field_error, is_token_id
from deepinfer_core.sampling.random import SEED_MASK
from deepinfer_core.sampling.structured import checked_so_args

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy (DeepInfer 0.1.0)."""

MAX_SAMPLES = 128
MAX_TOP_LOGPROBS = 1000
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_GOLDEN_TOKENS = 1 << 20

_ID_LISTS = {"stop_token_ids": MAX_STOP_TOKENS, "golden_token_ids": MAX_GOLDEN_TOKENS}


class SamplingParams(BaseModel):
    """Sampling parameters of one request; immutable. `RequestError` names the field, the value and what was expected.

    Numbers may be Python or numpy numbers; booleans are not numbers. `max_tokens=0` means 1, as in DeepInfer 0.1.0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0, le=1000, description="divides the logits; below 1e-5: greedy, the most likely token")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the most likely tokens until their mass exceeds this; 1: off")
    top_k: int = Field(-1, ge=-1, le=INT_MAX, description="keep this many of the most likely tokens; -1: off")
    min_p: float = Field(0.0, ge=0, le=1, description="drop tokens less likely than this times the most likely one; 0: off")
    max_tokens: int = Field(16, ge=1, le=INT_MAX, description="stop after this many output tokens")
    min_tokens: int = Field(0, ge=0, le=INT_MAX, description="EOS and stop_token_ids cannot be generated before this many output tokens")
    ignore_eos: bool = Field(False, description="EOS does not end the request (it may still be generated)")
    stop: tuple[str, ...] = Field((), description="the request ends when its text contains one of these")
    stop_token_ids: tuple[int, ...] = Field((), description="the request ends when one of these tokens was generated")
    n: int = Field(1, ge=1, le=MAX_SAMPLES, description="samples of the same prompt, each with its own seed")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted from the logit of every token in the output so far")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted as often as the token occurs in the output so far")
    repetition_penalty: float = Field(
        1.0, gt=0, le=10, description="divides positive, multiplies negative logits of tokens in prompt or output"
    )
    logit_bias: dict[int, float] = Field({}, description="added to the logits of these token ids")
    logprobs: bool = Field(False, description="accepted; the log-probability of each token is always returned")
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description="also return this many most likely tokens per position")
    prompt_logprobs: bool = Field(False, description="also return the log-probability of each prompt token given its prefix")
    first_n_token_no_eos: int = Field(0, ge=0, le=INT_MAX, description="1: the first output token is not EOS; other values do nothing")
    golden_token_ids: tuple[int, ...] | None = Field(None, description="force the first output tokens to be these")
    seq_seed: int | None = Field(None, description="seed of this request's random numbers, 64 bits; None: drawn per request")
    seed: int | None = Field(None, description="another name of seq_seed")
    so_args: dict[str, Any] | None = Field(None, description="structured output: schema_type, schema, trigger_token_ids, bound_token_id")
    eos_id: int = Field(0, ge=0, description="accepted for old scripts; the engine always uses the tokenizer's EOS")

    def __init__(self, **values: Any) -> None:
        unknown = [name for name in values if name not in type(self).model_fields]
        if unknown:
            problems = [f"SamplingParams has no field {name!r}{nearest(name, type(self).model_fields)}" for name in unknown]
            raise RequestError(listing("SamplingParams", problems), parameter=unknown[0], value=values[unknown[0]])
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _request_error(error) from None

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = {name: _plain(value) for name, value in values.items()}
        if values.get("max_tokens") == 0 and not isinstance(values["max_tokens"], bool):
            values["max_tokens"] = 1
        if "stop" in values:
            values["stop"] = _stop_strings(values["stop"])
        for name, limit in _ID_LISTS.items():
            if values.get(name) is not None:
                values[name] = _id_list(name, values[name], limit)
        if values.get("stop_token_ids", ()) is None:
            values["stop_token_ids"] = ()
        if "logit_bias" in values:
            values["logit_bias"] = _logit_bias(values["logit_bias"])
        if values.get("so_args") is not None:
            values["so_args"] = checked_so_args(values["so_args"])
        return _one_seed(values)

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.top_k == 0:
            raise field_error("top_k", 0, "expected -1 (off) or at least 1; leave it out to keep all tokens")
        if self.min_tokens > self.max_tokens:
            expected = f"it exceeds max_tokens={self.max_tokens}; raise max_tokens or lower min_tokens"
            raise field_error("min_tokens", self.min_tokens, expected)
        if self.so_args is not None and self.golden_token_ids:
            raise field_error(
                "golden_token_ids", list(self.golden_token_ids[:8]), "forced tokens contradict so_args; leave out one of the two"
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken (top_p, top_k and min_p then have no effect)."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the tokens generated so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError if a token id of any field lies outside [0, vocab_size)."""
        so_args = self.so_args or {}
        bound = so_args.get("bound_token_id")
        lists: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "golden_token_ids": self.golden_token_ids or (),
            "logit_bias": self.logit_bias,
            "so_args.trigger_token_ids": so_args.get("trigger_token_ids") or (),
            "so_args.bound_token_id": () if bound is None else (bound,),
        }
        for name, ids in lists.items():
            bad = [token for token in ids if not 0 <= token < vocab_size]
            if bad:
                raise field_error(name, bad[0], f"token ids of this model lie in [0, {vocab_size}); remove ids outside it")

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """These parameters with `defaults` in place of every field that was not given. `seed` and `seq_seed` count as one field."""
        given = self.model_fields_set
        kept = {name: getattr(self, name) for name in given}
        seeded = given & {"seed", "seq_seed"}
        added = {k: v for k, v in defaults.items() if k not in given and not (seeded and k in ("seed", "seq_seed"))}
        return SamplingParams(**kept, **added) if added else self


def defaults_from(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that a checkpoint's generation_config.json recommends, for `SamplingParams.with_defaults`.

    `do_sample: false` means temperature 0, `top_k: 0` means off; other keys of the file are not sampling parameters and are ignored.
    Raises: RequestError if a value is not valid, naming the file.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if found.get("top_k") == 0:
        found["top_k"] = -1
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    if generation_config.get("max_new_tokens") is not None:
        found["max_tokens"] = generation_config["max_new_tokens"]
    try:
        SamplingParams(**found)
    except RequestError as error:
        message = f"generation_config.json: {error}. Correct the file or ignore its defaults"
        raise RequestError(message, parameter=error.parameter, value=error.value) from None
    return found


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as Python values; everything else as it is."""
    if isinstance(value, np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) for item in strings):
        raise field_error("stop", value, "expected a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise field_error("stop", f"{len(strings)} strings", f"expected at most {MAX_STOP_STRINGS} strings; shorten the list")
    for item in strings:
        if not 1 <= len(item) <= MAX_STOP_LENGTH:
            raise field_error("stop", item, f"expected strings of 1 to {MAX_STOP_LENGTH} characters; remove this one")
    return tuple(strings)


def _id_list(name: str, value: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise field_error(name, value, "expected a list of token ids")
    if len(value) > limit:
        raise field_error(name, f"{len(value)} ids", f"expected at most {limit} token ids; shorten the list")
    ids = tuple(_plain(item) for item in value)
    for item in ids:
        if not is_token_id(item):
            raise field_error(name, item, "expected token ids: integers that are not negative")
    return ids


def _logit_bias(value: Any) -> dict[int, float]:
    """Token ids may be strings of digits, as JSON objects have them."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise field_error("logit_bias", value, "expected an object that maps token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise field_error("logit_bias", f"{len(value)} entries", f"expected at most {MAX_LOGIT_BIAS} entries; shorten the list")
    result: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else _plain(key)
        if not is_token_id(token):
            raise field_error("logit_bias", key, "expected token ids as keys: integers that are not negative")
        bias = _plain(bias)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias) or abs(bias) > 1e4:
            raise field_error("logit_bias", bias, f"expected a finite number between -10000 and 10000 for token {token}")
        result[token] = float(bias)
    return result


def _one_seed(values: dict[str, Any]) -> dict[str, Any]:
    """`seed` and `seq_seed` as one 64-bit number."""
    for name in ("seed", "seq_seed"):
        seed = values.get(name)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise field_error(name, seed, "expected an integer or None")
    seeds = {values[name] & SEED_MASK for name in ("seed", "seq_seed") if values.get(name) is not None}
    if len(seeds) > 1:
        raise field_error("seed", values["seed"], f"seed and seq_seed mean the same but differ (seq_seed={values['seq_seed']}); give one")
    return {**values, "seed": None, "seq_seed": seeds.pop()} if seeds else values


def _request_error(error: ValidationError) -> RequestError:
    """All problems that pydantic found, in one RequestError."""
    problems = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "SamplingParams"
        problems.append((name, item["input"], f"{name}={item['input']!r}: {_expectation(item)}"))
    name, value, _ = problems[0]
    return RequestError(listing("SamplingParams", [text[:300] for _, _, text in problems]), parameter=name, value=value)


def _expectation(item: Mapping[str, Any]) -> str:
    """What a field accepts, from its declaration: its type, range and meaning."""
    field = SamplingParams.model_fields[str(item["loc"][0])]
    low = next((f"at least {m.ge}" for m in field.metadata if hasattr(m, "ge")), None)
    low = low or next((f"more than {m.gt}" for m in field.metadata if hasattr(m, "gt")), None)
    high = next((f"at most {m.le}" for m in field.metadata if hasattr(m, "le")), None)
    kinds = {float: "a finite number", int: "an integer", bool: "true or false"}
    bounds = ", ".join(x for x in (low, high) if x)
    return f"expected {kinds.get(field.annotation, 'a valid value')}{', ' + bounds if bounds else ''} ({field.description})"  # type: ignore[arg-type]
