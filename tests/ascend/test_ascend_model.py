"""The golden checkpoint through the unchanged Ascend kernels on emulated operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deepinfer_core
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.conformance.solo import SoloModel

GOLDENS = Path(__file__).parents[1] / "data" / "goldens_small"
CHECKPOINT = Path(deepinfer_core.__file__).parent / "data" / "small_v41"
SHORT, LONG = (1, 2, 7, 33), 150


@pytest.fixture(scope="module")
def ascend(emulated_backend: Any) -> SoloModel:
    return SoloModel(CHECKPOINT, emulated_backend.kernels(""), sequences=2, max_tokens=500)


@pytest.fixture(scope="module")
def reference() -> SoloModel:
    return SoloModel(CHECKPOINT, ReferenceKernels(torch.device("cpu")), max_tokens=500)


def _record(length: int) -> dict[str, torch.Tensor]:
    return load_file(GOLDENS / f"text_p{length}.safetensors")


@pytest.mark.parametrize("length", SHORT)
def test_golden_logits_within_the_stated_statistics(length: int, ascend: SoloModel) -> None:
    """The bounds of the recordings' README for bf16, as for the reference."""
    record = _record(length)
    ascend.forget()
    logits = ascend.logits(record["input_ids"].tolist())[record["logit_positions"].long()]
    expected = record["logits.bf16"]
    assert (logits - expected).abs().mean() < 0.35
    log_p, log_q = expected.log_softmax(-1), logits.log_softmax(-1)
    assert (log_p.exp() * (log_p - log_q)).sum(-1).mean() < 0.1


@pytest.mark.parametrize("length", [*SHORT, LONG])
def test_greedy_tokens_are_the_reference_ones(length: int, ascend: SoloModel, reference: SoloModel) -> None:
    prompt = _record(length)["input_ids"].tolist()
    ascend.forget()
    reference.forget()
    assert ascend.greedy(prompt, 6) == reference.greedy(prompt, 6)


def test_long_context_stays_within_rounding_flips(ascend: SoloModel, reference: SoloModel) -> None:
    """400 tokens: windows, both pools and candidate blocks are full. A rounding flip changes later choices, so only statistics hold."""
    prompt = _record(400)["input_ids"].tolist()
    ascend.forget()
    reference.forget()
    assert (ascend.logits(prompt) - reference.logits(prompt)).abs().mean() < 0.35


def test_selections_and_attention_agree_on_the_same_inputs(emulated_backend: Any) -> None:
    """In a long context, where outputs may not: every index equal, attention within one rounding."""
    from deepinfer_backends.ascend950.kernels import AscendKernels
    from deepinfer_backends.ascend950.layout import PlainLayout

    other = ReferenceKernels(torch.device("cpu"))
    differences: list[str] = []

    class Lockstep(AscendKernels):
        def select_entries(self, query, head_weights, keys, visible, topk, candidates=None, emit=None, block_size=0):
            rest = (head_weights, keys, visible, topk, candidates, emit, block_size)
            mine = super().select_entries(query, *rest)
            theirs = other.select_entries(query.float(), *rest)
            same = torch.equal(mine.index, theirs.index)
            if theirs.candidates is not None:
                same = same and torch.equal(mine.candidates, theirs.candidates)
            differences.extend([] if same else ["selection"])
            return mine

        def sparse_attention(self, query, window, selected, sink, scale, rope):
            mine = super().sparse_attention(query, window, selected, sink, scale, rope)
            theirs = other.sparse_attention(query, window, selected, sink, scale, rope)
            near = torch.allclose(mine.float(), theirs.float(), rtol=2**-7, atol=1e-4)
            differences.extend([] if near else ["attention"])
            return mine

    model = SoloModel(CHECKPOINT, Lockstep(torch.device("cpu"), layout=PlainLayout()), max_tokens=500)
    model.logits(_record(400)["input_ids"].tolist())
    assert differences == []


def test_batched_chunked_and_alone_agree(ascend: SoloModel) -> None:
    """Cache bookkeeping: split prompts and mixed batches give the logits of a whole prompt alone, up to rounding."""
    first, second = _record(33)["input_ids"].tolist(), _record(7)["input_ids"].tolist()
    ascend.forget(0)
    whole = ascend.logits(first)
    ascend.forget(0)
    assert (ascend.logits(first, chunks=(1, 5, 2, 16)) - whole).abs().mean() < 0.05
    ascend.forget(0)
    ascend.forget(1)
    hidden = ascend.step({0: first, 1: second}).hidden
    assert (ascend.loaded.model.logits(hidden)[: len(first)] - whole).abs().mean() < 0.05
