"""What the device needs to know about the sampled rows of one step, built on the host and uploaded in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from deepinfer_core.backend.types import RandomRows, SamplingRows
from deepinfer_core.sampling.edits import LogitEdits, edit_arrays, edits_from
from deepinfer_core.sampling.packing import pack, unpack
from deepinfer_core.sampling.random import ROW_STRIDE
from deepinfer_core.sampling.state import RequestRows


@dataclass(frozen=True)
class SamplingBatch:
    """Device tensors of R sequences with Q sampled rows; rows of a sequence are consecutive. Valid for one step.

    `base` may be replaced (`dataclasses.replace`) by positions that only the device knows, as long as no sequence `needs_history`.
    """

    settings: SamplingRows  # [R], temperature 0 on greedy sequences: the distribution tokens are drawn from
    scores: SamplingRows  # [R], temperature 1 on greedy sequences: the distribution log-probabilities are reported from
    seeds: Tensor  # int64 [R]
    draft_seeds: Tensor  # int64 [R]
    base: Tensor  # int64 [R]: index of the token that the sequence's first row generates
    request: Tensor | None  # int64 [Q]: sequence of each row; None: one row each
    row: Tensor | None  # int64 [Q]: number of the row in its sequence
    first_row: Tensor | None  # int64 [R]
    golden: Tensor | None  # int64 [Q]: forced token or -1; None: no row has one
    edits: LogitEdits | None  # changes of the logits; None: none besides the blacklist
    count: int  # R
    all_greedy: bool
    top: int  # most `top_logprobs` that a sequence asks for
    row_stride: int = ROW_STRIDE

    def per_row(self, values: Tensor) -> Tensor:
        """`values` [R, ...] repeated for the rows of each sequence: [Q, ...]."""
        return values if self.request is None else values.index_select(0, self.request)

    def rows_of(self, settings: SamplingRows) -> SamplingRows:
        """`settings` [R] for each row [Q]."""
        if self.request is None:
            return settings
        temperature, top_k, top_p, min_p = (self.per_row(values) for values in settings[:4])
        return settings._replace(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    def random(self) -> RandomRows:
        """Random numbers of the target's draws [Q]: row j of a sequence uses position base + j * row_stride."""
        if self.request is None or self.row is None:
            return RandomRows(self.seeds, self.base)
        return RandomRows(self.per_row(self.seeds), self.per_row(self.base) + self.row * self.row_stride)


PLAIN = {"ints", "floats", "top_k"}
GREEDY_FLOATS = np.array([[0.0], [1.0], [1.0], [0.0]], np.float32)  # `SamplingState.floats` of a greedy sequence


@dataclass(frozen=True)
class HostBatch:
    """What `SamplingBatch` is made from, on the host."""

    arrays: dict[str, np.ndarray]
    count: int  # R
    greedy: int  # sequences that take the most likely token
    filtered: bool  # a sequence uses top_k, top_p or min_p
    top: int  # most `top_logprobs` that a sequence asks for

    @property
    def is_plain(self) -> bool:
        """One row each, nothing edited or forced, no alternatives reported: every step of the kind has arrays of the same shapes."""
        return self.arrays.keys() == PLAIN and not self.top

    def padded(self, count: int) -> HostBatch:
        """A plain batch with greedy sequences behind its own."""
        ints, floats, top_k = self.arrays["ints"], self.arrays["floats"], self.arrays["top_k"]
        rest = count - self.count
        arrays = {
            "ints": np.concatenate((ints, np.zeros((3, rest), np.int64)), 1),
            "floats": np.concatenate((floats, np.repeat(GREEDY_FLOATS, rest, 1)), 1),
            "top_k": np.concatenate((top_k, np.full(rest, -1, np.int32))),
        }
        return HostBatch(arrays, count, self.greedy + rest, self.filtered, self.top)


def host_batch(requests: Sequence[RequestRows]) -> HostBatch:
    """Gathers what the device needs for these rows."""
    states = [request.state for request in requests]
    count = len(states)
    arrays: dict[str, np.ndarray] = {
        "ints": np.array([(*s.seeds, r.position) for s, r in zip(states, requests, strict=True)], np.int64).reshape(count, 3).T,
        "floats": np.array([s.floats for s in states], np.float32).reshape(count, 4).T,
        "top_k": np.array([s.top_k for s in states], np.int32),
    }
    if any(request.drafts for request in requests):
        arrays |= _row_arrays(requests)
    if any(s.generated < len(s.golden) for s in states):
        arrays["golden"] = np.array([r.state.forced(j) for r in requests for j in range(r.drafts + 1)], np.int64)
    arrays |= edit_arrays(requests)
    return HostBatch(
        arrays,
        count,
        greedy=sum(s.greedy for s in states),
        filtered=any(s.filtered for s in states),
        top=max((s.params.top_logprobs for s in states), default=0),
    )


def device_batch(host: HostBatch, device: dict[str, Any], row_stride: int = ROW_STRIDE) -> SamplingBatch:
    """The batch, from `host.arrays` on the device."""
    (seeds, draft_seeds, base), (temperature, score_temperature, top_p, min_p) = device["ints"].unbind(0), device["floats"].unbind(0)
    settings = SamplingRows(temperature, device["top_k"], top_p, min_p, any_filtered=host.filtered, any_greedy=host.greedy > 0)
    return SamplingBatch(
        settings=settings,
        scores=settings._replace(temperature=score_temperature, any_greedy=False),
        seeds=seeds,
        draft_seeds=draft_seeds,
        base=base,
        request=device.get("request"),
        row=device.get("row"),
        first_row=device.get("first_row"),
        golden=device.get("golden"),
        edits=edits_from(device),
        count=host.count,
        all_greedy=host.greedy == host.count,
        top=host.top,
        row_stride=row_stride,
    )


def prepare(host: HostBatch, upload: Callable[[np.ndarray], Tensor], row_stride: int = ROW_STRIDE) -> SamplingBatch:
    """The batch; `upload` copies one uint8 array to the device."""
    buffer, layout = pack(host.arrays)
    return device_batch(host, unpack(upload(buffer), layout), row_stride)


def _row_arrays(requests: Sequence[RequestRows]) -> dict[str, np.ndarray]:
    lengths = np.array([request.drafts + 1 for request in requests])
    first = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    request = np.repeat(np.arange(len(requests)), lengths)
    return {"request": request, "row": np.arange(len(request)) - first[request], "first_row": first}
