"""Window keys, compressed entries, the indexer's selection and sparse attention."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_backends.cpu_ref import quant
from deepinfer_backends.cpu_ref.linear import LinearOps, matmul, pad_rows
from deepinfer_backends.cpu_ref.quant import split_last
from deepinfer_backends.cpu_ref.scalars import scalar
from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.types import (
    CandidateSpec,
    CompressorRing,
    CompressorRows,
    IndexQuery,
    PagedEntries,
    Rope,
    SelectedEntries,
    Selection,
    Weight,
    WindowKeys,
    WindowRing,
)

_LOWEST = torch.finfo(torch.float32).min
_GATHER_VALUES = 1 << 25  # float32 values gathered at once by sparse_attention


class Angles(NamedTuple):
    """cos and sin of the rotation of each row, [rows, 1 ..., rd/2, 1]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, rope: Rope, dims: int) -> Angles:
        """Angles for tensors of `dims` dimensions, rows first."""
        angles = rope.table.index_select(0, rope.positions)
        return cls(*angles.view(angles.shape[0], *[1] * (dims - 2), 2, angles.shape[1] // 2, 1).unbind(dims - 1))


@lru_cache
def _turn(device: torch.device, inverse: bool) -> Tensor:
    """Signs of the sine terms of a rotated pair."""
    return torch.tensor([1.0, -1.0] if inverse else [-1.0, 1.0], device=device)


def rotate(x: Tensor, angles: Angles, inverse: bool = False) -> Tensor:
    """x [rows, ..., d] with its last rd dims rotated in float32, then rounded: pairs (a, b) become (a cos - b sin, a sin + b cos)."""
    result = x.clone(memory_format=torch.contiguous_format)
    tail = result[..., -2 * angles.cos.shape[-2] :]
    pairs = split_last(tail.float(), 2)
    swapped = pairs.flip(-1).mul_(angles.sin).mul_(_turn(x.device, inverse))
    tail.copy_((pairs * angles.cos).add_(swapped).view(tail.shape))
    return result


def page_entries(pages: PagedEntries) -> tuple[Tensor, Tensor]:
    """Views (data [pages, n, data bytes], scales [pages, n, scale bytes]) of the whole pool. Writing to them writes to the pool."""
    n, dim = pages.entries_per_page, pages.dim
    data_bytes, entry_bytes = pages.format.data_bytes(dim), pages.format.entry_bytes(dim)
    if pages.sectioned:
        section = pages.data[:, : n * entry_bytes]
        return section[:, : n * data_bytes].unflatten(1, (n, -1)), section[:, n * data_bytes :].unflatten(1, (n, entry_bytes - data_bytes))
    entries = pages.data[:, : n * entry_bytes].unflatten(1, (n, -1))
    return entries[..., :data_bytes], entries[..., data_bytes:]


def load_entries(pages: PagedEntries, page: Tensor, entry: Tensor) -> Tensor:
    """float32 [..., dim] of the entries at (page, entry), index tensors of one shape."""
    if pages.sectioned:
        data, scales = page_entries(pages)
        return quant.decode(data[page, entry], scales[page, entry], pages.format)
    entry_bytes, data_bytes = pages.format.entry_bytes(pages.dim), pages.format.data_bytes(pages.dim)
    entries = pages.data[:, : pages.entries_per_page * entry_bytes].unflatten(1, (-1, entry_bytes))[page, entry]
    return quant.decode(entries[..., :data_bytes], entries[..., data_bytes:], pages.format)


def store_rows(values: Tensor, slots: Tensor, data: Tensor, scales: Tensor, fmt: CacheFormat) -> None:
    """Encodes float32 values [T, dim] into views [groups, n, bytes] at flat slots [T] = group*n + entry; slots < 0 are left out."""
    kept = (slots >= scalar(0)).nonzero().view(-1)
    if not kept.shape[0]:
        return
    if kept.shape[0] < slots.shape[0]:
        slots, values = slots[kept], values[kept]
    slots, n = slots.long(), scalar(data.shape[1])
    group, entry = slots // n, slots % n
    data[group, entry], encoded_scales = quant.encode(values, fmt)
    if encoded_scales.shape[-1]:
        scales[group, entry] = encoded_scales


class AttentionOps(LinearOps):
    """Ops of the contract's group "attention and caches"."""

    def _rotated(self, x: Tensor, rope: Rope) -> Tensor:
        return rotate(self._round(x), Angles.of(rope, x.dim()))

    def window_key(self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope) -> Tensor:
        return self._round(self.quantize(self._rotated(self.rms_norm(kv, norm_weight, eps), rope)))

    def store_window(self, key: Tensor, ring: WindowRing, slots: Tensor) -> None:
        data_bytes = ring.format.data_bytes(key.shape[1])
        store_rows(key.float(), slots, ring.data[..., :data_bytes], ring.data[..., data_bytes:], ring.format)

    def compress(self, rows: Tensor, ring: CompressorRing, index: CompressorRows, norm_weight: Tensor, eps: float) -> Tensor:
        slots, length, _, hd = ring.data.shape
        members = index.members.long()  # [T, r]
        kept = slots * length
        slot = members.clamp(0, kept - 1)
        old = ring.data[slot // length, slot % length]  # [T, r, 2, hd]
        new = rows.view(-1, 2, hd)[(members - kept).clamp_min(0)]
        latent, gate = torch.where((members < kept)[..., None, None], old, new).unbind(2)
        pooled = (gate.softmax(1) * latent).sum(1)
        pooled = torch.where(members[:, :1] >= 0, pooled, 0.0)
        result = self.rms_norm(self._round(pooled), norm_weight, eps)
        keep = index.slots >= 0
        slot = index.slots[keep].long()
        ring.data[slot // length, slot % length] = rows.view(-1, 2, hd)[keep]
        return result

    def store_entries(self, latent: Tensor, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        store_rows(self._rotated(latent, rope).float(), slots, *page_entries(pages), pages.format)

    def store_index_keys(self, key: Tensor, norm_weight: Tensor, eps: float, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        values = self._rotated(self.rms_norm(key, norm_weight, eps), rope).float()
        if pages.format is not CacheFormat.FP4_INDEX:  # that format's encoder puts values on the grid; doing it twice may halve the scale
            values = self._index_grid(values)
        store_rows(values, slots, *page_entries(pages), pages.format)

    def _index_grid(self, x: Tensor) -> Tensor:
        return quant.fake_fp4_index(x) if self.numerics is Numerics.RELEASE else x

    def index_query(self, query: Tensor, rope: Rope) -> IndexQuery:
        return self._index_grid(self._rotated(query, rope).float())

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
        scores = self._index_scores(query, head_weights.float(), keys)  # [T, entries]
        entries = torch.arange(scores.shape[1], device=scores.device)
        scores.masked_fill_(entries >= visible[:, None], -torch.inf)
        chosen = None
        if emit is not None:
            chosen = _best_blocks(scores, visible, emit)
        if candidates is not None:
            blocks = -(-scores.shape[1] // block_size)
            allowed = torch.zeros(scores.shape[0], blocks + 1, dtype=torch.bool, device=scores.device)
            allowed.scatter_(1, torch.where(candidates < 0, blocks, candidates).clamp_max(blocks).long(), True)
            scores.masked_fill_(~allowed[:, :blocks].repeat_interleave(block_size, 1)[:, : scores.shape[1]], -torch.inf)
        return Selection(_top_ascending(scores, topk), chosen)

    def _index_scores(self, query: Tensor, head_weights: Tensor, keys: PagedEntries) -> Tensor:
        """float32 [T, whole pages of entries]: sum over heads of weight * relu(q . k). One product of one shape for each sequence."""
        rows, heads, dim = query.shape
        table = keys.block_table.long()
        width = table.shape[1] * keys.entries_per_page
        entry = torch.arange(keys.entries_per_page, device=query.device)
        scores = query.new_empty(rows, width)
        order = keys.sequence.long()
        for s in range(table.shape[0]):
            mine = (order == s).nonzero()[:, 0]
            if not len(mine):
                continue
            key = load_entries(keys, table[s, :, None], entry[None]).flatten(0, 1)  # [entries, dim]
            dots = matmul(query[mine].reshape(-1, dim), key).relu_().view(len(mine), heads, width)
            scores[mine] = (dots * head_weights[mine][..., None]).sum(1)
        return scores

    def sparse_attention(
        self, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope
    ) -> Tensor:
        columns = window.index.shape[1] + (selected.index.shape[1] if selected else 0)
        step = max(1, _GATHER_VALUES // (columns * query.shape[-1]))
        angles = Angles.of(rope, 3)
        q = rotate(query, angles).float()
        parts = []
        for first in range(0, query.shape[0], step):
            rows = slice(first, first + step)
            keys, valid = self._gather_window(window, rows)
            if selected:
                more, also = self._gather_selected(selected, rows)
                keys, valid = torch.cat((keys, more), 1), torch.cat((valid, also), 1)
            parts.append(self._attend(q[rows], keys, valid, sink, scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._round(q)
        return rotate(out, angles, inverse=True)

    def _attend(self, q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
        """q [t, H, hd], keys [t, c, hd], valid [t, c] -> [t, H, hd]. `c` is fixed for a layer, so rows do not influence one another."""
        scores = torch.bmm(q, keys.transpose(1, 2)).mul_(scalar(scale)).masked_fill_(~valid.unsqueeze(1), -torch.inf)
        top = scores.amax(-1, True).clamp_min_(_LOWEST)  # finite even for a row without keys, whose p and result are then 0
        p = scores.sub_(top).exp_()
        total = p.sum(-1, True).add_((sink.unsqueeze(1) - top).exp_())
        return self._round(torch.bmm(self._round(p).float(), keys).div_(total))

    def _gather_window(self, window: WindowKeys, rows: slice) -> tuple[Tensor, Tensor]:
        slots, length, _ = window.ring.data.shape
        index = window.index[rows].long()
        valid = index >= scalar(0)
        current = index - scalar(slots * length)
        history = valid & (current < scalar(0))
        # The row of zeros behind the last is read for -1: for keys that are missing, or that come from the ring.
        keys = torch.cat((window.current.float(), window.current.new_zeros(1, window.current.shape[1], dtype=torch.float32)))
        keys = keys[current.clamp_min_(-1)]
        if history.any():
            slot = index.clamp(0, slots * length - 1)
            entries = window.ring.data[slot // scalar(length), slot % scalar(length)]
            data_bytes = window.ring.format.data_bytes(window.current.shape[1])
            old = quant.decode(entries[..., :data_bytes], entries[..., data_bytes:], window.ring.format)
            keys = torch.where(history.unsqueeze(-1), old, keys)
        return keys, valid

    def _gather_selected(self, selected: SelectedEntries, rows: slice) -> tuple[Tensor, Tensor]:
        pages = selected.pages
        n = scalar(pages.entries_per_page)
        index = selected.index[rows].long()
        valid = index >= scalar(0)
        entry = index.clamp_min(0)
        page = pages.block_table[pages.sequence[rows].unsqueeze(1), entry // n]
        keys = load_entries(pages, page, entry % n)
        return keys.masked_fill_(~valid.unsqueeze(-1), 0.0), valid

    def attention_output(self, out: Tensor, wo_a: Weight, wo_b: Weight, groups: int) -> Tensor:
        rows = out.shape[0]
        if not rows:
            return self._round(out.new_empty(0, wo_b.rows))
        padded = pad_rows(out.float().flatten(1))
        grouped = padded.view(padded.shape[0], groups, -1).transpose(0, 1)  # [g, T, H*hd/g]
        weight = wo_a.decoded().unflatten(0, (groups, -1)).transpose(1, 2)  # [g, H*hd/g, o]
        z = self._round(torch.bmm(grouped, weight).transpose(0, 1)[:rows]).flatten(1)
        return self.quantized_linear(self.quantize(z), wo_b)


def _top_ascending(scores: Tensor, k: int) -> Tensor:
    """int32 [T, k]: the k highest finite scores of each row, lower index first among equals, in ascending order, -1 padded."""
    width = min(k, scores.shape[1])
    values, index = scores.sort(dim=1, descending=True, stable=True)
    kept = torch.where(values[:, :width] == -torch.inf, scores.shape[1], index[:, :width]).sort(dim=1).values
    kept = torch.where(kept == scores.shape[1], -1, kept)
    return torch.nn.functional.pad(kept, (0, k - width), value=-1).int()


def _best_blocks(scores: Tensor, visible: Tensor, spec: CandidateSpec) -> Tensor:
    """int32 [T, spec.blocks]: candidate blocks of each row by their highest score; the row's last visible block is always in."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % spec.block_size), value=-torch.inf)
    best = padded.unflatten(1, (-1, spec.block_size)).amax(-1)
    last = (visible.long() - 1).clamp_min(0) // spec.block_size
    pinned = (torch.arange(best.shape[1], device=best.device) == last[:, None]) & (visible > 0)[:, None]
    return _top_ascending(best.masked_fill_(pinned, torch.inf), spec.blocks)
