"""Decoder-side bounded replay (T-28, REQ-R2 of the model notes): "mask" is the executable definition, "compact" must equal it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from decoding_tools import engine
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core import SamplingParams
from deepinfer_core.checkpoint.geometries import shipped_checkpoint
from deepinfer_core.conformance.solo import SoloModel
from deepinfer_core.errors import ConfigError
from deepinfer_core.model.batch import Truncation
from deepinfer_core.model.drafter import DraftInputs

WINDOW, DRAFTS = 8, 3
BACK = DRAFTS + 1
LEAST = WINDOW + BACK


@pytest.fixture(scope="module")
def solo():
    return SoloModel(shipped_checkpoint(), ReferenceKernels(torch.device("cpu")), sequences=2, max_tokens=160, draft_tokens=DRAFTS)


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(3, 700, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cuts(length: int, ends: list[int]) -> list[tuple[int, int]]:
    """Chunks [begin, end) of a prompt."""
    marks = [0, *sorted({e for e in ends if 0 < e < length}), length]
    return list(pairwise(marks))


@torch.inference_mode()
def prefill(solo: SoloModel, sequence: int, prompt: list[int], chunks: list[tuple[int, int]], keep: int, mode: str) -> torch.Tensor:
    """Logits of the prompt's rows from its last `keep` on, as `mode` computes them."""
    solo.forget(sequence)
    keep_from = max(len(prompt) - keep, 0)
    parts = []
    for begin, end in chunks:
        inputs = solo.inputs({sequence: prompt[begin:end]})
        kept = end - begin
        if mode != "off":
            kept_len = min(max(end - keep_from, 1), end - begin) if mode == "compact" else None
            kept = kept_len or kept
            start = torch.tensor([keep_from])
            inputs = replace(inputs, truncation=Truncation(start, torch.tensor([kept_len]) if kept_len else None, kept_len or 0))
        batch = solo.loaded.batch(inputs)
        result = solo.loaded.model.forward(batch, solo.loaded.caches)
        solo.loaded.drafter.feed(result.features, batch.decoder_rows or batch.rows, solo.loaded.caches)
        assert len(result.hidden) == kept
        wanted = max(end - max(begin, keep_from), 0)
        parts.append(solo.loaded.model.logits(result.hidden[kept - wanted :]))
        solo.sequences[sequence].tokens += prompt[begin:end]
    return torch.cat(parts)


@torch.inference_mode()
def drafted(solo: SoloModel, sequence: int, anchor: int, position: int, valid_start: int) -> torch.Tensor:
    own = solo.sequences[sequence]
    inputs = DraftInputs(*(torch.tensor([v]) for v in (anchor, position, own.slot, valid_start)))
    return solo.loaded.drafter.forward(inputs, DRAFTS, solo.loaded.caches)[1]


PROMPTS = st.integers(1, 150)
ENDS = st.lists(st.integers(1, 150), max_size=4)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), length=PROMPTS, ends=ENDS, keep=st.integers(LEAST, 60))
def test_compact_equals_mask_for_every_kept_row_and_what_follows(solo, seed, length, ends, keep):
    """Bit for bit: logits of kept rows, of decode steps, of steps after a rollback by B tokens, and the drafter's."""
    prompt, chunks, after = ids(seed, length), cuts(length, ends), ids(seed + 1, 2 * BACK)
    solo_runs = []
    for sequence, mode in enumerate(("mask", "compact")):
        rows = [prefill(solo, sequence, prompt, chunks, keep, mode)]
        rows.append(drafted(solo, sequence, after[0], length - 1, max(length - keep, 0))[0])
        rows.append(solo.logits(after[:BACK], sequence))  # a step of drafts, all refused but none of its rows kept:
        back = min(BACK, length - 1)
        del solo.sequences[sequence].tokens[length - back :]
        rows.append(solo.logits(after[BACK:], sequence))
        solo_runs.append(rows)
    for mask, compact in zip(*solo_runs, strict=True):
        assert torch.equal(mask, compact)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), length=PROMPTS, ends=ENDS, extra=st.integers(0, 9))
def test_keeping_the_whole_prompt_changes_nothing(solo, seed, length, ends, extra):
    prompt, chunks = ids(seed, length), cuts(length, ends)
    off = prefill(solo, 0, prompt, chunks, length + extra, "off")
    for mode in ("mask", "compact"):
        assert torch.equal(prefill(solo, 1, prompt, chunks, length + extra, mode), off)


def test_dropping_rows_changes_the_kept_ones(solo):
    """Otherwise the tests above would show nothing."""
    prompt = ids(5, 100)
    off = prefill(solo, 0, prompt, cuts(100, []), 100, "off")[-20:]
    assert not torch.equal(prefill(solo, 1, prompt, cuts(100, []), 20, "compact"), off)


@given(length=st.integers(1, 400), keep=st.integers(LEAST, 200), back=st.integers(0, BACK))
def test_after_a_rollback_the_window_has_all_its_keys(length, keep, back):
    """REQ-R2: W valid keys (or all there are) at the position that is decoded next after going back by up to B tokens."""
    at = length - min(back, length - 1)
    oldest = max(at - WINDOW + 1, 0)
    assert oldest >= max(length - keep, 0)


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_computes_the_same_in_both_modes(drafts, asynchronous):
    prompts = [ids(i, n) for i, n in enumerate((3, 12, 13, 60, 127, 140))]
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, top_logprobs=2)] * len(prompts)
    results = {}
    for mode, keep in (("off", 0), ("mask", 16), ("compact", 16), ("compact", 150)):
        llm = engine(
            num_draft_tokens=drafts,
            async_scheduling=asynchronous,
            chunked_prefill=True,
            max_num_batched_tokens=50,
            max_model_len=160,
            policy="mixed",
            prefill_truncation_mode=mode,
            prefill_keep_tokens=keep,
        )
        outputs = llm.generate(prompts, params, progress=False)
        results[mode, keep] = [(output.token_ids, output.logprobs) for output in outputs]
        llm.close()
    assert results["mask", 16] == results["compact", 16]
    assert results["off", 0] == results["compact", 150]
    assert results["off", 0] != results["mask", 16]
    assert results["off", 0][:2] == results["mask", 16][:2]  # short prompts are kept whole


def test_too_few_kept_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"prefill_keep_tokens.*11.*at least 12 = sliding window 8 \+ backtracking 4"):
        engine(num_draft_tokens=3, prefill_truncation_mode="compact", prefill_keep_tokens=11)
    with pytest.raises(ConfigError, match="set both or neither"):
        engine(prefill_truncation_mode="mask")


def test_prompt_logprobs_are_refused_with_replay():
    llm = engine(prefill_truncation_mode="compact", prefill_keep_tokens=16)
    params = SamplingParams(max_tokens=1, prompt_logprobs=True)
    (output,) = llm.generate([[3, 4, 5]], params, progress=False)
    assert output.finish_reason == "invalid_request"
    assert "prompt_logprobs needs every prompt row, but decoder-side replay keeps only the last 16" in output.error
    llm.close()
