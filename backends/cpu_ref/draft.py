"""Heads of the DSpark drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref.hyper import sigmoid
from deepinfer_backends.cpu_ref.linear import LinearOps, matmul
from deepinfer_core.backend.types import Weight


class DraftOps(LinearOps):
    """Ops of the contract's group "drafting" that are not attention."""

    def markov_logits(self, base: Tensor, previous: Tensor, embed: Tensor, head: Weight) -> Tensor:
        return base + self.linear(self._round(embed[previous]), head, torch.float32)

    def confidence(self, hidden: Tensor, previous: Tensor, embed: Tensor, weight: Tensor, temperature: float) -> Tensor:
        features = torch.cat((hidden.float(), embed[previous].float()), 1)
        return sigmoid((matmul(features, weight.float())[:, 0] / temperature).clamp(-60.0, 60.0))
