"""The model graph: from token ids to streams to logits, calling `Kernels` only.

Source: DeepSeek reference inference code for V4.1-Flash; names of parameters are the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.types import (
    CandidateSpec,
    HcInput,
    PagedEntries,
    Rope,
    SelectedEntries,
    WindowKeys,
)
from deepinfer_core.checkpoint.schema import TextConfig
from deepinfer_core.checkpoint.structure import LayerSpec
from deepinfer_core.model.batch import RowMeta, StepBatch
from deepinfer_core.model.caches import ModelCaches
from deepinfer_core.model.rope import rope_table
from deepinfer_core.model.weights import LayerWeights, ModelWeights


@dataclass
class Shared:
    """What a layer publishes for the layers after it, within one forward."""

    rows: RowMeta
    latent: Tensor | None = None  # compressed latents of this step, before rotation
    entries: PagedEntries | None = None
    keys: PagedEntries | None = None
    selected: Tensor | None = None  # int32 [T, topk]
    candidates: Tensor | None = None  # int32 [T, blocks]
    features: list[Tensor] = field(default_factory=list)  # stream means at the drafter's target layers


class LayerContext(NamedTuple):
    """What a layer works with besides its weights and streams."""

    batch: StepBatch
    caches: ModelCaches
    shared: Shared


@dataclass(frozen=True)
class ForwardResult:
    """Streams after the last layer. Rows are the kept rows (`StepBatch.kept`) of the step."""

    hidden: Tensor  # [T, D] activation dtype: collapsed, before the final norm
    features: Tensor | None  # [T, targets*D]: the drafter's input; None without drafter


class Model:
    """The text model of one device. Stateless between calls: everything that lasts is in the caches."""

    def __init__(self, config: TextConfig, kernels: Kernels, weights: ModelWeights, max_positions: int) -> None:
        self.config, self.kernels, self.weights = config, kernels, weights
        self.rope = {compressed: rope_table(config, max_positions, compressed).to(kernels.device) for compressed in (False, True)}
        self._boundary = config.boundary
        self._targets = frozenset(config.dspark_target_layer_ids if weights.drafter is not None else ())
        self._head_scale = torch.full((1,), config.index_head_dim**-0.5 * config.index_n_heads**-0.5, device=kernels.device)
        self._first_stream = torch.zeros(config.hc_mult, device=kernels.device)
        self._first_stream[:1] = 1.0

    def forward(self, batch: StepBatch, caches: ModelCaches) -> ForwardResult:
        """Runs all layers on the step's rows. Mutates: caches (windows, compressor rings, pages)."""
        shared = Shared(batch.rows)
        context = LayerContext(batch, caches, shared)
        streams, pre = self.enter(batch.tokens)
        for spec, weights in zip(self.config.layers, self.weights.layers, strict=True):
            streams, pre = self.layer(spec, weights, streams, pre, context)
        features = torch.cat(shared.features, 1) if shared.features else None
        return ForwardResult(self.kernels.hc_collapse(streams, pre), features)

    def layer(self, spec: LayerSpec, weights: LayerWeights, streams: Tensor, pre: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """(streams, pre) after one layer. Mutates: the context's caches and shared values."""
        k, batch, caches, shared = self.kernels, *context
        if weights.engram is not None:
            streams = self._engram(weights, streams, batch)
        if spec.index in self._targets:
            shared.features.append(k.stream_mean(streams))
        hc = k.hc_pre(streams, pre, weights.hc_attn, weights.attn_norm, self.weights.constants)
        self._publish(spec, weights, hc.x, context)
        if spec.index == self._boundary and batch.decoder_rows is not None:
            streams, hc = self._truncate(streams, hc, batch, shared)
        y = self._attention(spec, weights, hc, caches, shared)
        streams = k.hc_post(streams, y, hc.post, hc.comb)
        return self.moe_sublayer(weights, streams, hc.pre, self.config.num_experts_per_tok)

    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Initial streams [T, m, D] (the embedding in each) and `pre` [T, m] (the first stream) of tokens int64 [T]."""
        streams = self.kernels.embed(tokens, self.weights.embed)[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        return streams, self._first_stream.expand(tokens.shape[0], -1).contiguous()

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [Q, V] of collapsed hidden states [Q, D]."""
        normed = self.kernels.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        return self.kernels.linear(normed, self.weights.head, torch.float32)

    def _engram(self, weights: LayerWeights, streams: Tensor, batch: StepBatch) -> Tensor:
        k, engram = self.kernels, weights.engram
        assert engram is not None
        assert batch.ngrams is not None
        rows = k.engram_hash(batch.ngrams, engram.hash)
        kv = k.quantized_linear(k.engram_gather(engram.table, rows), engram.wkv)
        kv = kv.view(-1, self.config.hc_mult + 1, self.config.hidden_size)
        return k.engram_gate(streams, kv, engram.q_weight, engram.k_weight, self.config.rms_norm_eps)

    def _publish(self, spec: LayerSpec, weights: LayerWeights, x: Tensor, context: LayerContext) -> None:
        """Makes and stores the compressed entries and index keys of a source layer, for every row of the step."""
        k, eps, w = self.kernels, self.config.rms_norm_eps, weights.attn
        batch, caches, shared = context
        if spec.is_kv_source:
            meta = batch.entries[spec.ratio]
            assert w.compressor_norm is not None
            if meta.rows is None:
                shared.latent = k.rms_norm(k.linear(x, w.compressor), w.compressor_norm, eps)
            else:
                rows = k.linear(x, w.compressor, torch.float32)
                shared.latent = k.compress(rows, caches.compressor[spec.index], meta.rows, w.compressor_norm, eps)
            shared.entries = caches.entries(spec.index, batch.block_table, shared.rows.sequence)
            rope = Rope(self.rope[True], meta.positions)
            k.store_entries(shared.latent, rope, shared.entries, meta.slots)
        if spec.is_index_k_source:
            meta = batch.entries[spec.ratio]
            assert w.k_norm is not None
            assert shared.latent is not None
            shared.keys = caches.index_keys(spec.index, batch.block_table, shared.rows.sequence)
            rope = Rope(self.rope[True], meta.positions)
            k.store_index_keys(k.linear(shared.latent, w.wk), w.k_norm, eps, rope, shared.keys, meta.slots)

    def _truncate(self, streams: Tensor, hc: HcInput, batch: StepBatch, shared: Shared) -> tuple[Tensor, HcInput]:
        """Enters the decoder half with its own row metadata, and without the rows that it does not need."""
        assert batch.decoder_rows is not None
        shared.rows = batch.decoder_rows
        if batch.kept is None:
            return streams, hc
        shared.entries = _for_rows(shared.entries, shared.rows.sequence)
        shared.keys = _for_rows(shared.keys, shared.rows.sequence)
        x = hc.x[batch.kept]
        kept = HcInput(x, self.kernels.quantize(x), hc.pre[batch.kept], hc.post[batch.kept], hc.comb[batch.kept])
        return streams[batch.kept], kept

    def _attention(self, spec: LayerSpec, weights: LayerWeights, hc: HcInput, caches: ModelCaches, shared: Shared) -> Tensor:
        k, c, w, rows = self.kernels, self.config, weights.attn, shared.rows
        rope = Rope(self.rope[spec.ratio > 0], rows.positions)
        latent, kv = k.quantized_linear(hc.quantized, w.wq_a_wkv).split_with_sizes((c.q_lora_rank, c.head_dim), 1)
        qr = k.rms_norm_quantize(latent, w.q_norm, c.rms_norm_eps)
        key = k.window_key(kv, w.kv_norm, c.rms_norm_eps, rope)
        query = k.quantized_linear(qr, w.wq_b)
        if spec.is_index_source:
            query, index_query = query.split_with_sizes((c.num_attention_heads * c.head_dim, c.index_n_heads * c.index_head_dim), 1)
            self._select(spec, weights, hc.x, index_query, rope, shared)
        selected = None
        if spec.ratio:
            assert shared.entries is not None
            assert shared.selected is not None
            selected = SelectedEntries(shared.entries, shared.selected)
        window = WindowKeys(caches.window[spec.index], key, rows.window_index)
        query = query.view(-1, c.num_attention_heads, c.head_dim)
        out = k.sparse_attention(query, window, selected, w.attn_sink, c.head_dim**-0.5, rope)
        k.store_window(key, window.ring, rows.window_slots)
        return k.attention_output(out, w.wo_a, w.wo_b, c.o_groups)

    def _select(self, spec: LayerSpec, weights: LayerWeights, x: Tensor, query: Tensor, rope: Rope, shared: Shared) -> None:
        """Runs the indexer of an index source and publishes its selection."""
        k, c = self.kernels, self.config
        assert shared.keys is not None
        iq = k.index_query(query.view(-1, c.index_n_heads, c.index_head_dim), rope)
        head_weights = k.linear(x, weights.attn.weights_proj) * self._head_scale  # float32
        emit = CandidateSpec(c.candidate_topk_blocks, c.candidate_block_size) if spec.is_candidate_source else None
        selection = k.select_entries(
            iq,
            head_weights,
            shared.keys,
            shared.rows.visible[spec.ratio],
            c.index_topk,
            shared.candidates if spec.uses_candidates else None,
            emit,
            c.candidate_block_size,
        )
        shared.selected = selection.index
        if emit is not None:
            shared.candidates = selection.candidates

    def moe_sublayer(self, weights: LayerWeights, streams: Tensor, pre: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """(streams, pre) after the FFN half of a layer or of a draft block."""
        k, c, w = self.kernels, self.config, weights.ffn
        hc = k.hc_pre(streams, pre, weights.hc_ffn, weights.ffn_norm, self.weights.constants)
        routing = k.moe_gate(hc.x, w.gate, w.bias, top_k, c.routed_scaling_factor)
        y = k.moe(hc.quantized, routing, w.experts, w.shared_experts, c.swiglu_limit)
        return k.hc_post(streams, y, hc.post, hc.comb), hc.pre


def _for_rows(pages: PagedEntries | None, sequence: Tensor) -> PagedEntries | None:
    if pages is None:
        return None
    return PagedEntries(pages.data, pages.format, pages.dim, pages.entries_per_page, pages.sectioned, pages.block_table, sequence)
