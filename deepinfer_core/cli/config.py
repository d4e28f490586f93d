"""Print the configuration, each value with its source."""

from __future__ import annotations

import sys

from deepinfer_core.cli._options import BackendName, ConfigFile, Json, Model, Settings, resolve_from_options


def command(
    config: ConfigFile = None, model: Model = None, backend: BackendName = None, settings: Settings = None, json: Json = False
) -> None:
    """Print the resolved configuration, each value with where it came from: default, file, env or flag.

    Example: deepinfer config --config engine.yaml --set max_num_seqs=8
    """
    resolved = resolve_from_options(config, model, backend, settings)
    if json:
        print(resolved.as_json())
        return
    print(resolved.as_text())
    for note in resolved.notes:
        print(f"note: {note}", file=sys.stderr)
