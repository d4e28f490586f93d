"""Checks the NVIDIA backend on a GPU: every op against the PyTorch reference, batch invariance, the runtime.

    PYTHONPATH=tests/cuda python3 tests/cuda/device_check.py [--seconds 500] [--rows 1,8,64,300] [--ops store,attention] [--name FILE]

--ops: ops whose name contains one of these words, and nothing else: for `compute-sanitizer --tool memcheck python3 ...`.
Writes $OUT/device_check.jsonl as results come (default: the current folder) and prints a summary. Needs no pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_checks.cases import Case, all_cases, error, moe_cases
from cuda_checks.inputs import RELEASED, SMALL, Geometry, Inputs
from cuda_checks.invariance import invariance_problems
from cuda_checks.precompile import precompile

from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_backends.cuda_sm100.runtime import CudaRuntime

LARGE_ROWS = 7000
SAMPLED_ROWS = 64  # rows up to which ops over the vocabulary are compared: the reference sorts it


class Report:
    """Results, written at once."""

    def __init__(self, path: Path, deadline: float) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.deadline = deadline
        self.failures: list[str] = []
        self.passed = 0
        self.left_out = 0

    def add(self, label: str, problem: str, **details: object) -> None:
        if problem:
            self.failures.append(f"{label}: {problem}")
            print(f"FAIL {label}: {problem}", flush=True)
        else:
            self.passed += 1
        self._file.write(json.dumps({"label": label, "problem": problem, **details}) + "\n")
        self._file.flush()

    def late(self) -> bool:
        return time.monotonic() > self.deadline


def compared(case: Case, mine: CudaKernels, reference: ReferenceKernels) -> tuple[float, str]:
    """(worst error ÷ bound or error, problem) of one case."""
    want = case.run(reference, case.prepare(reference))
    got = case.run(mine, case.prepare(mine))
    torch.cuda.synchronize()
    worst, problem = 0.0, ""
    for name, value in want.items():
        size = error(got[name], value)
        worst = max(worst, size)
        if not size <= case.bound:
            problem = f"{name} has error {size:.3g}, bound {case.bound:.3g}"
    return worst, problem


def check_ops(report: Report, label: str, geometry: Geometry, rows: int, context: int, wanted: list[str], invariant: bool) -> None:
    device = torch.device("cuda:0")
    mine, reference = CudaKernels(device, batch_invariant=invariant), ReferenceKernels(device)
    mode = " invariant" if invariant else ""
    for case in all_cases(geometry, Inputs(device, seed=rows), rows, context):
        name = f"{label} {case.op}({case.note}) rows={rows}{mode}"
        sampling = case.op in ("log_probs", "verify", "sample", "markov_logits")
        if not any(word in case.op for word in wanted) or (rows > SAMPLED_ROWS and sampling):
            continue
        if report.late():
            report.left_out += 1
            continue
        start = time.perf_counter()
        try:
            worst, problem = compared(case, mine, reference)
        except Exception as failure:
            worst, problem = float("inf"), f"{type(failure).__name__}: {str(failure)[:400]}"
            if "CUDA error" in problem or "illegal" in problem:
                report.add(name, problem, trace=traceback.format_exc()[-2000:])
                raise
        report.add(name, problem, error=worst, bound=case.bound, seconds=round(time.perf_counter() - start, 3))


def check_large_step(report: Report) -> None:
    """Experts of a step that the grouped products take, some of them with more rows than a wide product has.

    Without the gate: among so many rows two experts nearly tie for the last place, and either may win. The suite judges that, with
    intervals.
    """
    device = torch.device("cuda:0")
    mine, reference = CudaKernels(device), ReferenceKernels(device)
    for case in moe_cases(RELEASED, Inputs(device, seed=1), LARGE_ROWS):
        if case.op == "moe_gate":
            continue
        worst, problem = compared(case, mine, reference)
        report.add(f"released {case.op}({case.note}) rows={LARGE_ROWS}", problem, error=worst, bound=case.bound)
    torch.cuda.empty_cache()


def check_runtime(report: Report) -> None:
    import numpy as np

    from deepinfer_core.errors import EngineError

    runtime = CudaRuntime()
    array = np.arange(1000, dtype=np.int32)
    there = runtime.to_device(array)
    array[:] = 0
    back = runtime.to_host({"x": there}).wait()["x"]
    report.add("runtime copies", "" if (back == np.arange(1000)).all() else "values differ")
    buffer, result = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def work() -> None:
        result.copy_(buffer * 2)

    graph = runtime.capture(work)
    buffer.fill_(3)
    graph.replay()
    runtime.synchronize()
    report.add("runtime graph replay", "" if (result == 6).all() else f"got {result.tolist()}")
    problem = "nothing was raised"
    try:
        with runtime.forbid_sync():
            there.sum().item()
    except (RuntimeError, EngineError):
        problem = ""
    report.add("runtime forbid_sync", problem)
    memory = runtime.memory()
    report.add("runtime memory", "" if 0 < memory.available <= memory.total else str(memory), memory=str(memory))


def guarded(report: Report, label: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as failure:  # noqa: BLE001 - the summary must come
        report.add(label, f"{type(failure).__name__}: {str(failure)[:400]}", trace=traceback.format_exc()[-3000:])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--rows", default="1,8,64,300")
    parser.add_argument("--ops", default="")
    parser.add_argument("--name", default="device_check")
    parser.add_argument("--compiled", action="store_true", help="do not compile ahead: an earlier run left the kernels in Triton's cache")
    options = parser.parse_args()
    wanted = options.ops.split(",")
    start = time.monotonic()
    out = Path(os.environ.get("OUT", "."))
    report = Report(out / f"{options.name}.jsonl", start + options.seconds)
    rows = [int(r) for r in options.rows.split(",")]
    plan = (*(("released", r) for r in rows), *(("small", r) for r in (1, 19, 300)))
    count = 0 if options.compiled else precompile(plan)
    print(f"{count} kernels compiled after {time.monotonic() - start:.0f} s", flush=True)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    if not options.ops:
        guarded(report, "runtime", lambda: check_runtime(report))
    for count in (1, 19, 300):
        guarded(report, "small", lambda count=count: check_ops(report, "small", SMALL, count, 96, wanted, False))
    print(f"small sizes done after {time.monotonic() - start:.0f} s", flush=True)
    for count in rows:
        guarded(report, "released", lambda count=count: check_ops(report, "released", RELEASED, count, 8192, wanted, False))
        print(f"released sizes, {count} rows, done after {time.monotonic() - start:.0f} s", flush=True)
        torch.cuda.empty_cache()
    if (not options.ops or "moe" in wanted) and not report.late():
        guarded(report, "large step", lambda: check_large_step(report))
    if not options.ops:
        guarded(report, "invariance", lambda: [report.add(f"invariance {op}", problem) for op, problem in invariance_problems()] and None)
    guarded(report, "invariant mode", lambda: check_ops(report, "released", RELEASED, 64, 8192, wanted, True))
    seconds = time.monotonic() - start
    print(f"{report.passed} passed, {len(report.failures)} failed, {report.left_out} left out for time, {seconds:.0f} s")
    for failure in report.failures:
        print("  " + failure[:300])
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
