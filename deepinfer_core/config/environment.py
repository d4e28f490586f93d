"""The `DEEPINFER_*` environment variables of DeepInfer 0.1.0 and the configuration keys they set. The only list of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from deepinfer_core.config.engine_config import leaves
from deepinfer_core.config.text import parse
from deepinfer_core.errors import ConfigError

PREFIX = "DEEPINFER_"

VARIABLES: dict[str, str] = {
    "ACCELERATOR": "backend.name",  # "nvidia" or "ascend": see ACCELERATORS
    "BATCH_INVARIANT": "determinism.batch_invariant",
    "DECODE_TOKEN_BLACKLIST": "sampling.token_blacklist",
    "CUDAGRAPH_BATCH_SIZE_INTERVAL": "graphs.batch_size_interval",
    "DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "speculative.confidence_temperatures",
    "ENABLE_MTP_VARLEN": "speculative.enable_varlen",
    "ENFORCE_EAGER": "graphs.enforce_eager",
    "HF_MODEL_DIR": "model.path",
    "LOGGING_INTERVAL_STEP": "observability.logging_interval_step",
    "MAX_BACKTRACKING_TOKENS": "cache.max_backtracking_tokens",
    "NUM_STATE_SLOTS_RATIO": "cache.num_state_slots_ratio",
    "PREFILL_ANY_ATTEMPT_INTERVAL": "scheduler.prefill_any_attempt_interval",
    "PREFILL_ATTEMPT_INTERVAL": "scheduler.prefill_attempt_interval",
    "PREFILL_MAX_SUM_SEQLEN_K": "scheduler.prefill_max_sum_seqlen_k",
    "USE_NEXTN_DECODE": "speculative.num_draft_tokens",
    "YOCO_PREFILL_KEEP_TOKENS": "scheduler.prefill_keep_tokens",
    "YOCO_PREFILL_TRUNCATION_MODE": "scheduler.prefill_truncation_mode",
    "ZERO_OVERHEAD_SCHEDULING": "scheduler.async_scheduling",
}
"""Variables that have an effect, without the prefix, and the key each one sets."""

ACCELERATORS = {"nvidia": "cuda_sm100", "ascend": "ascend950"}
"""Values of DEEPINFER_ACCELERATOR as backend names."""

NOT_BUILT: dict[str, str] = {
    "expert balancing and parallelism": (
        "NCCL_NUM_SMS USERBUFFER_COMM_SMS GLOO_TIMEOUT REARRANGE_P2P_GROUPS OVERRIDE_NUM_EXTRA_EXPERTS EXPERT_COUNT_WINDOW_SIZE "
        "EXPERT_REARRANGEMENT_STEP_INTERVAL REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE MOE_LB_STAT_INTERVAL FORCE_IMBALANCE_RATIO "
        "FORCE_LOAD_BALANCE SHOW_EPLB_DETAIL NCCL_MEMORY_SAMPLE_INTERVAL_STEPS RINGBUFFER_WARNING_INTERVAL"
    ),
    "graph capture and its timing curves": (
        "DFLASH_ENFORCE_EAGER DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL DECODE_PERF_CACHE_DIR DECODE_PERF_CACHE_TTL_SEC"
    ),
    "kernel workspaces and caches of compiled kernels": "JIT_CACHE_DIR INDEX_ATTN_MEMORY_LIMIT",
    "Engram placement": "ENGRAM_PAD_TOKEN ENGRAM_FORCE_GPU_STORAGE",
    "sampling extras": "COMPUTE_SUM_SMALLER_PROBS SAMPLER_FORCE_TOPK",
    "external cache stores": "PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE",
    "structured output": "XGRAMMAR_DEBUG XGRAMMAR_TIMEOUT XGRAMMAR_DISABLE_CACHE XGRAMMAR_CACHE_LIMIT_BYTES SO_BUILDER_CPUS",
    "images": "USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT",
    "profiling and debugging": (
        "GC_INTERVAL_STEP DISABLE_SYNC_GUARD PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE "
        "TORCH_PROFILER_DIR CPP_LOG_LEVEL"
    ),
}
"""Variables of DeepInfer 0.1.0 without effect here so far, by what they concern."""


def read_environment(environment: Mapping[str, str]) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Key -> (value, variable name) of every variable that has an effect, and notes on the set ones that have none.

    Raises: ConfigError that names every variable whose text has the wrong type.
    """
    found: dict[str, tuple[Any, str]] = {}
    problems = []
    fields = leaves()
    for name, key in VARIABLES.items():
        variable = PREFIX + name
        text = environment.get(variable)
        if text is None:
            continue
        try:
            found[key] = (_accelerator(text) if name == "ACCELERATOR" else parse(text, fields[key]), variable)
        except ValueError as error:
            problems.append(f"environment variable {variable}={text!r} (key {key}): {error}")
    if problems:
        raise ConfigError(problems)
    return found, _notes(environment)


def _accelerator(text: str) -> str:
    if text not in ACCELERATORS:
        raise ValueError("expected 'nvidia' or 'ascend'; select any other backend with backend.name")
    return ACCELERATORS[text]


def _notes(environment: Mapping[str, str]) -> list[str]:
    concerns = {PREFIX + name: what for what, names in NOT_BUILT.items() for name in names.split()}
    known = {PREFIX + name for name in VARIABLES}
    notes = []
    for variable in sorted(environment):
        if variable in concerns:
            notes.append(f"{variable} is set but has no effect: it concerns {concerns[variable]}, which this version does not have")
        elif variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)  # plugins may have variables of their own
            if close:
                notes.append(f"{variable} is set but means nothing; did you mean {close[0]!r}?")
    return notes
