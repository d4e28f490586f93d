"""A real engine over a made-up model: scheduler, runner, sampler and drafting are the engine's own, only the network is a table.

The next token's distribution depends on the last token alone, so that the law of any output is known exactly, and a step costs a
millisecond, so that tests can afford many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_core import LLM
from deepinfer_core.engine import engine as engine_module
from deepinfer_core.model.batch import SequenceInputs
from deepinfer_core.model.graph import ForwardResult

VOCAB = 768  # of the checkpoint that ships with the package


def engine(**options: Any) -> LLM:
    """An engine on the shipped checkpoint, small and synchronous unless `options` say otherwise."""
    return LLM(**{"max_num_seqs": 4, "max_model_len": 512, "async_scheduling": False, "backend": "cpu_ref", **options})


def table(size: int, seed: int, spread: float = 1.2) -> Tensor:
    """Logits [VOCAB, VOCAB] after each token; only ids 3 .. 2 + size are possible."""
    logits = torch.full((VOCAB, VOCAB), -torch.inf)
    logits[:, 3 : 3 + size] = torch.randn(VOCAB, size, generator=torch.Generator().manual_seed(seed)) * spread
    return logits


class ToyModel:
    """Replaces the network of `llm`: `target` and `draft` are tables of logits, `confidence` [VOCAB] is the head's output after a token."""

    def __init__(self, llm: LLM, target: Tensor, draft: Tensor | None = None, confidence: Tensor | None = None) -> None:
        self.target, self.draft, self.chance = target, draft, confidence
        loaded, runner = llm.parts.loaded, llm.engine.runner
        runner._run_model = self._forward  # type: ignore[method-assign]
        loaded.model.logits = lambda hidden: self.target[hidden[:, 0]]  # type: ignore[method-assign]
        drafter = loaded.drafter
        if drafter is not None:
            assert draft is not None
            drafter.forward = self._draft  # type: ignore[method-assign]
            drafter.markov_logits = lambda base, previous: draft[previous]  # type: ignore[method-assign]
            drafter.confidence = self._confidence  # type: ignore[method-assign]

    def _forward(self, inputs: SequenceInputs) -> ForwardResult:
        return ForwardResult(inputs.tokens[:, None], None)

    def _draft(self, inputs: Any, length: int, caches: Any) -> tuple[Tensor, Tensor]:
        count = len(inputs.anchor)
        return torch.zeros(count, length, 1), torch.zeros(count, length, VOCAB)

    def _confidence(self, hidden: Tensor, previous: Tensor, temperature: float) -> Tensor:
        return torch.full(previous.shape, 0.5) if self.chance is None else self.chance[previous]


class Curve:
    """A cost table whose cheapest budget wanders from step to step: `extras` drafts in turn."""

    def __init__(self, *extras: int) -> None:
        self.extras, self.calls, self.budgets = extras, 0, set[int]()

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        extra = min(self.extras[self.calls % len(self.extras)], len(rows) - 1)
        self.calls += 1
        self.budgets.add(extra)
        return np.where(rows == requests + extra, 1.0, 1e9)

    def plain_ms(self, requests: int) -> float:
        return np.inf

    def observe(self, *times: float) -> None:
        """Times do not matter here."""


def varlen_engine(monkeypatch: pytest.MonkeyPatch, cost: Any, **options: Any) -> LLM:
    """An engine with confidence-scheduled verification over `cost` instead of measured times."""
    monkeypatch.setattr(engine_module, "warm_up", lambda runner, parts: cost)
    return engine(enable_varlen=True, **options)
