"""Every tensor of a checkpoint: canonical name, shape, dtype and the component it belongs to.

Canonical names carry no `model.` prefix. Source: tensor list of the DeepSeek-V4.1-Flash release (model notes, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from deepinfer_core.checkpoint.schema import ModelConfig, TextConfig
from deepinfer_core.checkpoint.structure import BLOCK, LayerSpec

E4M3, E8M0, BF16, F32, INT8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32, torch.int8


class Component(StrEnum):
    """Parts of the model, as the size table of the release counts them."""

    EXPERTS = "routed experts"
    ENGRAM_TABLES = "engram tables"
    DRAFT_EXPERTS = "draft routed experts"
    ATTENTION = "attention"
    SHARED_EXPERTS = "shared experts"
    EMBED = "embedding"
    HEAD = "head"
    VISION = "vision, aligner, image vectors"
    DRAFT_OTHER = "draft, other"
    ENGRAM_PROJECTION = "engram projections"
    DRAFT_SHARED_EXPERTS = "draft shared experts"
    ROUTERS = "routers"
    MARKOV = "markov head"
    INDEXERS = "indexers"
    HYPER_CONNECTIONS = "hyper-connections"
    COMPRESSORS = "compressors"
    NORMS = "block and final norms"


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    component: Component

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def parameters(self) -> int:
        """Model parameters: two for each byte of packed experts, none for scales."""
        return {INT8: 2, E8M0: 0}.get(self.dtype, 1) * math.prod(self.shape)


Specs = Iterator[tuple[str, TensorSpec]]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint with this config, in layer order; a scale follows its weight."""
    text = config.text_config
    specs: dict[str, TensorSpec] = {}
    specs["embed.weight"] = TensorSpec((text.vocab_size, text.hidden_size), BF16, Component.EMBED)
    for layer in text.layers:
        specs.update(_layer(f"layers.{layer.index}.", text, layer))
    specs["norm.weight"] = TensorSpec((text.hidden_size,), BF16, Component.NORMS)
    specs["head.weight"] = TensorSpec((text.vocab_size, text.hidden_size), BF16, Component.HEAD)
    for layer in text.draft_layers:
        specs.update(_draft_block(text, layer.index))
    specs.update(_vision(config))
    return specs


def _fp8(stem: str, rows: int, columns: int, component: Component) -> Specs:
    yield f"{stem}.weight", TensorSpec((rows, columns), E4M3, component)
    yield f"{stem}.scale", TensorSpec((-(-rows // BLOCK), -(-columns // BLOCK)), E8M0, component)


def _fp4(stem: str, rows: int, columns: int, component: Component) -> Specs:
    yield f"{stem}.weight", TensorSpec((rows, columns // 2), INT8, component)
    yield f"{stem}.scale", TensorSpec((rows, columns // BLOCK), E8M0, component)


def _plain(dtype: torch.dtype, component: Component, shapes: Mapping[str, tuple[int, ...]]) -> Specs:
    for name, shape in shapes.items():
        yield name, TensorSpec(shape, dtype, component)


def _layer(prefix: str, text: TextConfig, layer: LayerSpec) -> Specs:
    if layer.engram is not None:
        yield from _engram(f"{prefix}engram.", text, text.engram_num_embeddings[layer.engram])
    yield from _attention(f"{prefix}attn.", text, Component.ATTENTION)
    if layer.is_kv_source:
        yield from _compressor(f"{prefix}attn.compressor.", text, layer.ratio)
    if layer.is_index_source or layer.is_index_k_source:
        yield from _indexer(f"{prefix}attn.indexer.", text, layer)
    yield from _norms_and_streams(prefix, text, Component.NORMS, Component.HYPER_CONNECTIONS)
    yield from _moe(f"{prefix}ffn.", text, text.n_routed_experts, (Component.ROUTERS, Component.EXPERTS, Component.SHARED_EXPERTS))


def _attention(prefix: str, text: TextConfig, component: Component) -> Specs:
    heads = text.num_attention_heads * text.head_dim
    groups = text.o_groups * text.o_lora_rank
    yield from _fp8(f"{prefix}wq_a", text.q_lora_rank, text.hidden_size, component)
    yield from _plain(BF16, component, {f"{prefix}q_norm.weight": (text.q_lora_rank,)})
    yield from _fp8(f"{prefix}wq_b", heads, text.q_lora_rank, component)
    yield from _fp8(f"{prefix}wkv", text.head_dim, text.hidden_size, component)
    yield from _plain(BF16, component, {f"{prefix}kv_norm.weight": (text.head_dim,)})
    yield from _fp8(f"{prefix}wo_a", groups, heads // text.o_groups, component)
    yield from _fp8(f"{prefix}wo_b", text.hidden_size, groups, component)
    yield from _plain(F32, component, {f"{prefix}attn_sink": (text.num_attention_heads,)})


def _compressor(prefix: str, text: TextConfig, ratio: int) -> Specs:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}wkv.weight": (text.head_dim, text.hidden_size)}
    if ratio > 1:
        shapes[f"{prefix}wgate.weight"] = (text.head_dim, text.hidden_size)
    shapes[f"{prefix}norm.weight"] = (text.head_dim,)
    yield from _plain(BF16, Component.COMPRESSORS, shapes)


def _indexer(prefix: str, text: TextConfig, layer: LayerSpec) -> Specs:
    if layer.is_index_k_source:
        shapes = {f"{prefix}wk.weight": (text.index_head_dim, text.head_dim), f"{prefix}k_norm.weight": (text.index_head_dim,)}
        yield from _plain(BF16, Component.INDEXERS, shapes)
    if layer.is_index_source:
        yield from _fp8(f"{prefix}wq_b", text.index_n_heads * text.index_head_dim, text.q_lora_rank, Component.INDEXERS)
        yield from _plain(BF16, Component.INDEXERS, {f"{prefix}weights_proj.weight": (text.index_n_heads, text.hidden_size)})


def _engram(prefix: str, text: TextConfig, rows: int) -> Specs:
    width, streams = text.engram_head_dim, text.hc_mult
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * width
    yield f"{prefix}embed.weight", TensorSpec((rows, width), E4M3, Component.ENGRAM_TABLES)
    yield f"{prefix}embed.scale", TensorSpec((rows, width // BLOCK), E8M0, Component.ENGRAM_TABLES)
    yield from _fp8(f"{prefix}wkv", (streams + 1) * text.hidden_size, columns, Component.ENGRAM_PROJECTION)
    shapes = {f"{prefix}{name}": (streams, text.hidden_size) for name in ("q_weight", "k_weight")}
    yield from _plain(BF16, Component.ENGRAM_PROJECTION, shapes)


def _norms_and_streams(prefix: str, text: TextConfig, norms: Component, streams: Component) -> Specs:
    m, width = text.hc_mult, text.hidden_size
    yield from _plain(BF16, norms, {f"{prefix}attn_norm.weight": (width,), f"{prefix}ffn_norm.weight": (width,)})
    for part in ("attn", "ffn"):
        shapes = {"fn": (m * (m + 2), m * width), "base": (m * (m + 2),), "scale": (3,)}
        yield from _plain(F32, streams, {f"{prefix}hc_{part}_{name}": shape for name, shape in shapes.items()})


def _moe(prefix: str, text: TextConfig, experts: int, components: tuple[Component, Component, Component]) -> Specs:
    router, routed, shared = components
    width, inner = text.hidden_size, text.moe_intermediate_size
    yield from _plain(BF16, router, {f"{prefix}gate.weight": (experts, width)})
    yield from _plain(F32, router, {f"{prefix}gate.bias": (experts,), f"{prefix}gate.bias_vl": (experts,)})
    for expert in range(experts):
        for name, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
            yield from _fp4(f"{prefix}experts.{expert}.{name}", rows, columns, routed)
    inner *= text.n_shared_experts
    for name, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
        yield from _fp8(f"{prefix}shared_experts.{name}", rows, columns, shared)


def _draft_block(text: TextConfig, block: int) -> Specs:
    prefix, width, other = f"mtp.{block}.", text.hidden_size, Component.DRAFT_OTHER
    if block == 0:
        yield from _fp8(f"{prefix}main_proj", width, len(text.dspark_target_layer_ids) * width, other)
        yield from _plain(BF16, other, {f"{prefix}main_norm.weight": (width,)})
    yield from _attention(f"{prefix}attn.", text, other)
    yield from _norms_and_streams(prefix, text, other, other)
    yield from _moe(f"{prefix}ffn.", text, text.dspark_n_routed_experts, (other, Component.DRAFT_EXPERTS, Component.DRAFT_SHARED_EXPERTS))
    if block == text.num_nextn_predict_layers - 1:
        table = (text.vocab_size, text.dspark_markov_rank)
        yield from _plain(BF16, other, {f"{prefix}norm.weight": (width,)})
        yield from _plain(BF16, Component.MARKOV, {f"{prefix}markov_head.{name}.weight": table for name in ("embed", "head")})
        yield from _plain(BF16, other, {f"{prefix}confidence_head.proj.weight": (1, width + text.dspark_markov_rank)})


def _vision(config: ModelConfig) -> Specs:
    vision, width = config.vision_config, config.text_config.hidden_size
    inner, cell = vision.hidden_size, vision.hidden_size * vision.downsample_ratio**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (inner, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (inner,),
    }
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        shapes |= {
            f"{prefix}norm1.weight": (inner,),
            f"{prefix}attn.wqkv.weight": (3 * inner, inner),
            f"{prefix}attn.wqkv.bias": (3 * inner,),
            f"{prefix}attn.wo.weight": (inner, inner),
            f"{prefix}attn.wo.bias": (inner,),
            f"{prefix}norm2.weight": (inner,),
            f"{prefix}mlp.w1.weight": (2 * vision.intermediate_size, inner),
            f"{prefix}mlp.w2.weight": (inner, vision.intermediate_size),
        }
    shapes |= {
        "vision.norm.weight": (inner,),
        "aligner.w1.weight": (width, cell),
        "aligner.w1.bias": (width,),
        "aligner.w2.weight": (width, width),
        "aligner.w2.bias": (width,),
    }
    shapes |= dict.fromkeys(("image_start", "image_end", "image_newline"), (width,))
    yield from _plain(BF16, Component.VISION, shapes)
