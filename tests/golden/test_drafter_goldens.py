"""The DSpark drafter against recordings (see tests/data/goldens_small/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_goldens import DATA, EXTRA, golden_sets

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.conformance.solo import SoloModel
from deepinfer_core.model.drafter import DraftInputs

CASES = ("end", "acc0", "acc1", "acc3", "acc5", "pos0", "pos3", "full", "nextn3")


@pytest.fixture(scope="module", params=golden_sets())
def solo(request):
    import deepinfer_core

    small = request.param == "small"
    checkpoint = Path(deepinfer_core.__file__).parent / "data" / "small_v41" if small else Path(EXTRA) / "tiny_v41"
    model = SoloModel(checkpoint, ReferenceKernels(torch.device("cpu"), Numerics.IDEAL), draft_tokens=5)
    model.recordings = DATA if small else Path(EXTRA)
    return model


def recording(solo, length, case="end"):
    """The recording of one prompt; skips what the set that ships with the repository leaves out to stay small."""
    path = solo.recordings / f"dspark_p{length}.safetensors"
    record = load_file(path) if path.exists() else {}
    if f"{case}.anchor" not in record:
        pytest.skip(f"case {case} of prompt p{length} is in the larger set only (DEEPINFER_GOLDENS_DIR)")
    return record


@torch.inference_mode()
def draft(solo, position, anchor, rows):
    """(hidden, base logits, chain logits, drafts, confidences) of one pass."""
    drafter = solo.loaded.drafter
    inputs = DraftInputs(*(torch.tensor([v]) for v in (anchor, position, solo.sequences[0].slot, 0)))
    hidden, base = drafter.forward(inputs, rows, solo.loaded.caches)
    previous, chain, drafts, confidences = torch.tensor([anchor]), [], [], []
    for s in range(rows):
        logits = drafter.markov_logits(base[:, s], previous)
        confidences.append(drafter.confidence(hidden[:, s], previous, 1.0))
        previous = logits.argmax(-1)
        chain.append(logits[0])
        drafts.append(int(previous))
    return hidden[0], base[0], torch.stack(chain), drafts, torch.cat(confidences)


@pytest.mark.parametrize("length", [33, 150])
def test_features(solo, length):
    record = recording(solo, length)
    solo.forget()
    result = solo.step({0: record["input_ids"].tolist()})
    assert (result.features - record["features"]).abs().max() < 1e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [33, 150])
def test_draft_pass(solo, length, case):
    record = recording(solo, length, case)
    ids = record["input_ids"].tolist()
    position, anchor, rows = record[f"{case}.anchor"].tolist()
    solo.forget()
    if case.startswith("acc"):
        prompt = int(record["prompt_length"])
        solo.step({0: ids[:prompt]})
        draft(solo, prompt - 1, ids[prompt], 5)
        solo.step({0: record[f"{case}.verify_ids"].tolist()})
    else:
        solo.step({0: ids[: position + 1]})
    hidden, base, chain, drafts, confidences = draft(solo, position, anchor, rows)
    recorded = {name: record[f"{case}.f32_noquant.{name}"] for name in ("collapsed", "base_logits", "logits", "drafts", "confidence")}
    assert (hidden - recorded["collapsed"]).abs().max() < 1e-3
    assert (base - recorded["base_logits"]).abs().max() < 1e-3
    assert (chain - recorded["logits"]).abs().max() < 1e-3
    assert (confidences - recorded["confidence"]).abs().max() < 1e-3
    assert drafts == recorded["drafts"].tolist()


def test_main_keys_outside_the_window_are_never_read(solo):
    record = recording(solo, 33)
    ids = record["input_ids"].tolist()
    solo.forget()
    solo.step({0: ids[:33]})
    clean = draft(solo, 32, ids[33], 5)
    geometry = solo.loaded.geometry
    valid = {p % geometry.ring for p in range(33 - geometry.window, 33)}
    for ring in solo.loaded.caches.draft_window:
        for row in set(range(geometry.ring)) - valid:
            ring.data[solo.sequences[0].slot, row] = 0x7F
    again = draft(solo, 32, ids[33], 5)
    assert torch.equal(clean[0], again[0])
    assert clean[3] == again[3]
