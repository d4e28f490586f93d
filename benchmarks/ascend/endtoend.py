"""A model through a backend from end to end: golden tokens by the engine, and the time of prefill and decode at released dimensions.

    python benchmarks/ascend/endtoend.py RESULT.json [--layers N] [--emulate]

Tokens: the small checkpoint that ships with the package, greedy, against the CPU reference in the same process. Times: the released
geometry with random weights and its first N layers, without Engram tables, one packed step at a time and without graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.backend.base import Backend
from deepinfer_core.backend.registry import Found, discover
from deepinfer_core.checkpoint.geometries import raw_geometry
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.synthetic import DummyCheckpoint
from deepinfer_core.conformance.solo import SoloModel

PROMPTS = 8  # of different lengths
NEW_TOKENS = 16
REPEATS = 5


def golden_tokens(backend: str) -> dict[str, Any]:
    """Greedy tokens of `backend` beside those of cpu_ref, for prompts of 1 to 120 random tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 500, (1 + 17 * i,), generator=generator).tolist() for i in range(PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens, seconds = {}, {}
    for name in (backend, "cpu_ref"):
        with LLM(backend=name, max_model_len=512) as llm:
            started = time.perf_counter()
            tokens[name] = [output.token_ids for output in llm.generate(prompts, params, progress=False)]
            seconds[name] = time.perf_counter() - started
    same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(tokens[backend], tokens["cpu_ref"], strict=True)]
    return {"backend": backend, "tokens": NEW_TOKENS, "equal to cpu_ref, by prompt": same, "seconds": seconds}


def times(backend: Backend, geometry: str, layers: int, prefill: int, batches: tuple[int, ...]) -> dict[str, Any]:
    """Median seconds of a prefill of `prefill` tokens, and of a decode step of each batch size after it."""
    raw = raw_geometry(geometry, layers=layers)
    raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    source = DummyCheckpoint(ModelConfig.parse(raw, where=geometry))
    runtime = backend.runtime("")
    model = SoloModel(source, backend.kernels(""), sequences=max(batches), max_tokens=prefill + 64, tokenizer_path=Path())
    vocabulary = source.config.text_config.vocab_size
    prompt = (torch.arange(prefill) * 7919 % vocabulary).tolist()

    def seconds(new: dict[int, Sequence[int]]) -> float:
        runtime.synchronize()
        started = time.perf_counter()
        model.loaded.model.logits(model.step(new).hidden[-len(new) :])
        runtime.synchronize()
        return time.perf_counter() - started

    prefills = []
    for sequence in range(max(batches)):
        prefills.append(seconds({sequence: prompt}))
    decodes = {b: statistics.median(seconds({i: [5] for i in range(b)}) for _ in range(REPEATS)) for b in batches}
    runtime.close()
    first, rest = prefills[0], prefills[1:] or prefills
    return {
        "geometry": geometry,
        "layers": layers,
        "prefill tokens": prefill,
        "first prefill, warm-up included (s)": first,
        "prefill (s)": statistics.median(rest),
        "decode step by batch (s)": decodes,
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line. Status 0 once everything ran: after a rounding flip, tokens of long prompts may differ, so a person judges them."""
    parser = argparse.ArgumentParser(prog="endtoend", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path, help="file for the result (JSON)")
    parser.add_argument("--layers", type=int, default=6, help="layers of the released geometry (default 6: 43 GB of experts)")
    parser.add_argument("--emulate", action="store_true", help="CPU emulation and a small geometry: a rehearsal")
    options = parser.parse_args(arguments)
    backend = _chosen(options.emulate)
    shape = ("small", 8, 40, (1, 2)) if options.emulate else ("flash", options.layers, 2048, (1, 8, 32))
    result: dict[str, Any] = {"golden": golden_tokens(backend.name)}
    options.result.write_text(json.dumps(result, indent=1))  # kept if the timing fails
    result["times"] = times(backend, *shape)
    options.result.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return 0


def _chosen(emulate: bool) -> Backend:
    """The backend. The emulated one is put into this process's registry, where the engine finds it by name."""
    registry = discover()
    found = registry.find("ascend950")
    backend = found.backend()
    if not emulate:
        return backend
    emulated = backend.emulated()
    assert emulated is not None
    registry.backends[emulated.name] = Found(type(emulated), found.origin)
    return emulated


if __name__ == "__main__":
    sys.exit(main())
