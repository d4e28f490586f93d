"""The model graph on the reference backend gives the same bits however a sequence is cut, batched or placed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer_core
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.conformance.solo import SoloModel

CHECKPOINT = Path(deepinfer_core.__file__).parent / "data" / "small_v41"
LENGTHS = st.integers(1, 70)


def tokens(seed: int, length: int) -> list[int]:
    return torch.randint(3, 700, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def solo():
    return SoloModel(CHECKPOINT, ReferenceKernels(torch.device("cpu")), sequences=3, max_tokens=300)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), length=LENGTHS, cuts=st.lists(st.integers(1, 20), max_size=6))
def test_chunked_equals_whole(solo, seed, length, cuts):
    ids = tokens(seed, length)
    chunks = []
    for cut in cuts:
        if sum(chunks) + cut < length:
            chunks.append(cut)
    solo.forget(0)
    solo.forget(1)
    assert torch.equal(solo.logits(ids, 0), solo.logits(ids, 1, chunks))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 17, 33])
def test_token_by_token_equals_prefill(solo, length):
    ids = tokens(length, length)
    solo.forget(0)
    solo.forget(1)
    assert torch.equal(solo.logits(ids, 0), solo.logits(ids, 1, [1] * (length - 1)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), lengths=st.tuples(LENGTHS, LENGTHS, LENGTHS), split=st.integers(1, 30), order=st.permutations([0, 1, 2]))
def test_batched_equals_alone(solo, seed, lengths, split, order):
    ids = [tokens(seed + i, n) for i, n in enumerate(lengths)]
    alone = []
    for i in range(3):
        solo.forget(i)
        alone.append(solo.logits(ids[i], i))
        solo.forget(i)
    got: list[list[torch.Tensor]] = [[], [], []]
    for part in (slice(0, split), slice(split, None)):
        new = {i: ids[i][part] for i in order if ids[i][part]}
        if not new:
            continue
        logits = solo.loaded.model.logits(solo.step(new).hidden)
        for i, rows in zip(new, logits.split([len(v) for v in new.values()]), strict=True):
            got[i].append(rows)
    for i in range(3):
        assert torch.equal(torch.cat(got[i]), alone[i])


def test_a_changed_token_leaves_every_earlier_position_alone(solo):
    ids = tokens(5, 60)
    solo.forget(0)
    before = solo.logits(ids, 0)
    for t in (0, 1, 7, 8, 16, 31, 59):
        changed = [*ids[:t], (ids[t] + 1) % 700 + 3, *ids[t + 1 :]]
        solo.forget(0)
        after = solo.logits(changed, 0)
        assert torch.equal(after[:t], before[:t])
        assert not torch.equal(after[t], before[t])
