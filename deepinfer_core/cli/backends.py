"""List the installed backends and what each can do."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated, Any

import typer

from deepinfer_core.backend.registry import Registry, discover
from deepinfer_core.cli._options import Json


def command(
    context: typer.Context,
    ops: Annotated[str | None, typer.Option(metavar="NAME", help="List each op of one backend: native, inherited or missing.")] = None,
    json: Json = False,
) -> None:
    """List the installed backends: available or why not, and what each can do. Broken plugins come last, after --debug with tracebacks.

    Example: deepinfer backends --ops cpu_ref
    """
    registry = discover()
    if ops is not None:
        _print_ops(ops, registry, json)
        return
    report = describe(registry)
    if json:
        print(json_format.dumps(report, indent=2))
        return
    for entry in report["backends"]:
        state = "available" if entry["available"] else "not available"
        print(f"{entry['name']}: {state} ({entry['distribution']} {entry['version']})")
        for line in [*entry["devices"], *entry["reasons"]]:
            print(f"  {line}")
    _print_capabilities(report["backends"])
    print_problems(report["problems"], tracebacks=bool(context.obj))


def describe(registry: Registry) -> dict[str, Any]:
    """Backends with their probes and claims, and plugin problems, as JSON values. Backends come in the order "auto" tries them."""
    entries = []
    for name in registry.auto_order():
        found = registry.backends[name]
        entries.append(
            {
                "name": name,
                "distribution": found.origin.distribution,
                "version": found.origin.version,
                **found.probe().model_dump(mode="json"),
                "capabilities": {key: _sorted(value) for key, value in found.claims().model_dump(mode="json").items()},
            }
        )
    return {"backends": entries, "problems": [asdict(problem) for problem in registry.problems]}


def print_problems(problems: list[dict[str, str]], tracebacks: bool = False) -> None:
    """The plugins that cannot be used, and why."""
    for problem in problems:
        print(f"\nplugin problem: {problem['distribution']} (entry point {problem['entry_point']!r}): {problem['reason']}")
        if tracebacks and problem["traceback"]:
            print(problem["traceback"])


def _print_ops(name: str, registry: Registry, as_json: bool) -> None:
    from deepinfer_core.backend.ops import backend_ops

    table = backend_ops(registry.find(name), registry)
    if as_json:
        print(json_format.dumps([asdict(origin) for origin in table], indent=2))
        return
    width = max(len(origin.op) for origin in table)
    for origin in table:
        print(f"{origin.op:<{width}}  {origin.status:<9}  {origin.module}".rstrip())
    counts = [f"{sum(o.status == status for o in table)} {status}" for status in ("native", "inherited", "missing")]
    print(f"{name}: {len(table)} ops, {', '.join(counts)}")


def _print_capabilities(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("capability", *(entry["name"] for entry in entries), box=None, pad_edge=False)
    for key in entries[0]["capabilities"] if entries else ():
        table.add_row(key, *(_cell(entry["capabilities"][key]) for entry in entries))
    print()
    Console(highlight=False, markup=False).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value is None else str(value)


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value
