"""Metadata of steps against the definitions, written out row by row in Python."""

import random

import pytest
import torch

from deepinfer_core.model import batch as batch_module
from deepinfer_core.model.arrays import TorchArrays
from deepinfer_core.model.batch import BatchGeometry, SequenceInputs, Truncation, build_batch

PAD, MAP = 7, [(31 * i) % 50 for i in range(100)]


@pytest.fixture(autouse=True, params=["cpu", "device"])
def library(request, monkeypatch):
    """Steps on a device compute their metadata in torch, steps on the CPU in numpy."""
    if request.param == "device":
        monkeypatch.setattr(batch_module, "arrays_on", TorchArrays)


def window_of(g, p, start, first, slot, valid):
    """Window columns of the row at position p: this step's rows from `start` on, the ring before."""
    keys = []
    for seen in range(p - g.window + 1, p + 1):
        here = g.state_slots * g.ring + first + seen - start
        keys.append(-1 if seen < valid else here if seen >= start else slot * g.ring + seen % g.ring)
    return keys


def rows_of(g, query_len, start, slot, valid):
    """(sequence, row in it, first row, position, window, window slot) of each row."""
    first = 0
    for i, count in enumerate(query_len):
        for j in range(count):
            p = start[i] + j
            kept = j >= count - g.ring and slot[i] > 0
            window = window_of(g, p, start[i], first, slot[i], valid[i])
            yield i, j, first, p, window, slot[i] * g.ring + p % g.ring if kept else -1
        first += count


def entry_of(g, r, s, row):
    """(page slot, first position, group members, ring row) of the entry that a row completes, or -1, 0, -1s."""
    i, j, first, p, _, _ = row
    n, slot, table = g.page_tokens // r, s["state_slot"][i], s["block_table"][i]
    done = (p + 1) % r == 0
    entry = p // r
    writes = done and p >= s["write_start"][i] and slot > 0
    at = table[min(entry // n, len(table) - 1)] * n + entry % n if writes else -1
    members = []
    for q in range(p - r + 1, p + 1):
        here = g.state_slots * g.compressor_ring + first + q - s["start"][i]
        members.append((here if q >= s["start"][i] else slot * g.compressor_ring + q % g.compressor_ring) if done else -1)
    newest = j >= s["query_len"][i] - g.compressor_ring and slot > 0
    return at, p - r + 1 if done else 0, members, slot * g.compressor_ring + p % g.compressor_ring if newest else -1


def ngrams_of(s, row, tokens, size):
    """Compressed ids of the row's token and its predecessors."""
    i, j, first, _, _, _ = row
    stream = [*s["history"][i], *tokens[first : first + j + 1]]
    return [MAP[t] if t >= 0 else PAD for t in reversed(stream[-size:])]


def draw(rng, one_row):
    """A geometry, and the numbers of some sequences."""
    count = rng.randint(1, 5)
    g = BatchGeometry(rng.choice([4, 8]), rng.choice([9, 10]), rng.choice([2, 4]), 6, 16, rng.choice([(1, 2), (2,), (1,)]), 4)
    s = {
        "query_len": [1 if one_row else rng.randint(1, 20) for _ in range(count)],
        "start": [rng.randint(0, 60) for _ in range(count)],
        "state_slot": [rng.randint(0, 5) for _ in range(count)],
        "block_table": [[rng.randint(1, 40) for _ in range(5)] for _ in range(count)],
        "valid_start": [rng.randint(0, 40) for _ in range(count)],
        "write_start": [rng.randint(0, 70) for _ in range(count)],
        "history": [[rng.randint(-1, 99) for _ in range(3)] for _ in range(count)],
    }
    return g, s, [rng.randint(0, 99) for _ in range(sum(s["query_len"]))]


def inputs(s, tokens, **more):
    arrays = {name: torch.tensor(value, dtype=torch.int32 if name == "block_table" else torch.int64) for name, value in s.items()}
    return SequenceInputs(**arrays, tokens=torch.tensor(tokens), **more)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("one_row", [False, True], ids=["rows", "one_row"])
def test_every_number_follows_its_definition(seed, one_row):
    g, s, tokens = draw(random.Random(seed), one_row)
    batch = build_batch(g, inputs(s, tokens, one_row=one_row), torch.tensor(MAP), PAD)
    rows = list(rows_of(g, s["query_len"], s["start"], s["state_slot"], s["valid_start"]))
    assert batch.rows.sequence.tolist() == [row[0] for row in rows]
    assert batch.rows.positions.tolist() == [row[3] for row in rows]
    assert batch.rows.window_index.tolist() == [row[4] for row in rows]
    assert batch.rows.window_slots.tolist() == [row[5] for row in rows]
    assert batch.ngrams.tolist() == [ngrams_of(s, row, tokens, 4) for row in rows]
    for r in g.ratios:
        found, wanted = batch.entries[r], [entry_of(g, r, s, row) for row in rows]
        assert batch.rows.visible[r].tolist() == [(row[3] + 1) // r for row in rows]
        assert found.slots.tolist() == [entry[0] for entry in wanted]
        assert found.positions.tolist() == [entry[1] for entry in wanted]
        assert (found.rows is None) == (r == 1)
        if found.rows is not None:
            assert found.rows.members.tolist() == [entry[2] for entry in wanted]
            assert found.rows.slots.tolist() == [entry[3] for entry in wanted]
    assert {batch.rows.sequence.dtype, batch.rows.window_index.dtype, batch.rows.window_slots.dtype} == {torch.int32}
    assert {batch.rows.positions.dtype, batch.ngrams.dtype} == {torch.int64}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("compact", [False, True], ids=["mask", "compact"])
def test_decoder_rows_of_a_truncated_step(seed, compact):
    rng = random.Random(seed)
    g, s, tokens = draw(rng, False)
    keep_from = [rng.randint(0, 70) for _ in s["start"]]
    kept = [rng.randint(1, count) if compact else count for count in s["query_len"]]
    cut = Truncation(torch.tensor(keep_from), torch.tensor(kept) if compact else None, sum(kept))
    batch = build_batch(g, inputs(s, tokens, truncation=cut), None, PAD)
    start = [a + q - k for a, q, k in zip(s["start"], s["query_len"], kept, strict=True)]
    rows = list(rows_of(g, kept, start, s["state_slot"], [max(pair) for pair in zip(s["valid_start"], keep_from, strict=True)]))
    assert batch.decoder_rows.window_index.tolist() == [row[4] for row in rows]
    assert batch.decoder_rows.window_slots.tolist() == [row[5] for row in rows]
    ends = torch.tensor(s["query_len"]).cumsum(0).tolist()
    last = [range(end - k, end) for end, k in zip(ends, kept, strict=True)]
    assert (batch.kept is None) == (not compact)
    assert batch.kept is None or batch.kept.tolist() == [row for part in last for row in part]
