"""From logits to tokens: edits, transform, draw, forced tokens, log-probabilities, verification of drafts.

Order of operations on the logits of a row: repetition, frequency and presence penalties; logit bias; forbidden ids (`min_tokens`,
`first_n_token_no_eos`); the blacklist; the grammar mask; `force_topk`; then the transform of `Kernels.log_probs` and the draw.
Everything that forbids comes after everything that adds, so that no bias can bring a forbidden id back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.types import RandomRows, SamplingRows
from deepinfer_core.sampling.batch import HostBatch, SamplingBatch, device_batch, host_batch, prepare
from deepinfer_core.sampling.params import GREEDY_TEMPERATURE, SamplingParams
from deepinfer_core.sampling.random import ROW_STRIDE
from deepinfer_core.sampling.state import RequestRows

FLOOR = -9999.0
"""Lowest log-probability ever reported (DeepInfer 0.1.0)."""

ALPHA = 0.9999500012499792
"""exp(-5e-5): how much of a draft's probability counts in verification (DeepInfer 0.1.0)."""

_PROMPT_ROWS = 512  # rows scored at a time; bounds the temporaries of prompt log-probabilities


@dataclass(frozen=True)
class SamplerOptions:
    """Settings of a sampler that no request can change."""

    blacklist: Sequence[int] = ()  # ids that are never generated
    logprobs_mode: Literal["processed", "raw"] = "processed"  # raw: softmax of the untouched logits at temperature 1
    force_topk: int = 0  # > 0: only this many largest logits of a row take part, ties to the lower id
    deterministic_rng: Literal["row", "token_index"] = "row"  # sampling position of verify row j: base + j * 10000019, or base + j


class Scores(NamedTuple):
    """Log-probabilities of rows, floored at -9999."""

    tokens: Tensor  # float32 [Q]: of the row's token
    top_ids: Tensor | None  # int64 [Q, top]: most likely ids, falling, ties by lower id; None if nobody asked
    top: Tensor | None  # float32 [Q, top]


class Sampled(NamedTuple):
    """Result of `sample`."""

    tokens: Tensor  # int64 [Q]
    scores: Scores
    failed: Tensor  # bool [Q]: the row's logits contain NaN or +inf, or no id is possible; its token is meaningless


class Verified(NamedTuple):
    """Result of `verify`."""

    accepted: Tensor  # int64 [R]: drafts accepted
    tokens: Tensor  # int64 [R]: the token after the accepted drafts
    emitted: Tensor  # int64 [Q]: accepted drafts, then the final token, in the rows that produced them; -1 in later rows
    scores: Scores  # of `emitted`; meaningless where that is -1
    estimate: Tensor  # float32 [Q]: estimated acceptance of each draft, 0 on rows without one
    failed: Tensor  # bool [R]: see `Sampled.failed`; only rows up to the final token count


class Sampler:
    """Samples tokens with the ops of `kernels`. Holds no per-request state; nothing here waits for the device."""

    def __init__(self, kernels: Kernels, vocab_size: int, options: SamplerOptions | None = None) -> None:
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.options = options or SamplerOptions()
        self._blacklist = torch.tensor(list(self.options.blacklist), dtype=torch.int64, device=kernels.device)
        self._row_stride = ROW_STRIDE if self.options.deterministic_rng == "row" else 1

    def prepare(self, requests: Sequence[RequestRows], upload: Callable[[np.ndarray], Tensor] | None = None) -> SamplingBatch:
        """Everything the device needs for these rows, in one copy. `upload` replaces the plain copy (staging buffers, streams)."""
        return self.prepared(host_batch(requests), upload)

    def prepared(self, host: HostBatch, upload: Callable[[np.ndarray], Tensor] | None = None) -> SamplingBatch:
        """`prepare` of rows that were gathered already."""
        return prepare(host, upload or self._upload, self._row_stride)

    def batch_of(self, host: HostBatch, arrays: dict[str, Tensor]) -> SamplingBatch:
        """The batch of `host`, whose arrays are on the device already."""
        return device_batch(host, arrays, self._row_stride)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """One token per sequence from logits float32 [R, V] (`batch` without drafts). The logits are not modified."""
        edited = self._edited(logits, batch, None)
        scores = self.kernels.log_probs(edited, batch.scores)
        if batch.all_greedy:
            tokens = edited.argmax(-1)
        else:
            tokens = self.kernels.sample(scores, batch.random())
            if batch.settings.any_greedy:
                tokens = torch.where(batch.settings.temperature == 0, edited.argmax(-1), tokens)
        if batch.golden is not None:
            tokens = torch.where(batch.golden >= 0, batch.golden, tokens)
        return Sampled(tokens, self._scores(logits, scores, tokens, batch.top), _failed(logits, edited))

    def verify(self, logits: Tensor, batch: SamplingBatch, drafts: Tensor, draft_log_probs: Tensor | None) -> Verified:
        """Verifies drafts: logits float32 [Q, V] of all rows, drafts int64 [Q] (row j's is the token after it; -1: none).

        draft_log_probs float32 [Q, V]: distributions the drafts were drawn from, anything in rows without a draft; None only if
        `batch.all_greedy`. A sequence's last row must have no draft. The logits are not modified.
        """
        edited = self._edited(logits, batch, drafts)
        scores = self.kernels.log_probs(edited, batch.rows_of(batch.scores))
        if batch.all_greedy or draft_log_probs is None:
            candidates = edited.argmax(-1)
            passed = drafts == candidates
            estimate = passed.to(torch.float32) * ALPHA
        else:
            rows = batch.rows_of(batch.settings)
            target = self.kernels.log_probs(edited, rows) if rows.any_greedy else scores
            passed, candidates, estimate = self.kernels.verify(target, draft_log_probs, drafts, batch.random(), rows.temperature == 0)
        if batch.golden is not None:
            forced = batch.golden >= 0
            passed = torch.where(forced, drafts == batch.golden, passed)
            candidates = torch.where(forced, batch.golden, candidates)
        accepted, run, final = _accepted_runs(passed, batch)
        emitted = torch.where(run, drafts, torch.where(final, candidates, -1))
        failed = _any_per_sequence(_failed(logits, edited) & (run | final), batch)
        tokens = candidates if batch.first_row is None else candidates[batch.first_row + accepted]
        return Verified(accepted, tokens, emitted, self._scores(logits, scores, emitted.clamp(min=0), batch.top), estimate, failed)

    def draft(self, logits: Tensor, batch: SamplingBatch, index: int, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Draft number `index` (from 1) of each sequence, from the drafter's logits [R, V]: tokens int64 [R], log-probs [R, V].

        `accepted` int64 [R]: drafts that this step's verification accepted (zeros after a prefill). The transform is the target's;
        masks, bias and penalties are not applied to drafts. The random numbers are those of the drafted token's index in the draft
        stream.
        """
        log_probs = self.kernels.log_probs(self._limited(logits), batch.settings)
        if batch.all_greedy:
            return log_probs.argmax(-1), log_probs
        return self.kernels.sample(log_probs, RandomRows(batch.draft_seeds, batch.base + accepted + index)), log_probs

    def prompt_scores(self, logits: Tensor, targets: Tensor, params: SamplingParams) -> Scores:
        """Log-probabilities of prompt tokens: logits [n, V] of prompt rows, targets int64 [n] the token after each.

        Transformed by the request's temperature, top_p, top_k and min_p (greedy: temperature 1); no penalties, bias or masks.
        """
        raw = self.options.logprobs_mode == "raw" or params.is_greedy
        parts = []
        for start in range(0, max(len(targets), 1), _PROMPT_ROWS):
            rows, wanted = logits[start : start + _PROMPT_ROWS], targets[start : start + _PROMPT_ROWS]
            settings = _uniform_rows(SamplingParams() if raw else params, len(wanted), logits.device)
            parts.append(_gathered(self.kernels.log_probs(rows, settings), wanted, params.top_logprobs))
        tokens, ids, top = zip(*parts, strict=True)
        return Scores(torch.cat(tokens), *((torch.cat(ids), torch.cat(top)) if params.top_logprobs else (None, None)))

    def _upload(self, buffer: np.ndarray) -> Tensor:
        return torch.from_numpy(buffer).to(self.kernels.device, non_blocking=True)

    def _edited(self, logits: Tensor, batch: SamplingBatch, drafts: Tensor | None) -> Tensor:
        edits = batch.edits
        if edits is not None or len(self._blacklist):
            logits = logits.clone()
        if edits is not None:
            edits.apply(logits, drafts)
        if len(self._blacklist):
            logits.index_fill_(1, self._blacklist, -torch.inf)
        if edits is not None and edits.mask is not None and edits.mask_rows is not None:
            self.kernels.apply_token_bitmask(logits, edits.mask, edits.mask_rows)
        return self._limited(logits)

    def _limited(self, logits: Tensor) -> Tensor:
        """`logits` with all but the `force_topk` largest of each row at -inf."""
        if not 0 < self.options.force_topk < logits.shape[1]:
            return logits
        largest = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, : self.options.force_topk]
        return torch.full_like(logits, -torch.inf).scatter_(1, largest, logits.gather(1, largest))

    def _scores(self, logits: Tensor, processed: Tensor, tokens: Tensor, top: int) -> Scores:
        if self.options.logprobs_mode == "raw":
            processed = self.kernels.log_probs(logits, _uniform_rows(SamplingParams(), len(tokens), logits.device))
        return _gathered(processed, tokens, top)


def _failed(logits: Tensor, edited: Tensor) -> Tensor:
    """bool [Q]: NaN or +inf among the logits, or no id possible. The maximum shows all three."""
    failed = logits.amax(-1).isfinite().logical_not_()
    return failed if edited is logits else failed | ~edited.amax(-1).isfinite()


def _gathered(log_probs: Tensor, tokens: Tensor, top: int) -> Scores:
    chosen = log_probs.gather(1, tokens[:, None])[:, 0].clamp(min=FLOOR)
    if not top:
        return Scores(chosen, None, None)
    # Log-probabilities are never positive, so their bits without the sign order them; below those bits the id breaks ties.
    key = (log_probs.abs().view(torch.int32).to(torch.int64) << 32) + torch.arange(log_probs.shape[1], device=log_probs.device)
    ids = key.topk(min(top, log_probs.shape[1]), dim=-1, largest=False).values & 0xFFFFFFFF
    return Scores(chosen, ids, log_probs.gather(1, ids).clamp_(min=FLOOR))


def _accepted_runs(passed: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts of each sequence [R]; rows of accepted drafts [Q]; rows of final tokens [Q]."""
    if batch.request is None or batch.first_row is None or batch.row is None:
        nothing = torch.zeros_like(passed)
        return nothing.to(torch.int64), nothing, ~nothing
    stops = (~passed).to(torch.int64)
    before = stops.cumsum(0)
    before = before - batch.per_row((before - stops)[batch.first_row])  # stops of the row's sequence up to and with the row
    run = before == 0
    accepted = torch.zeros_like(batch.first_row).index_add_(0, batch.request, run.to(torch.int64))
    return accepted, run, batch.row == batch.per_row(accepted)


def _any_per_sequence(flags: Tensor, batch: SamplingBatch) -> Tensor:
    if batch.request is None:
        return flags
    return torch.zeros(batch.count, dtype=torch.int64, device=flags.device).index_add_(0, batch.request, flags.to(torch.int64)) > 0


def _uniform_rows(params: SamplingParams, count: int, device: torch.device) -> SamplingRows:
    """`params` for `count` rows."""
    return SamplingRows(
        torch.full((count,), max(params.temperature, GREEDY_TEMPERATURE), device=device),
        torch.full((count,), params.top_k, dtype=torch.int32, device=device),
        torch.full((count,), params.top_p, device=device),
        torch.full((count,), params.min_p, device=device),
        any_filtered=params.top_p < 1 or params.top_k > 0 or params.min_p > 0,
        any_greedy=False,
    )
