"""A step's results: gathered on the device by sequence, copied to the host at once, taken apart there."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.engine.plan import StepPlan, StepResult
from deepinfer_core.sampling.sampler import Sampled, Scores, Verified


class TokenScores(NamedTuple):
    """Log-probabilities of n consecutive tokens of one sequence."""

    tokens: np.ndarray | list[float]  # float32 [n]
    top_ids: np.ndarray | None  # int64 [n, top]
    top: np.ndarray | None  # float32 [n, top], falling


@dataclass(frozen=True)
class StepPayload:
    """What a step tells about its S sequences' tokens besides the ids."""

    scores: TokenScores  # of the emitted tokens, each a numpy array with a first axis of sequences; anything behind the emitted ones
    prompt_scores: dict[int, TokenScores]  # by sequence; of the prompt tokens after this step's rows
    estimates: np.ndarray | None  # float32 [S, 1 + D] estimated acceptance of the verified drafts, 0 behind; None: none were verified

    def scores_of(self, sequence: int) -> TokenScores:
        """Those of one sequence."""
        _, ids, top = self.scores
        return TokenScores(self._logprobs[sequence], None if ids is None else ids[sequence], None if top is None else top[sequence])

    @cached_property
    def _logprobs(self) -> list[list[float]]:
        """`scores.tokens`, taken apart at once."""
        return np.asarray(self.scores.tokens).tolist()


@dataclass(frozen=True)
class DeviceStep:
    """Results of a step that the next one needs, on the device. Row s belongs to sequence s of the step's plan."""

    tokens: Tensor  # int64 [S] sampled token
    accepted: Tensor  # int64 [S] drafts accepted
    verified: Tensor  # int64 [S, D] drafts that were verified, -1 behind the last
    drafts: Tensor  # int64 [S, D] drafts made after sampling, -1 where none
    confidences: Tensor  # float32 [S, D]

    @classmethod
    def blank(cls, sequences: int, drafts: int, device: torch.device) -> DeviceStep:
        """Room for the results of a step."""
        none = torch.full((sequences, drafts), -1, dtype=torch.int64, device=device)
        count = torch.zeros(sequences, dtype=torch.int64, device=device)
        return cls(count - 1, count, none, none.clone(), torch.zeros(sequences, drafts, device=device))

    def first(self, count: int) -> DeviceStep:
        """Views of the first sequences."""
        return DeviceStep(*(getattr(self, field.name)[:count] for field in fields(self)))

    def copy_to(self, target: DeviceStep) -> None:
        """Overwrites the first S sequences of `target`."""
        count = len(self.tokens)
        target.tokens[:count].copy_(self.tokens)
        if self.drafts.shape[1]:
            for name in ("accepted", "verified", "drafts", "confidences"):
                getattr(target, name)[:count].copy_(getattr(self, name))


class DeviceOutputs:
    """Collects results of S sequences; rows of sequences that do not sample keep their initial values."""

    def __init__(self, sequences: int, drafts: int, device: torch.device) -> None:
        self.sequences, self.num_drafts, self.width, self._device = sequences, drafts, 1 + drafts, device
        self._top: dict[str, Tensor] = {}
        self._prompt: dict[str, Tensor] = {}
        self._has_drafts = self._has_verified = False

    # Made when they are first asked for: a step without drafts replaces or never needs most of them.

    @cached_property
    def tokens(self) -> Tensor:
        return torch.full((self.sequences,), -1, dtype=torch.int64, device=self._device)

    @cached_property
    def accepted(self) -> Tensor:
        return torch.zeros(self.sequences, dtype=torch.int64, device=self._device)

    @cached_property
    def emitted(self) -> Tensor:
        return torch.full((self.sequences, self.width), -1, dtype=torch.int64, device=self._device)

    @cached_property
    def failed(self) -> Tensor:
        return torch.zeros(self.sequences, dtype=torch.bool, device=self._device)

    @cached_property
    def verified(self) -> Tensor:
        return torch.full((self.sequences, self.num_drafts), -1, dtype=torch.int64, device=self._device)

    @cached_property
    def drafts(self) -> Tensor:
        return torch.full((self.sequences, self.num_drafts), -1, dtype=torch.int64, device=self._device)

    @cached_property
    def confidences(self) -> Tensor:
        return torch.zeros(self.sequences, self.num_drafts, device=self._device)

    @cached_property
    def scores(self) -> Tensor:
        return torch.zeros(self.sequences, self.width, device=self._device)

    @cached_property
    def estimates(self) -> Tensor:
        return torch.zeros(self.sequences, self.width, device=self._device)

    def put_sampled(self, sequences: Tensor | None, chosen: Sampled) -> None:
        """One token for each of `sequences` int64 [R]; None: for each of all."""
        if sequences is None and self.width == 1:
            self.tokens, self.failed = chosen.tokens, chosen.failed
            self.emitted, self.scores = chosen.tokens[:, None], chosen.scores.tokens[:, None]
            self._put_top(slice(None), 0, chosen.scores)
            return
        rows = slice(None) if sequences is None else sequences
        self.tokens[rows] = chosen.tokens
        self.emitted[rows, 0] = chosen.tokens
        self.failed[rows] = chosen.failed
        self.scores[rows, 0] = chosen.scores.tokens
        self._put_top(rows, 0, chosen.scores)

    def put_verified(self, sequences: Tensor, drafts: Tensor, ids: Tensor, verified: Verified) -> None:
        """Rows of R sequences: drafts int64 [R] of each, then one; ids int64 [Q] the verified drafts, -1 in last rows."""
        rows = torch.repeat_interleave(sequences, drafts + 1, output_size=len(ids))
        first = (drafts + 1).cumsum(0) - (drafts + 1)
        column = torch.arange(len(ids), device=ids.device) - torch.repeat_interleave(first, drafts + 1, output_size=len(ids))
        self.tokens[sequences] = verified.tokens
        self.accepted[sequences] = verified.accepted
        self.failed[sequences] = verified.failed
        self.emitted[rows, column] = verified.emitted
        self.scores[rows, column] = verified.scores.tokens
        self.estimates[rows, column] = verified.estimate
        padded = torch.full_like(self.emitted, -1)
        padded[rows, column] = ids
        self.verified = padded[:, :-1]
        self._has_verified = True
        self._put_top(rows, column, verified.scores)

    def put_drafts(self, sequences: Tensor, drafts: Tensor, confidences: Tensor) -> None:
        """New drafts int64 [R, D] and their confidences float32 [R, D]."""
        self.drafts[sequences] = drafts
        self.confidences[sequences] = confidences
        self._has_drafts = True

    def put_prompt_scores(self, sequence: int, scores: Scores) -> None:
        """Log-probabilities of prompt tokens of one sequence."""
        for name, value in zip(Scores._fields, scores, strict=True):
            if value is not None:
                self._prompt[f"prompt.{sequence}.{name}"] = value

    def device_step(self) -> DeviceStep:
        """What the next step needs."""
        return DeviceStep(self.tokens, self.accepted, self.verified, self.drafts, self.confidences)

    def tensors(self) -> dict[str, Tensor]:
        """Everything the host wants."""
        named = {
            "emitted": self.emitted,
            "accepted": self.accepted,
            "failed": self.failed,
            "scores": self.scores,
            **self._top,
            **self._prompt,
        }
        if self._has_drafts:
            named |= {"drafts": self.drafts, "confidences": self.confidences}
        if self._has_verified:
            named["estimates"] = self.estimates
        return named

    def _put_top(self, rows: Tensor | slice, column: Tensor | int, scores: Scores) -> None:
        if scores.top_ids is None or scores.top is None:
            return
        for name, values in (("top_ids", scores.top_ids), ("top", scores.top)):
            full = values.new_zeros(*self.emitted.shape, values.shape[1])
            full[rows, column] = values
            self._top[name] = full


def host_result(plan: StepPlan, rows: np.ndarray, arrays: dict[str, np.ndarray]) -> StepResult:
    """The scheduler's view of a finished step."""
    counts = arrays["accepted"] + 1 if "accepted" in arrays else np.ones(len(plan.requests), np.int64)
    prompts = {}
    for name in arrays:
        if name.startswith("prompt.") and name.endswith(".tokens"):
            s = int(name.split(".")[1])
            prompts[s] = TokenScores(arrays[name], arrays.get(f"prompt.{s}.top_ids"), arrays.get(f"prompt.{s}.top"))
    failed = (arrays["failed"] & plan.sample).nonzero()[0]
    reason = "the model's logits contain NaN or infinity, or every token is forbidden"
    return StepResult(
        tokens=arrays["emitted"],
        counts=counts,
        drafts=arrays.get("drafts"),
        confidences=arrays.get("confidences"),
        query_len=rows if plan.reallocate_drafts >= 0 else None,
        errors=dict.fromkeys(failed.tolist(), reason),
        payload=StepPayload(TokenScores(arrays["scores"], arrays.get("top_ids"), arrays.get("top")), prompts, arrays.get("estimates")),
    )
