"""The sections of `EngineConfig`. Every key, its default and its meaning; docs/config.md lists them, a test compares the two."""

from __future__ import annotations

from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

CacheFormatName = Literal["auto", "fp8", "fp4", "fp4_index", "bf16", "f32"]


def plain(value: Any) -> Any:
    """Paths and string enums as plain strings, so that callers may pass either."""
    if isinstance(value, PurePath):
        return str(value)
    return value.value if isinstance(value, Enum) else value


def _temperatures(value: Any) -> Any:
    """One number or a sequence of numbers, each at least 1e-5 (smaller ones are raised to it, as in DeepInfer 0.1.0)."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(max(v, 1e-5) if isinstance(v, int | float) and not isinstance(v, bool) else v for v in values)


class Section(BaseModel):
    """Base of the sections: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which checkpoint runs, and in which arithmetic."""

    path: str | None = Field(
        default=None, description="checkpoint folder or Hugging Face id; unset: the small checkpoint that ships with the package"
    )
    tokenizer: str | None = Field(default=None, description="folder of the tokenizer files; unset: the checkpoint's folder")
    load_format: Literal["auto", "dummy"] = Field(default="auto", description="'dummy': random weights of the checkpoint's shapes")
    revision: str | None = Field(default=None, description="revision of a Hugging Face id")
    tokenizer_revision: str | None = Field(default=None, description="the same for the tokenizer")
    max_model_len: int = Field(default=4096, ge=1, description="cap on prompt and output tokens of one request together")
    numerics: Literal["release", "ideal"] = Field(
        default="release", description="'release': every rounding of the released model; 'ideal': the same graph in float32, unrounded"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of everything random that a request does not seed itself")
    served_model_name: str | None = Field(default=None, description="name in outputs; unset: the checkpoint's")


class BackendSection(Section):
    """What it runs on."""

    name: str = Field(default="auto", min_length=1, description="a backend of `deepinfer backends`, or 'auto' for the best available")
    device: str = Field(default="", description="device string such as 'cuda:1'; empty: the backend's default")
    native_only: bool = Field(default=False, description="refuse to start if the backend inherits any op from another one")


class CacheSection(Section):
    """Memory of running requests."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, description="share of an accelerator's memory the engine may use")
    memory_bytes: int | None = Field(
        default=None, ge=1, description="bytes for caches, whatever the device; unset: sized from the device's memory"
    )
    num_pages: int | None = Field(default=None, ge=2, description="number of pages; unset: as many as the memory allows")
    window_format: CacheFormatName = Field(default="auto", description="storage of window keys; 'auto': the backend's first choice")
    entry_format: CacheFormatName = Field(default="auto", description="storage of compressed entries")
    index_format: CacheFormatName = Field(default="auto", description="storage of index keys")
    num_state_slots_ratio: float = Field(default=1.2, ge=1, description="state slots = int(max_num_seqs * ratio) + 1")
    max_backtracking_tokens: int = Field(
        default=0, ge=0, description="tokens by which a request's state can go back; at least num_draft_tokens + 1 are kept anyway"
    )
    prefix_caching: bool = Field(default=False, description="reuse the pages of common prompt prefixes")
    window_snapshots: int = Field(
        default=0, ge=0, description="prefixes whose window state is kept, for exact hits; a hit without one is replayed approximately"
    )


class SchedulerSection(Section):
    """Which requests run in a step."""

    max_num_seqs: int = Field(default=256, ge=1, description="most requests that run at a time")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens of one step; unset: max(max_model_len, 4096, max_num_seqs * (1 + num_draft_tokens))"
    )
    chunked_prefill: bool = Field(default=False, description="a prompt may be spread over several steps")
    policy: Literal["alternate", "mixed"] = Field(
        default="alternate", description="'alternate': a step prefills or decodes, as in DeepInfer 0.1.0; 'mixed': it may do both"
    )
    prefill_attempt_interval: int = Field(default=70, ge=1, description="decode steps between tries to prefill if all ranks want to")
    prefill_any_attempt_interval: int = Field(default=100, ge=1, description="decode steps between tries to prefill if any rank wants to")
    async_scheduling: bool = Field(default=True, description="plan a step while the one before it still runs")
    stop_preempted_request: bool = Field(default=False, description="a request that loses its pages ends, instead of being recomputed")
    prefill_truncation_mode: Literal["off", "mask", "compact"] = Field(
        default="off", description="decoder layers see only the end of a prompt: 'compact' skips the other rows, 'mask' is its slow oracle"
    )
    prefill_keep_tokens: int = Field(
        default=0, ge=0, description="prompt tokens that decoder layers see; at least sliding window + backtracking (140 for the release)"
    )
    prefill_max_sum_seqlen_k: int = Field(default=2**30, ge=1, description="cap on the summed sequence lengths of one prefill step")


class GraphsSection(Section):
    """Captured decode steps."""

    enforce_eager: bool | None = Field(default=None, description="no graph capture; unset: eager on a CPU, graphs elsewhere")
    batch_size_interval: int = Field(default=8, ge=1, description="rows between two captured sizes")


class SpeculativeSection(Section):
    """Drafting."""

    num_draft_tokens: int = Field(default=0, ge=0, description="tokens drafted per request and step; 0: no drafting")
    enable_varlen: bool = Field(default=False, description="verify as many drafts as their confidences are worth")
    confidence_temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_temperatures)] = Field(
        default=(1.0,), min_length=1, description="calibration of the confidence head: one number, or one per draft position"
    )


class SamplingSection(Section):
    """What holds for the sampling of all requests, and the defaults of requests that come without SamplingParams."""

    temperature: float | None = Field(default=None, ge=0, description="default of requests; unset: SamplingParams' own")
    top_p: float | None = Field(default=None, gt=0, le=1, description="default of requests; unset: SamplingParams' own")
    top_k: int | None = Field(default=None, ge=-1, description="default of requests; unset: SamplingParams' own")
    min_p: float | None = Field(default=None, ge=0, le=1, description="default of requests; unset: SamplingParams' own")
    max_tokens: int | None = Field(default=None, ge=1, description="default of requests; unset: SamplingParams' own")
    token_blacklist: str = Field(default="", description="ids never generated: '0..3,7,10..12', strictly increasing")
    greedy_compat: bool = Field(default=False, description="greedy as in DeepInfer 0.1.0 (temperature 1e-5) instead of the exact argmax")
    logprobs_mode: Literal["processed", "raw"] = Field(
        default="processed", description="log-probabilities after temperature, top-k, top-p and min-p, or before"
    )

    @property
    def request_defaults(self) -> dict[str, float | int]:
        """Arguments for the SamplingParams of a request that comes without: the defaults that are set."""
        names = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class ParallelSection(Section):
    """How many processes share the work."""

    data_parallel_size: int = Field(default=1, ge=1, description="attention replicas")
    context_parallel_size: int = Field(default=1, ge=1, description="processes that share one prompt")
    expert_parallel_size: int = Field(default=1, ge=1, description="processes that share the experts")
    engram_parallel_size: int = Field(default=1, ge=1, description="processes that share the Engram tables")


class DeterminismSection(Section):
    """Guarantees beyond the default; a backend that does not claim them is refused."""

    batch_invariant: bool = Field(default=False, description="a request's numbers do not depend on the requests beside it")
    deterministic_sampling: bool = Field(default=False, description="same prompt, parameters and seed: same tokens, under any load")


class ObservabilitySection(Section):
    """What the engine reports while it runs."""

    disable_log_stats: bool = Field(default=True, description="no statistics line in the log")
    logging_interval_step: int = Field(default=100, description="steps between two statistics lines; 0 or less: none")
