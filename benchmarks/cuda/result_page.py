"""The results page: what end_to_end.py measured, as Markdown ready for docs/results/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from golden_on_device import COMPARISONS
from profiling import Profile

Results = Mapping[str, Any]


def page(results: Results, profiles: Sequence[Profile]) -> str:
    """The whole page, with whatever parts there are."""
    sections = (heading, ceilings, build, decode, prefill, golden, errors)
    parts = [text for section in sections if (text := section(results))]
    if profiles:
        parts.append("## Profile\n\n" + "\n".join(found.markdown() for found in profiles))
    return "\n".join(parts)


def heading(results: Results) -> str:
    machine, options = results["machine"], results["options"]
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    command = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value not in (None, "", False))
    return (
        f"# End to end on {machine.get('gpu', 'a CPU')}, {machine['date']}\n\nMachine: {facts}.\n\n"
        f"Command: `python benchmarks/cuda/end_to_end.py {command}`\n"
    )


def ceilings(results: Results) -> str:
    rates = results.get("ceilings")
    if not rates:
        return ""
    return (
        f"Ceilings: copy {rates['copy'] / 1e12:.2f} TB/s (read and written), bf16 products {rates['product'] / 1e12:.0f} TFLOP/s"
        " on random data.\n"
    )


def build(results: Results) -> str:
    built = results.get("build")
    if not built:
        return ""
    memory = ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in built["bytes"].items())
    shared = "All layers share one set of routed experts (traffic is unchanged: a layer reads far more than the L2 cache holds). " * bool(
        built["routed experts shared by all layers"]
    )
    return (
        f"Model: {built['layers']} layers of the released dimensions, compress ratios {built['compress_ratios']}, random weights. {shared}"
        f"Engram tables of {built['engram_num_embeddings']} rows instead of 384 million each.\n\nMemory: {memory}.\n"
    )


def decode(results: Results) -> str:
    rows = [row for name, row in results.items() if name.startswith("decode ")]
    if not rows:
        return ""
    options = results["options"]
    lines = []
    for row in rows:
        best = row.get("graph ms", row.get("eager ms"))
        bound = row.get("bound ms", float("nan"))
        graph, eager = row.get("graph ms", float("nan")), row.get("eager ms", float("nan"))
        lines.append(
            f"| {row['batch']} | {graph:.2f} | {row.get('graph device ms', float('nan')):.2f} | {eager:.2f} | {1 - graph / eager:.0%} | "
            f"{1e3 * row['batch'] / best:.0f} | {row.get('distinct experts', float('nan')):.0f} | {row.get('GB', float('nan')):.1f} | "
            f"{bound:.2f} | {bound / best:.0%} | {row.get('bound ms, even routing', float('nan')) / best:.0%} |"
        )
    return (
        f"## Decode, context {options['context']}, temperature {options['temperature']}\n\n"
        "Medians of whole engine steps (scheduler, graph replay, sampling, results on the host). Bound: bytes of the distinct experts that "
        "were really chosen, dense weights and caches at copy bandwidth, or operations at the product rate, whichever is slower; the last "
        "column takes the number of experts that even routing would choose.\n\n"
        "| batch | graph ms | of that device | eager ms | launch-bound share | tokens/s | experts per layer | GB | bound ms | of bound | "
        "of bound, even routing |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines) + "\n"
    )


def prefill(results: Results) -> str:
    row = results.get("prefill")
    if not row:
        return ""
    return (
        f"## Prefill of {row['tokens']} tokens\n\n{row['tokens/s']:.0f} tokens/s ({row['seconds']:.3f} s, on the device "
        f"{row['device seconds']:.3f} s); {row['operations per token'] / 1e9:.1f} GFLOP per token, {row['TFLOP/s']:.0f} TFLOP/s = "
        f"{row['fraction of the product rate']:.0%} of the bf16 product rate.\n"
    )


def golden(results: Results) -> str:
    found = [(name, results[name]) for name in COMPARISONS if results.get(name)]
    if not found:
        return ""
    parts = ["## The shipped checkpoint\n"]
    for name, value in found:
        rows = value if isinstance(value, list) else [value]
        parts.append(f"{COMPARISONS[name]}\n\n{table(rows)}")
    return "\n".join(parts)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(name, "")) for name in columns) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def errors(results: Results) -> str:
    if not results["errors"]:
        return ""
    blocks = [f"**{name}**\n\n```\n{text}\n```\n" for name, text in results["errors"].items()]
    return "## Parts that failed or were left out\n\n" + "\n".join(blocks)
