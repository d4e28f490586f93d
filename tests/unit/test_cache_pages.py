"""Accounting of pages and slots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.cache import CacheAccountingError, PagePool, SlotPool


def test_pages_are_handed_out_first_freed_first():
    pool = PagePool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert not pool.can_allocate(1)
    pool.release([3, 1])
    assert pool.allocate(2) == [3, 1]


def test_a_shared_page_is_free_after_its_last_reference():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert (pool.references(page), pool.used) == (1, 1)
    pool.release([page])
    assert (pool.used, pool.available) == (0, 2)


def test_retained_pages_are_evicted_last_and_longest_idle_first():
    pool = PagePool(5)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pages = pool.allocate(3)
    for page in pages:
        pool.retain(page)
    pool.release(reversed(pages))
    assert pool.available == 4
    assert pool.allocate(1) == [4]  # the free page first
    assert not evicted
    assert pool.allocate(1) == [3]  # then the tail of the chain
    assert evicted == [3]
    pool.share([2])
    assert pool.can_allocate(1)
    assert not pool.can_allocate(1, sharing=[1])
    assert pool.num_retained == 2


def test_a_forgotten_page_becomes_free():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.retain(page)
    pool.release([page])
    pool.forget(page)
    assert (pool.num_retained, pool.available) == (0, 2)


def test_broken_accounting_is_loud():
    pool = PagePool(3)
    with pytest.raises(CacheAccountingError, match="page 1 is released but has no reference"):
        pool.release([1])
    with pytest.raises(CacheAccountingError, match="page 1 is free and cannot be shared"):
        pool.share([1])
    with pytest.raises(CacheAccountingError, match="page 1 has no owner"):
        pool.retain(1)
    with pytest.raises(CacheAccountingError, match="3 pages wanted, 2 of 2 available"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="1 pages; at least 2"):
        PagePool(1)


def test_slots():
    pool = SlotPool(3)
    assert [pool.allocate(), pool.allocate()] == [1, 2]
    assert not pool.can_allocate()
    with pytest.raises(CacheAccountingError, match="all 2 slots are taken"):
        pool.allocate()
    pool.release(1)
    with pytest.raises(CacheAccountingError, match="slot 1 is released but not taken"):
        pool.release(1)
    assert pool.available == 1
    with pytest.raises(ValueError, match="at least 2"):
        SlotPool(1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ahsrkf"), st.integers(0, 7)), max_size=60))
def test_random_use_never_loses_a_page(ops):
    pool = PagePool(7)
    owned: list[int] = []
    for op, value in ops:
        if op == "a" and pool.can_allocate(value):
            owned += pool.allocate(value)
        elif op == "h" and owned:
            pool.share([owned[value % len(owned)]])
            owned.append(owned[value % len(owned)])
        elif op == "r" and owned:
            pool.release([owned.pop(value % len(owned))])
        elif op == "k" and owned:
            pool.retain(owned[value % len(owned)])
        elif op == "f":
            pool.forget(1 + value % 6)
        assert pool.used == len(set(owned))
        assert pool.used + pool.available == pool.usable
        assert all(pool.references(page) == owned.count(page) for page in range(1, 7))
