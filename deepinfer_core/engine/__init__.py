"""Requests to steps to tokens."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_core.engine.llm import LLM as LLM
    from deepinfer_core.engine.outputs import RequestOutput as RequestOutput

_LAZY = {"LLM": "deepinfer_core.engine.llm", "RequestOutput": "deepinfer_core.engine.outputs"}
"""Imported when first used: the scheduler half of this package needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
