"""Every field of SamplingParams: defaults, edges, and a refusal that names field, value and expectation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.sampling import SamplingParams, defaults_from, parse_blacklist

JSON = {"schema_type": "json", "schema": "{}"}


def test_defaults_are_those_of_deepinfer() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, -1, 16)
    assert (params.ignore_eos, params.logprobs, params.prompt_logprobs, params.top_logprobs) == (False, False, False, 0)
    assert (params.first_n_token_no_eos, params.so_args, params.golden_token_ids, params.seq_seed) == (0, None, None, None)
    assert (params.n, params.min_p, params.min_tokens, params.stop, params.stop_token_ids, params.logit_bias) == (1, 0, 0, (), (), {})
    assert not params.has_penalties
    assert not params.is_greedy


REFUSED = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "finite number"),
    ("temperature", math.inf, "finite number"),
    ("temperature", "1", "finite number"),
    ("temperature", True, "finite number"),
    ("temperature", None, "finite number"),
    ("top_p", 0, "more than 0"),
    ("top_p", 1.01, "at most 1"),
    ("top_p", math.nan, "finite number"),
    ("top_k", 0, "-1 .off. or at least 1"),
    ("top_k", -2, "at least -1"),
    ("top_k", 2**31, "at most 2147483647"),
    ("top_k", 1.5, "integer"),
    ("top_k", True, "integer"),
    ("min_p", -0.1, "at least 0"),
    ("min_p", 1.1, "at most 1"),
    ("max_tokens", -1, "at least 1"),
    ("max_tokens", 2**31, "at most"),
    ("max_tokens", False, "integer"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "exceeds max_tokens=16"),
    ("ignore_eos", 1, "true or false"),
    ("stop", 5, "string or a list of strings"),
    ("stop", [""], "1 to 1024 characters"),
    ("stop", ["x"] * 65, "at most 64"),
    ("stop", ["x" * 1025], "1 to 1024 characters"),
    ("stop_token_ids", 5, "list of token ids"),
    ("stop_token_ids", [-1], "not negative"),
    ("stop_token_ids", [True], "not negative"),
    ("stop_token_ids", [1.0], "not negative"),
    ("stop_token_ids", [0] * 1025, "at most 1024"),
    ("n", 0, "at least 1"),
    ("n", 129, "at most 128"),
    ("presence_penalty", 2.1, "at most 2"),
    ("presence_penalty", math.nan, "finite number"),
    ("frequency_penalty", -2.1, "at least -2"),
    ("repetition_penalty", 0, "more than 0"),
    ("repetition_penalty", math.inf, "finite number"),
    ("logit_bias", [1], "maps token ids to numbers"),
    ("logit_bias", {"x": 1}, "token ids as keys"),
    ("logit_bias", {-1: 1}, "token ids as keys"),
    ("logit_bias", {1: math.nan}, "finite number"),
    ("logit_bias", {1: "2"}, "finite number"),
    ("logit_bias", dict.fromkeys(range(1025), 0), "at most 1024"),
    ("logprobs", 3, "true or false"),
    ("top_logprobs", -1, "at least 0"),
    ("top_logprobs", 1001, "at most 1000"),
    ("prompt_logprobs", "yes", "true or false"),
    ("first_n_token_no_eos", -1, "at least 0"),
    ("golden_token_ids", "12", "list of token ids"),
    ("golden_token_ids", [1, None], "not negative"),
    ("seq_seed", 1.0, "integer or None"),
    ("seq_seed", True, "integer or None"),
    ("seed", "7", "integer or None"),
    ("eos_id", -1, "at least 0"),
    ("so_args", [], "schema_type and schema"),
]


@pytest.mark.parametrize(("field", "value", "expected"), REFUSED, ids=[f"{f}={str(v)[:20]}" for f, v, _ in REFUSED])
def test_bad_values_are_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(RequestError, match=expected) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert field in str(caught.value)
    assert len(str(caught.value)) < 600


SO_REFUSED = [
    ({"schema_type": "xml", "schema": "x"}, "so_args.schema_type", "one of ebnf, json, regex"),
    ({"schema_type": "regex"}, "so_args.schema", "not empty"),
    ({"schema_type": "json", "schema": "{"}, "so_args.schema", "not JSON"),
    ({"schema_type": "json", "schema": "[" * 100000}, "so_args.schema", "not JSON"),
    ({"schema_type": "regex", "schema": "x" * (2**20 + 1)}, "so_args.schema", "at most"),
    ({**JSON, "serialized": "x"}, "so_args.serialized", "schema_type and schema"),
    ({**JSON, "bound_token_ids": [1]}, "so_args.bound_token_ids", "use bound_token_id"),
    ({**JSON, "trigger": [1]}, "so_args.trigger", "unknown key"),
    ({**JSON, "trigger_token_ids": [-1]}, "so_args.trigger_token_ids", "not negative"),
    ({**JSON, "trigger_token_ids": [1] * 65}, "so_args.trigger_token_ids", "at most 64"),
    ({**JSON, "trigger_token_ids": [1], "bound_token_id": -3}, "so_args.bound_token_id", "not negative"),
    ({**JSON, "bound_token_id": 3}, "so_args.bound_token_id", "needs trigger_token_ids"),
]


@pytest.mark.parametrize(("value", "parameter", "expected"), SO_REFUSED, ids=[p + "-" + e[:8] for _, p, e in SO_REFUSED])
def test_bad_structured_output_is_refused_by_key(value: dict, parameter: str, expected: str) -> None:
    with pytest.raises(RequestError, match=expected) as caught:
        SamplingParams(so_args=value)
    assert caught.value.parameter == parameter


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(RequestError, match="2 problems") as caught:
        SamplingParams(temperature=-1.0, top_p=2.0)
    assert "temperature=-1.0" in str(caught.value)
    assert "top_p=2.0" in str(caught.value)


def test_unknown_field_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="no field 'temperatur'; did you mean 'temperature'") as caught:
        SamplingParams(temperatur=1.0)
    assert caught.value.parameter == "temperatur"


def test_contradictions() -> None:
    with pytest.raises(RequestError, match=r"differ .seq_seed=2.; give one"):
        SamplingParams(seed=1, seq_seed=2)
    with pytest.raises(RequestError, match="contradict so_args"):
        SamplingParams(golden_token_ids=[1], so_args=JSON)


def test_accepted_edges() -> None:
    assert SamplingParams(max_tokens=0).max_tokens == 1
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=0.9e-5).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert SamplingParams(top_p=1, top_k=2**31 - 1, min_p=1).top_k == 2**31 - 1
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    assert SamplingParams(logit_bias={"12": 1, 3: -2.5}).logit_bias == {12: 1.0, 3: -2.5}
    assert SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5)).top_k == 5
    assert SamplingParams(min_tokens=16).min_tokens == 16
    so_args = {**JSON, "trigger_token_ids": (1, 2), "bound_token_id": 0}
    assert SamplingParams(so_args=so_args).so_args == {**JSON, "trigger_token_ids": [1, 2], "bound_token_id": 0}


def test_seeds_are_64_bits_and_seed_is_an_alias() -> None:
    assert SamplingParams(seed=5).seq_seed == 5
    assert SamplingParams(seed=5) == SamplingParams(seq_seed=5) == SamplingParams(seed=5, seq_seed=5)
    assert SamplingParams(seq_seed=-1).seq_seed == 2**64 - 1
    assert SamplingParams(seq_seed=2**64 + 3).seq_seed == 3


def test_immutable() -> None:
    with pytest.raises(Exception, match="frozen"):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"stop_token_ids": [10]}, "stop_token_ids"),
        ({"golden_token_ids": [3, 11]}, "golden_token_ids"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"so_args": {**JSON, "trigger_token_ids": [10]}}, "so_args.trigger_token_ids"),
        ({"so_args": {**JSON, "trigger_token_ids": [1], "bound_token_id": 10}}, "so_args.bound_token_id"),
    ],
)
def test_ids_are_checked_against_the_vocabulary(values: dict, parameter: str) -> None:
    params = SamplingParams(**values)
    params.check_vocabulary(12)
    with pytest.raises(RequestError, match=r"lie in \[0, 10\)") as caught:
        params.check_vocabulary(10)
    assert caught.value.parameter == parameter


def test_penalties_are_seen() -> None:
    assert SamplingParams(presence_penalty=0.1).has_penalties
    assert SamplingParams(frequency_penalty=-0.1).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties


def test_defaults_from_generation_config() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "do_sample": True, "eos_token_id": 1, "max_new_tokens": 100, "min_p": None}
    defaults = defaults_from(config)
    assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "max_tokens": 100}
    assert defaults_from({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    with pytest.raises(RequestError, match=r"generation_config.json: top_p=3"):
        defaults_from({"top_p": 3})


def test_defaults_fill_only_what_was_not_given() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "seed": 4}
    merged = SamplingParams(temperature=1.0, seq_seed=9).with_defaults(defaults)
    assert (merged.temperature, merged.top_p, merged.seq_seed) == (1.0, 0.95, 9)
    assert SamplingParams().with_defaults(defaults).seq_seed == 4
    unchanged = SamplingParams(top_k=3)
    assert unchanged.with_defaults({}) is unchanged


def test_blacklist_good() -> None:
    assert parse_blacklist("", 10) == ()
    assert parse_blacklist("0..3,7,9..9", 10) == (0, 1, 2, 3, 7, 9)
    assert parse_blacklist(" 1 , 2 .. 3 ", 10) == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (",", "an id or a range"),
        ("1,,2", "an id or a range"),
        ("1,", "an id or a range"),
        ("3..1", "ends before it starts"),
        ("x", "an id or a range"),
        ("-1", "an id or a range"),
        ("1.5", "an id or a range"),
        ("2,2", "increase strictly"),
        ("4..6,5", "increase strictly"),
        ("10", r"in \[0, 10\)"),
        ("5..10", r"in \[0, 10\)"),
        ("0..9", "whole vocabulary"),
        ("1..2..3", "an id or a range"),
    ],
)
def test_blacklist_bad(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        parse_blacklist(text, 10)
    assert "DEEPINFER_DECODE_TOKEN_BLACKLIST" in str(caught.value)
