"""DSpark: the drafter's blocks, fed by the main model's features, and its sequential heads.

Source: DeepSeek reference inference code for V4.1-Flash (classes of the drafter) and DeepInfer 0.1.0's draft pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_core.backend.types import Rope, WindowKeys, WindowRing
from deepinfer_core.model.batch import BatchGeometry, RowMeta
from deepinfer_core.model.caches import ModelCaches
from deepinfer_core.model.graph import Model
from deepinfer_core.model.weights import DraftWeights, LayerWeights


class DraftInputs(NamedTuple):
    """One draft pass over S sequences."""

    anchor: Tensor  # int64 [S]: the token after the last one that went through the main model
    position: Tensor  # int64 [S]: position of that last one, `a`; the block occupies a+1 .. a+N
    state_slot: Tensor  # int64 [S]
    valid_start: Tensor  # int64 [S]: first position with a main key


class Drafter:
    """The draft model of one device. Stateless: main keys are in the caches, block keys live for one pass."""

    def __init__(self, model: Model, geometry: BatchGeometry) -> None:
        assert model.weights.drafter is not None
        self.model, self.geometry = model, geometry
        self.weights: DraftWeights = model.weights.drafter
        self.top_k = model.config.dspark_num_experts_per_tok or model.config.num_experts_per_tok

    def feed(self, features: Tensor, rows: RowMeta, caches: ModelCaches) -> None:
        """Stores the main keys of rows that went through the main model. features [T, targets*D]. Mutates: caches (draft windows)."""
        k, c = self.model.kernels, self.model.config
        rope = Rope(self.model.rope[False], rows.positions)
        main = k.rms_norm_quantize(k.quantized_linear(k.quantize(features), self.weights.main_proj), self.weights.main_norm, c.rms_norm_eps)
        for block, ring in zip(self.weights.blocks, caches.draft_window, strict=True):
            key = k.window_key(k.quantized_linear(main, block.attn.wkv), block.attn.kv_norm, c.rms_norm_eps, rope)
            k.store_window(key, ring, rows.window_slots)

    def forward(self, inputs: DraftInputs, length: int, caches: ModelCaches) -> tuple[Tensor, Tensor]:
        """(collapsed hidden [S, N, D], base logits float32 [S, N, V]) of a block of N = `length` rows per sequence."""
        count, c = len(inputs.anchor), self.model.config
        tokens = torch.full((count, length), c.dspark_noise_token_id, dtype=torch.int64, device=inputs.anchor.device)
        tokens[:, 0] = inputs.anchor
        positions = inputs.position[:, None] + torch.arange(1, length + 1, device=tokens.device)
        index = self._window_index(inputs, length)
        streams, pre = self.model.enter(tokens.flatten())
        for block, ring in zip(self.weights.blocks, caches.draft_window, strict=True):
            streams, pre = self._attention_sublayer(block, streams, pre, ring, index, positions.flatten())
            streams, pre = self.model.moe_sublayer(block, streams, pre, self.top_k)
        hidden = self.model.kernels.hc_collapse(streams, pre)
        normed = self.model.kernels.rms_norm(hidden, self.weights.norm, c.rms_norm_eps)
        logits = self.model.kernels.linear(normed, self.model.weights.head, torch.float32)
        return hidden.unflatten(0, (count, length)), logits.unflatten(0, (count, length))

    def markov_logits(self, base: Tensor, previous: Tensor) -> Tensor:
        """Draft logits of one position: base float32 [S, V] plus the Markov head's term for `previous` int64 [S]."""
        return self.model.kernels.markov_logits(base, previous, self.weights.markov_embed, self.weights.markov_head)

    def confidence(self, hidden: Tensor, previous: Tensor, temperature: float) -> Tensor:
        """float32 [S]: estimated probability that the draft of one position is accepted if those before it were."""
        return self.model.kernels.confidence(hidden, previous, self.weights.markov_embed, self.weights.confidence, temperature)

    def _window_index(self, inputs: DraftInputs, length: int) -> Tensor:
        """int32 [S*N, W+N]: main keys at a-W+1 .. a, then every row of the block, for each row alike."""
        g, device = self.geometry, inputs.anchor.device
        seen = inputs.position[:, None] + torch.arange(1 - g.window, 1, device=device)
        main = (inputs.state_slot * g.ring)[:, None] + seen % g.ring
        main = torch.where(seen >= inputs.valid_start[:, None].clamp_min(0), main, -1)
        block = g.state_slots * g.ring + torch.arange(len(seen) * length, device=device).view(-1, length)
        return torch.cat((main, block), 1).repeat_interleave(length, 0).int()

    def _attention_sublayer(
        self, block: LayerWeights, streams: Tensor, pre: Tensor, ring: WindowRing, index: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k, c, w = self.model.kernels, self.model.config, block.attn
        hc = k.hc_pre(streams, pre, block.hc_attn, block.attn_norm, self.model.weights.constants)
        rope = Rope(self.model.rope[False], positions)
        a = k.quantized_linear(hc.quantized, w.wq_a_wkv)
        qr = k.rms_norm_quantize(a[:, : c.q_lora_rank], w.q_norm, c.rms_norm_eps)
        key = k.window_key(a[:, c.q_lora_rank :], w.kv_norm, c.rms_norm_eps, rope)
        query = k.quantized_linear(qr, w.wq_b).unflatten(1, (c.num_attention_heads, c.head_dim))
        out = k.sparse_attention(query, WindowKeys(ring, key, index), None, w.attn_sink, c.head_dim**-0.5, rope)
        y = k.attention_output(out, w.wo_a, w.wo_b, c.o_groups)
        return k.hc_post(streams, y, hc.post, hc.comb), hc.pre
