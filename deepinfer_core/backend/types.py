"""Values that the model graph and the kernels exchange.

Dimension names used everywhere: T token rows of a step, S sequences of a step, D hidden_size, m hc_mult, H heads, hd head_dim,
rd qk_rope_head_dim, W sliding_window, R ring length of a window, r compress ratio, n entries of a page (page_tokens / r),
E experts, K experts per token, V vocab_size, Q rows that are sampled.

Rows of a step are packed: sequence 0's rows first, each sequence's rows in position order. Every tensor here lives on the kernels'
device and is valid for one step, except weights and cache buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat

Weight = Any
"""A weight in the backend's own layout, made by a `prepare_*` op, understood only by the kernels that made it."""

Activation = Any
"""A quantised activation in the backend's own layout: made by `quantize` and friends, consumed by `quantized_linear` and `moe`."""

IndexQuery = Any
"""Quantised index queries in the backend's own layout: made by `index_query`, consumed by `select_entries`."""


class QuantTensor(NamedTuple):
    """A weight as the checkpoint stores it.

    `weight` is bf16 [out, in], e4m3 [out, in] or int8 [out, in/2] (two e2m1, low nibble = even column). `scale` is
    float8_e8m0fnu: [out/32, in/32] for e4m3 linears (sizes rounded up), [out, in/32] for e2m1 experts and for Engram rows, or None
    for bf16.
    """

    weight: Tensor
    scale: Tensor | None = None

    def to(self, device: torch.device) -> QuantTensor:
        """The same weight on `device`."""
        return QuantTensor(self.weight.to(device), None if self.scale is None else self.scale.to(device))


class ExpertTensors(NamedTuple):
    """The three projections of one routed or shared expert: gate (`w1`), down (`w2`), up (`w3`)."""

    w1: QuantTensor
    w2: QuantTensor
    w3: QuantTensor


class Rope(NamedTuple):
    """Rotary angles of the rows of one op."""

    table: Tensor  # [positions, rd] float32: rd/2 cosines, then rd/2 sines of `position * inv_freq`
    positions: Tensor  # [rows] int64, each a row of `table`


class HcWeights(NamedTuple):
    """Hyper-connection parameters of one sub-layer, all float32 (checkpoint names `hc_*_fn`, `hc_*_base`, `hc_*_scale`)."""

    fn: Tensor  # [m*(m+2), m*D]
    base: Tensor  # [m*(m+2)]
    scale: Tensor  # [3]


class HcConstants(NamedTuple):
    """Scalars of the hyper-connections: `rms_norm_eps`, `hc_eps`, `hc_sinkhorn_iters` of the checkpoint."""

    norm_eps: float
    hc_eps: float
    sinkhorn_iters: int


class HcInput(NamedTuple):
    """What one sub-layer reads from the streams, and how its result will be mixed back."""

    x: Tensor  # [T, D] activation dtype: normed collapse of the streams, the sub-layer's input
    quantized: Activation  # `x` after `quantize`
    pre: Tensor  # [T, m] float32: how the NEXT sub-layer collapses the streams
    post: Tensor  # [T, m] float32: weight of the sub-layer's output in each stream
    comb: Tensor  # [T, m, m] float32: comb[t, j, k] weights old stream j in new stream k


@dataclass(frozen=True)
class WindowRing:
    """The sliding-window keys of one layer: a ring of R entries for each state slot."""

    data: Tensor  # uint8 [slots, R, entry bytes]; strides of dim 0 are arbitrary, entries are contiguous
    format: CacheFormat


@dataclass(frozen=True)
class WindowKeys:
    """Which window keys each row of a step attends to.

    `index[t, c]` counts in one address space: value < slots*R is entry `value % R` of slot `value // R`; value - slots*R is a row of
    `current`; -1 is no key. Columns are in position order.
    """

    ring: WindowRing
    current: Tensor  # [rows, hd] activation dtype: keys of this step's rows, as `window_key` returned them
    index: Tensor  # int32 [T, columns]


@dataclass(frozen=True)
class PagedEntries:
    """Compressed entries or index keys of one source layer, in pages.

    Entry j of sequence s is entry `j % n` of page `block_table[s, j // n]`. In a page, main entries are stored one after the other
    (data, then scales, of each entry); index keys are sectioned: the data of all n entries, then the scales of all n entries.
    """

    data: Tensor  # uint8 [pages, section bytes]; the stride of dim 0 is the page stride
    format: CacheFormat
    dim: int  # values of one entry
    entries_per_page: int  # n
    sectioned: bool  # True for index keys
    block_table: Tensor  # int32 [S, pages of the longest sequence]
    sequence: Tensor  # int32 [T]: sequence of each row


@dataclass(frozen=True)
class SelectedEntries:
    """The compressed entries each row attends to, besides its window."""

    pages: PagedEntries
    index: Tensor  # int32 [T, topk] entry numbers in the row's sequence, ascending, -1 padded at the end


@dataclass(frozen=True)
class CandidateSpec:
    """Two-level selection: keep the best `blocks` blocks of `block_size` consecutive entries."""

    blocks: int
    block_size: int


class Selection(NamedTuple):
    """Result of `select_entries`."""

    index: Tensor  # type: ignore[assignment]  # int32 [T, topk] ascending entry numbers, -1 padded (hides tuple.index)
    candidates: Tensor | None  # int32 [T, blocks] ascending candidate block numbers, -1 padded; None unless asked for


@dataclass(frozen=True)
class CompressorRing:
    """Open groups of one ratio > 1 source: float32 (latent, gate) rows by position, a ring for each state slot."""

    data: Tensor  # float32 [slots, ring rows, 2, hd]


class CompressorRows(NamedTuple):
    """Which rows form the group that each row of a step completes, and where this step's rows are kept.

    `members` counts in one address space: value < slots*ring rows is a ring row, value minus that is a row of this step, -1 is none
    (the row completes no group).
    """

    members: Tensor  # int32 [T, r]
    slots: Tensor  # int32 [T]: flat ring row to keep this row in, -1: do not keep


class EngramHashTables(NamedTuple):
    """Constants of one Engram layer's hash (`C` = (max n-gram size - 1) * heads columns)."""

    multipliers: Tensor  # int64 [max n-gram size]
    primes: Tensor  # int64 [C]
    offsets: Tensor  # int64 [C]


class Routing(NamedTuple):
    """Chosen experts of each row."""

    ids: Tensor  # int32 [T, K], by falling score
    weights: Tensor  # float32 [T, K], normalised and scaled


class SamplingRows(NamedTuple):
    """Sampling parameters of each sampled row."""

    temperature: Tensor  # float32 [Q]; 0 means greedy: the row's distribution is one-hot at the lowest argmax
    top_k: Tensor  # int32 [Q]; -1 is off
    top_p: Tensor  # float32 [Q]; 1 is off
    min_p: Tensor  # float32 [Q]; 0 is off
    any_filtered: bool = True  # False: the host promises that no row uses top_k, top_p or min_p (spares the sort)
    any_greedy: bool = True  # False: the host promises that no row has temperature 0


class RandomRows(NamedTuple):
    """Keys of the counter-based random numbers of each row. No state: equal keys give equal numbers."""

    seeds: Tensor  # int64 [Q]: the 64 seed bits
    positions: Tensor  # int64 [Q]: sampling position s of the row


class Verification(NamedTuple):
    """Result of `verify`, one entry per verified row."""

    accepted: Tensor  # bool [Q]: the row's draft passes; False on rows without a draft
    tokens: Tensor  # int64 [Q]: token to emit if this is the first row that does not pass
    estimate: Tensor  # float32 [Q]: max(1 - mass of the residual, 0), 0 on rows without a draft
