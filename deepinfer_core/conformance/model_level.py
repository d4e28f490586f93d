"""The `model` level: the shipped checkpoint against recordings of an independent implementation, and the graph against itself.

In ideal numerics everything is compared: logits within 1e-3 (two float32 implementations of this model differ by 1e-4 at most), every
selected expert, entry and candidate block, greedy tokens, streams after a layer. In release numerics single rounding flips are amplified
by quantisers and selections, so statistics are compared: bounds are those that two independent implementations keep between themselves,
doubled (recorded in the checkpoint's noise report): mean |logit difference| 0.35, mean KL divergence 0.1, top-1 agreement 0.6, and the
same top-1 token wherever the recording's margin exceeds 1.5.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.checkpoint.geometries import shipped_checkpoint
from deepinfer_core.conformance.checks import Check, UnsupportedError, expect
from deepinfer_core.conformance.solo import SoloModel
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.trace import traced
from deepinfer_core.model.loaded import CacheFormats

PROMPTS = ("p33", "p150")


@cache
def golden() -> dict[str, Tensor]:
    """The recordings."""
    with as_file(files("deepinfer_core.conformance") / "data" / "golden_small_v41.safetensors") as path:
        return load_file(path)


def solo_model(subject: Subject, numerics: Numerics, kernels: Kernels | None = None, sequences: int = 1, tokens: int = 256) -> SoloModel:
    """The shipped checkpoint on the subject. Raises UnsupportedError if it does not offer the arithmetic or the model's cache formats."""
    claims = subject.claims
    if numerics not in claims.numerics:
        raise UnsupportedError(f"numerics does not name {numerics}")
    formats = CacheFormats(CacheFormat.FP8, CacheFormat.FP4, CacheFormat.FP4_INDEX)
    if numerics is Numerics.IDEAL:
        formats = CacheFormats(CacheFormat.F32, CacheFormat.F32, CacheFormat.F32)
    for kind in ("window", "entry", "index"):
        if getattr(formats, kind) not in getattr(claims, f"{kind}_formats"):
            raise UnsupportedError(f"{kind}_formats does not name {getattr(formats, kind)}")
    return SoloModel(shipped_checkpoint(), kernels or subject.invariant_kernels(numerics), sequences, tokens, formats=formats)


def _ids(prompt: str) -> list[int]:
    return golden()[f"{prompt}.input_ids"].tolist()


def _logits(prompt: str):
    def logits(subject: Subject) -> None:
        """Every recorded logit."""
        solo = solo_model(subject, Numerics.IDEAL)
        got = solo.logits(_ids(prompt)).cpu()[golden()[f"{prompt}.positions"].long()]
        difference = (got - golden()[f"{prompt}.logits.f32_noquant"]).abs()
        at = int(difference.amax(1).argmax())
        position = int(golden()[f"{prompt}.positions"][at])
        expect(difference.max() < 1e-3, f"a logit at position {position} is off by {float(difference.max()):.3g}, bound 1e-3")
        expect(difference.mean() < 1e-4, f"logits are off by {float(difference.mean()):.3g} in the mean, bound 1e-4")

    return logits


def _selections(prompt: str):
    def selections(subject: Subject) -> None:
        """Every chosen expert, entry and candidate block."""
        seen: dict[str, list[Tensor]] = {"moe_gate": [], "select_entries": [], "blocks": []}

        def on_call(op: str, args: Any, kwargs: Any, result: Any) -> None:
            if op == "moe_gate":
                seen[op].append(result.ids.cpu().sort(1).values)
            elif op == "select_entries":
                seen[op].append(result.index.cpu())
                if result.candidates is not None:
                    seen["blocks"].append(result.candidates.cpu())

        solo = solo_model(subject, Numerics.IDEAL, traced(_kernels(subject), on_call))
        solo.step({0: _ids(prompt)})
        chosen_in = dict(zip(solo.loaded.config.index_source_layer_ids, seen["select_entries"], strict=True))
        experts = golden()[f"{prompt}.moe_ids.f32_noquant"].int()
        for layer, (ids, want) in enumerate(zip(seen["moe_gate"], experts, strict=True)):  # in the order of execution
            if layer in chosen_in:
                entries = golden()[f"{prompt}.index_topk.f32_noquant.layer{layer}"].int()
                _same(f"entries chosen in layer {layer}", chosen_in[layer][:, : entries.shape[1]], entries)
            _same(f"experts of layer {layer}", ids, want)
        mask = golden().get(f"{prompt}.candidates.f32_noquant.layer4")
        if mask is not None:
            block = torch.arange(mask.shape[1]) // solo.loaded.config.candidate_block_size
            for row, chosen in enumerate(seen["blocks"][0]):
                allowed = torch.isin(block, chosen[chosen >= 0])
                _same(f"candidate blocks of row {row}", allowed[: row + 1], mask[row, : row + 1].bool())

    return selections


def _kernels(subject: Subject) -> Kernels:
    if Numerics.IDEAL not in subject.claims.numerics:
        raise UnsupportedError("numerics does not name ideal")
    return subject.kernels(Numerics.IDEAL)


def _same(what: str, got: Tensor, want: Tensor) -> None:
    wrong = (got != want).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        expect(False, f"{what}: {len(wrong)} of {want.numel()} differ, first at {list(at)}: expected {want[at]}, got {got[at]}")


def _greedy(prompt: str):
    def greedy(subject: Subject) -> None:
        """The greedy continuation, token by token."""
        solo = solo_model(subject, Numerics.IDEAL)
        want = golden()[f"{prompt}.greedy_ids.f32_noquant"].tolist()
        got = solo.greedy(_ids(prompt), len(want))
        first = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
        if first is not None:
            expect(False, f"greedy token {first} is {got[first]}, recorded {want[first]}")

    return greedy


def _hidden_states(subject: Subject) -> None:
    """Streams after three of the layers."""
    solo, seen = solo_model(subject, Numerics.IDEAL), {}
    inner = solo.loaded.model.layer

    def layer(spec, weights, streams, pre, context):
        out = inner(spec, weights, streams, pre, context)
        seen[spec.index] = out[0].cpu().clone()
        return out

    solo.loaded.model.layer = layer  # type: ignore[method-assign]
    solo.step({0: _ids("p33")})
    for key, want in golden().items():
        if ".streams." in key:
            index = int(key.rsplit("layer", 1)[1])
            error = float((seen[index] - want).abs().max())
            expect(error < 1e-3, f"streams after layer {index} are off by {error:.3g}, bound 1e-3")


def _release_statistics(subject: Subject) -> None:
    """KL divergence, top-1 agreement and mean error of the released arithmetic."""
    solo = solo_model(subject, Numerics.RELEASE)
    got, want = solo.logits(_ids("p33")).cpu(), golden()["p33.logits.bf16"]
    error = float((got - want).abs().mean())
    log_p, log_q = want.log_softmax(-1), got.log_softmax(-1)
    divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    agreement = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    expect(error < 0.35, f"mean |logit difference| is {error:.3g}, bound 0.35")
    expect(divergence < 0.1, f"mean KL divergence is {divergence:.3g}, bound 0.1")
    expect(agreement >= 0.6, f"top-1 agreement is {agreement:.3g}, bound 0.6")


def _release_margins(prompt: str):
    def release_margins(subject: Subject) -> None:
        """The same best token wherever the recording is sure."""
        solo = solo_model(subject, Numerics.RELEASE)
        best = solo.logits(_ids(prompt)).cpu().argmax(-1)
        wrong = ((best != golden()[f"{prompt}.top1.f32"]) & (golden()[f"{prompt}.margin.f32"] > 1.5)).nonzero().flatten()
        expect(not len(wrong), f"the best token differs at positions {wrong.tolist()} although the recording's margin exceeds 1.5")

    return release_margins


def _cut(numerics: Numerics):
    def decode_equals_prefill(subject: Subject) -> None:
        """One step, chunks, and token by token give the same logits: bitwise if batch invariance is claimed, else to statistics."""
        solo = solo_model(subject, numerics, sequences=3)
        ids = _ids("p33")
        whole = solo.logits(ids, 0).cpu()
        solo.forget(0)
        solo.logits(ids[::-1], 0)  # other content in the first sequence's pages and slot
        for sequence, chunks in ((1, (7, 1, 9)), (2, (1,) * (len(ids) - 1))):
            parts = solo.logits(ids, sequence, chunks).cpu()
            if subject.claims.batch_invariant:
                expect(torch.equal(parts, whole), f"logits change with the chunks {chunks[:4]} although batch_invariant is claimed")
                continue
            difference = (parts - whole).abs()
            bound = 0.35 if numerics is Numerics.RELEASE else 1e-4
            expect(difference.mean() < bound, f"chunks {chunks[:4]} move logits by {float(difference.mean()):.3g}, bound {bound}")

    return decode_equals_prefill


CHECKS: list[Check] = [
    *(Check("model", "logits", _logits(p), p) for p in PROMPTS),
    *(Check("model", "selections", _selections(p), p) for p in PROMPTS),
    Check("model", "hidden_states", _hidden_states),
    *(Check("model", "greedy_tokens", _greedy(p), p, slow=p != "p33") for p in PROMPTS),
    Check("model", "release_statistics", _release_statistics),
    *(Check("model", "release_margins", _release_margins(p), p) for p in PROMPTS),
    *(Check("model", "decode_equals_prefill", _cut(n), n, slow=True) for n in Numerics),
]
