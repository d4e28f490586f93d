"""Cache buffers as tables of rows that CANN can index: loads and stores by slot, without reading anything back to the host.

A cache is groups (state slots, pages) of entries; the stride between groups is arbitrary. CANN's scatter wants one table with equal
rows, so the buffer is seen as rows of the largest unit that divides both the entry and the group stride.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_core.backend.types import PagedEntries


@dataclass(frozen=True)
class RowTable:
    """Entries of `width` items, `entries` in a group, as rows of `table` [N, unit]."""

    table: Tensor  # int8 (bytes) or float32
    entries: int
    group_rows: int  # rows from one group to the next
    entry_rows: int  # rows of one entry

    @classmethod
    def of(cls, data: Tensor, offset: int, entries: int, width: int) -> RowTable:
        """The entries that start at item `offset` of each group of `data` [groups, ...] (dim 0 of any stride, the rest contiguous)."""
        groups, stride = data.shape[0], data.stride(0)
        unit = math.gcd(width, stride) if groups > 1 else width
        items = (groups - 1) * stride + entries * width
        base = data.view(torch.int8) if data.dtype is torch.uint8 else data  # CANN scatters int8, not uint8
        table = base.as_strided((items // unit, unit), (unit, 1), base.storage_offset() + offset)
        return cls(table, entries, stride // unit if groups > 1 else 0, width // unit)

    def load(self, slots: Tensor) -> Tensor:
        """Entries [..., width] at flat slots (group * entries + entry), int64, all >= 0. Bytes come as uint8."""
        rows = self.table[self._rows(slots)].flatten(-2)
        return rows.view(torch.uint8) if rows.dtype is torch.int8 else rows

    def store(self, slots: Tensor, values: Tensor) -> None:
        """Writes values [T, width] at flat slots [T] (int32 or int64); a slot of -1 writes nothing.

        Shapes must not depend on data, so a row that stores nothing repeats a row that does: the same bytes, to the same place. If no
        row stores anything, all of them write back what entry 0 holds.
        """
        if not slots.shape[0]:
            return
        keep = slots >= 0
        source = torch.where(keep, torch.arange(slots.shape[0], device=slots.device), keep.int().argmax())
        slots = slots.long()[source].clamp_min(0)
        values = torch.where(keep.any(), values[source], self.load(slots))
        values = values.view(torch.int8) if values.dtype is torch.uint8 else values
        calls.scatter_rows(self.table, self._rows(slots).flatten(), values.reshape(-1, self.table.shape[1]))

    def _rows(self, slots: Tensor) -> Tensor:
        first = slots // self.entries * self.group_rows + slots % self.entries * self.entry_rows
        return first[..., None] + torch.arange(self.entry_rows, device=slots.device)


def page_tables(pages: PagedEntries) -> tuple[RowTable, RowTable]:
    """Tables of the data and of the scales of the entries of `pages`."""
    n = pages.entries_per_page
    data, scale = pages.format.data_bytes(pages.dim), pages.format.scale_bytes(pages.dim)
    if not pages.sectioned:
        raise ValueError("page_tables: entries of unsectioned pages carry their scales; use page_table")
    return RowTable.of(pages.data, 0, n, data), RowTable.of(pages.data, n * data, n, scale)


def page_table(pages: PagedEntries) -> RowTable:
    """Table of whole entries (data, then scales) of unsectioned `pages`."""
    return RowTable.of(pages.data, 0, pages.entries_per_page, pages.format.entry_bytes(pages.dim))


def page_slots(pages: PagedEntries, sequence: Tensor, entry: Tensor) -> Tensor:
    """Flat slots, int64 [rows, c], of entries [rows, c] (int64, >= 0) of each row's sequence [rows]."""
    n = pages.entries_per_page
    page = pages.block_table.long()[sequence.long()[:, None], entry // n]
    return page * n + entry % n
