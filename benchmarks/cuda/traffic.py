"""What a step must read and compute at least: bytes of weights and caches, operations. Source: model notes, physical limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.checkpoint.names import Component, TensorSpec, expected_tensors
from deepinfer_core.checkpoint.schema import ModelConfig

_NOT_READ = {  # whole: a step reads few rows of these, or none
    Component.EXPERTS,
    Component.EMBED,
    Component.ENGRAM_TABLES,
    Component.VISION,
    Component.DRAFT_EXPERTS,
    Component.DRAFT_OTHER,
    Component.DRAFT_SHARED_EXPERTS,
    Component.MARKOV,
}


@dataclass(frozen=True)
class Traffic:
    """Work of one model. Bytes and operations of all layers together."""

    config: ModelConfig
    layout: CacheLayout

    @property
    def always_read(self) -> int:
        """Bytes of weights that every step reads whole."""
        return sum(spec.nbytes for spec in self._dense())

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert."""
        text = self.config.text_config
        return sum(s.nbytes for s in self._experts()) / (text.num_hidden_layers * text.n_routed_experts)

    def expected_experts(self, rows: int) -> float:
        """Distinct experts of one layer if every row chooses independently and evenly."""
        text = self.config.text_config
        return text.n_routed_experts * (1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** rows)

    def cache_bytes(self, context: int) -> int:
        """Bytes of window keys, selected entries and index keys that one decoding sequence reads."""
        text, total = self.config.text_config, 0
        for layer in text.layers:
            total += min(context, text.sliding_window) * self.layout.window_format.entry_bytes(text.head_dim)
            if not layer.ratio:
                continue
            visible = context // layer.ratio
            total += min(visible, text.index_topk) * self.layout.entry_format.entry_bytes(text.head_dim)
            if layer.is_index_source:
                scored = min(visible, text.candidate_topk_blocks * text.candidate_block_size) if layer.uses_candidates else visible
                total += scored * self.layout.index_format.entry_bytes(text.index_head_dim)
        return total

    def decode_bytes(self, rows: int, context: int, distinct: float | None = None) -> float:
        """Bytes of a decode step of `rows` sequences; `distinct` experts per layer (default: as expected of even routing)."""
        experts = self.expected_experts(rows) if distinct is None else distinct
        return self.always_read + self.config.text_config.num_hidden_layers * experts * self.expert_bytes + rows * self.cache_bytes(context)

    def operations(self, rows: int, keys: float, logit_rows: int) -> float:
        """Operations of a step: `keys` is the mean number of tokens before a row."""
        text = self.config.text_config
        head = sum(spec.parameters for spec in self._dense() if spec.component is Component.HEAD)
        dense = sum(spec.parameters for spec in self._dense()) - head
        experts = text.num_experts_per_tok / text.n_routed_experts * sum(spec.parameters for spec in self._experts())
        return rows * (2 * (dense + experts) + self._attention(keys)) + 2 * head * logit_rows

    def _attention(self, keys: float) -> float:
        text, total = self.config.text_config, 0.0
        for layer in text.layers:
            attended = min(keys, text.sliding_window)
            if layer.ratio:
                attended += min(keys / layer.ratio, text.index_topk)
            total += 4 * text.num_attention_heads * attended * text.head_dim
            if layer.is_index_source:
                total += 2 * text.index_n_heads * (keys / layer.ratio) * text.index_head_dim
        return total

    def _dense(self) -> list[TensorSpec]:
        return [spec for spec in expected_tensors(self.config).values() if spec.component not in _NOT_READ]

    def _experts(self) -> list[TensorSpec]:
        return [spec for spec in expected_tensors(self.config).values() if spec.component is Component.EXPERTS]


def bound_ms(nbytes: float, operations: float, ceilings: dict[str, float]) -> float:
    """Milliseconds that a step needs at least, from memory or arithmetic. `ceilings`: bytes/s `copy`, operations/s `product`."""
    if math.isnan(ceilings.get("copy", math.nan)):
        return math.nan
    return 1e3 * max(nbytes / ceilings["copy"], operations / ceilings["product"])
