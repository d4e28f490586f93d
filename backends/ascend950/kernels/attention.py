"""Sparse attention over a gathered buffer of decoded keys, and the grouped output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.ascend950.kernels.caches import ring_table, rotate
from deepinfer_backends.ascend950.kernels.formats import decode
from deepinfer_backends.ascend950.kernels.linears import LinearOps
from deepinfer_backends.ascend950.kernels.rows import page_slots, page_table
from deepinfer_core.backend.types import Rope, SelectedEntries, Weight, WindowKeys

_KEY_VALUES = 1 << 27
"""bf16 values of the key buffer of one operator call (256 MiB): bounds the memory of a long prefill chunk."""


class AttentionOps(LinearOps):
    """Ops of the contract's group "attention and caches" that read keys. No CANN operator reads this model's cache entries, so they
    are decoded to bf16 first, which is exact."""

    def sparse_attention(
        self, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope
    ) -> Tensor:
        if not len(query):
            return query
        q = rotate(query, rope)
        columns = window.index.shape[1] + (selected.index.shape[1] if selected else 0)
        step = max(1, _KEY_VALUES // (columns * query.shape[-1]))
        parts = []
        for first in range(0, len(query), step):
            rows = slice(first, first + step)
            keys, valid = _window_keys(window, rows)
            if selected:
                more, also = _selected_keys(selected, rows)
                keys, valid = torch.cat((keys, more), 1), torch.cat((valid, also), 1)
            parts.append(_attend(q[rows], keys, valid, sink, scale))
        return rotate(torch.cat(parts), rope, inverse=True)

    def attention_output(self, out: Tensor, wo_a: Weight, wo_b: Weight, groups: int) -> Tensor:
        width = out.shape[1] * out.shape[2] // groups
        z = calls.linear_grouped(out.reshape(len(out), groups, width).contiguous(), wo_a.by_group(groups))
        return self.quantized_linear(self.quantize(z.flatten(1)), wo_b)


def _attend(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    columns = keys.shape[1]
    column = torch.arange(columns, dtype=torch.int32, device=keys.device)
    # The operator wants valid indices first; column numbers are distinct, so sorting them needs no stability.
    index = torch.where(valid, column, columns).sort(dim=1).values
    index = torch.where(index == columns, -1, index).int()
    some = valid.any(1)
    index[:, 0] = torch.where(some, index[:, 0], 0)  # a row without keys is undefined: give it one and drop the result
    out = calls.sparse_attention(query, keys, index, sink, scale)
    return torch.where(some[:, None, None], out, 0.0)


def _window_keys(window: WindowKeys, rows: slice) -> tuple[Tensor, Tensor]:
    """(keys [t, columns, hd] bf16, valid [t, columns])."""
    index, ring = window.index[rows].long(), window.ring
    past = ring.data.shape[0] * ring.data.shape[1]
    entries = ring_table(ring).load(index.clamp(0, past - 1))
    data_bytes = ring.format.data_bytes(window.current.shape[1])
    keys = decode(entries[..., :data_bytes], entries[..., data_bytes:], ring.format)
    if len(window.current):
        keys = torch.where((index < past)[..., None], keys, window.current[(index - past).clamp_min(0)])
    return keys, index >= 0


def _selected_keys(selected: SelectedEntries, rows: slice) -> tuple[Tensor, Tensor]:
    """(keys [t, topk, hd] bf16, valid [t, topk])."""
    pages, index = selected.pages, selected.index[rows].long()
    entries = page_table(pages).load(page_slots(pages, pages.sequence[rows], index.clamp_min(0)))
    data_bytes = pages.format.data_bytes(pages.dim)
    return decode(entries[..., :data_bytes], entries[..., data_bytes:], pages.format), index >= 0
