"""DeepInfer core: a backend-agnostic inference engine for DeepSeek-V4.1-Flash.

    from deepinfer_core import LLM, SamplingParams

Names are imported when they are first used, so that `import deepinfer_core` needs neither torch nor a device.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from deepinfer_core.errors import BackendError, CheckpointError, ConfigError, DeepInferError, EngineError, RequestError

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig as EngineConfig
    from deepinfer_core.config import ResolvedConfig as ResolvedConfig
    from deepinfer_core.config import resolve_config as resolve_config

# A vendor's wheel without the vendor's runtime makes a plain `import torch` fail. Backends import their vendor library themselves.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

__version__ = "0.1.0"

_LAZY = {
    "LLM": "deepinfer_core.engine",
    "RequestOutput": "deepinfer_core.engine",
    "SamplingParams": "deepinfer_core.sampling",
    "EngineConfig": "deepinfer_core.config",
    "ResolvedConfig": "deepinfer_core.config",
    "resolve_config": "deepinfer_core.config",
}
"""Public names and the packages that hold them."""

__all__ = [
    "LLM",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "EngineConfig",
    "EngineError",
    "RequestError",
    "RequestOutput",
    "ResolvedConfig",
    "SamplingParams",
    "__version__",
    "resolve_config",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'deepinfer_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
