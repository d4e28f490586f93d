"""The description of one op: geometries, generator, reference, aliasing and cost. Declared once, used by suite, benchmark and docs."""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from deepinfer_core.backend.capabilities import Capabilities
from deepinfer_core.backend.formats import CacheFormat, Numerics, WeightFormat
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.conformance.analysis import Arithmetic
from deepinfer_core.conformance.expect import Expectation
from deepinfer_core.conformance.generate import Draw

Inputs = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Cost:
    """What an ideal implementation of one call moves and computes: bytes of every input read once and every output written once."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Geometry:
    """A named shape (and content) of inputs."""

    name: str
    dims: Mapping[str, Any]
    why: str = ""  # which mistake it is after
    quick: bool = True  # part of `--quick`
    numerics: Numerics | None = None  # only in this arithmetic; None: in each that the backend offers
    exact_sums: bool = False  # numbers are small integers: float32 sums are exact
    weights: WeightFormat | None = None  # needs this checkpoint format
    window: CacheFormat | None = None  # needs this storage format of window keys
    entry: CacheFormat | None = None  # ... of compressed entries
    index: CacheFormat | None = None  # ... of index keys

    def unsupported(self, claims: Capabilities) -> str:
        """Why a backend with these claims does not run it; "" if it does."""
        for kind, needed, offered in (
            ("weight_formats", self.weights, claims.weight_formats),
            ("window_formats", self.window, claims.window_formats),
            ("entry_formats", self.entry, claims.entry_formats),
            ("index_formats", self.index, claims.index_formats),
        ):
            if needed is not None and needed not in offered:
                return f"{kind} does not name {needed}"
        return ""


@dataclass(frozen=True)
class OpDescription:
    """Everything the suite knows about one op of `Kernels`."""

    op: str
    bound: str  # how far a result may be off, and why
    geometries: tuple[Geometry, ...]
    make: Callable[[Mapping[str, Any], Draw], Inputs]  # CPU inputs
    run: Callable[[Kernels, Inputs], Outputs]  # calls the op, makes opaque results visible
    expect: Callable[[Arithmetic, Inputs, Outputs], dict[str, Expectation]]  # CPU inputs as before the call; outputs for conditional ones
    cost: Callable[[Inputs], Cost]
    mutates: frozenset[str] = frozenset()  # paths of inputs that the op may change
    may_alias: bool = False  # results may share memory with inputs
    rows: Callable[[Inputs, Tensor], Inputs] | None = None  # the call restricted to some rows; None: not an op on rows
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # dims of the benchmark geometries
    prepare: Callable[[Kernels, Inputs], Callable[[], Any]] | None = None  # benchmark: set-up outside the clock; None: time `run`
    workspace: Callable[[Mapping[str, Any]], float] | None = None  # bytes that a plain implementation needs for these dims; None: little

    def geometry(self, name: str) -> Geometry:
        """The geometry of that name. Raises KeyError."""
        return {g.name: g for g in self.geometries}[name]

    def inputs(self, geometry: Geometry, numerics: Numerics, seed: int) -> Inputs:
        """Inputs of one case on the CPU: the same for every backend."""
        return self.make(geometry.dims, Draw(case_seed(self.op, geometry.name, seed), numerics))


def case_seed(op: str, geometry: str, seed: int) -> int:
    """A generator seed that depends on all three."""
    return zlib.crc32(f"{op}/{geometry}/{seed}".encode())


@cache
def descriptions() -> dict[str, OpDescription]:
    """Every described op by name, from the modules of `deepinfer_core.conformance.ops`."""
    from deepinfer_core.conformance import ops

    found: dict[str, OpDescription] = {}
    for module in pkgutil.iter_modules(ops.__path__):
        for description in importlib.import_module(f"{ops.__name__}.{module.name}").OPS:
            assert description.op not in found, f"op {description.op!r} is described twice"
            found[description.op] = description
    return dict(sorted(found.items()))
