"""One frozen configuration object, its sources and the source of every value."""

from deepinfer_core.config.engine_config import EngineConfig
from deepinfer_core.config.resolve import ResolvedConfig, resolve_config

__all__ = ["EngineConfig", "ResolvedConfig", "resolve_config"]
