"""Finds backends through entry points, explains what is wrong with the others, and selects one.

Discovery imports every entry module of the group `deepinfer`, each on its own: one that fails is reported as a `PluginProblem` and
stands in nobody's way, unless the configuration selects it by name. `Backend` methods run only when a backend is asked for.
"""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from deepinfer_core.backend import hookspecs
from deepinfer_core.backend.base import API_VERSION, Backend
from deepinfer_core.backend.capabilities import Capabilities, Probe
from deepinfer_core.errors import BackendError, UnknownBackendError, nearest

AUTO = "auto"
REFERENCE = "cpu_ref"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from."""

    distribution: str  # name of the installed package
    version: str
    entry_point: str  # "name = module"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} (entry point {self.entry_point!r})"


@dataclass(frozen=True)
class PluginProblem:
    """Why a plugin, or one backend of it, cannot be used."""

    distribution: str
    entry_point: str
    reason: str
    traceback: str = ""  # of the exception, if there was one
    backend: str = ""  # name of the backend concerned; "": the whole plugin


@dataclass(frozen=True)
class Found:
    """A backend class and its origin. Whatever a foreign class raises, `claims` and `probe` do not."""

    backend: type[Backend]
    origin: Origin

    def claims(self) -> Capabilities:
        """The backend's claims; none, on an unknown device, if it cannot state them: `probe` then says why."""
        try:
            return self.backend().capabilities()
        except (Exception, SystemExit):  # noqa: BLE001 reported by `probe`
            return Capabilities(device_type="unknown")

    def probe(self) -> Probe:
        """Whether the backend can be used. Failing to be built, to state its claims or to probe, against the contract, means no."""
        step = "its constructor"
        try:
            backend = self.backend()
            step = "its capabilities()"
            backend.capabilities()
            step = "its probe()"
            return backend.probe()
        except (Exception, SystemExit) as error:  # noqa: BLE001 one broken backend must not hide the others
            return Probe(available=False, reasons=(f"{step} raised {_reason(error)}; report it to {self.origin.distribution}.",))


@dataclass(frozen=True)
class Selected:
    """The backend that a configuration gets."""

    backend: Backend
    origin: Origin
    probe: Probe
    why: str  # one sentence for the start-up block


@dataclass
class Registry:
    """Result of one discovery. `manager` holds every plugin that was accepted, for hooks other than backends."""

    manager: pluggy.PluginManager
    plugins: list[Origin] = field(default_factory=list)
    backends: dict[str, Found] = field(default_factory=dict)
    ambiguous: dict[str, list[Found]] = field(default_factory=dict)  # names that several plugins claim: unusable
    problems: list[PluginProblem] = field(default_factory=list)

    def find(self, name: str) -> Found:
        """The backend called `name`, not probed. Raises BackendError, with what is known about the name."""
        if name in self.backends:
            return self.backends[name]
        if name in self.ambiguous:
            owners = " and ".join(str(found.origin) for found in self.ambiguous[name])
            raise BackendError(f"backend {name!r} is claimed by {owners}: uninstall one of them, or select another backend")
        broken = [p for p in self.problems if name in (p.backend, p.entry_point.split(" = ")[0])]
        if broken:
            raise BackendError("\n".join(f"backend {name!r} cannot be used: {_described(problem)}" for problem in broken))
        raise UnknownBackendError(
            f"unknown backend {name!r} (`deepinfer backends` lists the installed ones; one of your own needs an entry point in the "
            f"group 'deepinfer'){nearest(name, [*self.backends, AUTO])}"
        )

    def select(self, name: str = AUTO) -> Selected:
        """The backend called `name`, or for "auto" the first available one in `auto_order`. Raises BackendError if there is none."""
        if name == AUTO:
            return self._select_auto()
        found = self.find(name)
        probe = found.probe()
        if not probe.available:
            usable = [other for other in self.auto_order() if self.backends[other].probe().available]
            raise BackendError(
                f"backend {name!r} is not available here: {' '.join(probe.reasons)} Available: {', '.join(usable) or 'none'}. "
                "Set backend.name to one of these or to 'auto'."
            )
        return Selected(found.backend(), found.origin, probe, "named by the configuration")

    def auto_order(self) -> list[str]:
        """Names in the order in which "auto" tries them: accelerators by name, then CPU backends by name, then the reference."""

        def rank(name: str) -> tuple[int, str]:
            if name == REFERENCE:
                return 2, name
            return int(self.backends[name].claims().device_type == "cpu"), name

        return sorted(self.backends, key=rank)

    def _select_auto(self) -> Selected:
        refused: list[str] = []
        for name in self.auto_order():
            found = self.backends[name]
            probe = found.probe()
            if probe.available:
                others = f"; before it: {', '.join(refused)} not available" if refused else ""
                return Selected(found.backend(), found.origin, probe, f"chosen by 'auto'{others}")
            refused.append(name)
        raise BackendError("no backend is available: `deepinfer backends` says why, for each one installed")


def get_backend(name: str = AUTO) -> Backend:
    """The backend called `name` ("auto": the best available one), probed. Raises BackendError that says what to do."""
    return discover().select(name).backend


@functools.cache
def discover() -> Registry:
    """The backends and plugins installed in this environment. Looked up once per process; `discover.cache_clear()` forgets them."""
    return discover_in(entry_points(group=hookspecs.PROJECT))


def discover_in(points: Iterable[EntryPoint]) -> Registry:
    """The registry of the given entry points. Never raises because of a plugin: see `Registry.problems`."""
    registry = Registry(_new_manager())
    classes: list[tuple[Any, Origin]] = []
    for point in sorted(points, key=lambda p: (p.dist.name if p.dist else "", p.name)):
        origin = Origin(point.dist.name if point.dist else "unknown", point.dist.version if point.dist else "?", _line(point))
        try:
            plugin = point.load()
            found = _backend_classes(plugin)
            registry.manager.register(plugin, name=f"{origin.distribution}:{point.name}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 a foreign module may raise anything; it is reported, with its traceback
            registry.problems.append(
                PluginProblem(origin.distribution, origin.entry_point, _reason(error), "".join(traceback.format_exception(error)))
            )
        else:
            registry.plugins.append(origin)
            classes += [(cls, origin) for cls in found]
    _sort_out(registry, classes)
    return registry


def package_of(backend: type[Backend]) -> str:
    """The package that a backend class lives in; ops defined elsewhere under another backend's package count as inherited."""
    module = backend.__module__
    return module.rpartition(".")[0] or module


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _backend_classes(plugin: object) -> list[Any]:
    """What the plugin's `deepinfer_backends` hands over. A manager of its own keeps its mistakes apart from other plugins'."""
    manager = _new_manager()
    manager.register(plugin)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        known = ", ".join(vars(manager.hook))
        raise TypeError(f"it implements no hook of DeepInfer (mark one of {known} with deepinfer_core.backend.hookspecs.hookimpl)")
    return [cls for group in manager.hook.deepinfer_backends() for cls in group]


def _sort_out(registry: Registry, classes: list[tuple[Any, Origin]]) -> None:
    """Files every class under backends, ambiguous or problems."""
    named: dict[str, list[Found]] = {}
    for cls, origin in classes:
        reason = _class_problem(cls)
        if reason:
            name = getattr(cls, "name", "")
            registry.problems.append(
                PluginProblem(origin.distribution, origin.entry_point, reason, backend=name if isinstance(name, str) else "")
            )
        elif cls not in [found.backend for found in named.get(cls.name, [])]:
            named.setdefault(cls.name, []).append(Found(cls, origin))
    for name, found in named.items():
        if len(found) == 1:
            registry.backends[name] = found[0]
            continue
        registry.ambiguous[name] = found
        owners = ", ".join(str(entry.origin) for entry in found)
        reason = f"backend name {name!r} is claimed {len(found)} times, by {owners}; it cannot be selected until one is uninstalled"
        registry.problems += [PluginProblem(f.origin.distribution, f.origin.entry_point, reason, backend=name) for f in found]


def _class_problem(cls: object) -> str:
    """Why `cls` is no backend class for this core; "" if it is one. The contract version is looked at first."""
    if not inspect.isclass(cls):
        return f"deepinfer_backends returned {cls!r}, expected subclasses of deepinfer_core.backend.Backend"
    version = getattr(cls, "api_version", None)
    if version != API_VERSION:
        remedy = "upgrade deepinfer-core" if isinstance(version, int) and version > API_VERSION else "upgrade the plugin"
        return f"class {cls.__name__} has api_version {version!r}, this core has contract version {API_VERSION}: {remedy}"
    if not issubclass(cls, Backend):
        return f"class {cls.__name__} is not a subclass of deepinfer_core.backend.Backend"
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == AUTO:
        return f"class {cls.__name__} has name {name!r}, expected lower-case letters, digits and '_', not 'auto'"
    missing = sorted(cls.__abstractmethods__)
    return f"backend {name!r} lacks the methods {', '.join(missing)}" if missing else ""


def _described(problem: PluginProblem) -> str:
    return f"{problem.distribution} (entry point {problem.entry_point!r}): {problem.reason}"


def _line(point: EntryPoint) -> str:
    return f"{point.name} = {point.value}"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
