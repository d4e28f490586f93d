"""Runs every case in the interpreter and writes the errors: `python -m cuda_checks.interpret OUT.json LAYOUT ROWS [OP]`.

TRITON_INTERPRET=1 must be set.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings

import torch

from cuda_checks.cases import Case, Results, all_cases, error
from cuda_checks.inputs import SMALL, Inputs
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cuda_sm100 import prefill, routing
from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_core.backend.kernels import Kernels


def _counted_apart(case: Case) -> Case:
    """The case with the plan of a large step, which two launches make."""

    def run(kernels: Kernels, prepared: object) -> Results:
        usual, routing._MANY_PAIRS = routing._MANY_PAIRS, 0
        try:
            return case.run(kernels, prepared)
        finally:
            routing._MANY_PAIRS = usual

    return dataclasses.replace(case, run=run, note=f"{case.note} counted apart")


def _expanded(case: Case) -> Case:
    """The case on attention's way for many rows."""

    def run(kernels: Kernels, prepared: object) -> Results:
        usual = prefill.PREFILL_ROWS, prefill.KEYS_PER_ROW
        prefill.PREFILL_ROWS, prefill.KEYS_PER_ROW = 1, 1 << 30
        try:
            return case.run(kernels, prepared)
        finally:
            prefill.PREFILL_ROWS, prefill.KEYS_PER_ROW = usual

    return dataclasses.replace(case, run=run, note=f"{case.note} expanded")


_OTHER_WAYS = {"moe": _counted_apart, "sparse_attention": _expanded}


def report(layout: int, rows: int, op: str = "") -> list[dict[str, object]]:
    device = torch.device("cpu")
    mine, reference = CudaKernels(device), ReferenceKernels(device)
    mine._arch = layout
    entries: list[dict[str, object]] = []
    cases = [case for case in all_cases(SMALL, Inputs(device, seed=rows), rows, context=96) if op in case.op]
    for case in (*cases, *(_OTHER_WAYS[case.op](case) for case in cases if case.op in _OTHER_WAYS)):
        # Nothing to compare in zero rows: the call must return, and the results be empty.
        want = case.run(reference, case.prepare(reference)) if rows else {}
        start = time.perf_counter()
        got = case.run(mine, case.prepare(mine))
        seconds = round(time.perf_counter() - start, 3)
        for name in want or got or {"-": None}:
            value = error(got[name], want[name]) if want else 0.0
            entry = {"op": case.op, "note": case.note, "rows": rows, "name": name, "error": value, "bound": case.bound, "seconds": seconds}
            entries.append(entry)
    return entries


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # masked lanes overflow; numpy says so, a GPU does not
    out, layout, rows, *op = sys.argv[1:]
    result = report(int(layout), int(rows), *op)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
