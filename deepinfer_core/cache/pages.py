"""Who owns which page and which state slot. Pure accounting: no memory is touched here.

Pages are reference counted: a page shared by a cached prefix has one reference per request that uses it. A page without references
is free, or idle if the prefix index retains its content; idle pages are handed out again only when no free page is left, the longest
idle first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable


class CacheAccountingError(AssertionError):
    """The engine broke an invariant of page or slot accounting: a double release, or a use of something not owned."""


class PagePool:
    """Pages 1 .. total-1. Page 0 is never handed out: it is the target of padding."""

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ValueError(f"page pool: {total} pages; at least 2 are needed (page 0 is reserved). Give the cache more memory")
        self.total = total
        self._free = deque(range(1, total))  # FIFO: what was freed last keeps its content longest
        self._idle: OrderedDict[int, None] = OrderedDict()  # retained pages without references, longest idle first
        self._refs = [0] * total
        self._retained: set[int] = set()
        self.on_evict: Callable[[int], None] | None = None  # called with a retained page just before it is handed out anew

    @property
    def usable(self) -> int:
        """Pages that requests can own at most."""
        return self.total - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages with at least one reference."""
        return self.usable - self.available

    @property
    def num_retained(self) -> int:
        """Pages whose content the prefix index keeps, referenced or idle."""
        return len(self._retained)

    def references(self, page: int) -> int:
        """References of `page`."""
        return self._refs[page]

    def can_allocate(self, count: int, sharing: Iterable[int] = ()) -> bool:
        """True if `count` new pages are there besides the pages in `sharing`, which the caller is about to share."""
        return count <= self.available - sum(1 for page in sharing if page in self._idle)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one reference. Raises CacheAccountingError if `can_allocate(count)` is false."""
        if count > self.available:
            raise CacheAccountingError(f"page pool: {count} pages wanted, {self.available} of {self.usable} available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._idle.popitem(last=False)
                if self.on_evict is not None:
                    self.on_evict(page)
                self._retained.discard(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page, which must be referenced or idle."""
        for page in pages:
            if self._refs[page] == 0:
                if page not in self._idle:
                    raise CacheAccountingError(f"page pool: page {page} is free and cannot be shared")
                del self._idle[page]
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page. Give a sequence's pages last page first, so that chains are evicted from their tail."""
        for page in pages:
            if self._refs[page] <= 0:
                raise CacheAccountingError(f"page pool: page {page} is released but has no reference")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._retained:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def retain(self, page: int) -> None:
        """Keeps the content of `page` after its last reference is gone, until the page is needed. The page must be referenced."""
        if self._refs[page] <= 0:
            raise CacheAccountingError(f"page pool: page {page} has no owner and cannot be retained")
        self._retained.add(page)

    def forget(self, page: int) -> None:
        """Ends `retain`; an idle page becomes free."""
        self._retained.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)


class SlotPool:
    """State slots 1 .. total-1. Slot 0 belongs to placeholder rows. Slots are not cleared on reuse: visibility comes from positions."""

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ValueError(f"slot pool: {total} slots; at least 2 are needed (slot 0 is reserved)")
        self.total = total
        self._free = deque(range(1, total))
        self._taken = [False] * total

    @property
    def available(self) -> int:
        """Slots that `allocate` can hand out."""
        return len(self._free)

    def can_allocate(self) -> bool:
        """True if a slot is left."""
        return bool(self._free)

    def allocate(self) -> int:
        """Takes a slot. Raises CacheAccountingError if none is left."""
        if not self._free:
            raise CacheAccountingError(f"slot pool: all {self.total - 1} slots are taken")
        slot = self._free.popleft()
        self._taken[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Gives `slot` back."""
        if not self._taken[slot]:
            raise CacheAccountingError(f"slot pool: slot {slot} is released but not taken")
        self._taken[slot] = False
        self._free.append(slot)
