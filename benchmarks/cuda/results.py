"""Makes the page for docs/results/ of what measure_device.sh left in a folder.

    python benchmarks/cuda/results.py FOLDER > docs/results/nvidia_h200_DATE.md

Parts that were not run are said to be missing. The page states goals and misses by comparing numbers; why a goal is missed is for a person.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result_page
from profiling import Profile

LEVELS = ("contract", "ops", "model", "engine", "claims")
MEMORY_GOAL, MEMORY_ROWS = 0.70, 8  # share of copy bandwidth, from how many rows on (issue of this backend)
PRODUCT_GOAL = 0.50  # share of the bf16 product rate: experts and sparse attention at prefill
DECODE_GOAL = 0.35  # share of the bound of a whole decode step
NOT_MEMORY_BOUND = (
    "select_entries",
    "sparse_attention",
    "index_query",
    "log_probs",
    "sample",
    "verify",
    "engram_hash",
    "hc_pre",
    "moe_gate",
)
"""Ops that do arithmetic on what they read, or read next to nothing. Every other op is bound by bytes until products take over."""


class Folder:
    """The files of a session."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def text(self, name: str) -> str:
        file = self.path / name
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def json(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        return json.loads(text) if text else {}

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(name).splitlines() if line.strip()]

    def status(self, name: str) -> str:
        """How a run ended, in words."""
        code = self.text(f"{name}.status").strip()
        return {"": "not run", "0": "", "124": "**stopped by its time limit**", "137": "**stopped by its time limit**"}.get(
            code, f"exit code {code}"
        )


def heading(folder: Folder) -> str:
    machine = (folder.json("end_to_end.json") or folder.json("golden.json")).get("machine", {})
    facts = ", ".join(f"{name} {machine[name]}" for name in ("driver", "python", "torch", "cuda", "triton") if name in machine)
    return (
        f"# {machine.get('gpu', 'GPU')}, {machine.get('date', '')}\n\nBackend `cuda_sm100` on SM90, one GPU; {facts}. Random weights "
        "throughout.\n"
        "**Not run: SM100.** Its kernels are compiled ahead of time in CI (`tests/cuda/aot`) and interpreted, never executed.\n\n"
        "Everything here comes from one session: `sh benchmarks/cuda/measure_device.sh`, then `benchmarks/cuda/results.py`.\n"
    )


def checks(folder: Folder) -> str:
    """One row for each kind of check, then what failed and what was not run."""
    rows = [{"what": f"conformance, {level}", "result": _level(folder, level)} for level in LEVELS]
    device = folder.lines("device_check.jsonl")
    bad = [entry for entry in device if entry["problem"]]
    left = re.search(r"(\d+) left out", folder.text("device_check.log"))
    text = f"{len(device) - len(bad)} passed, {len(bad)} failed, {left[1] if left else '?'} left out" if device else "not run"
    rows.append({"what": "every op at small and released sizes, batch invariance, runtime (`tests/cuda/device_check.py`)", "result": text})
    summary = re.findall(r"ERROR SUMMARY: (\d+ errors?)", folder.text("sanitizer.log"))
    sanitized = folder.lines("sanitized.jsonl")
    found = f"{summary[-1]}; {len(sanitized)} cases" if summary else folder.status("sanitizer") or "no summary"
    rows.append({"what": "`compute-sanitizer --tool memcheck` on stores and attention", "result": found})
    parts = ["## Checks\n", result_page.table(rows)]
    failures = [
        f"`{r['level']}: {r['id']}`: {r['message'][:300]}" for level in LEVELS for r in _results(folder, level) if r["status"] == "failed"
    ]
    failures += [f"`{entry['label']}`: {entry['problem'][:300]}" for entry in bad]
    if failures:
        parts.append("Failed:\n\n" + "\n".join(f"* {text}" for text in failures) + "\n")
    reasons: dict[str, int] = {}
    for level in LEVELS:
        for r in _results(folder, level):
            if r["status"] in ("unsupported", "skipped"):
                reason = f"{level}, {r['status']}: {r['message']}"
                reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        parts.append("Not run, by the suite's own words:\n\n" + "\n".join(f"* {text} ({count})" for text, count in reasons.items()) + "\n")
    return "\n".join(parts)


def _results(folder: Folder, level: str) -> list[dict[str, Any]]:
    return list(folder.json(f"conformance_{level}.json").get("results", []))


def _level(folder: Folder, level: str) -> str:
    results = _results(folder, level)
    if not results:
        return folder.status(f"conformance_{level}") or "no report"
    counts = {status: sum(r["status"] == status for r in results) for status in ("passed", "failed", "unsupported", "skipped")}
    seconds = sum(r["seconds"] for r in results)
    return ", ".join(f"{count} {status}" for status, count in counts.items()) + f" ({seconds:.0f} s of work)"


def golden(folder: Folder) -> str:
    text = result_page.golden(folder.json("golden.json"))
    errors = folder.json("golden.json").get("errors")
    return text + (result_page.errors({"errors": errors}) if errors else "")


def end_to_end(folder: Folder) -> str:
    results = folder.json("end_to_end.json")
    if not results:
        return "## Decode and prefill\n\nNot run.\n"
    parts = [result_page.ceilings(results), result_page.build(results), result_page.decode(results), result_page.prefill(results)]
    return "\n".join(part for part in parts if part) + result_page.errors(results)


def profile(folder: Folder) -> str:
    results = folder.json("end_to_end.json")
    found = {name: value for name, value in results.items() if name.startswith("profile ") and value}
    if not found:
        return ""
    titles = {"profile prefill": "Prefill"}
    parts = ["## Where the time goes\n"]
    for name, value in found.items():
        batch = name.split()[1]
        mode = "graph" if name.endswith("True") else "eager"
        title = titles.get(name, f"One decode step, batch {batch}, {mode}")
        kernels = [(str(kernel), int(count), float(ms)) for kernel, count, ms in value["kernels"]]
        parts.append(Profile(title, value["wall"], value["span"], value["busy"], value["launches"], kernels).markdown(12))
    return "\n".join(parts)


def ops(folder: Folder) -> str:
    """The table of ops with the batch-invariant mode beside the default one."""
    limits, *entries = folder.lines("bench_ops.jsonl") or [{}]
    if not entries:
        return "## Ops\n\nNot run.\n"
    invariant = {_key(entry): entry for entry in folder.lines("bench_ops_invariant.jsonl")[1:]}
    lines = [
        "## Ops at the released dimensions\n",
        f"Copy {limits['copy'] / 1e12:.2f} TB/s, bf16 product {limits['product'] / 1e12:.0f} TFLOP/s, an empty graph "
        f"{limits['empty_us']:.1f} us. Cold: the L2 cache was overwritten before. Shares are of copy bandwidth (bytes that must move) and "
        "of the product rate; `sparse_attention` counts half of the selected keys, which is what its rows have. Last columns: "
        "`DEEPINFER_BATCH_INVARIANT=1`, cold, and its cost, for ops whose code differs in that mode.\n",
        "| rows | op | cold us | warm us | of copy | of product | invariant us | cost |\n|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in entries:
        label = f"{entry['op']} {entry['note']}".strip()
        if "failure" in entry:
            lines.append(f"| {entry['rows']} | {label} | {entry['failure']} | | | | | |")
            continue
        other = invariant.get(_key(entry), {}).get("cold_us")
        cost = f"{other:.1f} | {other / entry['cold_us']:.2f}" if other else "|"
        lines.append(
            f"| {entry['rows']} | {label} | {entry['cold_us']:.1f} | {entry['warm_us']:.1f} | {entry['bandwidth_share']:.0%} | "
            f"{entry['product_share']:.0%} | {cost} |"
        )
    return "\n".join(lines) + "\n"


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["op"], entry["note"], entry["rows"]


def peers(folder: Folder) -> str:
    text = folder.text("peers.md")
    if not text:
        return f"## Against public kernels\n\n{folder.status('peers') or 'Not run.'}\n"
    slower = [row for row in folder.lines("peers.jsonl")[1:] if row.get("ratio", 1.0) < 1.0 and not row["differs"].startswith("a part of")]
    lines = [
        f"* {row['op']}, {row['rows']} rows: {row['ratio']:.2f} of {row['peer']}" for row in sorted(slower, key=lambda row: row["ratio"])
    ]
    found = "Ours is slower in:\n\n" + "\n".join(lines) if lines else "Ours is at least as fast everywhere."
    return f"## Against public kernels\n\n{text}\n{found}\n"


def goals(folder: Folder) -> str:
    """Every goal of the backend's issue that the numbers decide."""
    lines = [f"* {line}" for line in _goals(folder)]
    return "## Goals\n\n" + "\n".join(lines) + "\n" if lines else ""


def _goals(folder: Folder) -> Iterator[str]:
    entries = [entry for entry in folder.lines("bench_ops.jsonl")[1:] if "failure" not in entry]
    for rows in sorted({entry["rows"] for entry in entries if entry["rows"] >= MEMORY_ROWS}):
        here = [e for e in entries if e["rows"] == rows and e["op"] not in NOT_MEMORY_BOUND and e["product_share"] < PRODUCT_GOAL]
        met = [e for e in here if e["bandwidth_share"] >= MEMORY_GOAL]
        missed = ", ".join(f"{e['op']} {e['note']}".strip() + f" {e['bandwidth_share']:.0%}" for e in here if e not in met)
        yield (
            f"memory-bound ops at {rows} rows, at least {MEMORY_GOAL:.0%} of copy: {len(met)} of {len(here)} meet it. "
            f"Missed: {missed or 'none'}."
        )
    for op in ("moe", "sparse_attention"):
        for e in entries:
            if e["op"] == op and e["rows"] > 1000:
                verdict = "met" if e["product_share"] >= PRODUCT_GOAL else "**missed**"
                where = f"{op} {e['note']}".strip() + f" at {e['rows']} rows"
                yield f"{where}, at least {PRODUCT_GOAL:.0%} of the product rate: {e['product_share']:.0%}, {verdict}."
    for name, row in folder.json("end_to_end.json").items():
        if name.startswith("decode ") and row and "bound ms" in row:
            share = row["bound ms"] / row.get("graph ms", row["eager ms"])
            verdict = "met" if share >= DECODE_GOAL else "**missed**"
            yield f"decode at batch {row['batch']}, at least {DECODE_GOAL:.0%} of the bound: {share:.0%}, {verdict}."
    recorded = folder.json("golden.json")
    if forced := recorded.get("compare_forced"):
        wanted, modes = sum(row["sure"] for row in forced), ("one step", "token by token")
        equal = " and ".join(f"{sum(row[f'equal where sure, {mode}'] for row in forced)} ({mode})" for mode in modes)
        yield f"recorded greedy tokens, release numerics: equal at {equal} of the {wanted} positions where recordings are sure."
    if ideal := recorded.get("compare_ideal"):
        equal, wanted = (sum(row[name] for row in ideal) for name in ("equal", "tokens"))
        yield f"recorded greedy tokens, ideal numerics (the reference's ops on this GPU): {equal} of {wanted} equal."
    compared = [row for row in folder.lines("peers.jsonl")[1:] if "ratio" in row and not row["differs"].startswith("a part of")]
    if compared:
        yield f"at least as fast as public kernels: {sum(row['ratio'] >= 1.0 for row in compared)} of {len(compared)} comparisons."


def sessions(folder: Folder) -> str:
    text = folder.text("times.txt")
    return f"## The session\n\n```\n{text}```\n" if text else ""


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = Folder(parser.parse_args().folder)
    for section in (heading, goals, checks, golden, end_to_end, peers, ops, profile, sessions):
        if text := section(folder):
            print(text)


if __name__ == "__main__":
    main()
