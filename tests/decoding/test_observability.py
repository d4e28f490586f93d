"""docs/observability.md lists what the code tells, and the figures are right."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from decoding_tools import VOCAB, ToyModel, engine, table

import deepinfer_core
from deepinfer_core import SamplingParams

ROOT = Path(deepinfer_core.__file__).parent
PAGE = (ROOT.parent / "docs" / "observability.md").read_text(encoding="utf-8")


def rows(section: str) -> dict[str, str]:
    """First column without backquotes -> the rest of each table row of a section."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def stats():
    llm = engine(num_draft_tokens=2, max_model_len=300, async_scheduling=True, prefix_caching=True)
    ToyModel(llm, table(40, seed=3), table(40, seed=3), torch.full((VOCAB,), 0.9))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for prompts in ([[3] * 200], [[3] * 200, [4, 5]]):
        llm.generate(prompts, params, progress=False)
    llm.engine.settle()
    yield llm.stats()
    llm.close()


def test_the_page_lists_every_figure(stats):
    assert set(rows("Figures")) == set(stats)


def test_the_page_lists_every_log_event():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "engine").glob("*.py"))
    found = dict(re.findall(r'log\.(\w+)\(\s*f?"event=(\w+)', source))
    assert found
    listed = rows("Log events")
    assert set(listed) == set(re.findall(r"event=(\w+)", source))
    for level, event in re.findall(r'log\.(\w+)\(\s*f?"event=(\w+)', source):
        assert listed[event].startswith(level)


def test_the_figures_of_a_small_run(stats):
    assert stats["completion_tokens"] == 30
    assert stats["finished"] == {"length": 3}
    assert (stats["running"], stats["pending"]) == (2, 0)  # the newest plan held both
    assert stats["cached_tokens"] == 128
    assert stats["prefill_caching_rate"] == round(128 / 402, 4)
    assert stats["prompt_tokens"] - stats["replayed_tokens"] == 402 - 128
    assert stats["avg_nextn_accept_rate"] > 0.8
    assert stats["avg_confidence_error"] == pytest.approx(0.1, abs=0.02)  # greedy drafts of the target itself are always right
    assert 0 < stats["TTFT_mean_ms"] <= stats["TTFT_max_ms"]
    assert stats["avg_SPS"] > 0
    assert stats["completion_TPS"] > 0


def test_the_log_line_holds_every_figure(caplog):
    llm = engine(disable_log_stats=False, logging_interval_step=4, max_model_len=64)
    ToyModel(llm, table(40, seed=3))
    with caplog.at_level(logging.INFO, logger="deepinfer"):
        llm.generate([[3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), progress=False)
    lines = [record.message for record in caplog.records if record.message.startswith("event=stats ")]
    assert [re.findall(r"step=(\d+)", line)[0] for line in lines] == ["0", "4"]
    assert all(f" {name}=" in lines[1] for name in llm.stats())
    llm.close()
