"""Report what a bug report needs."""

from __future__ import annotations

import json as json_format
import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepinfer_core.backend.registry import discover
from deepinfer_core.cli._options import BackendName, ConfigFile, Json, Model, Settings, resolve_from_options
from deepinfer_core.cli.backends import describe, print_problems
from deepinfer_core.config.resolve import ResolvedConfig
from deepinfer_core.errors import DeepInferError

PACKAGES = ("torch", "numpy", "pydantic", "pluggy", "safetensors", "tokenizers", "triton", "torch_npu", "huggingface_hub")


def command(
    config: ConfigFile = None, model: Model = None, backend: BackendName = None, settings: Settings = None, json: Json = False
) -> None:
    """Report what a bug report needs: versions, devices, backends, plugins, configuration, limits. Example: deepinfer doctor --json"""
    report = gather(config, model, backend, settings)
    if json:
        print(json_format.dumps(report, indent=2))
    else:
        _print(report)
    if report["selected"]["name"] is None:
        sys.exit(1)


def gather(config: Path | None, model: str | None, backend: str | None, settings: list[str] | None) -> dict[str, Any]:
    """The report as JSON values. Problems are part of it: nothing here raises because something is broken. No prompts, no secrets."""
    registry = discover()
    resolved, config_problem = _resolve(config, model, backend, settings)
    found = describe(registry)
    return {
        "versions": {"deepinfer-core": _version("deepinfer-core"), **{name: _version(name) for name in PACKAGES}},
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "limits": _limits(),
        "plugins": [{"distribution": o.distribution, "version": o.version, "entry_point": o.entry_point} for o in registry.plugins],
        **found,
        "selected": _selected(resolved),
        "config": {
            "problem": config_problem,
            "changed": {} if resolved is None else {k: s for k, s in resolved.sources.items() if s != "default"},
            "notes": [] if resolved is None else list(resolved.notes),
        },
        "checkpoint": _checkpoint(resolved),
    }


def _resolve(
    config: Path | None, model: str | None, backend: str | None, settings: list[str] | None
) -> tuple[ResolvedConfig | None, str | None]:
    try:
        return resolve_from_options(config, model, backend, settings), None
    except DeepInferError as error:
        return None, str(error)


def _selected(resolved: ResolvedConfig | None) -> dict[str, str | None]:
    if resolved is None:
        return {"name": None, "why": "the configuration has problems"}
    try:
        selected = discover().select(resolved.config.backend.name)
    except DeepInferError as error:
        return {"name": None, "why": str(error)}
    return {"name": selected.backend.name, "why": selected.why}


def _checkpoint(resolved: ResolvedConfig | None) -> str:
    path = None if resolved is None else resolved.config.model.path
    if path is None:
        return "none named; the small one that ships with the package is used"
    folder = Path(path)
    if not folder.is_dir():
        return f"{_hide_home(path)}: no such folder (a Hugging Face id is looked up when the engine starts)"
    shards = sorted(folder.glob("*.safetensors"))
    absent = [name for name in ("config.json", "tokenizer.json", "model.safetensors.index.json") if not (folder / name).exists()]
    size = sum(shard.stat().st_size for shard in shards)
    missing = f"; missing: {', '.join(absent)}" if absent else ""
    return f"{_hide_home(path)}: {len(shards)} shards, {size} bytes{missing} (`deepinfer checkpoint verify` checks the tensors)"


def _limits() -> dict[str, Any]:
    import torch

    return {
        "logical cores": os.cpu_count(),
        "cores of this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "physical memory bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked memory bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _hide_home(path: str) -> str:
    return path.replace(str(Path.home()), "~", 1)


def _print(report: dict[str, Any]) -> None:
    for name in ("python", "platform", "checkpoint"):
        print(f"{name}: {report[name]}")
    for title in ("versions", "limits"):
        print(f"{title}:")
        for key, value in report[title].items():
            print(f"  {key}: {'not installed' if value is None else value}")
    print("backends:")
    for entry in report["backends"]:
        print(
            f"  {entry['name']}: {'available' if entry['available'] else 'not available'}. {' '.join(entry['devices'] + entry['reasons'])}"
        )
    print(f"  selected: {report['selected']['name']} ({report['selected']['why']})")
    print("plugins:")
    for plugin in report["plugins"]:
        print(f"  {plugin['entry_point']} ({plugin['distribution']} {plugin['version']})")
    if report["config"]["problem"]:
        print(f"configuration: {report['config']['problem']}")
    for key, source in report["config"]["changed"].items():
        print(f"configuration: {key} is set by {source}")
    for note in report["config"]["notes"]:
        print(f"note: {note}")
    print_problems(report["problems"])
