"""Changing any tensor of the text model or of the drafter changes what the model computes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_goldens import DATA

import deepinfer_core
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.types import QuantTensor
from deepinfer_core.checkpoint.engram import engram_tables
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.conformance.solo import SoloModel
from deepinfer_core.model.drafter import DraftInputs
from deepinfer_core.model.weights import WeightLoader

CHECKPOINT = Path(deepinfer_core.__file__).parent / "data" / "small_v41"
UNREAD = re.compile(
    r"vision\.|aligner\.|image_(start|end|newline)$|.*bias_vl$"  # image path
)


class Perturbed:
    """A checkpoint with one tensor changed."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint, self.name, self.config = checkpoint, name, checkpoint.config

    def tensor(self, name):
        value = self.checkpoint.tensor(name)
        if name != self.name:
            return value
        if value.dtype in (torch.int8, torch.float8_e4m3fn):
            return (value.view(torch.uint8) ^ (0x11 if value.dtype == torch.int8 else 0x08)).view(value.dtype)
        if value.dtype == torch.float8_e8m0fnu:
            return (value.view(torch.uint8) + 1).view(value.dtype)
        return value + torch.linspace(0.5, 1.0, value.shape[-1]).to(value.dtype)

    def quant(self, stem):
        scale = f"{stem}.scale"
        return QuantTensor(self.tensor(f"{stem}.weight"), self.tensor(scale) if self.checkpoint.has(scale) else None)


@pytest.fixture(scope="module")
def world():
    solo = SoloModel(CHECKPOINT, ReferenceKernels(torch.device("cpu"), Numerics.IDEAL), draft_tokens=5)
    ids = load_file(DATA / "text_p150.safetensors")["input_ids"].tolist()
    return solo, Checkpoint.open(CHECKPOINT), ids


@torch.inference_mode()
def outputs(solo, ids):
    """Everything the model computes for a prompt: logits, draft logits, confidences."""
    solo.forget()
    logits = solo.loaded.model.logits(solo.step({0: ids}).hidden)
    drafter = solo.loaded.drafter
    inputs = DraftInputs(*(torch.tensor([v]) for v in (5, len(ids) - 1, solo.sequences[0].slot, 0)))
    hidden, base = drafter.forward(inputs, 5, solo.loaded.caches)
    previous = torch.tensor([5])
    markov = drafter.markov_logits(base[:, 0], previous)
    return torch.cat([logits.flatten(), base.flatten(), markov.flatten(), drafter.confidence(hidden[:, 0], previous, 1.0)])


def reloaded(solo, source, name):
    """The model's weights with the part that holds `name` read again from `source`."""
    loaded, weights = solo.loaded, solo.loaded.model.weights
    engram = engram_tables(source.config, CHECKPOINT)
    loader = WeightLoader(source, loaded.kernels, engram)
    if match := re.match(r"layers\.(\d+)\.", name):
        i = int(match[1])
        layer = loader.layer(f"layers.{i}", loaded.config.layers[i], loaded.config.n_routed_experts)
        return replace(weights, layers=(*weights.layers[:i], layer, *weights.layers[i + 1 :]))
    if name.startswith("mtp."):
        return replace(weights, drafter=loader.drafter())
    return replace(weights, embed=loader.tensor("embed.weight"), norm=loader.tensor("norm.weight"), head=loader.linear("head"))


def unchanged(world, names):
    solo, checkpoint, ids = world
    original, before = solo.loaded.model.weights, outputs(solo, ids)
    silent = []
    for name in names:
        weights = reloaded(solo, Perturbed(checkpoint, name), name)
        solo.loaded.model.weights = weights
        solo.loaded.drafter.weights = weights.drafter
        if torch.equal(outputs(solo, ids), before):
            silent.append(name)
    solo.loaded.model.weights, solo.loaded.drafter.weights = original, original.drafter
    return silent


def test_one_tensor_of_each_kind(world):
    kinds = {re.sub(r"\d+", "N", name): name for name in world[1].names if not UNREAD.match(name)}
    assert len(kinds) > 40
    assert unchanged(world, kinds.values()) == []


@pytest.mark.slow
def test_every_tensor(world):
    assert unchanged(world, [name for name in world[1].names if not UNREAD.match(name)]) == []
