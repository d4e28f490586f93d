"""The released dimensions with any number of layers and random weights made on the device in seconds, as the parts of an engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.registry import discover
from deepinfer_core.backend.types import ExpertTensors, QuantTensor, Weight
from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.checkpoint.geometries import raw_geometry
from deepinfer_core.checkpoint.hashing import table_primes
from deepinfer_core.checkpoint.names import E4M3, E8M0, INT8, expected_tensors
from deepinfer_core.checkpoint.schema import ModelConfig, TextConfig
from deepinfer_core.checkpoint.synthetic import statistics_of
from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.startup import PAGE_TOKENS, EngineParts, activation_bytes, cache_formats, cache_sizes, scheduler_limits
from deepinfer_core.model.loaded import CacheSizes, LoadedModel

ENCODER_SHARE = 18 / 38  # of the layers behind the two local ones: ratio 2 in the release, the others ratio 1
E4M3_RMS = 100.06  # root mean square of uniformly drawn finite e4m3 codes
E2M1_RMS = 2.926  # the same of e2m1 codes


@dataclass(frozen=True)
class Shape:
    """What is built and for how much work."""

    geometry: str = "flash"  # or "tiny"
    layers: int = 18  # of "flash"; "tiny" keeps its eight
    engram_rows: int = 50_000  # per head, instead of 16 million
    context: int = 8192
    batch: int = 128  # most sequences
    new_tokens: int = 512  # most tokens that a sequence grows by
    share_experts: bool = True  # all layers read one set of routed experts


def released_layers(layers: int) -> ModelConfig:
    """The release's config with `layers` layers that keep its proportions and every kind of layer; 40 gives the release itself.

    Only the Engram token map is left out (it needs the tokenizer): every token id is its own compressed id.
    """
    raw = raw_geometry("flash")
    text = raw["text_config"]
    encoder = max(1, round((layers - 2) * ENCODER_SHARE))
    boundary = 2 + encoder
    kv_sources = list(range(2, boundary, 6))
    text |= {
        "num_hidden_layers": layers,
        "compress_ratios": [0, 0] + [2] * encoder + [1] * (layers - boundary) + [0] * text["num_nextn_predict_layers"],
        "kv_source_layer_ids": [*kv_sources, boundary],
        "index_source_layer_ids": [*kv_sources, *range(boundary, layers, 4)],
        "candidate_source_layer_id": boundary,
        "engram_layer_ids": [1, kv_sources[-1]],
        "engram_compressed_vocab_size": 0,
        "dspark_target_layer_ids": list(range(layers - 3, layers)),
    }
    return ModelConfig.parse(raw, where=f"released dimensions, {layers} layers")


def model_config(shape: Shape) -> ModelConfig:
    """The config of `shape`."""
    if shape.geometry == "tiny":
        raw = raw_geometry("tiny")
    else:
        raw = copy.deepcopy(released_layers(shape.layers).model_dump(mode="json", by_alias=True))
        raw["text_config"]["engram_vocab_size"] = shape.engram_rows
        text = TextConfig.model_validate(raw["text_config"])
        raw["text_config"]["engram_num_embeddings"] = [int(primes.sum()) for primes in table_primes(text)]
    return ModelConfig.parse(raw, where=shape.geometry)


class RandomWeights:
    """A `TensorSource` of random weights in the release's formats, made on a device; every call makes new ones.

    Codes are drawn uniformly, and scales bring each row's values to the standard deviation that keeps activations of order one.
    """

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self.config, self.device = config, device
        self._specs = expected_tensors(config)
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str) -> Tensor:
        spec = self._specs[name]
        mean, deviation = statistics_of(name, spec.shape[-1]) if not name.endswith("gate.bias") else (0.0, 0.0)  # routes evenly
        values = torch.randn(spec.shape, generator=self._generator, device=self.device, dtype=spec.dtype)
        return values.mul_(deviation).add_(mean)

    def quant(self, stem: str) -> QuantTensor:
        spec = self._specs[f"{stem}.weight"]
        if f"{stem}.scale" not in self._specs:
            return QuantTensor(self.tensor(f"{stem}.weight"))
        codes = self._bytes(spec.shape, 256)
        if spec.dtype == E4M3:
            codes -= ((codes & 0x7F) == 0x7F).to(torch.uint8)  # no NaN
        inputs, rms = (2 * spec.shape[-1], E2M1_RMS) if spec.dtype == INT8 else (spec.shape[-1], E4M3_RMS)
        _, deviation = statistics_of(f"{stem}.weight", inputs)
        exponent = round(math.log2(deviation / rms))
        scale = self._bytes(self._specs[f"{stem}.scale"].shape, 2) + (127 + exponent)
        return QuantTensor(codes.view(spec.dtype), scale.view(E8M0))

    def _bytes(self, shape: Sequence[int], below: int) -> Tensor:
        return torch.randint(0, below, tuple(shape), generator=self._generator, device=self.device, dtype=torch.uint8)


def share_experts(kernels: Kernels) -> None:
    """From now on every layer gets the routed experts that were prepared first. Each layer still reads far more than any cache holds."""
    prepare = kernels.prepare_experts
    kept: dict[int, Weight] = {}

    def once(experts: Iterable[ExpertTensors], count: int) -> Weight:
        if count == 1:  # shared experts: small, each layer has its own
            return prepare(experts, count)
        if count not in kept:
            kept[count] = prepare(experts, count)
        return kept[count]

    kernels.prepare_experts = once  # type: ignore[method-assign]


class NoText:
    """A tokenizer without text: outputs are token ids only."""

    def incremental(self) -> NoText:
        return self

    def feed(self, tokens: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def engine_config(shape: Shape, backend: str, device: str) -> EngineConfig:
    """An engine for `shape.batch` sequences of `shape.context` tokens that grow by `shape.new_tokens`; it captures no graphs by itself."""
    longest = shape.context + shape.new_tokens
    pages = shape.batch * -(-(longest + 2) // PAGE_TOKENS)
    return EngineConfig.model_validate(
        {
            "model": {"max_model_len": longest},
            "backend": {"name": backend, "device": device},
            "scheduler": {"max_num_seqs": shape.batch, "max_num_batched_tokens": longest + shape.batch, "policy": "mixed"},
            "cache": {"num_pages": 2 + pages * 5 // 4},  # nothing is admitted above 90 % use
            "graphs": {"enforce_eager": True},
        }
    )


def build(shape: Shape, backend: str, device: str) -> tuple[EngineParts, dict[str, Any]]:
    """An engine's parts as `startup.start` makes them, with random weights; and what they take, in bytes."""
    config = engine_config(shape, backend, device)
    selected = discover().select(backend)
    kernels = selected.backend.kernels(device, Numerics.RELEASE)
    if shape.share_experts:
        share_experts(kernels)
    runtime = selected.backend.runtime(device)
    model = model_config(shape)
    text = model.text_config
    formats = cache_formats(config, text, selected.backend.capabilities(), selected.backend.name)
    limits = scheduler_limits(config, text)
    layout = CacheLayout.of(text, formats.window, formats.entry, formats.index, 0)
    before = runtime.memory().available
    first = CacheSizes(1 + layout.pages_for(limits.max_positions), 2, limits.max_positions)
    loaded = LoadedModel(RandomWeights(model, kernels.device), Path(), kernels, layout, first)
    weights = before - runtime.memory().available
    activations = activation_bytes(loaded, limits, runtime)
    sizes = cache_sizes(config, limits, layout, runtime, activations)
    loaded.resize(sizes)
    memory = {
        "weights": weights,
        "activations of the largest step": activations,
        "pages": sizes.pages * layout.page_stride,
        "state slots": sizes.state_slots * layout.slot_bytes,
        "free afterwards": runtime.memory().available,
        "device": runtime.memory().total,
    }
    parts = EngineParts(config, model, Path(), NoText(), selected, kernels, runtime, loaded, limits, sizes, b"")  # type: ignore[arg-type]
    return parts, memory
