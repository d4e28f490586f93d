"""Times every op of the NVIDIA backend at the released model's dimensions, beside ceilings measured in the same run.

    PYTHONPATH=tests/cuda python3 benchmarks/cuda/bench_ops.py [--seconds 400] [--rows 1,8,64,8192] [--ops linear,moe] [--invariant]

Each op is captured in a CUDA graph; `cold` is one replay after the L2 cache was overwritten, `warm` the mean of replays in a row. Writes
$OUT/bench_ops.jsonl as results come, $OUT/bench_ops.md at the end (bench_ops_invariant with --invariant: the batch-invariant mode).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from cuda_checks.cases import Case, all_cases
from cuda_checks.inputs import RELEASED, Inputs
from cuda_checks.precompile import precompile

from deepinfer_backends.cuda_sm100.kernels import CudaKernels

SAMPLED_ROWS = 64


def timed(work: Callable[[], object], flush: torch.Tensor, cold: int = 15, warm: int = 20) -> tuple[float, float]:
    """(cold, warm) microseconds of one call, as a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(cold):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(warm):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * median(times), 1e3 * begin.elapsed_time(end) / warm


def eager_us(work: Callable[[], object], runs: int = 10) -> float:
    """Mean microseconds of `work`, launched `runs` times in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        work()
    start.record()
    for _ in range(runs):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / runs


def ceilings(flush: torch.Tensor) -> dict[str, float]:
    """Copy bandwidth in bytes/s (read and written), bf16 product rate in operations/s."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = eager_us(lambda: target.copy_(source))  # not in a graph: a copy node there runs on a slower engine (2.8 against 4.2 TB/s)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = eager_us(lambda: a @ b)
    empty = torch.zeros(1, device="cuda")
    return {
        "copy": 8 * source.numel() / copy * 1e6,
        "product": 2 * 8192**3 / product * 1e6,
        "empty_us": timed(lambda: empty.zero_(), flush)[0],
    }


def by_kernel(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds on the device of each kernel of one eager call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:40]] = times.get(event.name[:40], 0.0) + event.device_time
    return dict(sorted(times.items(), key=lambda item: -item[1])[:6])


def peers(case: Case, rows: int, flush: torch.Tensor) -> dict[str, float]:
    """Microseconds (cold) of what a user would call instead."""
    inputs = Inputs("cuda:0")
    g = RELEASED
    sizes = {"wq_a+wkv": (g.q_lora + g.head_dim, g.hidden), "wq_b": (g.heads * g.head_dim, g.q_lora), "wo_b": (g.hidden, 8192)}
    if case.op == "quantized_linear":
        n, k = sizes[case.note]
        x, w = inputs.bf16(rows, k), inputs.bf16(n, k)
        return {"cuBLAS bf16": timed(lambda: x @ w.t(), flush)[0]}
    if case.op == "select_entries" and case.note.startswith("context"):
        scores = inputs.f32(rows, 8192)
        return {"torch.topk alone": timed(lambda: scores.topk(g.index_topk, 1), flush)[0]}
    if case.op == "rms_norm":
        x, w = inputs.bf16(rows, g.hidden), inputs.bf16(g.hidden)
        return {"torch rms_norm": timed(lambda: torch.nn.functional.rms_norm(x, (g.hidden,), w), flush)[0]}
    return {}


def measure(
    case: Case, rows: int, kernels: CudaKernels, flush: torch.Tensor, limits: dict[str, float], profiled: bool
) -> dict[str, object]:
    entry: dict[str, object] = {"op": case.op, "note": case.note, "rows": rows}
    try:
        state = case.prepare(kernels)
        cold, warm = timed(lambda: case.run(kernels, state), flush)
        entry |= {
            "cold_us": cold,
            "warm_us": warm,
            "bandwidth_share": case.traffic / cold * 1e6 / limits["copy"],
            "product_share": case.operations / cold * 1e6 / limits["product"],
            "peers": peers(case, rows, flush),
            "kernels": by_kernel(lambda: case.run(kernels, state)) if profiled else {},
        }
    except Exception as failure:  # noqa: BLE001 - one op that fails must not hide the others
        entry["failure"] = f"{type(failure).__name__}: {str(failure)[:300]}"
    return entry


def line(entry: dict[str, object]) -> str:
    label = f"{entry['op']} {entry['note']}".strip()
    if "failure" in entry:
        return f"| {entry['rows']} | {label} | {entry['failure']} | | | | | |"
    peers_text = ", ".join(f"{name} {us:.1f}" for name, us in entry["peers"].items())  # type: ignore[union-attr, attr-defined]
    parts = "; ".join(f"{name} {us:.0f}" for name, us in entry["kernels"].items())  # type: ignore[union-attr, attr-defined]
    return (
        f"| {entry['rows']} | {label} | {entry['cold_us']:.1f} | {entry['warm_us']:.1f} | {entry['bandwidth_share']:.0%} | "
        f"{entry['product_share']:.0%} | {peers_text} | {parts} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--rows", default="1,8,64,8192")
    parser.add_argument("--ops", default="", help="ops whose name contains one of these words")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="also the time of each kernel of an op")
    options = parser.parse_args()
    start, out = time.monotonic(), Path(os.environ.get("OUT", "."))
    rows, wanted = [int(r) for r in options.rows.split(",")], options.ops.split(",")
    print(f"{precompile(tuple(('released', r) for r in rows))} kernels compiled after {time.monotonic() - start:.0f} s", flush=True)
    device = torch.device("cuda:0")
    kernels, flush = CudaKernels(device, batch_invariant=options.invariant), torch.empty(1 << 28, dtype=torch.uint8, device=device)
    limits = ceilings(flush)
    name = "bench_ops_invariant" if options.invariant else "bench_ops"
    head = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {limits['copy'] / 1e12:.2f} TB/s, bf16 product "
        f"{limits['product'] / 1e12:.0f} TFLOP/s, one empty graph {limits['empty_us']:.1f} us\n\n"
        "| rows | op | cold us | warm us | of copy | of product | peers, cold us | kernels, us |\n" + "| --- " * 8 + "|"
    )
    print(head, flush=True)
    lines = [head]
    with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps(limits) + "\n")
        for count in rows:
            for case in all_cases(RELEASED, Inputs(device, seed=count), min(count, 8192), 8192):
                late = time.monotonic() - start > options.seconds
                if (
                    late
                    or not any(word in case.op for word in wanted)
                    or (count > SAMPLED_ROWS and case.op in ("log_probs", "verify", "sample", "markov_logits"))
                ):
                    continue
                entry = measure(case, count, kernels, flush, limits, options.kernels)
                file.write(json.dumps(entry) + "\n")
                file.flush()
                lines.append(line(entry))
                print(lines[-1], flush=True)
            torch.cuda.empty_cache()
    (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
