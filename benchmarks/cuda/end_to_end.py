"""Decode and prefill of the released dimensions through the engine, profiles, and the shipped checkpoint against its recordings.

    python benchmarks/cuda/end_to_end.py [--layers 18] [--batches 1,8,32,128] [--context 8192] [--seconds 420] [--parts golden,…]

On a machine without a GPU the same code runs small: --geometry tiny --backend cpu_ref --device cpu. Every part is written to
$OUT/NAME.{json,md} (default: the current folder, NAME end_to_end) as soon as it is done; a part that fails leaves its traceback there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import golden_on_device
import torch
from driving import admit, distinct_experts, fill_caches, leave, recorded_routing, timed_prefill, timed_steps
from profiling import Profile, profiled
from released_model import Shape, build
from result_page import page
from torch import Tensor
from traffic import Traffic, bound_ms

from deepinfer_core.engine.engine import Engine

PARTS = ("ceilings", "decode", "prefill", "profile", "golden")


class Run:
    """One run: options, the engine, results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(os.environ.get("OUT", "."))
        self.deadline = time.monotonic() + options.seconds
        self.batches = [int(batch) for batch in options.batches.split(",")]
        self.results: dict[str, Any] = {"machine": machine(), "options": vars(options), "errors": {}}
        self.profiles: list[Profile] = []
        self.engine: Engine | None = None
        self.traffic: Traffic | None = None
        self.routed: dict[int, list[Tensor]] = {}  # by batch: the expert ids of each layer, which every replay of its graph writes anew

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """Runs one part if there is time, keeps its result or its traceback, and writes everything."""
        begin = time.monotonic()
        if begin > self.deadline:
            self.results["errors"][name] = "left out: no time"
        else:
            try:
                self.results[name] = work()
            except Exception:  # noqa: BLE001 the other parts still run; the traceback is in the results
                self.results["errors"][name] = traceback.format_exc()
                print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        self.results.setdefault("seconds", {})[name] = round(time.monotonic() - begin, 1)
        print(f"[{name}: {time.monotonic() - begin:.1f} s] {json.dumps(self.results.get(name), default=str)[:1500]}", flush=True)
        self.write()

    def write(self) -> None:
        """The files, as far as results go."""
        (self.out / f"{self.options.name}.json").write_text(json.dumps(self.results, indent=1, default=str), encoding="utf-8")
        (self.out / f"{self.options.name}.md").write_text(page(self.results, self.profiles), encoding="utf-8")

    # ------------------------------------------------------------------ parts

    def build(self) -> dict[str, Any]:
        o = self.options
        shape = Shape(o.geometry, o.layers, context=o.context, batch=max(self.batches), share_experts=not o.own_experts)
        parts, memory = build(shape, o.backend, o.device)
        self.engine = Engine(parts)
        self.traffic = Traffic(parts.model_config, parts.loaded.layout)
        fill_caches(self.engine, o.context)
        text = parts.model_config.text_config
        return {
            "layers": text.num_hidden_layers,
            "compress_ratios": list(text.compress_ratios[: text.num_hidden_layers]),
            "routed experts shared by all layers": shape.share_experts,
            "engram_num_embeddings": list(text.engram_num_embeddings),
            "bytes": memory,
        }

    def capture(self) -> dict[str, Any]:
        engine = self.ready()
        claims = engine.parts.selected.backend.capabilities()
        if not claims.graph_capture and not self.options.pretend_graphs:
            return {"captured": False}
        engine.runner.use_graphs(sorted(self.batches), engine.parts.limits.max_positions)
        with recorded_routing(engine) as seen:
            failed = engine.runner.capture(lambda size: print(f"graph of {size} rows", flush=True))
        layers = engine.parts.model_config.text_config.num_hidden_layers
        self.routed = {size: [r.ids for r in seen if len(r.ids) == size][-layers:] for size in self.batches}
        return {"captured": True, "failed": failed}

    def decode(self, batch: int) -> dict[str, Any]:
        """With graphs, then without."""
        engine, o = self.ready(), self.options
        graphs = engine.runner.graphs
        ids = admit(engine, batch, o.context, o.temperature, f"decode-{batch}")
        row: dict[str, Any] = {"batch": batch}
        try:
            if graphs is not None:
                row |= self.figures(batch, "graph", *timed_steps(engine, o.steps))
                row["distinct experts"] = distinct_experts(self.routed[batch])
                self.results[f"decode {batch}"] = row
                self.write()
            engine.runner.graphs = None
            row |= self.figures(batch, "eager", *timed_steps(engine, o.eager_steps))
            with recorded_routing(engine) as seen:
                self.one_step(engine)
            row["distinct experts, eager"] = distinct_experts([routing.ids for routing in seen])
            row.setdefault("distinct experts", row["distinct experts, eager"])
            assert self.traffic is not None
            context = o.context + batch // 2 + o.steps
            nbytes = self.traffic.decode_bytes(batch, context, row["distinct experts"])
            row["GB"] = nbytes / 1e9
            row["bound ms"] = bound_ms(nbytes, self.traffic.operations(batch, context, batch), self.ceilings())
            row["bound ms, even routing"] = bound_ms(
                self.traffic.decode_bytes(batch, context), self.traffic.operations(batch, context, batch), self.ceilings()
            )
        finally:
            engine.runner.graphs = graphs
            row["failures"] = leave(engine, ids)
        return row

    def figures(self, batch: int, mode: str, intervals: list[float], device: list[float]) -> dict[str, float]:
        """Median step times of one mode, and tokens per second."""
        ms = median(intervals)
        return {
            f"{mode} ms": ms,
            f"{mode} device ms": median(device),
            f"{mode} fastest ms": min(intervals),
            f"{mode} tokens/s": 1e3 * batch / ms,
        }

    def prefill(self) -> dict[str, Any]:
        engine, tokens = self.ready(), self.options.context
        assert self.traffic is not None
        timed_prefill(engine, tokens, 7)
        runs = [timed_prefill(engine, tokens, seed) for seed in (8, 9, 10)]
        seconds, device = median(run[0] for run in runs), median(run[1] for run in runs) / 1e3
        operations = self.traffic.operations(tokens, tokens / 2, 1)
        return {
            "tokens": tokens,
            "seconds": seconds,
            "device seconds": device,
            "tokens/s": tokens / seconds,
            "TFLOP/s": operations / device / 1e12,
            "fraction of the product rate": operations / device / self.ceilings()["product"],
            "operations per token": operations / tokens,
        }

    def profile(self, batch: int, with_graphs: bool) -> dict[str, Any]:
        engine, o = self.ready(), self.options
        graphs = engine.runner.graphs
        if with_graphs and graphs is None:
            return {}
        ids = admit(engine, batch, o.context, o.temperature, f"profile-{batch}-{with_graphs}")
        try:
            engine.runner.graphs = graphs if with_graphs else None
            timed_steps(engine, 2)
            title = f"One decode step, batch {batch}, {'graph' if with_graphs else 'eager'}"
            found = profiled(title, engine.parts.kernels.device, lambda: self.one_step(engine))
        finally:
            engine.runner.graphs = graphs
            leave(engine, ids)
        self.profiles.append(found)
        return found.record()

    def profile_prefill(self) -> dict[str, Any]:
        engine, tokens = self.ready(), self.options.context
        found = profiled(f"Prefill of {tokens} tokens", engine.parts.kernels.device, lambda: timed_prefill(engine, tokens, 11) and None)
        self.profiles.append(found)
        return found.record()

    def one_step(self, engine: Engine) -> None:
        """One whole step, waited for."""
        engine.step()
        engine.settle()
        engine.parts.runtime.synchronize()

    def ready(self) -> Engine:
        """The engine, a new one if the last part broke it. Raises if there are no parts to build it from."""
        if self.engine is None:
            raise RuntimeError("no engine: see the error of part 'build'")
        if self.engine.failure is not None:
            captured = self.engine.runner.graphs is not None
            self.engine = Engine(self.engine.parts)
            if captured:
                self.capture()
        return self.engine

    def ceilings(self) -> dict[str, float]:
        """Rates measured in this run."""
        return self.results.get("ceilings") or {"copy": float("nan"), "product": float("nan")}


def driver_version() -> str:
    """As nvidia-smi prints it; empty if it cannot be asked."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": os.cpu_count(),
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": driver_version(),
        }
    return found


def ceilings(device: torch.device, small: bool) -> dict[str, float]:
    """Copy bandwidth (bytes read and written per second) and bf16 matrix product rate (operations per second), on random data."""
    size, side = (1 << 22, 256) if small else (1 << 32, 8192)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    copy, product = (median(_seconds(device, work)) for work in (lambda: target.copy_(source), lambda: a @ b))
    return {"copy": 2 * size / copy, "product": 2 * side**3 / product}


def _seconds(device: torch.device, work: Callable[[], Any], runs: int = 12) -> list[float]:
    times = []
    for _ in range(runs):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return times[2:]


def main() -> None:
    """Runs the parts that were asked for, the most important first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", choices=("flash", "tiny"), default="flash")
    parser.add_argument("--layers", type=int, default=18, help="of the released dimensions; 40 is the whole model (with shared experts)")
    parser.add_argument("--backend", default="cuda_sm100")
    parser.add_argument("--device", default="")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40, help="measured decode steps with graphs")
    parser.add_argument("--eager-steps", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--own-experts", action="store_true", help="every layer has its own routed experts")
    parser.add_argument("--pretend-graphs", action="store_true", help="use graph buckets on a backend that does not capture")
    parser.add_argument("--seconds", type=float, default=420, help="no part begins later than this")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--name", default="end_to_end", help="of the files")
    logging.basicConfig(level=logging.WARNING)
    run = Run(parser.parse_args())
    o, wanted = run.options, set(run.options.parts.split(","))
    device = torch.device(o.device or "cuda:0")
    if "ceilings" in wanted:
        run.part("ceilings", lambda: ceilings(device, o.geometry == "tiny"))
    if wanted & {"decode", "prefill", "profile"}:
        run.part("build", run.build)
        run.part("capture", run.capture)
    if "decode" in wanted:
        for batch in run.batches:
            run.part(f"decode {batch}", lambda batch=batch: run.decode(batch))
    if "prefill" in wanted:
        run.part("prefill", run.prefill)
    if "profile" in wanted:
        for batch in [batch for batch in run.batches if batch in (1, 32)] or run.batches[:1]:
            for with_graphs in (True, False):
                run.part(f"profile {batch} {with_graphs}", lambda b=batch, g=with_graphs: run.profile(b, g))
        run.part("profile prefill", run.profile_prefill)
    if run.engine is not None:
        run.engine.close()
    if "golden" in wanted:
        for name in golden_on_device.COMPARISONS:
            run.part(name, lambda name=name: getattr(golden_on_device, name)(o.backend, o.device))
    print((run.out / f"{o.name}.md").read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    main()
