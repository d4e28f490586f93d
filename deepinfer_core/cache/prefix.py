"""Which pages and windows of earlier requests can be reused.

Pages form chains: the hash of page i covers its token ids and the hash of page i-1, and the root covers everything else that makes
content comparable (model, formats, page size, tenant salt). A page enters the index when it is complete and its step was committed;
it stays after its requests ended, until the pool needs it. A chain loses its last page first, because requests reference whole chains
and release them from the end.

Source: model notes, cache section 2.7.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepinfer_core.cache.pages import PagePool


class Hit(NamedTuple):
    """What a request can reuse."""

    length: int  # H: tokens whose pages are reused, a multiple of the page size
    start: int  # first position to compute; rows below `length` rebuild windows and write no pages
    snapshot: bool  # windows come from a snapshot at `length`; False: by replay from `start` (or there is nothing to reuse)


NO_HIT = Hit(0, 0, False)


class Reuse(NamedTuple):
    """Sizes that decide where computation starts after a hit."""

    page_tokens: int
    window: int  # W: rows that a replay recomputes
    keep_tokens: int  # last prompt tokens that must be recomputed (decoder-side replay); 0: none
    replay: bool  # False: only hits with a snapshot are used


def choose_hit(found: int, prompt_len: int, reuse: Reuse, snapshots: Sequence[int] = (), spans: Sequence[tuple[int, int]] = ()) -> Hit:
    """The hit that leaves least to compute, given `found` reusable tokens and the positions at which window snapshots exist.

    At least one token is computed, and at least `keep_tokens`. A hit never ends, and a replay never starts, inside one of `spans`.
    Among equals a snapshot is preferred: it is exact.
    """

    def splits(position: int) -> bool:
        return any(begin < position < end for begin, end in spans)

    page = reuse.page_tokens
    most = min(found, prompt_len - 1, prompt_len - reuse.keep_tokens)
    exact = max((h for h in snapshots if 0 < h <= most and h % page == 0 and not splits(h)), default=0)
    replayed = min(found, prompt_len - 1, prompt_len - reuse.keep_tokens + reuse.window) // page * page if reuse.replay else 0
    while replayed > reuse.window and (splits(replayed) or splits(replayed - reuse.window)):
        replayed -= page
    start = replayed - reuse.window
    if exact and exact >= start:
        return Hit(exact, exact, True)
    return Hit(replayed, start, False) if start > 0 else NO_HIT


@dataclass(frozen=True)
class _Entry:
    page: int
    tokens: bytes  # int32 ids of the page: a hit is verified, not only looked up
    exact: bool  # False: computed from windows that a replay rebuilt approximately


class PrefixIndex:
    """Maps chain hashes to pages of one pool, and to window snapshots. `identity` names model revision, formats and engine version.

    Not thread safe. Mutates the pool: indexed pages are retained there.
    """

    def __init__(self, pool: PagePool, page_tokens: int, identity: bytes = b"", snapshot_slots: Sequence[int] = ()) -> None:
        self._pool, self._page_tokens, self._identity = pool, page_tokens, identity
        self._entries: dict[bytes, _Entry] = {}
        self._hash_of: dict[int, bytes] = {}
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._inexact_snapshots: set[bytes] = set()
        self._free_slots = list(snapshot_slots)
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_snapshots(self) -> int:
        """Window snapshots that can be used."""
        return len(self._snapshots)

    def extend(
        self,
        hashes: list[bytes],
        tokens: np.ndarray,
        salt: bytes = b"",
        spans: Sequence[tuple[int, int]] = (),
        digests: Sequence[bytes] = (),
    ) -> None:
        """Appends to `hashes` the hashes of the complete pages of `tokens` (int32, all ids from position 0) that it lacks."""
        page = self._page_tokens
        for i in range(len(hashes), len(tokens) // page):
            self.append(hashes, tokens[i * page : (i + 1) * page], salt, spans, digests)

    def append(self, hashes: list[bytes], ids: np.ndarray, salt: bytes, spans: Sequence[tuple[int, int]], digests: Sequence[bytes]) -> None:
        """Appends the hash of the page with int32 `ids` that follows the pages of `hashes`. `digests` identify `spans` of positions."""
        begin = len(hashes) * self._page_tokens
        end = begin + self._page_tokens
        inside = b"".join(digest for (b, e), digest in zip(spans, digests, strict=True) if b < end and e > begin)
        parent = hashes[-1] if hashes else self.root(salt)
        hashes.append(hashlib.sha256(parent + ids.astype("<i4", copy=False).tobytes() + inside).digest())

    def root(self, salt: bytes) -> bytes:
        """Hash before the first page of a chain."""
        head = self._page_tokens.to_bytes(4, "little") + len(salt).to_bytes(4, "little") + salt + self._identity
        return hashlib.sha256(head).digest()

    def match(self, hashes: Sequence[bytes], tokens: np.ndarray) -> list[int]:
        """Pages of the longest known chain along `hashes`; each page's ids are compared with `tokens`."""
        page, pages = self._page_tokens, []
        for i, key in enumerate(hashes):
            entry = self._entries.get(key)
            if entry is None or entry.tokens != tokens[i * page : (i + 1) * page].tobytes():
                break
            pages.append(entry.page)
        return pages

    def register(self, key: bytes, page: int, ids: np.ndarray, exact: bool = True) -> int:
        """Makes a complete, committed page known and returns the page that the index holds for `key`.

        If that is another page with the same content, the caller keeps its own and must hold a reference of the returned one as long
        as it registers pages behind it, so that a chain never loses its middle.
        """
        entry = self._entries.get(key)
        if entry is not None:
            return entry.page
        self._entries[key] = _Entry(page, ids.astype(np.int32, copy=False).tobytes(), exact)
        self._hash_of[page] = key
        self._pool.retain(page)
        return page

    def is_exact(self, hashes: Sequence[bytes], snapshot: bool) -> bool:
        """True if the pages of `hashes`, and with `snapshot` the windows behind the last of them, are what a cold run computes."""
        pages = all(self._entries[key].exact for key in hashes)
        return pages and not (snapshot and hashes[-1] in self._inexact_snapshots)

    def has(self, key: bytes) -> bool:
        """True if the page of `key` is indexed."""
        return key in self._entries

    def clear(self) -> None:
        """Forgets all pages and snapshots."""
        for page in list(self._hash_of):
            self._pool.forget(page)
        self._entries.clear()
        self._hash_of.clear()
        self._free_slots += self._snapshots.values()
        self._snapshots.clear()
        self._inexact_snapshots.clear()

    def snapshot_positions(self, hashes: Sequence[bytes]) -> list[int]:
        """Positions along the chain at which a window snapshot exists, ascending."""
        return [(i + 1) * self._page_tokens for i, key in enumerate(hashes) if key in self._snapshots] if self._snapshots else []

    def use_snapshot(self, key: bytes) -> int:
        """The state slot that holds the snapshot of `key`; counts as a use."""
        self._snapshots.move_to_end(key)
        return self._snapshots[key]

    def has_snapshot(self, key: bytes) -> bool:
        """True if a usable snapshot of `key` exists."""
        return key in self._snapshots

    def reserve_snapshot(self) -> int | None:
        """A state slot to copy windows into; the least recently used snapshot gives way. None if snapshots are off or all in the making."""
        if self._free_slots:
            return self._free_slots.pop()
        if not self._snapshots:
            return None
        key, slot = self._snapshots.popitem(last=False)
        self._inexact_snapshots.discard(key)
        return slot

    def add_snapshot(self, key: bytes, slot: int, exact: bool = True) -> None:
        """The copy into reserved `slot` is committed. It is dropped if its chain left the index or a snapshot of it exists."""
        if key in self._entries and key not in self._snapshots:
            self._snapshots[key] = slot
            if not exact:
                self._inexact_snapshots.add(key)
        else:
            self._free_slots.append(slot)

    def _evicted(self, page: int) -> None:
        key = self._hash_of.pop(page)
        del self._entries[key]
        self._inexact_snapshots.discard(key)
        slot = self._snapshots.pop(key, None)
        if slot is not None:
            self._free_slots.append(slot)
