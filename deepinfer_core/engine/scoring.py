"""Logits of whole sequences, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_core.engine.engine import Engine, StepOutputs, token_ids
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.model.batch import SequenceInputs


def score(engine: Engine, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [len, V] on the CPU: logits of every position of `tokens`, computed in steps of the engine's token budget.

    The engine must be idle. Raises RequestError for ids or lengths the engine does not take, EngineError if the device fails.
    """
    limits, parts = engine.parts.limits, engine.parts
    if engine.failure is not None:
        raise engine.failure
    ids = token_ids(tokens)
    if ids is None or not ids.size or ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise RequestError(
            f"compute_logits: expected a list of at least one token id in [0, {limits.vocab_size})", parameter="sequences", value=tokens
        )
    if len(ids) > limits.max_model_len:
        raise RequestError(
            f"compute_logits: {len(ids)} tokens; at most model.max_model_len = {limits.max_model_len} fit; raise it or cut the sequence",
            parameter="sequences",
            value=len(ids),
        )
    if engine.has_unfinished:
        raise EngineError("compute_logits: requests are running; wait for them first")
    engine.settle()
    need = -(-len(ids) // limits.page_tokens)
    if not engine.pages.can_allocate(need):
        raise EngineError(f"compute_logits: {need} cache pages are needed and {engine.pages.available} are free; raise cache.memory_bytes")
    pages, slot = engine.pages.allocate(need), engine.slots.allocate()
    try:
        work = _Scoring(engine, ids.astype(np.int64), pages, slot)
        with engine.guarded(StepOutputs()):
            return torch.from_numpy(np.concatenate([parts.runtime.submit(work.next).wait()["logits"] for _ in range(work.steps)]))
    finally:
        engine.pages.release(pages)
        engine.slots.release(slot)


class _Scoring:
    def __init__(self, engine: Engine, ids: np.ndarray, pages: list[int], slot: int) -> None:
        self.loaded, self.ids, self.pages, self.slot = engine.parts.loaded, ids, pages, slot
        self.chunk = min(engine.parts.limits.max_num_batched_tokens, len(ids))
        self.steps = -(-len(ids) // self.chunk)
        self.start = 0

    @torch.inference_mode()
    def next(self) -> dict[str, torch.Tensor]:
        """Logits of the next chunk."""
        start, chunk = self.start, self.ids[self.start : self.start + self.chunk]
        self.start += len(chunk)
        size = max(self.loaded.config.engram_max_ngram_size - 1, 0)
        history = np.concatenate((np.full(size, -1), self.ids[:start]))[start:]
        device = self.loaded.kernels.device

        def put(values: object) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device)

        zero = put([0])
        inputs = SequenceInputs(
            put([len(chunk)]), put([start]), put([self.slot]), put([self.pages]).int(), zero, zero, put([history]), put(chunk)
        )
        result = self.loaded.model.forward(self.loaded.batch(inputs), self.loaded.caches)
        return {"logits": self.loaded.model.logits(result.hidden)}
