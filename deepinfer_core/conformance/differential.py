"""Two backends on the same inputs: op by op, token by token, and through the model op call by op call.

For single ops the judge is the float64 reference, as in the `ops` level. Inside the model there is no float64 reference of every
intermediate, so a call diverges if its results differ by more than these bounds. Both backends get the very same inputs in every call, so
nothing accumulates:

* floats: relative error in the 2-norm of 2^-6 in release numerics (rounding flips of single elements stay far below, a wrong element of
  100 does not), 1e-4 in ideal numerics;
* chosen entries, experts and stored bytes: 2 of 100 may differ (near ties and rounding flips).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.kernels import OPS, Kernels
from deepinfer_core.conformance import trees
from deepinfer_core.conformance.model_level import golden, solo_model
from deepinfer_core.conformance.op_level import OpCase, judge
from deepinfer_core.conformance.results import CaseResult
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.watchdog import Watchdog

_FLOAT_BOUND = {Numerics.RELEASE: 2.0**-6, Numerics.IDEAL: 1e-4}
_DISCRETE_BOUND = 0.02

# Parameters that hold what a `prepare_*` op or a quantising op of the same backend made, and the ops whose result is of that kind.
_OPAQUE = {
    "linear": ("weight",),
    "quantized_linear": ("x", "weight"),
    "attention_output": ("wo_a", "wo_b"),
    "engram_gather": ("table",),
    "moe_gate": ("weight",),
    "moe": ("x", "experts", "shared"),
    "select_entries": ("query",),
    "markov_logits": ("head",),
}
_MAKES_OPAQUE = {
    "quantize",
    "rms_norm_quantize",
    "engram_gather",
    "index_query",
    "prepare_linear",
    "prepare_experts",
    "prepare_engram_table",
}


def compare_case(a: Subject, b: Subject, case: OpCase, watchdog: Watchdog) -> CaseResult:
    """One case on both. Failed if one of them leaves the bound; the message names it."""
    result = CaseResult("ops", case.description.op, case.case, "passed")
    problems, ratio = [], 0.0
    for subject in (a, b):
        reason = case.geometry.unsupported(subject.claims)
        if reason:
            return CaseResult("ops", case.description.op, case.case, "unsupported", f"{subject.name}: {reason}")
        try:
            verdicts = watchdog.run(functools.partial(judge, subject, case))
        except Exception as error:  # noqa: BLE001 a backend may raise anything: the case fails, the run goes on
            problems.append(f"{subject.name}: {type(error).__name__}: {error}")
            continue
        ratio = max(ratio, *(verdict.ratio for verdict in verdicts.values()))
        problems += [f"{subject.name}: output {name!r}: {v.describe()}" for name, v in verdicts.items() if not v.passed]
    if not problems:
        return CaseResult("ops", case.description.op, case.case, "passed", ratio=ratio)
    return CaseResult("ops", result.name, result.case, "failed", "; ".join(problems), ratio, reproduce=case.reproduce(a.name))


@dataclass(frozen=True)
class TokenDifference:
    """Where two greedy continuations of one prompt part."""

    prompt: str
    position: int  # output token; -1: they agree
    tokens: tuple[int, int]
    lead: float  # by how much the first backend's best logit leads there

    @property
    def matters(self) -> bool:
        """True if rounding cannot explain it: the best logit leads by more than rounding moves logits (see the model level)."""
        return self.position >= 0 and self.lead > 0.35

    def describe(self) -> str:
        """One line."""
        if self.position < 0:
            return "the same"
        return f"part at output token {self.position} ({self.tokens[0]} and {self.tokens[1]}), where the best leads by {self.lead:.3g}"


def compare_tokens(a: Subject, b: Subject, numerics: Numerics, count: int = 24) -> list[TokenDifference]:
    """Greedy tokens of both backends after the recorded prompts."""
    found = []
    for prompt in ("p33", "p150"):
        ids = golden()[f"{prompt}.input_ids"].tolist()
        first, second = (solo_model(subject, numerics).greedy(ids, count) for subject in (a, b))
        at = next((i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x != y), -1)
        lead, pair = 0.0, (0, 0)
        if at >= 0:
            top = solo_model(a, numerics).logits([*ids, *first[:at]])[-1].topk(2).values
            lead, pair = float(top[0] - top[1]), (first[at], second[at])
        found.append(TokenDifference(prompt, at, pair, lead))
    return found


@dataclass(frozen=True)
class Divergence:
    """One op call whose results differ beyond bound although the inputs were the same."""

    layer: int  # -1: outside the layers
    op: str
    call: int  # number of the op call in the step
    result: str
    error: float
    bound: float

    def describe(self) -> str:
        """One line."""
        place = f"layer {self.layer}" if self.layer >= 0 else "outside the layers"
        return f"{place}, op {self.op} (call {self.call}), result {self.result}: error {self.error:.3g}, bound {self.bound:.3g}"


def bisect(a: Subject, b: Subject, numerics: Numerics) -> list[Divergence]:
    """Every diverging op call of one prefill and one decode step of the shipped checkpoint, in the order of execution.

    The first backend runs the model. Before each op call its arguments are copied to the second backend, which runs the same op on them.
    """
    found: list[Divergence] = []
    layer = [-1]
    shadow = _Shadow(b.kernels(numerics), numerics, found, layer)
    solo = solo_model(a, numerics, shadow.around(a.kernels(numerics)))
    model = solo.loaded.model
    inner = model.layer

    def tracked(spec: Any, *args: Any) -> Any:
        layer[0] = spec.index
        try:
            return inner(spec, *args)
        finally:
            layer[0] = -1

    model.layer = tracked  # type: ignore[method-assign, assignment]
    ids = golden()["p33.input_ids"].tolist()
    for tokens in (ids, [7]):
        shadow.calls = 0
        model.logits(solo.step({0: tokens}).hidden)
    return found


class _Shadow:
    """Runs every op of one backend on another one's arguments and compares."""

    def __init__(self, other: Kernels, numerics: Numerics, found: list[Divergence], layer: list[int]) -> None:
        self.other, self.found, self.layer = other, found, layer
        self.bound = _FLOAT_BOUND[numerics]
        self.calls, self._depth = 0, 0
        self._twin: dict[int, tuple[Any, Any]] = {}  # id of an opaque value -> (that value, the other backend's)

    def around(self, kernels: Kernels) -> Kernels:
        """The same kernels, shadowed."""
        cls = type("Shadowed", (type(kernels),), {op: self._wrap(op, getattr(type(kernels), op)) for op in OPS})
        same: Kernels = object.__new__(cls)
        same.__dict__ = kernels.__dict__
        return same

    def _wrap(self, op: str, inner: Callable[..., Any]) -> Any:
        signature = inspect.signature(getattr(Kernels, op))

        @functools.wraps(inner)
        def method(kernels: Kernels, *args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return inner(kernels, *args, **kwargs)
            bound = signature.bind(kernels, *args, **kwargs)
            bound.apply_defaults()
            arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
            if op == "prepare_experts":
                arguments["experts"] = list(arguments["experts"])
            theirs = self._translated(op, arguments)
            with self._inside():
                mine = inner(kernels, **arguments)
            self._compare(op, arguments, mine, theirs, getattr(self.other, op)(**theirs))
            return mine

        return method

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _translated(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        opaque = {name: arguments[name] for name in _OPAQUE.get(op, ()) if arguments[name] is not None}
        plain = trees.copy_to({name: value for name, value in arguments.items() if name not in opaque}, self.other.device)
        return {**plain, **{name: self._twin[id(value)][1] for name, value in opaque.items()}}

    def _compare(self, op: str, arguments: dict[str, Any], mine: Any, theirs_in: dict[str, Any], theirs: Any) -> None:
        self.calls += 1
        if op in _MAKES_OPAQUE:
            self._twin[id(mine)] = (mine, theirs)
            return
        if op == "hc_pre":
            self._twin[id(mine.quantized)] = (mine.quantized, theirs.quantized)
            mine, theirs = mine._replace(quantized=None), theirs._replace(quantized=None)
        opaque = _OPAQUE.get(op, ())
        pairs = zip(trees.tensors({"out": mine}), trees.tensors({"out": theirs}), strict=True)
        if mine is None:  # a store: what counts are the buffers
            kept = [name for name in arguments if name not in opaque]
            pairs = zip(trees.tensors({n: arguments[n] for n in kept}), trees.tensors({n: theirs_in[n] for n in kept}), strict=True)
        for (path, x), (_, y) in pairs:
            error, bound = self._error(x.detach().cpu(), y.detach().cpu())
            if error > bound:
                self.found.append(Divergence(self.layer[0], op, self.calls, path, error, bound))

    def _error(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf"), 0.0
        if x.dtype.is_floating_point and x.element_size() > 1:
            size = float(x.double().norm())
            error = float((x.double() - y.double()).norm())
            return (error / size if size else error) if error == error else float("inf"), self.bound
        return float((x.view(torch.uint8) != y.view(torch.uint8)).float().mean()) if x.numel() else 0.0, _DISCRETE_BOUND
