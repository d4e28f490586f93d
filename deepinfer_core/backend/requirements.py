"""What a configuration asks of a backend, held against the backend's claims before anything is built."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer_core.backend.capabilities import Capabilities
from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.registry import Registry, Selected
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import BackendError, listing


def check_requirements(config: EngineConfig, selected: Selected, registry: Registry) -> None:
    """Raises BackendError that names every feature the selected backend lacks, and the backends which have it."""
    claims = selected.backend.capabilities()
    name = selected.backend.name
    problems = []
    for feature, has in _requirements(config):
        if not has(claims):
            others = [other for other, found in registry.backends.items() if other != name and has(found.claims())]
            problems.append(f"backend {name!r} does not offer {feature}; backends that do: {', '.join(others) or 'none'}")
    if problems:
        raise BackendError(listing(f"backend {name!r}", problems))


def _requirements(config: EngineConfig) -> list[tuple[str, Callable[[Capabilities], bool]]]:
    """What `config` asks for: the key and value in words, and whether given claims satisfy it."""
    numerics = Numerics(config.model.numerics)
    length = config.runtime_max_model_len
    wanted: list[tuple[str, Callable[[Capabilities], bool]]] = [
        (f"model.numerics: {numerics}", lambda claims: numerics in claims.numerics),
        (
            f"sequences of {length} tokens (model.max_model_len plus look-ahead)",
            lambda claims: claims.max_context is None or length <= claims.max_context,
        ),
    ]
    if config.determinism.batch_invariant:
        wanted.append(("determinism.batch_invariant: true", lambda claims: claims.batch_invariant))
    if config.determinism.deterministic_sampling:
        wanted.append(("determinism.deterministic_sampling: true", lambda claims: claims.deterministic_sampling))
    for kind in ("window", "entry", "index"):
        asked = getattr(config.cache, f"{kind}_format")
        if asked != "auto":
            wanted.append((f"cache.{kind}_format: {asked}", _stores(f"{kind}_formats", CacheFormat(asked))))
    return wanted


def _stores(field: str, cache_format: CacheFormat) -> Callable[[Capabilities], bool]:
    return lambda claims: cache_format in getattr(claims, field)
