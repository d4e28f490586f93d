"""Cache buffers of cases: what lies where, and the comparison of a buffer after a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import PagedEntries, WindowRing
from deepinfer_core.conformance import grids
from deepinfer_core.conformance.analysis import Approx, Arithmetic
from deepinfer_core.conformance.expect import Judged, Verdict, failed, worst
from deepinfer_core.conformance.generate import Draw

OPS: tuple[Any, ...] = ()
NOTHING = 0xFF
"""Byte of memory that no op may read: NaN in every scale and float format."""

Views = Callable[[Tensor], tuple[Tensor, Tensor]]


def window_ring(slots: int, length: int, dim: int, fmt: CacheFormat) -> WindowRing:
    """An unwritten ring: every byte is NOTHING; slots lie 64 bytes apart."""
    size = length * fmt.entry_bytes(dim)
    whole = torch.full((slots, size + 64), NOTHING, dtype=torch.uint8)
    return WindowRing(whole[:, :size].unflatten(1, (length, -1)), fmt)


def paged(pages: int, n: int, dim: int, fmt: CacheFormat, sectioned: bool, table: Tensor, sequence: Tensor) -> PagedEntries:
    """Unwritten pages: every byte is NOTHING; sections start inside wider pages whose stride is a multiple of 128."""
    section = n * fmt.entry_bytes(dim)
    stride = -(-(section + 32) // 128) * 128
    whole = torch.full((pages, stride), NOTHING, dtype=torch.uint8)
    return PagedEntries(whole[:, 32 : 32 + section], fmt, dim, n, sectioned, table.int(), sequence.int())


def ring_views(fmt: CacheFormat, dim: int) -> Views:
    """Splits ring.data [slots, R, bytes] into data and scales."""
    size = fmt.data_bytes(dim)
    return lambda data: (data[..., :size], data[..., size:])


def page_views(pages: PagedEntries) -> Views:
    """Splits pages.data [pages, section] into data [pages, n, bytes] and scales."""
    n, size, whole = pages.entries_per_page, pages.format.data_bytes(pages.dim), pages.format.entry_bytes(pages.dim)

    def split(data: Tensor) -> tuple[Tensor, Tensor]:
        if pages.sectioned:
            return data[:, : n * size].unflatten(1, (n, -1)), data[:, n * size : n * whole].unflatten(1, (n, whole - size))
        entries = data[:, : n * whole].unflatten(1, (n, -1))
        return entries[..., :size], entries[..., size:]

    return split


def write(buffer: Tensor, views: Views, groups: Tensor, entries: Tensor, encoded: tuple[Tensor, Tensor]) -> None:
    """Puts encoded entries at (group, entry) of a buffer."""
    data, scales = views(buffer)
    data[groups, entries] = encoded[0]
    if encoded[1].shape[-1]:
        scales[groups, entries] = encoded[1]


def read(buffer: Tensor, views: Views, fmt: CacheFormat, groups: Tensor, entries: Tensor) -> Tensor:
    """float64 values of the entries at (group, entry)."""
    data, scales = views(buffer)
    return grids.decode(data[groups, entries], scales[groups, entries], fmt)


def filled_pages(draw: Draw, pages: PagedEntries, counts: list[int], scale: float = 1.0) -> Tensor:
    """Writes counts[s] random entries of each sequence; returns float64 [S, longest, dim] of what was written (NaN where nothing)."""
    longest = max([*counts, 1])
    values = torch.full((len(counts), longest, pages.dim), torch.nan, dtype=torch.float64)
    for s, count in enumerate(counts):
        j = torch.arange(count)
        group = pages.block_table[s, j // pages.entries_per_page].long()
        write(pages.data, page_views(pages), group, j % pages.entries_per_page, draw.encoded(count, pages.dim, pages.format, scale))
        values[s, :count] = read(pages.data, page_views(pages), pages.format, group, j % pages.entries_per_page)
    return values


def block_table(draw: Draw, counts: list[int], n: int) -> tuple[Tensor, int]:
    """(int32 [S, P] of shuffled pages, number of pages): room for counts[s] entries each; unused places name page 0, which is nobody's."""
    needed = [max(-(-count // n), 1) for count in counts]
    order = 1 + draw.permutation(sum(needed))
    table = torch.zeros(len(counts), max([*needed, 1]), dtype=torch.int32)
    first = 0
    for s, pages in enumerate(needed):
        table[s, :pages] = order[first : first + pages].int()
        first += pages
    return table, 1 + sum(needed)


def stored(a: Arithmetic, before: Tensor, views: Views, fmt: CacheFormat, slots: Tensor, value: Approx) -> Judged:
    """The buffer after a store of `value` [T, dim] at flat `slots` [T]: right entries, right scales, nothing else touched."""
    keep = slots >= 0
    per_group = views(before)[0].shape[1]
    group, entry = slots[keep].long() // per_group, slots[keep].long() % per_group
    kept, want = value[keep], a.stored(value[keep], fmt)

    def judge(got: Tensor) -> Verdict:
        if got.shape != before.shape or got.dtype != torch.uint8:
            return failed("the cache buffer changed its form", list(before.shape), list(got.shape))
        written = torch.zeros(before.shape, dtype=torch.bool)
        for part in views(written):
            part[group, entry] = True
        touched = ((got != before) & ~written).nonzero()
        if len(touched):
            at = tuple(touched[0].tolist())
            return failed(f"{len(touched)} bytes outside the stored entries changed, first", hex(int(before[at])), hex(int(got[at])), at)
        verdict = worst(read(got, views, fmt, group, entry), want)
        if not verdict.passed or fmt not in grids.BLOCK or not len(group):
            return verdict
        return _scales(views(got)[1][group, entry], kept, fmt) or verdict

    return Judged(judge)


def _scales(got: Tensor, value: Approx, fmt: CacheFormat) -> Verdict | None:
    """Scale bytes must be those of the rule where no error of the value can change them."""
    expected = grids.encode(value.value, fmt)[1]
    certain = (grids.encode(value.low, fmt)[1] == expected) & (grids.encode(value.high, fmt)[1] == expected)
    wrong = ((got != expected) & certain).nonzero()
    if not len(wrong):
        return None
    at = tuple(wrong[0].tolist())
    return failed(f"{len(wrong)} scale bytes differ (the values are right), first", hex(int(expected[at])), hex(int(got[at])), at)
