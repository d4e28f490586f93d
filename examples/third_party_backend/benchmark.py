"""Times every native op of `cpu_simd` against the reference, both in one run: `python -P benchmark.py [--ops PATTERN] [--threads N]`.

Sizes: `small`, the decode step of the checkpoint that ships with the core; `decode-1`, `decode-64` and `prefill-256`, the released
model's dimensions. Inputs are the conformance suite's. A time is the best of at least five calls, the two backends in turn: what else
runs on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections.abc import Callable
from typing import Any

import torch

from deepinfer_core.backend import Numerics
from deepinfer_core.backend.ops import op_table
from deepinfer_core.backend.registry import discover
from deepinfer_core.conformance.describe import Geometry, OpDescription, descriptions

SECONDS = 0.5  # for one op at one size and backend, unless five calls take longer

# Dimensions of one decode step of the shipped checkpoint (its config.json), where the suite's small geometries differ from it.
SMALL: dict[str, dict[str, Any]] = {
    "attention_output": {"heads": 4, "dim": 64, "groups": 2, "rank": 32, "hidden": 128},
    "compress": {"dim": 64, "ring": 9},
    "engram_gather": {"columns": 6, "channels": 32},
    "engram_hash": {"heads": 2},
    "index_query": {"heads": 2, "dim": 32},
    "linear": {"dim": 128, "outs": (64, 64)},
    "moe": {"dim": 128, "inner": 64, "experts": 8, "top_k": 2},
    "moe_gate": {"dim": 128, "experts": 8, "top_k": 2},
    "quantized_linear": {"dim": 128, "outs": (64, 64)},
    "select_entries": {"heads": 2, "dim": 32, "topk": 8, "counts": (40,), "first_visible": 40, "entries": 8},
    "sparse_attention": {"dim": 64, "heads": 4, "ring": 14, "columns": 8, "topk": 8, "counts": (40,), "entries": 8},
    "store_entries": {"dim": 64},
    "store_index_keys": {"dim": 32},
    "store_window": {"dim": 64},
    "window_key": {"dim": 64},
}
LARGE = {"moe": {"experts": 24}}  # enough experts to choose from; 384 of the released size fill 13 GB


def sizes(description: OpDescription) -> dict[str, dict[str, Any]]:
    """Dimensions by name."""
    decode = dict(description.presets["decode-1"]) | LARGE.get(description.op, {})
    small = decode | SMALL.get(description.op, {"dim": 128})
    if "rd" in small:
        small["rd"] = 16
    return {"small": small, "decode-1": decode, "decode-64": decode | {"rows": 64}, "prefill-256": decode | {"rows": 256}}


def times(calls: list[Callable[[], Any]]) -> list[float]:
    """Least seconds of each call."""
    taken: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    started = time.perf_counter()
    while len(taken[0]) < 5 or (time.perf_counter() - started < SECONDS * len(calls) and len(taken[0]) < 2000):
        for call, mine in zip(calls, taken, strict=True):
            begun = time.perf_counter()
            call()
            mine.append(time.perf_counter() - begun)
    return [min(mine) for mine in taken]


def timed_call(description: OpDescription, kernels: Any, dims: dict[str, Any]) -> Callable[[], Any]:
    """The op on inputs of its own, set-up done."""
    inputs = description.inputs(Geometry("benchmark", dims), Numerics.RELEASE, 0)
    if description.prepare is not None:
        return description.prepare(kernels, inputs)
    return lambda: description.run(kernels, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="*", help="shell pattern")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", default="*", help="shell pattern")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    registry = discover()
    ours, reference = (registry.find(name).backend() for name in ("cpu_simd", "cpu_ref"))
    kernels = [backend.kernels("") for backend in (ours, reference)]
    native = [o.op for o in op_table(type(kernels[0]), type(ours), registry) if o.status == "native" and not o.op.startswith("prepare")]
    print(f"torch {torch.__version__}, {options.threads} threads, release numerics\n")
    print(f"{'op':20}{'size':13}{'cpu_simd us':>13}{'cpu_ref us':>13}{'speed-up':>10}")
    for op in fnmatch.filter(native, options.ops):
        for size, dims in sizes(descriptions()[op]).items():
            if not fnmatch.fnmatchcase(size, options.sizes):
                continue
            with torch.no_grad():
                mine, theirs = times([timed_call(descriptions()[op], k, dims) for k in kernels])
            print(f"{op:20}{size:13}{mine * 1e6:13.1f}{theirs * 1e6:13.1f}{theirs / mine:9.1f}x", flush=True)


if __name__ == "__main__":
    main()
