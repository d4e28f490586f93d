"""Options that every command with an engine shares, and their way into a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_core.config.resolve import ResolvedConfig, parse_settings, resolve_config

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings; see `deepinfer config`.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Checkpoint folder or Hugging Face id [model.path].")]
BackendName = Annotated[str | None, typer.Option("--backend", "-b", help="Backend, or 'auto' [backend.name].")]
Settings = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any other setting; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def resolve_from_options(
    config: Path | None, model: str | None = None, backend: str | None = None, settings: list[str] | None = None, **flags: Any
) -> ResolvedConfig:
    """The configuration of a command line. `flags` are further keys that the command has options for; None is not given."""
    given = {**flags, "model": model, "backend": backend, **parse_settings(settings or [])}
    return resolve_config(file=config, flags=given)
