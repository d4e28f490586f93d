"""Changes of the logits that requests ask for: penalties, bias, forbidden ids, grammar masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.sampling.state import RequestRows


@dataclass(frozen=True)
class Penalties:
    """Penalised rows (P of them) and the tokens that count for each."""

    rows: Tensor  # int64 [P]
    factors: Tensor  # float32 [3, P]: presence, frequency, repetition
    output: Tensor  # int64 [2, n]: penalised row, token id of the output so far
    counts: Tensor  # float32 [n]: how often it occurs
    prompt: Tensor | None  # int64 [2, n]: penalised row, token id of the prompt
    drafts: Tensor | None  # int64 [2, n]: penalised row, row whose draft precedes it

    def apply(self, logits: Tensor, drafts: Tensor | None) -> None:
        """Mutates: logits [Q, V]. Repetition first, then frequency and presence. Drafts before a row count as output; -1 is no draft."""
        shape = (len(self.rows), logits.shape[1])
        counts = torch.zeros(shape, device=logits.device).index_put_((self.output[0], self.output[1]), self.counts)
        if self.drafts is not None and drafts is not None:
            ids = drafts[self.drafts[1]]
            counts.index_put_((self.drafts[0], ids.clamp(min=0)), (ids >= 0).to(counts.dtype), accumulate=True)
        used = counts > 0
        seen = used.clone()
        if self.prompt is not None:
            seen[self.prompt[0], self.prompt[1]] = True
        presence, frequency, repetition = self.factors[:, :, None]
        x = logits[self.rows]
        factor = torch.where(seen, repetition, 1.0)
        x = torch.where(x > 0, x / factor, x * factor)
        logits[self.rows] = x - frequency * counts - presence * used


@dataclass(frozen=True)
class LogitEdits:
    """Edits of a step's logits; absent kinds are None."""

    penalties: Penalties | None
    bias: Tensor | None  # int64 [2, n]: row, token id
    bias_values: Tensor | None  # float32 [n]
    forbidden: Tensor | None  # int64 [2, n]: row, token id
    mask: Tensor | None  # int32 [m, ceil(V/32)] grammar masks
    mask_rows: Tensor | None  # int64 [m]

    def apply(self, logits: Tensor, drafts: Tensor | None) -> None:
        """Applies penalties, then bias, then forbidden ids. Grammar masks are an op of the kernels. Mutates: logits [Q, V]."""
        if self.penalties is not None:
            self.penalties.apply(logits, drafts)
        if self.bias is not None and self.bias_values is not None:
            logits.index_put_((self.bias[0], self.bias[1]), self.bias_values, accumulate=True)
        if self.forbidden is not None:
            logits[self.forbidden[0], self.forbidden[1]] = -torch.inf


def edit_arrays(requests: Sequence[RequestRows]) -> dict[str, np.ndarray]:
    """The host arrays of all edits of a step, by name; empty if there are none."""
    pairs: dict[str, list[tuple[int, np.ndarray]]] = {"bias": [], "forbidden": [], "output": [], "prompt": [], "drafts": []}
    penalised: list[int] = []
    bias_values, counts, factors, masks, mask_rows = [], [], [], [], []
    start = 0
    for request in requests:
        state = request.state
        if not state.is_edited and request.mask is None:
            start += request.drafts + 1
            continue
        output = state.output_counts() if state.has_penalties else None
        for j in range(request.drafts + 1):
            row = start + j
            if len(state.bias_ids):
                pairs["bias"].append((row, state.bias_ids))
                bias_values.append(state.bias_values)
            if len(ids := state.forbidden(j)):
                pairs["forbidden"].append((row, ids))
            if output is not None:
                at = len(penalised)
                penalised.append(row)
                factors.append((state.params.presence_penalty, state.params.frequency_penalty, state.params.repetition_penalty))
                pairs["output"].append((at, output[0]))
                pairs["prompt"].append((at, state.prompt_ids))
                pairs["drafts"].append((at, np.arange(start, row)))
                counts.append(output[1])
        if request.mask is not None:
            masks.append(request.mask)
            mask_rows.append(np.arange(start, start + request.drafts + 1))
        start += request.drafts + 1
    arrays = {name: _joined(found) for name, found in pairs.items() if any(len(ids) for _, ids in found)}
    if bias_values:
        arrays["bias_values"] = np.concatenate(bias_values)
    if penalised:
        arrays["penalised"] = np.array(penalised, np.int64)
        arrays["factors"] = np.array(factors, np.float32).T
        arrays["counts"] = np.concatenate(counts)
        arrays.setdefault("output", np.zeros((2, 0), np.int64))
    if masks:
        arrays["mask"] = np.concatenate(masks).astype(np.int32, copy=False)
        arrays["mask_rows"] = np.concatenate(mask_rows)
    return arrays


def edits_from(device: dict[str, Any]) -> LogitEdits | None:
    """The edits whose arrays were uploaded as `device`; None if there are none."""
    penalties = None
    if "penalised" in device:
        fields = (device["penalised"], device["factors"], device["output"], device["counts"])
        penalties = Penalties(*fields, device.get("prompt"), device.get("drafts"))
    parts = [device.get(name) for name in ("bias", "bias_values", "forbidden", "mask", "mask_rows")]
    return None if penalties is None and all(part is None for part in parts) else LogitEdits(penalties, *parts)


def _joined(pairs: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """int64 [2, n] of all (row, id)."""
    rows = np.repeat(np.array([row for row, _ in pairs], np.int64), [len(ids) for _, ids in pairs])
    return np.stack((rows, np.concatenate([ids for _, ids in pairs])))
