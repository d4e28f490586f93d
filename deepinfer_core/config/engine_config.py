"""`EngineConfig`: the one frozen object that says how an engine runs."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deepinfer_core.config.sections import (
    BackendSection,
    CacheSection,
    DeterminismSection,
    GraphsSection,
    ModelSection,
    ObservabilitySection,
    ParallelSection,
    SamplingSection,
    SchedulerSection,
    Section,
    SpeculativeSection,
    plain,
)
from deepinfer_core.errors import ConfigError, nearest

SHORTHANDS = {"model": "path", "backend": "name"}
"""Sections that may be given as one string, and the key which that string sets."""


class EngineConfig(Section):
    """All settings of an engine, checked as a whole. Raises ConfigError that lists every problem and the nearest valid names."""

    model: ModelSection = Field(default_factory=ModelSection)
    backend: BackendSection = Field(default_factory=BackendSection)
    cache: CacheSection = Field(default_factory=CacheSection)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    graphs: GraphsSection = Field(default_factory=GraphsSection)
    speculative: SpeculativeSection = Field(default_factory=SpeculativeSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    determinism: DeterminismSection = Field(default_factory=DeterminismSection)
    observability: ObservabilitySection = Field(default_factory=ObservabilitySection)

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler: ModelWrapValidatorHandler[EngineConfig], info: ValidationInfo) -> EngineConfig:
        sources = info.context["sources"] if info.context else {}
        try:
            config = handler(_normalised(data))
        except ValidationError as error:
            raise ConfigError([_problem(detail, sources) for detail in error.errors()]) from None
        problems = _contradictions(config)
        if problems:
            raise ConfigError(problems)
        return config

    @property
    def token_budget(self) -> int:
        """Most tokens of one step: `scheduler.max_num_batched_tokens`, or its rule."""
        scheduler = self.scheduler
        if scheduler.max_num_batched_tokens is not None:
            return scheduler.max_num_batched_tokens
        return max(self.model.max_model_len, 4096, self._decode_rows)

    @property
    def prompt_limit(self) -> int:
        """Longest prompt that is accepted, in tokens."""
        limit = self.model.max_model_len
        return limit if self.scheduler.chunked_prefill else min(limit, self.token_budget)

    @property
    def num_state_slots(self) -> int:
        """State slots of the caches, slot 0 (never used) included."""
        snapshots = self.cache.window_snapshots if self.cache.prefix_caching else 0
        return int(self.scheduler.max_num_seqs * self.cache.num_state_slots_ratio) + 1 + snapshots

    @property
    def backtracking_tokens(self) -> int:
        """Tokens by which a request's state can go back."""
        return max(self.cache.max_backtracking_tokens, self.speculative.num_draft_tokens + 1)

    @property
    def runtime_max_model_len(self) -> int:
        """Exclusive upper bound of any position ever touched: look-ahead, one step in flight, and drafting included."""
        drafts = self.speculative.num_draft_tokens
        return self.model.max_model_len + 2 * drafts + (drafts + 1 if self.scheduler.async_scheduling else 0)

    @property
    def _decode_rows(self) -> int:
        return self.scheduler.max_num_seqs * (1 + self.speculative.num_draft_tokens)


def leaves() -> dict[str, FieldInfo]:
    """Every key, dotted ("scheduler.max_num_seqs"), with its pydantic field, in declaration order."""
    return {f"{section}.{name}": field for section, kind in section_types().items() for name, field in kind.model_fields.items()}


def section_types() -> dict[str, type[Section]]:
    """The sections by name."""
    return {name: typing.cast("type[Section]", field.annotation) for name, field in EngineConfig.model_fields.items()}


def values(config: EngineConfig) -> Iterator[tuple[str, Any]]:
    """Every key with its value."""
    for path in leaves():
        section, name = path.split(".")
        yield path, getattr(getattr(config, section), name)


def is_optional(field: FieldInfo) -> bool:
    """Whether None is a value of the field."""
    return type(None) in typing.get_args(field.annotation)


def unknown_key(path: str, where: str = "") -> str:
    """The message for a key that does not exist."""
    keys = leaves()
    section, _, name = path.partition(".")
    close = difflib.get_close_matches(name or section, {key.split(".")[1] for key in keys}, cutoff=0.7)
    same_name = [key for key in keys if key.split(".")[1] in close]
    siblings = [key for key in keys if key.startswith(f"{section}.")]
    candidates = same_name or siblings or list(section_types())
    return f"unknown key {path!r}{f' ({where})' if where else ''}{nearest(path, candidates)}"


def _normalised(data: Any) -> Any:
    """Shorthands written out, and paths and enums as strings."""
    if not isinstance(data, Mapping):
        return data
    out: dict[str, Any] = {}
    for key, value in data.items():
        value = plain(value)
        if key in SHORTHANDS and isinstance(value, str):
            value = {SHORTHANDS[key]: value}
        out[key] = {name: plain(v) for name, v in value.items()} if isinstance(value, Mapping) else value
    return out


def _problem(detail: ErrorDetails, sources: Mapping[str, str]) -> str:
    """One line for one pydantic complaint: key, value, source, expectation."""
    path = ".".join(str(part) for part in detail["loc"][:2])
    source = sources.get(path, "")
    if detail["type"] == "extra_forbidden":
        return unknown_key(path, source)
    expected = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{path} = {detail['input']!r}{f' (from {source})' if source else ''}: {expected}"


def _contradictions(config: EngineConfig) -> list[str]:
    """Every pair of values that cannot go together, and every request for what does not exist yet."""
    problems = [f"parallel.{name} = {size}: this version runs in one process, set it to 1" for name, size in config.parallel if size != 1]
    scheduler, drafts = config.scheduler, config.speculative.num_draft_tokens
    budget = scheduler.max_num_batched_tokens
    if budget is not None and budget < config._decode_rows:
        problems.append(
            f"scheduler.max_num_batched_tokens = {budget}: a decode step of {scheduler.max_num_seqs} requests (scheduler.max_num_seqs) "
            f"with {drafts} drafts each has {config._decode_rows} tokens; raise the budget to that or lower max_num_seqs"
        )
    if budget is not None and budget < config.model.max_model_len and not scheduler.chunked_prefill:
        problems.append(
            f"scheduler.max_num_batched_tokens = {budget} is below model.max_model_len = {config.model.max_model_len}, so a long prompt "
            "would fit no step; raise the budget, lower max_model_len, or set scheduler.chunked_prefill: true"
        )
    elif scheduler.prefill_max_sum_seqlen_k < config.prompt_limit:
        problems.append(
            f"scheduler.prefill_max_sum_seqlen_k = {scheduler.prefill_max_sum_seqlen_k} is below the longest prompt, "
            f"{config.prompt_limit} tokens; raise it or lower model.max_model_len"
        )
    temperatures = config.speculative.confidence_temperatures
    if len(temperatures) not in (1, drafts):
        problems.append(
            f"speculative.confidence_temperatures has {len(temperatures)} values: expected one, or one for each of the "
            f"speculative.num_draft_tokens = {drafts} positions"
        )
    if (scheduler.prefill_truncation_mode == "off") != (scheduler.prefill_keep_tokens == 0):
        problems.append(
            f"scheduler.prefill_truncation_mode = {scheduler.prefill_truncation_mode!r} with scheduler.prefill_keep_tokens = "
            f"{scheduler.prefill_keep_tokens}: set both or neither (the release needs 140 tokens)"
        )
    determinism = config.determinism
    if determinism.deterministic_sampling and not determinism.batch_invariant:
        problems.append("determinism.deterministic_sampling needs determinism.batch_invariant: true")
    if determinism.deterministic_sampling and config.speculative.enable_varlen:
        problems.append(
            "determinism.deterministic_sampling excludes speculative.enable_varlen: how many drafts are verified depends on the load, "
            "and the random numbers on that; switch one of them off"
        )
    return problems
