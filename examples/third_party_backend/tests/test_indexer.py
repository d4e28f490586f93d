"""The indexer's ways through its C++: threads, few candidates, many rows, sizes that go to the reference."""

from __future__ import annotations

import pytest
import torch
from deepinfer_simd.backend import SimdBackend

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend import CacheFormat
from deepinfer_core.backend.types import CandidateSpec, PagedEntries, Rope


@pytest.fixture
def kernels():
    return SimdBackend().kernels("")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def keys(entries: int, dim: int, rows: int, sequences: int = 1, per_page: int = 16) -> PagedEntries:
    """Random bf16 keys; the rows are spread over the sequences in order."""
    pages = -(-entries // per_page)
    data = torch.randn(sequences * pages, per_page * dim).bfloat16().view(torch.uint8)
    table = torch.randperm(sequences * pages).view(sequences, pages).int()
    sequence = (torch.arange(rows) * sequences // max(rows, 1)).int()
    return PagedEntries(data, CacheFormat.BF16, dim, per_page, True, table, sequence)


def best(query: torch.Tensor, weights: torch.Tensor, pages: PagedEntries, visible: torch.Tensor, topk: int) -> list[set[int]]:
    """What is selected, the plain way in float64. Random scores have no ties."""
    data = pages.data.view(torch.bfloat16).view(-1, pages.entries_per_page, pages.dim).double()
    chosen = []
    for t in range(len(query)):
        key = data[pages.block_table[pages.sequence[t]].long()].flatten(0, 1)[: visible[t]]
        scores = (query[t].double() @ key.T).relu().mul(weights[t, :, None].double()).sum(0)
        chosen.append(set(scores.topk(min(topk, len(scores))).indices.tolist()))
    return chosen


def test_many_rows_in_pieces_with_threads(kernels, threads):
    torch.manual_seed(1)
    rows, heads, dim, topk = 150, 5, 64, 20
    query, weights = torch.randn(rows, heads, dim), torch.rand(rows, heads)
    pages, visible = keys(300, dim, rows, sequences=2), torch.randint(0, 301, (rows,)).int()
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(kernels.select_entries(query, weights, pages, visible, topk).index)
        one = kernels.select_entries(query[:1], weights[:1], pages, visible[:1], topk).index  # fewer pieces than threads
        assert torch.equal(one, results[0][:1])
    assert all(torch.equal(results[0], other) for other in results[1:])
    got = [set(row[row >= 0].tolist()) for row in results[0]]
    assert got == best(query, weights, pages, visible, topk)


def test_candidates_alone_are_scored_as_all_entries_are(kernels):
    torch.manual_seed(2)
    rows, heads, dim = 7, 4, 32
    query, weights, pages = torch.randn(rows, heads, dim), torch.randn(rows, heads), keys(500, dim, rows)
    visible = torch.tensor([500, 499, 3, 0, 250, 17, 500]).int()
    candidates = torch.tensor([[0, 5, 124], [2, 124, -1], [0, 1, 2], [0, 1, 2], [60, 61, 62], [-1, -1, -1], [124, 0, 0]]).int()
    few = kernels.select_entries(query, weights, pages, visible, 9, candidates, None, 4)
    all_scored = kernels.select_entries(query, weights, pages, visible, 9, candidates, CandidateSpec(3, 4), 4)
    assert few.candidates is None
    assert torch.equal(few.index, all_scored.index)
    assert few.index[6].tolist() == [0, 1, 2, 3, 496, 497, 498, 499, -1]  # in any order, one of them twice
    assert few.index[5].eq(-1).all()


def test_sizes_that_cpp_does_not_know_go_to_the_reference(kernels):
    torch.manual_seed(3)
    rows, heads, dim = 3, 2, 16
    reference = ReferenceKernels(torch.device("cpu"))
    query, weights, pages = torch.randn(rows, heads, dim).bfloat16(), torch.rand(rows, heads), keys(40, dim, rows)
    visible = torch.tensor([40, 9, 1]).int()
    got, want = (k.select_entries(query.float(), weights, pages, visible, 6) for k in (kernels, reference))
    assert torch.equal(got.index, want.index)
    rope = Rope(torch.randn(4, 8), torch.tensor([0, 1, 3]))
    slots = torch.tensor([0, 5, -1]).int()
    for k, stored in ((kernels, pages.data), (reference, other := pages.data.clone())):
        target = PagedEntries(stored, pages.format, dim, pages.entries_per_page, False, pages.block_table, pages.sequence)
        k.store_entries(query[:, 0], rope, target, slots)
    assert torch.equal(pages.data, other)
