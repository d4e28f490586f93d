"""The hooks a plugin may implement: pluggy project `deepinfer`, entry-point group `deepinfer`.

A plugin is a module named by an entry point of that group. The module stays light (no torch, no vendor library: a test enforces it
for ours), marks its functions with `hookimpl` and is imported whenever plugins are listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from deepinfer_core.backend.base import Backend

PROJECT = "deepinfer"
"""Name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def deepinfer_backends() -> list[type[Backend]]:  # type: ignore[empty-body]
    """The `Backend` classes that the plugin brings. Classes, not instances: nothing of them runs before one is asked for."""
