"""The shipped checkpoint on a backend, against the reference backend and the recorded logits of an independent implementation."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.backend.registry import discover
from deepinfer_core.checkpoint.geometries import shipped_checkpoint
from deepinfer_core.conformance.solo import SoloModel
from deepinfer_core.engine.llm import LLM
from deepinfer_core.sampling import SamplingParams

GOLDENS = Path(__file__).parents[2] / "tests" / "data" / "goldens_small"
NEW_TOKENS = 48
SURE = 1.0
"""Margin (best logit above the second) from which on two implementations of the quantised model agree on the best token, as measured
between the recordings' two variants: all of 66 positions. See the notes that come with the recordings."""


def prompts() -> dict[str, list[int]]:
    """The recorded prompts."""
    return {name: entry["ids"] for name, entry in json.loads((GOLDENS / "prompts.json").read_text(encoding="utf-8")).items()}


def greedy_tokens(backend: str, device: str, eager: bool | None, requests: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """Greedy outputs of the engine, all requests at once."""
    llm = LLM(
        backend=backend,
        **{"backend.device": device, "graphs.enforce_eager": eager, "max_model_len": 512, "max_num_seqs": 8, "memory_bytes": 1 << 28},
        **options,
    )
    try:
        outputs = llm.generate(list(requests), SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True), progress=False)
        return [output.samples[0].token_ids for output in outputs]
    finally:
        llm.close()
        gc.collect()


def kernels_of(backend: str, device: str, batch_invariant: bool = False) -> Kernels:
    """The kernels of a backend."""
    return discover().select(backend).backend.kernels(device, batch_invariant=batch_invariant)


def divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first different token, None if there is none."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def compare_tokens(backend: str, device: str) -> list[dict[str, Any]]:
    """Greedy tokens of `backend` against the reference's, with the logit margins at the first difference."""
    names, ids = list(prompts()), list(prompts().values())
    mine, reference = (greedy_tokens(name, where, None, ids) for name, where in ((backend, device), ("cpu_ref", "")))
    solo = {who: SoloModel(shipped_checkpoint(), kernels_of(*who), max_tokens=500) for who in ((backend, device), ("cpu_ref", ""))}
    rows = []
    for name, prompt, a, b in zip(names, ids, mine, reference, strict=True):
        at = divergence(a, b)
        row: dict[str, Any] = {"prompt": name, "tokens": len(a), "first difference": at}
        if at is not None:
            for (who, _), model in solo.items():
                model.forget()
                logits = model.logits([*prompt, *b[:at]])[-1]
                row[f"margin of {who}"] = float(logits[b[at]] - logits[a[at]])  # the reference's choice over the backend's
        rows.append(row)
    return rows


def divergences(expected: Tensor, logits: Tensor) -> dict[str, float | int]:
    """Statistics of two sets of logits [n, V]: mean KL, mean absolute difference, share of equal argmax: of all, and where it is sure."""
    p, q = expected.log_softmax(-1), logits.log_softmax(-1)
    same = expected.argmax(-1) == logits.argmax(-1)
    best = expected.topk(2, -1).values
    sure = best[:, 0] - best[:, 1] > SURE
    return {
        "mean KL": float((p.exp() * (p - q)).sum(-1).mean()),
        "mean absolute difference": float((logits - expected).abs().mean()),
        "argmax agreement": float(same.float().mean()),
        "sure positions": int(sure.sum()),
        "equal there": int(same[sure].sum()),
    }


def compare_logits(backend: str, device: str) -> list[dict[str, Any]]:
    """Prompt logits of `backend` against the recordings and against the reference, and the reference against the recordings."""
    solo = {who: SoloModel(shipped_checkpoint(), kernels_of(*who), max_tokens=500) for who in ((backend, device), ("cpu_ref", ""))}
    rows = []
    for name in prompts():
        record = load_file(GOLDENS / f"text_{name}.safetensors")
        logits = []
        for model in solo.values():
            model.forget()
            logits.append(
                model.logits(record["input_ids"].tolist())[record["logit_positions"].long().to(model.loaded.kernels.device)].cpu()
            )
        pairs = {f"{backend} against cpu_ref": (logits[1], logits[0])}
        for variant in ("bf16", "f32"):
            if f"logits.{variant}" in record:
                recorded = record[f"logits.{variant}"].float()
                pairs |= {
                    f"{backend} against recorded {variant}": (recorded, logits[0]),
                    f"cpu_ref against recorded {variant}": (recorded, logits[1]),
                }
        rows += [{"prompt": name, "pair": pair, **divergences(*both)} for pair, both in pairs.items()]
    return rows


def compare_forced(backend: str, device: str) -> list[dict[str, Any]]:
    """The best token after each prefix of the recorded greedy continuations, in release numerics, fed in one step and token by token.

    Recordings of quantised arithmetic are compared where they are sure: single rounding flips move logits, so that two independent
    implementations agree on the best token everywhere only at positions whose margin exceeds `SURE`.
    """
    model = SoloModel(shipped_checkpoint(), kernels_of(backend, device), sequences=2, max_tokens=500)
    rows = []
    for name in prompts():
        record = load_file(GOLDENS / f"text_{name}.safetensors")
        for variant in ("f32", "bf16"):
            if f"greedy_ids.{variant}" not in record:
                continue
            want, sure = record[f"greedy_ids.{variant}"].long(), record[f"greedy_margin.{variant}"] > SURE
            ids = record["input_ids"].tolist() + want.tolist()[:-1]
            once = model.logits(ids, 0)[-len(want) :].argmax(-1).cpu()
            stepwise = model.logits(ids, 1, (len(ids) - len(want) + 1, *(1,) * (len(want) - 1)))[-len(want) :].argmax(-1).cpu()
            model.forget(0)
            model.forget(1)
            row = {"prompt": name, "recorded": variant, "positions": len(want), "sure": int(sure.sum())}
            for mode, got in (("one step", once), ("token by token", stepwise)):
                row[f"equal where sure, {mode}"] = int((got == want)[sure].sum())
                row[f"equal, {mode}"] = int((got == want).sum())
            rows.append(row)
    return rows


def compare_ideal(backend: str, device: str) -> list[dict[str, Any]]:
    """Greedy tokens in ideal numerics (float32, no quantiser), where they must equal the recordings: the reference's ops on the device.

    The NVIDIA kernels compute release numerics only; this checks everything around them on the device.
    """
    kernels = ReferenceKernels(torch.device(device or kernels_of(backend, device).device), Numerics.IDEAL)
    model = SoloModel(shipped_checkpoint(), kernels, max_tokens=500)
    rows = []
    for name in prompts():
        record = load_file(GOLDENS / f"text_{name}.safetensors")
        want = record["greedy_ids.f32_noquant"].tolist()
        model.forget()
        got = model.greedy(record["input_ids"].tolist(), len(want))
        rows.append({"prompt": name, "tokens": len(want), "equal": sum(a == b for a, b in zip(got, want, strict=True))})
    return rows


def compare_graphs(backend: str, device: str) -> dict[str, Any]:
    """Greedy tokens with captured graphs against eager steps."""
    ids = list(prompts().values())
    eager, replayed = (greedy_tokens(backend, device, flag, ids) for flag in (True, False))
    return {"sequences": len(ids), "equal": sum(a == b for a, b in zip(eager, replayed, strict=True))}


def compare_batches(backend: str, device: str) -> list[dict[str, Any]]:
    """Logits of prompts alone against the same prompts among others, in the default and in the batch-invariant mode."""

    def differences(invariant: bool) -> tuple[int, float]:
        ids = [prompt for name, prompt in prompts().items() if name in ("p7", "p33", "p150", "p400")]
        model = SoloModel(shipped_checkpoint(), kernels_of(backend, device, invariant), sequences=len(ids), max_tokens=500)
        alone = []
        for i, prompt in enumerate(ids):
            alone.append(model.logits(prompt, i)[-1])
            model.forget(i)
        with torch.inference_mode():
            hidden = model.step(dict(enumerate(ids))).hidden
            ends = torch.tensor([len(prompt) for prompt in ids]).cumsum(0) - 1
            together = model.loaded.model.logits(hidden[ends.to(hidden.device)])
        stacked = torch.stack(alone)
        return int((stacked != together).any(-1).sum()), float((stacked - together).abs().max())

    columns = ("different rows", "largest difference")
    modes = (("default", False), ("batch invariant", True))
    return [dict(zip(columns, differences(invariant), strict=True), mode=mode) for mode, invariant in modes]


COMPARISONS = {
    "compare_forced": "Best token after each prefix of the recorded continuations, release numerics. Sure: recorded margin above 1.",
    "compare_ideal": "Greedy tokens in ideal numerics (the reference's ops on this device) against the recorded float32 tokens.",
    "compare_graphs": "Greedy tokens with graphs against eager steps.",
    "compare_batches": "Last logits of four prompts alone against together.",
    "compare_tokens": "Greedy tokens against cpu_ref; margin: logit of the reference's choice above the backend's at the first difference.",
    "compare_logits": "Logits of the prompts. Sure: margin above 1 in the first of the pair.",
}
"""Every comparison with its caption, the most telling first."""
