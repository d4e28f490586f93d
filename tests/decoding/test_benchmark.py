"""benchmarks/decoding.py runs, small, and measures what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import decoding_cases as cases


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"OUTPUT": 40, "WARM": 2, "STEPS": 1, "LONG": 300}.items():
        monkeypatch.setattr(cases, name, value)


def test_controlled_drafts_are_accepted_as_often_as_p_says():
    with cases.DraftingBench(None, 2) as bench:
        for p in (1.0, 0.0):
            before = bench.engines["static"].stats()
            row = bench.measure(p, 2, 1)
            after = bench.engines["static"].stats()
            made = {name: after[name] - before[name] for name in ("verified_tokens", "accepted_tokens")}
            assert made["accepted_tokens"] == p * made["verified_tokens"] > 0 or p == 0 == made["accepted_tokens"]
            assert row["static"] > 0
            assert row["scheduled"] > 0
            assert 1 <= row["rows_per_request"] <= 6


def test_the_other_cases_report_what_they_measured():
    idle = cases.idle_share(None, 2, 2)
    assert 0 <= idle["idle"] < 1
    hit = cases.prefix_hit(None, 2, 1)
    assert hit["cached_tokens"] == 256
    assert hit["hit_s"] > 0
    replay = cases.decoder_replay(None, 1)
    assert replay["bits_off"] > 0
    assert abs(replay["bits_change"]) < 1
