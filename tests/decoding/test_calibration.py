"""Calibration of confidences: the fit on made-up blocks, the records of the engine, the command."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding_tools import VOCAB, ToyModel, engine, table

from deepinfer_core import SamplingParams
from deepinfer_core.cli._app import run
from deepinfer_core.engine.calibration import LEAST, calibration_error, fit_temperatures
from deepinfer_core.engine.drafting import DraftRecords


def blocks(temperatures: list[float], count: int, seed: int = 0) -> DraftRecords:
    """Blocks whose confidences, scaled by `temperatures`, are the true chances of acceptance."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.5, 2.0, (count, len(temperatures)))
    chances = 1 / (1 + np.exp(-logits / np.array(temperatures)))
    accepted = np.cumprod(rng.random(chances.shape) < chances, axis=1).sum(axis=1)
    confidences = (1 / (1 + np.exp(-logits))).astype(np.float32)
    return DraftRecords(confidences, np.full(count, len(temperatures)), accepted)


class TestFit:
    def test_it_finds_the_temperatures_that_made_the_confidences_wrong(self):
        truth = [2.0, 0.5, 1.0, 3.0]
        fit = fit_temperatures(blocks(truth, 40_000), (1.0,))
        assert np.log(fit.temperatures) == pytest.approx(np.log(truth), abs=0.25)
        assert all(after < 0.02 for after in fit.after)
        assert all(after <= before for before, after in zip(fit.before, fit.after, strict=True))
        assert fit.before[0] > 0.05

    def test_temperatures_of_the_run_are_taken_back_first(self):
        """The same blocks, recorded by an engine that already scaled by 2: the fit is the same."""
        records = blocks([2.0, 2.0], 40_000)
        logits = np.log(records.confidences.astype(np.float64) / (1 - records.confidences.astype(np.float64)))
        scaled = records._replace(confidences=(1 / (1 + np.exp(-logits / 2))).astype(np.float32))
        plain, again = fit_temperatures(records, (1.0,)), fit_temperatures(scaled, (2.0, 2.0))
        assert again.temperatures == pytest.approx(plain.temperatures, rel=0.05)
        assert again.before[0] < 0.02 < plain.before[0]

    def test_only_verified_positions_count_and_a_position_with_few_keeps_its_temperature(self):
        records = blocks([2.0, 2.0, 2.0], 5000)
        verified = np.where(np.arange(5000) < LEAST - 1, 3, 2)
        fit = fit_temperatures(records._replace(verified=verified, accepted=np.minimum(records.accepted, verified)), (1.25,))
        assert fit.counts == (5000, 5000, LEAST - 1)
        assert fit.temperatures[2] == 1.25

    def test_unknown_confidences_are_left_out(self):
        records = blocks([2.0, 1.0], 4000)
        records.confidences[::2, 1] = np.nan
        assert fit_temperatures(records, (1.0,)).counts == (4000, 2000)

    def test_calibration_error_by_hand(self):
        predicted = np.array([0.05, 0.05, 0.95, 1.0])
        happened = np.array([False, True, True, True])
        assert calibration_error(predicted, happened) == pytest.approx((abs(0.1 - 1) + abs(1.95 - 2)) / 4)
        assert calibration_error(np.zeros(0), np.zeros(0, bool)) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_records_every_verified_block(asynchronous):
    target = table(40, seed=3)
    draft = target + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
    confidence = torch.rand(VOCAB, generator=torch.Generator().manual_seed(5))
    llm = engine(num_draft_tokens=3, async_scheduling=asynchronous, max_model_len=80)
    ToyModel(llm, target, draft, confidence)
    llm.engine.drafting.record()
    llm.generate([[3 + i] for i in range(9)], SamplingParams(temperature=0, max_tokens=15, ignore_eos=True), progress=False)
    llm.engine.settle()
    records, stats = llm.engine.drafting.records(), llm.stats()
    assert records.verified.sum() == stats["verified_tokens"]
    assert records.accepted.sum() == stats["accepted_tokens"]
    assert np.isin(records.confidences, confidence.numpy()).all()
    assert 0 < stats["avg_confidence_error"] < 1
    llm.close()


def test_greedy_drafts_have_an_error_of_zero_if_their_confidences_tell_the_outcome():
    target = table(40, seed=3)
    llm = engine(num_draft_tokens=2, max_model_len=80)
    ToyModel(llm, target, target, torch.ones(VOCAB))
    llm.generate([[3], [4]], SamplingParams(temperature=0, max_tokens=15, ignore_eos=True), progress=False)
    assert llm.stats()["avg_confidence_error"] == pytest.approx(0, abs=1e-3)
    llm.close()


def command(*arguments: str) -> int:
    return run(["bench", "calibrate-confidence", "--backend", "cpu_ref", *arguments])


def test_the_command_prints_errors_and_the_setting(capsys):
    sizes = ("--num-prompts", "8", "--input-len", "4", "--output-len", "18", "--set", "max_model_len=64")
    assert command(*sizes, "--set", "num_draft_tokens=2") == 0
    out = capsys.readouterr().out
    assert "position 0" in out
    assert "calibration error" in out
    assert "speculative.confidence_temperatures: [" in out
    assert "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE=" in out


def test_the_command_reads_prompts_from_a_file(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n\nThe weather\n", encoding="utf-8")
    arguments = ("--output-len", "4", "--set", "max_model_len=64", "--set", "num_draft_tokens=1")
    assert command("--prompts", str(file), *arguments) == 0
    assert "2 prompts" in capsys.readouterr().out
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    assert command("--prompts", str(tmp_path / "empty.txt"), *arguments) == 2
    assert "no prompts" in capsys.readouterr().err


def test_the_command_needs_drafts(capsys):
    assert command("--set", "max_model_len=64") == 2
    assert "num_draft_tokens = 0: nothing is drafted; --set speculative.num_draft_tokens=5" in capsys.readouterr().err
