"""Drives a loaded model without a scheduler: a few sequences, any split into steps. The plain reference for engine equalities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.model.batch import SequenceInputs
from deepinfer_core.model.graph import ForwardResult
from deepinfer_core.model.loaded import CacheFormats, CacheSizes, LoadedModel
from deepinfer_core.model.weights import TensorSource


@dataclass
class SoloSequence:
    """One sequence: the tokens that went through the model, its state slot and its pages."""

    slot: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)


class SoloModel:
    """A model with room for `sequences` sequences of `max_tokens` tokens, each with pages and a slot of its own."""

    def __init__(
        self,
        checkpoint: str | Path | TensorSource,
        kernels: Kernels,
        sequences: int = 1,
        max_tokens: int = 512,
        draft_tokens: int = 0,
        formats: CacheFormats | None = None,
        tokenizer_path: Path | None = None,
    ) -> None:
        source = Checkpoint.open(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
        config = source.config.text_config
        formats = formats or CacheFormats.default(config, kernels.numerics)
        layout = CacheLayout.of(config, formats.window, formats.entry, formats.index, draft_tokens)
        self.pages_each = layout.pages_for(max_tokens + draft_tokens)
        sizes = CacheSizes(1 + sequences * self.pages_each, 1 + sequences, max_tokens + draft_tokens + 1)
        path = tokenizer_path or Path(source.path)  # type: ignore[attr-defined]
        self.loaded = LoadedModel(source, path, kernels, layout, sizes, drafter=draft_tokens > 0)
        self.draft_tokens = draft_tokens
        self.sequences = [
            # Page lists are interleaved, so that a sequence's pages are not side by side.
            SoloSequence(slot=1 + i, pages=[1 + i + sequences * j for j in range(self.pages_each)])
            for i in range(sequences)
        ]

    def inputs(self, new: dict[int, Sequence[int]]) -> SequenceInputs:
        """Step inputs that extend sequence i by the tokens new[i]. Does not change the sequences."""
        order = list(new)
        mine = [self.sequences[i] for i in order]
        size = max(self.loaded.config.engram_max_ngram_size - 1, 0)
        history = [([-1] * size + s.tokens)[len(s.tokens) :] for s in mine]
        device = self.loaded.kernels.device

        def put(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return SequenceInputs(
            query_len=put([len(new[i]) for i in order]),
            start=put([len(s.tokens) for s in mine]),
            state_slot=put([s.slot for s in mine]),
            block_table=put([s.pages for s in mine], torch.int32),
            valid_start=put([0] * len(order)),
            write_start=put([0] * len(order)),
            history=put(history),
            tokens=put([int(token) for i in order for token in new[i]]),
        )

    @torch.inference_mode()
    def step(self, new: dict[int, Sequence[int]]) -> ForwardResult:
        """Runs one packed step and keeps the tokens. Rows come back packed, in the order of `new`."""
        batch = self.loaded.batch(self.inputs(new))
        result = self.loaded.model.forward(batch, self.loaded.caches)
        if self.loaded.drafter is not None and result.features is not None:
            self.loaded.drafter.feed(result.features, batch.rows, self.loaded.caches)
        for i, tokens in new.items():
            self.sequences[i].tokens += [int(token) for token in tokens]
        return result

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], sequence: int = 0, chunks: Sequence[int] = ()) -> Tensor:
        """float32 [n, V] of every row, feeding `tokens` in chunks of the given lengths (the rest in one)."""
        parts, first = [], 0
        for length in [*chunks, len(tokens) - sum(chunks)]:
            if length:
                parts.append(self.loaded.model.logits(self.step({sequence: tokens[first : first + length]}).hidden))
            first += length
        return torch.cat(parts)

    def greedy(self, prompt: Sequence[int], count: int, sequence: int = 0) -> list[int]:
        """`count` argmax tokens after `prompt`, one step each."""
        out = [int(self.logits(prompt, sequence)[-1].argmax())]
        while len(out) < count:
            out.append(int(self.logits(out[-1:], sequence)[-1].argmax()))
        return out

    def forget(self, sequence: int = 0) -> None:
        """Starts the sequence anew; its cache memory keeps the old bytes, as after a reuse by the engine."""
        self.sequences[sequence].tokens.clear()
