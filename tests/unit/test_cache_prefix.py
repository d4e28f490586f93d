"""Which prefixes are reused, from where a request then computes, and what is evicted first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.cache import Hit, PagePool, PrefixIndex, Reuse, choose_hit

RELEASE = Reuse(page_tokens=128, window=128, keep_tokens=0, replay=True)


def indexed(tokens: list[int], pages: int = 10, page: int = 2, **options) -> tuple[PrefixIndex, PagePool, list[bytes], list[int]]:
    """An index that knows all complete pages of `tokens`, owned by one sequence."""
    pool = PagePool(pages)
    index = PrefixIndex(pool, page, **options)
    ids, hashes = np.array(tokens, np.int32), []
    index.extend(hashes, ids)
    owned = pool.allocate(len(hashes))
    for i, key in enumerate(hashes):
        index.register(key, owned[i], ids[i * page : (i + 1) * page])
    return index, pool, hashes, owned


def test_a_chain_is_matched_up_to_its_first_unknown_page():
    index, _, _, owned = indexed([1, 2, 3, 4, 5, 6])
    ids = np.array([1, 2, 3, 4, 9, 9], np.int32)
    other: list[bytes] = []
    index.extend(other, ids)
    assert index.match(other, ids) == owned[:2]


def test_hashes_depend_on_position_salt_identity_and_images():
    pool = PagePool(3)
    keys = set()
    for identity, salt, digest in ((b"", b"", b""), (b"model", b"", b""), (b"", b"tenant", b""), (b"", b"", b"image")):
        hashes: list[bytes] = []
        PrefixIndex(pool, 2, identity).extend(hashes, np.array([7, 7, 7, 7], np.int32), salt, [(1, 3)], [digest])
        keys.update(hashes)
    assert len(keys) == 8


def test_an_image_counts_in_every_page_it_touches_and_no_other():
    index = PrefixIndex(PagePool(3), 2)
    plain: list[bytes] = []
    index.extend(plain, np.zeros(8, np.int32))
    image: list[bytes] = []
    index.extend(image, np.zeros(8, np.int32), b"", [(2, 5)], [b"x"])
    assert plain[0] == image[0]
    assert plain[1] != image[1]


def test_a_hit_is_verified_against_the_ids():
    index, _, hashes, owned = indexed([1, 2, 3, 4])
    assert index.match(hashes, np.array([1, 2, 3, 5], np.int32)) == owned[:1]


def test_eviction_takes_the_tail_of_the_chain_and_its_snapshot():
    index, pool, hashes, owned = indexed([1, 2, 3, 4, 5, 6], pages=4, snapshot_slots=[7])
    slot = index.reserve_snapshot()
    index.add_snapshot(hashes[2], slot)
    assert index.snapshot_positions(hashes) == [6]
    pool.release(reversed(owned))
    pool.allocate(1)
    assert [index.has(key) for key in hashes] == [True, True, False]
    assert (index.num_snapshots, index.reserve_snapshot()) == (0, 7)


def test_a_second_page_with_known_content_is_not_indexed():
    index, pool, hashes, owned = indexed([1, 2])
    (again,) = pool.allocate(1)
    assert index.register(hashes[0], again, np.array([1, 2], np.int32)) == owned[0]
    pool.release([again])
    assert (len(index), pool.num_retained) == (1, 1)


def test_snapshots_are_few_and_the_least_recently_used_gives_way():
    index, _, hashes, _ = indexed([1, 2, 3, 4, 5, 6], snapshot_slots=[7, 8])
    for key in hashes[:2]:
        index.add_snapshot(key, index.reserve_snapshot())
    first = index.use_snapshot(hashes[0])
    index.add_snapshot(hashes[2], index.reserve_snapshot())
    assert index.snapshot_positions(hashes) == [2, 6]
    assert index.use_snapshot(hashes[0]) == first
    assert index.has_snapshot(hashes[2])


def test_a_snapshot_of_an_unknown_chain_is_dropped():
    index, _, _, _ = indexed([1, 2], snapshot_slots=[7])
    index.add_snapshot(b"unknown", index.reserve_snapshot())
    assert (index.num_snapshots, index.reserve_snapshot()) == (0, 7)


def test_clear_forgets_everything():
    index, pool, hashes, owned = indexed([1, 2, 3, 4], snapshot_slots=[7])
    index.add_snapshot(hashes[0], index.reserve_snapshot())
    pool.release(reversed(owned))
    index.clear()
    assert (len(index), index.num_snapshots, pool.num_retained, index.reserve_snapshot()) == (0, 0, 0, 7)


@pytest.mark.parametrize(
    ("found", "prompt", "keep", "snapshots", "want"),
    [
        (1024, 2000, 0, [], Hit(1024, 896, False)),
        (1024, 2000, 0, [1024], Hit(1024, 1024, True)),
        (1024, 1024, 0, [1024], Hit(896, 768, False)),  # at least one token is computed, and no snapshot is left below
        (1024, 1024, 0, [896], Hit(896, 896, True)),
        (128, 2000, 0, [], Hit(0, 0, False)),  # a replay of the whole hit gains nothing
        (128, 2000, 0, [128], Hit(128, 128, True)),
        (1024, 1100, 140, [1024, 896], Hit(896, 896, True)),  # the last 140 tokens are computed anyway
        (1024, 1100, 140, [], Hit(1024, 896, False)),  # a replay starts early enough for them
        (1024, 1100, 300, [], Hit(896, 768, False)),
        (100_000, 100_100, 0, [1024], Hit(99_968, 99_840, False)),  # an early snapshot does not beat a long replayed hit
        (0, 500, 0, [], Hit(0, 0, False)),
        (1024, 100, 140, [], Hit(0, 0, False)),
    ],
)
def test_where_computation_starts(found, prompt, keep, snapshots, want):
    assert choose_hit(found // 128 * 128, prompt, RELEASE._replace(keep_tokens=keep), snapshots) == want


def test_exact_mode_uses_snapshots_only():
    exact = RELEASE._replace(replay=False)
    assert choose_hit(1024, 2000, exact) == Hit(0, 0, False)
    assert choose_hit(1024, 2000, exact, [512]) == Hit(512, 512, True)


def test_a_hit_never_ends_and_never_starts_inside_an_image():
    assert choose_hit(1024, 2000, RELEASE, spans=[(1000, 1030)]) == Hit(896, 768, False)
    assert choose_hit(1024, 2000, RELEASE, spans=[(890, 900)]) == Hit(768, 640, False)
    assert choose_hit(1024, 2000, RELEASE, [1024, 512], spans=[(1000, 1030), (700, 1020)]) == Hit(512, 512, True)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 300), st.sampled_from([0, 5, 17]), st.booleans(), st.sets(st.integers(0, 40)), st.integers(1, 12))
def test_rules_of_a_hit_hold_for_any_sizes(pages, prompt, keep, replay, snapshots, window):
    reuse = Reuse(page_tokens=8, window=window, keep_tokens=keep, replay=replay)
    hit = choose_hit(pages * 8, prompt, reuse, [8 * s for s in sorted(snapshots)])
    assert hit.length % 8 == 0
    assert 0 <= hit.start <= hit.length <= pages * 8
    assert hit.start <= prompt - 1
    assert hit.start <= max(0, prompt - keep)
    assert hit.length <= prompt - 1
    assert hit.start == (hit.length if hit.snapshot or not hit.length else hit.length - window)
    if hit.snapshot:
        assert hit.length // 8 in snapshots
