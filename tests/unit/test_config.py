"""`EngineConfig` and its sources: precedence, provenance, names, and every message."""

import contextlib
import json
import re
from enum import StrEnum
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.config import EngineConfig, resolve_config
from deepinfer_core.config.engine_config import leaves
from deepinfer_core.config.environment import NOT_BUILT, VARIABLES
from deepinfer_core.config.resolve import FIXED, parse_settings
from deepinfer_core.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


def refused(pattern: str, **sources: object) -> None:
    with pytest.raises(ConfigError, match=pattern):
        resolve_config(**{"env": {}, **sources})


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_need_nothing():
    config = resolve_config(env={}).config
    assert config == EngineConfig()
    assert (config.model.max_model_len, config.model.numerics, config.backend.name) == (4096, "release", "auto")


def test_rising_precedence_and_sources(tmp_path):
    file = write(tmp_path, "scheduler: {prefill_attempt_interval: 2, prefill_any_attempt_interval: 2, max_num_seqs: 2}\nmodel: from_file\n")
    resolved = resolve_config(
        {"prefill_attempt_interval": 1, "max_num_seqs": 1, "seed": 1, "model": "from_keyword"},
        file,
        {"DEEPINFER_PREFILL_ATTEMPT_INTERVAL": "3", "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": "3"},
        {"prefill_attempt_interval": 4},
    )
    config, sources = resolved.config, resolved.sources
    assert (config.scheduler.prefill_attempt_interval, sources["scheduler.prefill_attempt_interval"]) == (4, "flag")
    assert config.scheduler.prefill_any_attempt_interval == 3
    assert sources["scheduler.prefill_any_attempt_interval"] == "env DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL"
    assert (config.scheduler.max_num_seqs, sources["scheduler.max_num_seqs"]) == (2, f"file {file}")
    assert (config.model.seed, sources["model.seed"]) == (1, "keyword")
    assert (config.model.path, sources["model.path"]) == ("from_file", f"file {file}")
    assert sources["cache.num_pages"] == "default"
    assert set(sources) == set(leaves())


def test_printed_text_is_yaml_of_the_same_config(tmp_path):
    resolved = resolve_config({"num_draft_tokens": 2, "confidence_temperatures": [0.5, 1], "model": "a'b: #c"}, env={})
    assert yaml.safe_load(resolved.as_text())["speculative"]["confidence_temperatures"] == [0.5, 1]
    assert "num_draft_tokens: 2" in resolved.as_text()
    again = resolve_config(file=write(tmp_path, resolved.as_text()), env={})
    assert again.config == resolved.config
    assert json.loads(resolved.as_json())["config"]["model.path"] == {"value": "a'b: #c", "source": "keyword"}


def test_shorthands_paths_and_enums():
    class Numerics(StrEnum):
        IDEAL = "ideal"

    config = EngineConfig(model=Path("some") / "folder", backend="cpu_ref")
    assert (config.model.path, config.backend.name) == (str(Path("some") / "folder"), "cpu_ref")
    assert resolve_config({"numerics": Numerics.IDEAL}, env={}).config.model.numerics == "ideal"
    assert resolve_config({"scheduler": config.scheduler, "backend": {"name": "x"}}, env={}).config.backend.name == "x"


def test_derived_numbers():
    config = EngineConfig(scheduler={"max_num_seqs": 1000, "async_scheduling": True}, speculative={"num_draft_tokens": 5})
    assert config.token_budget == 6000
    assert config.runtime_max_model_len == 4096 + 5 + 6 + 5
    assert (config.num_state_slots, config.backtracking_tokens, config.prompt_limit) == (1201, 6, 4096)
    plain = EngineConfig(scheduler={"async_scheduling": False})
    assert (plain.token_budget, plain.runtime_max_model_len, plain.backtracking_tokens) == (4096, 4096, 1)


def test_sampling_defaults_that_are_set():
    assert EngineConfig().sampling.request_defaults == {}
    config = resolve_config({"temperature": 0.0, "top_p": 0.9, "max_tokens": 8}, env={}).config
    assert config.sampling.request_defaults == {"temperature": 0.0, "top_p": 0.9, "max_tokens": 8}


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().model.seed = 3


@pytest.mark.parametrize(
    ("keywords", "pattern"),
    [
        ({"max_num_seq": 4}, r"unknown key 'max_num_seq' \(keyword\); did you mean 'scheduler.max_num_seqs'\?"),
        ({"scheduler": {"polcy": "mixed"}}, r"unknown key 'scheduler.polcy'.*did you mean 'scheduler.policy'"),
        ({"cache.max_num_seqs": 4}, "did you mean 'scheduler.max_num_seqs'"),
        ({"schedular": {}}, "did you mean 'scheduler'"),
        ({"zzz": 4}, "unknown key 'zzz'.*valid: backend, cache"),
        ({"scheduler": 3}, r"scheduler = 3 \(keyword\): expected keys and values"),
        ({"max_num_seqs": 0}, r"scheduler.max_num_seqs = 0 \(from keyword\): input should be greater than or equal to 1"),
        ({"max_num_seqs": "8"}, "scheduler.max_num_seqs = '8'.*valid integer"),
        ({"chunked_prefill": "yes"}, "scheduler.chunked_prefill = 'yes'.*valid boolean"),
        ({"gpu_memory_utilization": 1.5}, "cache.gpu_memory_utilization = 1.5.*less than or equal to 1"),
        ({"gpu_memory_utilization": float("nan")}, "cache.gpu_memory_utilization = nan.*finite"),
        ({"numerics": "fast"}, "model.numerics = 'fast'.*'release' or 'ideal'"),
        ({"load_format": "pickle"}, "model.load_format = 'pickle'.*'auto' or 'dummy'"),
        ({"data_parallel_size": 2}, "parallel.data_parallel_size = 2: this version runs in one process, set it to 1"),
        ({"max_num_batched_tokens": 100}, "a decode step of 256 requests.*raise the budget"),
        ({"max_num_batched_tokens": 2000}, "below model.max_model_len = 4096.*chunked_prefill: true"),
        ({"prefill_max_sum_seqlen_k": 5}, "prefill_max_sum_seqlen_k = 5 is below the longest prompt, 4096"),
        ({"num_draft_tokens": 3, "confidence_temperatures": [1, 2]}, "has 2 values: expected one, or one for each"),
        ({"deterministic_sampling": True}, "deterministic_sampling needs determinism.batch_invariant"),
        ({"deterministic_sampling": True, "batch_invariant": True, "enable_varlen": True}, "excludes speculative.enable_varlen"),
        ({"trust_remote_code": True}, "trust_remote_code = True.*expected False; code from a checkpoint is never run"),
        ({"engine_type": "PROMPT"}, "engine_type = 'PROMPT'.*expected 'NORMAL' or 0"),
        ({"tokens_per_block": 64}, "tokens_per_block = 64.*a page holds 128 tokens"),
        ({"engine_rank": 1}, "engine_rank = 1.*one process"),
        ({"lookahead_tokens": 4}, "lookahead_tokens = 4.*expected 0"),
    ],
)
def test_bad_keywords(keywords, pattern):
    refused(pattern, keywords=keywords)


def test_all_problems_are_listed_together():
    with pytest.raises(ConfigError) as caught:
        EngineConfig(scheduler={"max_num_seqs": 0, "policy": "x"}, cache={"num_pages": 1}, nonsense=1)
    assert len(caught.value.problems) == 4
    assert "the configuration has 4 problems:" in str(caught.value)
    assert caught.value.exit_code == 2


def test_deepinfer_keyword_names_are_all_accepted():
    keywords = {
        "model": "m", "tokenizer": None, "trust_remote_code": False, "load_format": "auto", "seed": 0, "revision": None,
        "tokenizer_revision": None, "max_model_len": None, "data_parallel_size": 0, "context_parallel_size": 1,
        "expert_parallel_size": 1, "engram_parallel_size": 0, "engine_rank": 0, "engine_group_rank": 0,
        "gpu_memory_utilization": 0.9, "max_num_batched_tokens": None, "max_num_seqs": 256, "disable_log_stats": True,
        "stop_preempted_request": False, "engine_type": 0, "chunked_prefill": False, "tokens_per_block": -1, "lookahead_tokens": 0,
        "served_model_name": None, "ignore_len": False, "offline_inference": True,
    }  # fmt: skip
    assert resolve_config(keywords, env={}).config == EngineConfig(model="m")
    assert set(FIXED) < set(keywords)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("model: [", "is not valid YAML"),
        ("- a", "holds list, expected sections"),
        ("scheduler: {max_num_seqs: 1}\nscheduler: {}", "key 'scheduler' stands twice"),
        ("max_num_seqs: 3", r"unknown key 'max_num_seqs' \(file .*did you mean 'scheduler.max_num_seqs'"),
        ("1: 3", "key 1 .*expected a section name"),
    ],
)
def test_bad_files(tmp_path, text, pattern):
    refused(pattern, file=write(tmp_path, text))


def test_unreadable_files(tmp_path):
    refused("cannot be read: No such file.*check the path", file=tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    refused("is not UTF-8 text", file=tmp_path / "binary.yaml")


def test_null_in_a_file_overrides_a_keyword(tmp_path):
    resolved = resolve_config({"num_pages": 8}, write(tmp_path, "cache: {num_pages: null}\nscheduler:\n"), {})
    assert resolved.config.cache.num_pages is None


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("ACCELERATOR", "ascend", "backend.name", "ascend950"),
        ("BATCH_INVARIANT", "1", "determinism.batch_invariant", True),
        ("DECODE_TOKEN_BLACKLIST", "0..3,7", "sampling.token_blacklist", "0..3,7"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0", "speculative.confidence_temperatures", (1e-5,)),
        ("ENABLE_MTP_VARLEN", "on", "speculative.enable_varlen", True),
        ("HF_MODEL_DIR", "some/folder", "model.path", "some/folder"),
        ("LOGGING_INTERVAL_STEP", "-1", "observability.logging_interval_step", -1),
        ("MAX_BACKTRACKING_TOKENS", "6", "cache.max_backtracking_tokens", 6),
        ("NUM_STATE_SLOTS_RATIO", "2", "cache.num_state_slots_ratio", 2.0),
        ("PREFILL_ANY_ATTEMPT_INTERVAL", "5", "scheduler.prefill_any_attempt_interval", 5),
        ("PREFILL_ATTEMPT_INTERVAL", "5", "scheduler.prefill_attempt_interval", 5),
        ("PREFILL_MAX_SUM_SEQLEN_K", "8192", "scheduler.prefill_max_sum_seqlen_k", 8192),
        ("USE_NEXTN_DECODE", "5", "speculative.num_draft_tokens", 5),
        ("ENFORCE_EAGER", "1", "graphs.enforce_eager", True),
        ("CUDAGRAPH_BATCH_SIZE_INTERVAL", "4", "graphs.batch_size_interval", 4),
        ("YOCO_PREFILL_TRUNCATION_MODE", "off", "scheduler.prefill_truncation_mode", "off"),
        ("YOCO_PREFILL_KEEP_TOKENS", "0", "scheduler.prefill_keep_tokens", 0),
        ("ZERO_OVERHEAD_SCHEDULING", "False", "scheduler.async_scheduling", False),
    ],
)
def test_every_variable(name, text, path, value):
    resolved = resolve_config(env={f"DEEPINFER_{name}": text})
    section, key = path.split(".")
    assert getattr(getattr(resolved.config, section), key) == value
    assert resolved.sources[path] == f"env DEEPINFER_{name}"
    assert VARIABLES[name] == path


def test_no_variable_is_forgotten_above():
    source = Path(__file__).read_text(encoding="utf-8")
    assert set(re.findall(r'^        \("([A-Z_]+)", ', source, re.M)) == set(VARIABLES)


@given(st.sampled_from(["1", "true", "YES", "On", "0", "False", "no", "oFF", "", " 1 "]))
def test_booleans_are_case_insensitive_words(text):
    expected = text.strip().lower() in ("1", "true", "yes", "on")
    assert resolve_config(env={"DEEPINFER_BATCH_INVARIANT": text}).config.determinism.batch_invariant is expected


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("BATCH_INVARIANT", "maybe", "variable DEEPINFER_BATCH_INVARIANT='maybe'.*expected one of 1, true, yes, on"),
        ("USE_NEXTN_DECODE", "five", "DEEPINFER_USE_NEXTN_DECODE='five'.*expected an integer"),
        ("USE_NEXTN_DECODE", "-1", r"num_draft_tokens = -1 \(from env DEEPINFER_USE_NEXTN_DECODE\).*greater than or equal to 0"),
        ("NUM_STATE_SLOTS_RATIO", "x", "expected a number"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,x", "expected a number, or numbers separated by commas"),
        ("ACCELERATOR", "tpu", "DEEPINFER_ACCELERATOR='tpu'.*expected 'nvidia' or 'ascend'"),
    ],
)
def test_bad_variables(name, text, pattern):
    refused(pattern, env={f"DEEPINFER_{name}": text})


def test_variables_without_effect_are_noted():
    notes = resolve_config(
        env={"DEEPINFER_SHOW_EPLB_DETAIL": "1", "DEEPINFER_BATCH_INVARIANTS": "1", "DEEPINFER_OF_A_PLUGIN": "1", "OTHER": "1"}
    ).notes
    assert len(notes) == 2
    assert "DEEPINFER_SHOW_EPLB_DETAIL is set but has no effect: it concerns expert balancing" in "\n".join(notes)
    assert "did you mean 'DEEPINFER_BATCH_INVARIANT'" in "\n".join(notes)


def test_settings_are_read_as_their_keys_type():
    parsed = parse_settings(["max_num_seqs=8", "cache.num_pages=none", "model=a=b", "chunked_prefill=on", "confidence_temperatures=1,2"])
    assert parsed == {
        "scheduler.max_num_seqs": 8,
        "cache.num_pages": None,
        "model.path": "a=b",
        "scheduler.chunked_prefill": True,
        "speculative.confidence_temperatures": (1.0, 2.0),
    }


def test_bad_settings_are_listed_together():
    with pytest.raises(ConfigError, match=r"(?s)expected KEY=VALUE.*unknown key 'polcy' \(flag\).*'seed=x': expected an integer") as caught:
        parse_settings(["seed", "polcy=mixed", "seed=x"])
    assert len(caught.value.problems) == 3


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.integers(), st.text(max_size=4), st.lists(st.integers(), max_size=2))))
def test_arbitrary_keywords_end_in_a_config_or_in_a_config_error(keywords):
    with contextlib.suppress(ConfigError):
        resolve_config(keywords, env={})


def test_docs_list_every_key_variable_and_keyword():
    text = DOCS.read_text(encoding="utf-8")
    names = [*leaves(), *VARIABLES, *FIXED, *(name for group in NOT_BUILT.values() for name in group.split())]
    assert [name for name in names if f"`{name}`" not in text and f"`DEEPINFER_{name}`" not in text] == []
