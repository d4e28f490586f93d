"""From a configuration to a running engine's parts, refusing early whatever cannot work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_core.backend.capabilities import Capabilities
from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.ops import refuse_inherited
from deepinfer_core.backend.registry import Selected, discover
from deepinfer_core.backend.requirements import check_requirements
from deepinfer_core.backend.runtime import DeviceRuntime
from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.checkpoint.geometries import shipped_checkpoint
from deepinfer_core.checkpoint.hub import resolve_model
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.checkpoint.schema import ModelConfig, TextConfig
from deepinfer_core.checkpoint.synthetic import DummyCheckpoint
from deepinfer_core.checkpoint.tokenizer import Tokenizer
from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.errors import ConfigError, EngineError
from deepinfer_core.model.batch import SequenceInputs
from deepinfer_core.model.loaded import CacheFormats, CacheSizes, LoadedModel

PAGE_TOKENS = 128
HOST_CACHE_SHARE = 0.5  # of the available host memory that caches may take on a device that shares it, unless configured


@dataclass(frozen=True)
class EngineParts:
    """Everything an engine is made of."""

    config: EngineConfig
    model_config: ModelConfig
    model_path: Path
    tokenizer: Tokenizer
    selected: Selected
    kernels: Kernels
    runtime: DeviceRuntime
    loaded: LoadedModel
    limits: SchedulerLimits
    sizes: CacheSizes
    identity: bytes  # model and cache formats: part of every prefix hash


def start(config: EngineConfig, progress: Callable[[str], None] = lambda part: None) -> EngineParts:
    """Selects the backend, checks the checkpoint and every claim the configuration needs, plans memory, then loads the weights."""
    registry = discover()
    selected = registry.select(config.backend.name)
    backend, claims = selected.backend, selected.backend.capabilities()
    path = shipped_checkpoint() if config.model.path is None else resolve_model(config.model.path, config.model.revision)
    model = ModelConfig.load(path)
    tokenizer_path = path if config.model.tokenizer is None else resolve_model(config.model.tokenizer, config.model.tokenizer_revision)
    tokenizer = Tokenizer.load(tokenizer_path, model)
    check_requirements(config, selected, registry)
    check_model(config, model.text_config)
    formats = cache_formats(config, model.text_config, claims, backend.name)
    source = DummyCheckpoint(model, config.model.seed, path) if config.model.load_format == "dummy" else Checkpoint.open(path)
    limits = scheduler_limits(config, model.text_config)
    drafts = config.speculative.num_draft_tokens
    layout = CacheLayout.of(
        model.text_config, formats.window, formats.entry, formats.index, drafts, config.cache.max_backtracking_tokens, PAGE_TOKENS
    )
    invariant = config.determinism.batch_invariant
    kernels = backend.kernels(config.backend.device, Numerics(config.model.numerics), invariant)
    if config.backend.native_only:
        refuse_inherited(kernels, type(backend), registry)
    runtime = backend.runtime(config.backend.device)
    try:
        refuse_weights_too_large(source.total_bytes, runtime)
        first = CacheSizes(1 + layout.pages_for(limits.max_positions), 2, limits.max_positions)  # for the profile run
        loaded = LoadedModel(source, tokenizer_path, kernels, layout, first, drafter=drafts > 0, progress=progress)
        sizes = cache_sizes(config, limits, layout, runtime, activation_bytes(loaded, limits, runtime))
        loaded.resize(sizes)
    except BaseException:
        runtime.close()
        raise
    identity = f"{path.name}|{formats}|{config.model.numerics}".encode()
    return EngineParts(config, model, path, tokenizer, selected, kernels, runtime, loaded, limits, sizes, identity)


def cache_formats(config: EngineConfig, text: TextConfig, claims: Capabilities, name: str) -> CacheFormats:
    """The storage formats to use: those asked for (already checked), else the model's own. Raises ConfigError if these are not stored."""
    default = CacheFormats.default(text, Numerics(config.model.numerics))
    problems, chosen = [], {}
    for kind in ("window", "entry", "index"):
        wanted, known = getattr(config.cache, f"{kind}_format"), getattr(claims, f"{kind}_formats")
        chosen[kind] = getattr(default, kind) if wanted == "auto" else CacheFormat(wanted)
        if chosen[kind] not in known:
            problems.append(
                f"cache.{kind}_format: the model's is {chosen[kind].value!r}, backend {name!r} stores {', '.join(sorted(known))}; "
                "set the key to one of these"
            )
    if problems:
        raise ConfigError(problems)
    return CacheFormats(**chosen)


def check_model(config: EngineConfig, text: TextConfig) -> None:
    """Raises ConfigError listing everything the configuration asks for and the checkpoint does not have."""
    problems = []
    if config.model.max_model_len > text.max_position_embeddings:
        problems.append(
            f"model.max_model_len = {config.model.max_model_len} exceeds the checkpoint's max_position_embeddings = "
            f"{text.max_position_embeddings}; lower it"
        )
    drafts = config.speculative.num_draft_tokens
    if drafts and not text.num_nextn_predict_layers:
        problems.append(f"speculative.num_draft_tokens = {drafts}: the checkpoint has no draft blocks; set it to 0")
    elif drafts > text.dspark_block_size:
        problems.append(f"speculative.num_draft_tokens = {drafts}: the drafter's block holds {text.dspark_block_size}; lower it to that")
    if config.scheduler.prefill_truncation_mode != "off":
        boundary = text.boundary
        if boundary is None or any(layer >= boundary for layer in text.engram_layer_ids):
            problems.append("scheduler.prefill_truncation_mode: Engram layers must lie before the decoder half; switch it off")
        elif drafts and any(layer < boundary for layer in text.dspark_target_layer_ids):
            problems.append("scheduler.prefill_truncation_mode: the drafter's target layers must lie in the decoder half; switch it off")
    if problems:
        raise ConfigError(problems)


def scheduler_limits(config: EngineConfig, text: TextConfig) -> SchedulerLimits:
    """The scheduler's view of the configuration."""
    s = config.scheduler
    return SchedulerLimits(
        max_model_len=config.model.max_model_len,
        max_num_batched_tokens=config.token_budget,
        max_num_seqs=s.max_num_seqs,
        vocab_size=text.vocab_size,
        num_draft_tokens=config.speculative.num_draft_tokens,
        page_tokens=PAGE_TOKENS,
        window=text.sliding_window,
        chunked_prefill=s.chunked_prefill,
        policy=s.policy,
        asynchronous=s.async_scheduling,
        varlen_verification=config.speculative.enable_varlen,
        recompute_preempted=not s.stop_preempted_request,
        max_backtracking=config.cache.max_backtracking_tokens,
        keep_tokens=s.prefill_keep_tokens,
        prefix_cache=config.cache.prefix_caching,
        window_snapshots=config.cache.window_snapshots,
        max_prefill_seqlen=s.prefill_max_sum_seqlen_k,
        prefill_interval=s.prefill_attempt_interval,
        prefill_any_interval=s.prefill_any_attempt_interval,
        history=max(text.engram_max_ngram_size - 1, 0),
    )


def refuse_weights_too_large(weights: int, runtime: DeviceRuntime) -> None:
    """Raises EngineError before anything is loaded if the checkpoint's tensors alone exceed the device's free memory."""
    available = runtime.memory().available
    if weights > available:
        raise EngineError(
            f"device memory: the checkpoint's tensors take {weights} bytes, {available} bytes are free on {runtime.device}; free some, use "
            "a device with more, or a checkpoint with fewer layers"
        )


def activation_bytes(loaded: LoadedModel, limits: SchedulerLimits, runtime: DeviceRuntime) -> int:
    """Memory that the largest step needs besides weights and caches, measured by running it; 0 where the device cannot tell."""
    rows = min(limits.max_num_batched_tokens, limits.max_positions - 1)
    outputs = min(limits.max_num_seqs * (1 + limits.num_draft_tokens), rows)

    @torch.inference_mode()
    def largest_step() -> None:
        device = loaded.kernels.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        table = torch.arange(1, 1 + loaded.layout.pages_for(limits.max_positions), dtype=torch.int32, device=device)[None]
        history = torch.full((1, limits.history), -1, dtype=torch.int64, device=device)
        tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        inputs = SequenceInputs(zero + rows, zero, zero + 1, table, zero, zero, history, tokens)
        hidden = loaded.model.forward(loaded.batch(inputs), loaded.caches).hidden
        loaded.model.logits(hidden[:outputs]).softmax(-1)

    return runtime.peak_bytes(largest_step) or 0


def cache_sizes(config: EngineConfig, limits: SchedulerLimits, layout: CacheLayout, runtime: DeviceRuntime, reserved: int) -> CacheSizes:
    """Pages and state slots, leaving `reserved` bytes free. Raises EngineError, with the arithmetic, if no request of full length fits."""
    slots = config.num_state_slots
    most = 1 + limits.max_num_seqs * layout.pages_for(limits.max_positions)  # more would never be used
    memory = runtime.memory()
    if config.cache.num_pages is not None:
        pages = config.cache.num_pages
    elif config.cache.memory_bytes is not None:
        pages = min(layout.pages_that_fit(config.cache.memory_bytes, slots), most)
    else:
        if runtime.device.type == "cpu":
            budget = int(memory.available * HOST_CACHE_SHARE)
        else:
            kept_free = int(memory.total * (1 - config.cache.gpu_memory_utilization))
            budget = memory.available - kept_free - reserved
        pages = min(layout.pages_that_fit(max(budget, 0), slots), most)
    need = 1 + layout.pages_for(limits.max_positions)
    if pages < need and config.cache.num_pages is None:
        raise EngineError(
            f"cache memory: one request of model.max_model_len = {limits.max_model_len} tokens needs {need} pages of "
            f"{layout.page_stride} bytes besides {slots} state slots of {layout.slot_bytes} bytes, that is "
            f"{need * layout.page_stride + slots * layout.slot_bytes} bytes; {pages} pages fit ({memory.available} bytes are free). Lower "
            "model.max_model_len or scheduler.max_num_seqs, or raise cache.memory_bytes"
        )
    return CacheSizes(max(pages, 2), slots, limits.max_positions)
