"""The parameters of the model graph, prepared by a backend's kernels from a checkpoint, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.types import EngramHashTables, ExpertTensors, HcConstants, HcWeights, QuantTensor, Weight
from deepinfer_core.checkpoint.engram import EngramTables
from deepinfer_core.checkpoint.schema import ModelConfig, TextConfig
from deepinfer_core.checkpoint.structure import LayerSpec


class TensorSource(Protocol):
    """Where weights come from: `Checkpoint` or `DummyCheckpoint`."""

    config: ModelConfig

    def tensor(self, name: str) -> Tensor: ...

    def quant(self, stem: str) -> QuantTensor: ...


@dataclass(frozen=True)
class EngramWeights:
    table: Weight
    wkv: Weight
    q_weight: Tensor  # [m, D] bf16
    k_weight: Tensor  # [m, D] bf16
    hash: EngramHashTables


@dataclass(frozen=True)
class AttentionWeights:
    wq_a_wkv: Weight  # wq_a, then wkv
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Weight  # wq_b, then indexer.wq_b at index sources
    wo_a: Weight
    wo_b: Weight
    attn_sink: Tensor  # float32 [H]
    compressor: Weight | None  # compressor.wkv, then compressor.wgate at ratio > 1; kv sources only
    compressor_norm: Tensor | None
    wk: Weight | None  # indexer.wk; index key sources only
    k_norm: Tensor | None
    weights_proj: Weight | None  # indexer.weights_proj; index sources only
    wkv: Weight | None  # wkv alone; draft blocks only, which also apply it to the main model's features


@dataclass(frozen=True)
class MoeWeights:
    gate: Weight
    bias: Tensor  # float32 [E]
    bias_vl: Tensor  # float32 [E]
    experts: Weight
    shared_experts: Weight


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HcWeights
    hc_ffn: HcWeights
    attn: AttentionWeights
    ffn: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True)
class DraftWeights:
    """The drafter: `mtp.*`."""

    main_proj: Weight
    main_norm: Tensor
    blocks: tuple[LayerWeights, ...]
    norm: Tensor
    markov_embed: Tensor  # [V, rank] bf16
    markov_head: Weight
    confidence: Tensor  # [1, D + rank] bf16


@dataclass(frozen=True)
class ModelWeights:
    embed: Tensor  # [V, D] bf16
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Weight
    drafter: DraftWeights | None
    constants: HcConstants


class WeightLoader:
    """Reads a checkpoint through a backend's `prepare_*` ops. One layer's tensors are alive at a time besides what the backend keeps."""

    def __init__(self, source: TensorSource, kernels: Kernels, engram: EngramTables | None) -> None:
        self.source, self.kernels, self.engram = source, kernels, engram
        self.config: TextConfig = source.config.text_config

    def load(self, drafter: bool, progress: Callable[[str], None] = lambda stage: None) -> ModelWeights:
        """All weights of the text model, and of the drafter if asked. `progress` is told the name of each part when it is done."""
        layers = []
        for spec in self.config.layers:
            layers.append(self.layer(f"layers.{spec.index}", spec, self.config.n_routed_experts))
            progress(f"layers.{spec.index}")
        c = self.config
        weights = ModelWeights(
            embed=self.tensor("embed.weight"),
            layers=tuple(layers),
            norm=self.tensor("norm.weight"),
            head=self.linear("head"),
            drafter=self.drafter() if drafter else None,
            constants=HcConstants(c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters),
        )
        progress("head")
        return weights

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(name).to(self.kernels.device)

    def linear(self, *stems: str) -> Weight:
        return self.kernels.prepare_linear([self.source.quant(stem) for stem in stems])

    def layer(self, name: str, spec: LayerSpec, experts: int, is_draft: bool = False) -> LayerWeights:
        return LayerWeights(
            attn_norm=self.tensor(f"{name}.attn_norm.weight"),
            ffn_norm=self.tensor(f"{name}.ffn_norm.weight"),
            hc_attn=HcWeights(*(self.tensor(f"{name}.hc_attn_{part}") for part in ("fn", "base", "scale"))),
            hc_ffn=HcWeights(*(self.tensor(f"{name}.hc_ffn_{part}") for part in ("fn", "base", "scale"))),
            attn=self.attention(f"{name}.attn", spec, is_draft),
            ffn=self.moe(f"{name}.ffn", experts),
            engram=None if spec.engram is None else self.engram_layer(f"{name}.engram", spec.engram),
        )

    def attention(self, name: str, spec: LayerSpec, is_draft: bool) -> AttentionWeights:
        compressor = [f"{name}.compressor.wkv"] + ([f"{name}.compressor.wgate"] if spec.ratio > 1 else [])
        return AttentionWeights(
            wq_a_wkv=self.linear(f"{name}.wq_a", f"{name}.wkv"),
            q_norm=self.tensor(f"{name}.q_norm.weight"),
            kv_norm=self.tensor(f"{name}.kv_norm.weight"),
            wq_b=self.linear(f"{name}.wq_b", *([f"{name}.indexer.wq_b"] if spec.is_index_source else [])),
            wo_a=self.linear(f"{name}.wo_a"),
            wo_b=self.linear(f"{name}.wo_b"),
            attn_sink=self.tensor(f"{name}.attn_sink"),
            compressor=self.linear(*compressor) if spec.is_kv_source else None,
            compressor_norm=self.tensor(f"{name}.compressor.norm.weight") if spec.is_kv_source else None,
            wk=self.linear(f"{name}.indexer.wk") if spec.is_index_k_source else None,
            k_norm=self.tensor(f"{name}.indexer.k_norm.weight") if spec.is_index_k_source else None,
            weights_proj=self.linear(f"{name}.indexer.weights_proj") if spec.is_index_source else None,
            wkv=self.linear(f"{name}.wkv") if is_draft else None,
        )

    def moe(self, name: str, count: int) -> MoeWeights:
        return MoeWeights(
            gate=self.linear(f"{name}.gate"),
            bias=self.tensor(f"{name}.gate.bias"),
            bias_vl=self.tensor(f"{name}.gate.bias_vl"),
            experts=self.kernels.prepare_experts(self.experts(f"{name}.experts.{e}" for e in range(count)), count),
            shared_experts=self.kernels.prepare_experts(self.experts([f"{name}.shared_experts"]), 1),
        )

    def experts(self, stems: Iterator[str] | list[str]) -> Iterator[ExpertTensors]:
        for stem in stems:
            yield ExpertTensors(*(self.source.quant(f"{stem}.{part}") for part in ("w1", "w2", "w3")))

    def engram_layer(self, name: str, index: int) -> EngramWeights:
        assert self.engram is not None
        device = self.kernels.device
        constants = (self.engram.multipliers[index], self.engram.primes[index], self.engram.offsets[index])
        return EngramWeights(
            table=self.kernels.prepare_engram_table(self.source.quant(f"{name}.embed")),
            wkv=self.linear(f"{name}.wkv"),
            q_weight=self.tensor(f"{name}.q_weight"),
            k_weight=self.tensor(f"{name}.k_weight"),
            hash=EngramHashTables(*(torch.from_numpy(constant).to(device) for constant in constants)),
        )

    def drafter(self) -> DraftWeights:
        last = f"mtp.{self.config.num_nextn_predict_layers - 1}"
        experts = self.config.dspark_n_routed_experts or self.config.n_routed_experts
        return DraftWeights(
            main_proj=self.linear("mtp.0.main_proj"),
            main_norm=self.tensor("mtp.0.main_norm.weight"),
            blocks=tuple(self.layer(f"mtp.{spec.index}", spec, experts, is_draft=True) for spec in self.config.draft_layers),
            norm=self.tensor(f"{last}.norm.weight"),
            markov_embed=self.tensor(f"{last}.markov_head.embed.weight"),
            markov_head=self.linear(f"{last}.markov_head.head"),
            confidence=self.tensor(f"{last}.confidence_head.proj.weight"),
        )
