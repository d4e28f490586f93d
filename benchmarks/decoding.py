"""What the decoding features bring: ratios measured in one run, variants interleaved.

    python benchmarks/decoding.py [drafting] [idle] [prefix] [replay] [--checkpoint DIR] [--json FILE]

drafting  tokens/s with DSpark / without, static and confidence-scheduled, at 1 .. 64 requests. The real drafter runs; its drafts are then
          replaced by the known greedy continuation with probability p at each position, and its confidences by p, so that acceptance
          is controlled and the confidences are calibrated.
idle      share of a step during which the device waits for the host, at 64 requests.
prefix    time to first token after a hit of a 4,000-token prefix / cold.
replay    prefill time with decoder-side replay ("compact") / without, at 4,000 tokens, and the change in held-out bits per byte.

Bars: drafting at least 1.8 at one request and never below 0.95 with confidence scheduling; idle below 5 %; prefix at most 0.15; replay at
most 0.65. Times are wall times of one thread of torch; each ratio is the median over rounds in which every variant ran once.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import decoding_cases as cases
import torch

BARS = {"idle": 0.05, "prefix": 0.15, "replay": 0.65}


def main() -> None:
    """Runs the chosen cases, prints a table of each and writes all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--checkpoint", default=None, help="folder of a checkpoint; default: the small one that ships with the package")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.85, 0.5, 0.2], help="p of the controlled drafter")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="file that all figures are written to")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case {sorted(unknown)[0]!r}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"machine": f"{platform.machine()}, {cases.cpu_name()}", "torch": torch.__version__}
    for name in options.cases or CASES:
        figures[name] = CASES[name](options)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def drafting(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns one row for each p and batch."""
    print("\n| p | requests | static | scheduled | rows/request scheduled | steps that draft |  |\n|---|---|---|---|---|---|---|")
    rows = []
    with cases.DraftingBench(options.checkpoint, max(options.batches)) as bench:
        for p in options.acceptance:
            for batch in options.batches:
                row = bench.measure(p, batch, options.rounds)
                least = 1.8 if batch == 1 and p >= 0.85 else 0.95
                verdict = "ok" if row["scheduled"] >= least else f"below {least}"
                print(
                    f"| {p} | {batch} | {row['static']:.2f} | {row['scheduled']:.2f} | {row['rows_per_request']:.2f} | "
                    f"{row['steps_that_draft']:.0%} | {verdict} |",
                    flush=True,
                )
                rows.append(row)
    return rows


def idle(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns the device's idle share without and with drafting."""
    rows = []
    for drafts in (0, 5):
        row = cases.idle_share(options.checkpoint, drafts, max(options.batches))
        share = f"{row['idle']:.2%} of {row['step_ms']:.1f} ms a step"
        print(f"idle: {drafts} drafts, {row['requests']} requests: {share}{_verdict('idle', row['idle'])}")
        print("      " + "  ".join(f"{name} {value:.2f}" for name, value in row["summary"].items()))
        rows.append(row)
    return rows


def prefix(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns times to first token."""
    rows = []
    for snapshots in (4, 0):
        row = cases.prefix_hit(options.checkpoint, snapshots, min(options.rounds, 3))
        how = "with window snapshot" if snapshots else "with replay"
        print(
            f"prefix: hit of {row['cached_tokens']} of {row['prompt']} tokens {how}: {row['hit_s']:.3f} s, cold {row['cold_s']:.3f} s, "
            f"ratio {row['ratio']:.3f}{_verdict('prefix', row['ratio'])}"
        )
        rows.append(row)
    return rows


def replay(options: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns prefill times and bits per byte."""
    row = cases.decoder_replay(options.checkpoint, min(options.rounds, 3))
    print(
        f"replay: {row['prompt']} tokens, {row['keep']} kept: compact {row['compact_s']:.3f} s, off {row['off_s']:.3f} s, "
        f"ratio {row['ratio']:.3f}{_verdict('replay', row['ratio'])}"
    )
    print(f"        bits per byte off {row['bits_off']:.4f}, compact {row['bits_compact']:.4f}, change {row['bits_change']:+.4f}")
    return row


def _verdict(name: str, value: float) -> str:
    return f" (bar {BARS[name]}: {'ok' if value <= BARS[name] else 'missed'})"


CASES = {"drafting": drafting, "idle": idle, "prefix": prefix, "replay": replay}


if __name__ == "__main__":
    main()
