"""Times ops of the NVIDIA backend against public kernels for Hopper, in one run, at the released model's dimensions.

    PYTHONPATH=tests/cuda python3 benchmarks/cuda/peers.py [--rows 1,8,64,8192] [--ops PATTERN] [--only attention,humming,tile,torch]

benchmarks/README.md says which packages to install; one that is missing or does not load becomes a row that says so. Both sides are
captured in CUDA graphs and timed with a cold L2 cache, in turns; where one of them cannot be captured, both are launched eagerly. Writes
$OUT/peers.jsonl and $OUT/peers.md as results come.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_ops import ceilings, timed
from peer_pairs import DEVICE, Comparison, Pair

FAMILIES = ("attention", "humming", "tile", "torch")
Chosen = tuple[tuple[str, ...], tuple[int, ...], str]  # families, rows, part of an op's name


def chosen_comparisons(chosen: Chosen) -> Iterator[Comparison]:
    """Every comparison asked for, made as it is needed: inputs of one row count can go before the next ones are made."""
    families, rows, pattern = chosen
    for count in rows:
        for family in families:
            for comparison in importlib.import_module(f"peers_{family}").comparisons(count):
                if pattern in f"{comparison.op} | {comparison.peer}":
                    yield comparison


def _compile_share(chosen: Chosen, share: int, shares: int, deadline: float) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("HUMMING_MAX_PARALLEL_BUILD_WORKERS", "2")  # there are other processes
    for comparison in chosen_comparisons(chosen):
        if zlib.crc32(f"{comparison.op} {comparison.peer}".encode()) % shares != share or time.time() > deadline:
            continue
        begin = time.time()
        try:
            pair = comparison.build()
            pair.ours()
            pair.theirs()
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the measurement meets it again and reports it
            torch.cuda.empty_cache()
        if time.time() - begin > 5.0:
            print(f"compiled in {time.time() - begin:.0f} s: {comparison.op}, {comparison.rows} rows, {comparison.peer}", flush=True)


def compile_kernels(chosen: Chosen, jobs: int, seconds: float) -> None:
    """Calls everything once on several processes: Triton, TileLang and Humming keep what they compile on disk. Stops after `seconds`."""
    deadline = time.time() + seconds
    workers = [get_context("spawn").Process(target=_compile_share, args=(chosen, share, jobs, deadline)) for share in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.1, deadline - time.time()))
        if worker.is_alive():
            worker.kill()


def eager_cold(work: Callable[[], object], flush: torch.Tensor, runs: int = 9) -> float:
    """Median microseconds of one eager call after the L2 cache was overwritten."""
    times = []
    for _ in range(runs):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * median(times)


def times_of(pair: Pair, flush: torch.Tensor) -> tuple[float, float, str]:
    """(microseconds of ours, of theirs, how they were launched)."""
    pair.ours()
    pair.theirs()
    torch.cuda.synchronize()
    try:
        theirs, ours = (timed(work, flush, cold=9, warm=1)[0] for work in (pair.theirs, pair.ours))
        return ours, theirs, "graph"
    except Exception:  # noqa: BLE001 - a peer that waits for the device cannot be captured
        torch.cuda.synchronize()
        return eager_cold(pair.ours, flush), eager_cold(pair.theirs, flush), "eager"


def measure(comparison: Comparison, flush: torch.Tensor) -> dict[str, Any]:
    """One row as plain values; `failure` instead of times if something raised."""
    row: dict[str, Any] = {"op": comparison.op, "rows": comparison.rows, "peer": comparison.peer, "differs": comparison.differs}
    try:
        pair = comparison.build()
        ours, theirs, mode = times_of(pair, flush)
        row |= {"ours_us": ours, "peer_us": theirs, "ratio": theirs / ours, "launched": mode}
        if pair.same is not None:
            row |= {"difference": pair.same(), "bound": comparison.bound}
    except ImportError as error:
        row |= {"failure": f"not installed or does not load: {str(error)[:160]}", "trace": traceback.format_exc()[-3000:]}
    except Exception as error:  # noqa: BLE001 - one comparison that fails must not hide the others
        row |= {"failure": f"{type(error).__name__}: {str(error).strip()[:300]}", "trace": traceback.format_exc()[-3000:]}
    return row


def line(row: dict[str, Any]) -> str:
    """The row in the table. A ratio of 1 or more: ours is faster."""
    if "failure" in row:
        text = " ".join(row["failure"].split()).replace("|", "/")
        return f"| {row['op']} | {row['rows']} | | {row['peer']} | | | | {text} |"
    close = ""
    if "difference" in row:
        close = f"{row['difference']:.1g}" + (f" **above {row['bound']:.1g}**" if row["difference"] > row["bound"] else "")
    notes = "; ".join(note for note in (row["differs"], "launched eagerly" if row["launched"] == "eager" else "") if note)
    numbers = f"{row['ours_us']:.1f} | {row['peer']} | {row['peer_us']:.1f} | {row['ratio']:.2f}"
    return f"| {row['op']} | {row['rows']} | {numbers} | {close} | {notes} |"


def main() -> None:
    """Compiles, then measures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,8,64,8192")
    parser.add_argument("--ops", default="", help="part of 'op | peer'")
    parser.add_argument("--only", default=",".join(FAMILIES))
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile; 0: compile while measuring")
    parser.add_argument("--compile-seconds", type=float, default=120.0, help="how long they may take")
    parser.add_argument("--seconds", type=float, default=400.0, help="no measurement begins later than this; 0: only compile")
    parser.add_argument("--name", default="peers", help="of the files")
    options = parser.parse_args()
    start, out = time.monotonic(), Path(os.environ.get("OUT", "."))
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    chosen = (tuple(options.only.split(",")), tuple(int(count) for count in options.rows.split(",")), options.ops)
    if options.jobs:
        compile_kernels(chosen, options.jobs, options.compile_seconds)
        print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    if not options.seconds:
        return
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    limits = ceilings(flush)
    head = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {limits['copy'] / 1e12:.2f} TB/s, bf16 product "
        f"{limits['product'] / 1e12:.0f} TFLOP/s, one empty graph {limits['empty_us']:.1f} us. Ratio: time of the peer / ours.\n\n"
        "| op | rows | ours, us | peer | peer, us | ratio | difference of results | what is not the same |\n" + "| --- " * 8 + "|"
    )
    print(head, flush=True)
    with (
        (out / f"{options.name}.jsonl").open("w", encoding="utf-8") as file,
        (out / f"{options.name}.md").open("w", encoding="utf-8") as table,
    ):
        file.write(json.dumps(limits) + "\n")
        table.write(head + "\n")
        for comparison in chosen_comparisons(chosen):
            if time.monotonic() - start > options.seconds:
                table.write(f"| {comparison.op} | {comparison.rows} | | {comparison.peer} | | | | left out: no time |\n")
                continue
            row = measure(comparison, flush)
            file.write(json.dumps(row) + "\n")
            file.flush()
            table.write(line(row) + "\n")
            table.flush()
            print(line(row), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
