"""Selection of compressed entries: CANN's indexer narrows long contexts, plain operators decide."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.ascend950.kernels.caches import rotate
from deepinfer_backends.ascend950.kernels.formats import decode, index_grid
from deepinfer_backends.ascend950.kernels.linears import LinearOps
from deepinfer_backends.ascend950.kernels.rows import page_slots, page_tables
from deepinfer_core.backend.types import CandidateSpec, IndexQuery, PagedEntries, Rope, Selection

_MOST = 2048  # largest sparse_count of the indexer operator
_SPARE = 4
"""The operator returns this many times `topk` entries, and the exact scores of these decide. It leaves the order among equal scores
and the rounding of scores open; the spare entries make both irrelevant unless 3*topk entries tie at the threshold."""

_KEY_VALUES = 1 << 26  # float32 key values scored at a time (256 MiB)


class IndexerOps(LinearOps):
    """Ops of the contract's group "attention and caches" that choose entries. An index query is bf16 [T, heads, d], on the fp4 grid."""

    def index_query(self, query: Tensor, rope: Rope) -> IndexQuery:
        return calls.dequantize(index_grid(rotate(query, rope)))

    def select_entries(
        self,
        query: IndexQuery,
        head_weights: Tensor,
        keys: PagedEntries,
        visible: Tensor,
        topk: int,
        candidates: Tensor | None = None,
        emit: CandidateSpec | None = None,
        block_size: int = 0,
    ) -> Selection:
        rows, capacity = len(query), keys.block_table.shape[1] * keys.entries_per_page
        if not rows:
            return Selection(visible.new_empty(0, topk), None if emit is None else visible.new_empty(0, emit.blocks))
        entries = torch.arange(capacity, device=query.device).expand(rows, -1)
        narrowed = min(_MOST, _SPARE * topk)
        if candidates is not None:
            if candidates.shape[1] * block_size < capacity and emit is None:
                entries = _entries_of_blocks(candidates, block_size)
        elif emit is None and narrowed < capacity:
            entries = _narrow(query, head_weights, keys, visible, narrowed)
        allowed = (entries >= 0) & (entries < visible[:, None])
        scores = _scores(query, head_weights, keys, entries.clamp(0, capacity - 1)).masked_fill(~allowed, -torch.inf)
        blocks = None if emit is None else _best_blocks(scores, visible, emit)
        if candidates is not None and entries.shape[1] == capacity:
            scores = scores.masked_fill(~_in_blocks(candidates, block_size, capacity), -torch.inf)
        return Selection(_best(scores, entries, topk), blocks)


def _narrow(query: Tensor, head_weights: Tensor, keys: PagedEntries, visible: Tensor, count: int) -> Tensor:
    """int64 [T, count]: a superset of the best visible entries, ascending, -1 first."""
    data, scales = page_tables(keys)
    table = keys.block_table.long()
    slots = table[..., None] * keys.entries_per_page + torch.arange(keys.entries_per_page, device=query.device)
    slots = slots.clamp_min(0).flatten(0, 1)  # [S * pages of a sequence, n]
    decoded = decode(data.load(slots), scales.load(slots), keys.format)
    pages = torch.arange(table.numel(), dtype=torch.int32, device=query.device).view(table.shape)[keys.sequence.long()]
    found = calls.lightning_indexer(query, decoded, head_weights.bfloat16(), visible.clamp_min(1), pages, count)
    return found.long().sort(dim=1).values


def _scores(query: Tensor, head_weights: Tensor, keys: PagedEntries, entries: Tensor) -> Tensor:
    """float32 [T, c]: score of each of the entries [T, c] of a row's sequence; operands are exact in bf16, sums are float32."""
    data, scales = page_tables(keys)
    step = max(1, _KEY_VALUES // (entries.shape[1] * keys.dim))
    parts = []
    for first in range(0, len(query), step):
        rows = slice(first, first + step)
        slots = page_slots(keys, keys.sequence[rows], entries[rows]).clamp_min(0)
        decoded = decode(data.load(slots), scales.load(slots), keys.format).float()
        dots = torch.bmm(query[rows].float(), decoded.transpose(1, 2)).relu_()  # [t, heads, c]
        parts.append((dots * head_weights[rows].float()[..., None]).sum(1))
    return torch.cat(parts)


def _entries_of_blocks(blocks: Tensor, size: int) -> Tensor:
    """int64 [T, C * size]: entries of the blocks [T, C] in order; blocks of -1 give negative numbers."""
    first = torch.where(blocks < 0, -1 - size, blocks).long()[..., None] * size
    return (first + torch.arange(size, device=blocks.device)).flatten(1)


def _in_blocks(blocks: Tensor, size: int, entries: int) -> Tensor:
    """bool [T, entries]: whether each entry lies in one of the row's blocks [T, C] (-1: none)."""
    count = -(-entries // size)
    marks = torch.zeros(len(blocks), count + 1, dtype=torch.bool, device=blocks.device)
    marks = marks.scatter(1, torch.where(blocks < 0, count, blocks).clamp_max(count).long(), True)
    return marks[:, :count].repeat_interleave(size, 1)[:, :entries]


def _best_blocks(scores: Tensor, visible: Tensor, spec: CandidateSpec) -> Tensor:
    """int32 [T, spec.blocks] of scores [T, all entries]: blocks by their highest score; the last visible block is always in."""
    padded = functional.pad(scores, (0, -scores.shape[1] % spec.block_size), value=-torch.inf)
    best = padded.unflatten(1, (-1, spec.block_size)).amax(-1)
    block = torch.arange(best.shape[1], device=best.device)
    last = (visible.long() - 1)[:, None] // spec.block_size
    best = best.masked_fill((block == last) & (visible > 0)[:, None], torch.inf)
    return _best(best, block.expand(len(best), -1), spec.blocks)


def _best(scores: Tensor, numbers: Tensor, count: int) -> Tensor:
    """int32 [T, count]: the numbers [T, c] (ascending) of the highest finite scores, the lower number among equals, ascending, then -1."""
    width = min(count, scores.shape[1])
    values, order = scores.sort(dim=1, descending=True, stable=True)
    beyond = torch.iinfo(torch.int32).max
    kept = torch.where(values[:, :width] == -torch.inf, beyond, numbers.gather(1, order[:, :width])).sort(dim=1).values
    return functional.pad(torch.where(kept == beyond, -1, kept), (0, count - width), value=-1).int()
