"""Times alternatives of tile sizes, pipeline depths and splits for the kernels that carry a step.

    PYTHONPATH=tests/cuda python3 benchmarks/cuda/tune.py [--seconds 300] [--rows 1,8,64,8192] [--ops moe,quantized_linear]

Prints microseconds (cold and warm) of each alternative; the shipped choice comes first. Nothing here changes the package.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_ops import timed
from cuda_checks.cases import Case, attention_cases, hyper_cases, index_cases, linear_cases, moe_cases
from cuda_checks.inputs import RELEASED, Inputs

from deepinfer_backends.cuda_sm100 import attention, experts, hyper, indexer, linears, prefill
from deepinfer_backends.cuda_sm100.kernels import CudaKernels

Alternative = tuple[str, list[tuple[Any, str, Any]], dict[str, dict[str, int]]]
"""(label, attributes to set, launch options by kernel name)."""


@contextlib.contextmanager
def applied(alternative: Alternative) -> Iterator[None]:
    """Sets attributes and launch options, and puts everything back."""
    _, attributes, options = alternative
    undo = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    modules = (attention, experts, hyper, indexer, linears, prefill)
    plain = {module: module.launch for module in modules}

    def changed(original: Callable[..., None]) -> Callable[..., None]:
        def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
            original(kernel, grid, *args, **{**kwargs, **options.get(kernel.__name__, {})})

        return launch

    for owner, name, value in attributes:
        setattr(owner, name, value)
    for module, original in plain.items():
        module.launch = changed(original)
    try:
        yield
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)
        for module, original in plain.items():
            module.launch = original


def moe_alternatives(rows: int) -> Iterator[Alternative]:
    yield "shipped", [], {}
    for n, stages, warps in itertools.product((64, 128), (2, 3, 4, 5), (4, 8)):
        if n == 64 and warps == 8:
            continue
        both = {"stages": stages, "warps": warps}
        patch = [(experts.ExpertOps, "_block_n", lambda self, r, n=n: n)]
        yield f"N={n} stages={stages} warps={warps}", patch, {"_up_kernel": both, "_down_kernel": both}
    if rows >= 1024:
        for r, stages in itertools.product((64, 128, 256), (2, 3)):
            patch = [(experts, "tile_rows", lambda *_, r=r: r)]
            both = {"stages": stages, "warps": 8}
            yield f"R={r} stages={stages} warps=8", patch, {"_up_kernel": both, "_down_kernel": both}


def linear_alternatives(rows: int) -> Iterator[Alternative]:
    yield "shipped", [], {}
    for programs, stages in itertools.product((132, 264, 396, 528), (3, 4, 5, 6)):
        yield f"programs={programs} stages={stages}", [(linears, "_PROGRAMS", programs)], {"_linear_kernel": {"stages": stages}}
    if rows >= 64:
        yield "own kernel instead of cuBLAS", [(linears, "LIBRARY_ROWS", 1 << 30)], {}
        yield "cuBLAS", [(linears, "LIBRARY_ROWS", 1)], {}


def attention_alternatives(rows: int) -> Iterator[Alternative]:
    yield "shipped", [], {}
    if rows < 256:
        for programs in (66, 132, 264):
            yield f"programs={programs}", [(attention, "_PROGRAMS", programs)], {}


def select_alternatives(rows: int) -> Iterator[Alternative]:
    yield "shipped", [], {}
    for warps, part in itertools.product((4, 8, 16), (4096, 8192, 16384)):
        yield f"select warps={warps} part={part}", [(indexer, "_PART", part)], {"_select_kernel": {"warps": warps}}
    for warps in (4, 8):
        yield f"score warps={warps}", [], {"_score_kernel": {"warps": warps}}


def hyper_alternatives(rows: int) -> Iterator[Alternative]:
    yield "shipped", [], {}
    for channels, warps in itertools.product((32, 64, 128), (4, 8)):
        yield f"channels={channels} warps={warps}", [(hyper, "_CHANNELS", channels)], {"_mix_kernel": {"warps": warps}}


GROUPS: dict[str, tuple[Callable[[Inputs, int], list[Case]], Callable[[int], Iterator[Alternative]]]] = {
    "moe": (lambda i, rows: moe_cases(RELEASED, i, rows), moe_alternatives),
    "quantized_linear": (lambda i, rows: linear_cases(RELEASED, i, rows), linear_alternatives),
    "sparse_attention": (lambda i, rows: attention_cases(RELEASED, i, rows), attention_alternatives),
    "select_entries": (lambda i, rows: index_cases(RELEASED, i, rows, 8192), select_alternatives),
    "hc_pre": (lambda i, rows: hyper_cases(RELEASED, i, rows), hyper_alternatives),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rows", default="1,8,64,8192")
    parser.add_argument("--ops", default=",".join(GROUPS))
    options = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cuda:0")
    kernels, flush = CudaKernels(device), torch.empty(1 << 28, dtype=torch.uint8, device=device)
    with (Path(os.environ.get("OUT", ".")) / "tune.txt").open("w", encoding="utf-8") as file:
        for op, rows in itertools.product(options.ops.split(","), map(int, options.rows.split(","))):
            make, alternatives = GROUPS[op]
            for case in [c for c in make(Inputs(device, seed=rows), rows) if c.op == op][:3]:
                state = case.prepare(kernels)
                for alternative in alternatives(rows):
                    if time.monotonic() - start > options.seconds:
                        return
                    try:
                        with applied(alternative):
                            cold, warm = timed(lambda case=case, state=state: case.run(kernels, state), flush, cold=9, warm=10)
                        text = f"{cold:9.1f} {warm:9.1f}"
                    except Exception as failure:  # noqa: BLE001 - an alternative that does not fit is an answer
                        text = f"{type(failure).__name__}: {str(failure)[:80]}"
                    print(f"{op:17} {case.note:22} rows={rows:<5} {alternative[0]:34} {text}", file=file, flush=True)
                    print(f"{op:17} {case.note:22} rows={rows:<5} {alternative[0]:34} {text}", flush=True)


if __name__ == "__main__":
    main()
