"""What a case expects of each output, and the verdict of one comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_core.conformance.analysis import Approx


@dataclass(frozen=True)
class Verdict:
    """Result of comparing one output."""

    ratio: float  # worst error divided by its bound; 0: exactly right, above 1: failed
    where: tuple[int, ...] = ()  # indices of the worst element
    expected: str = ""
    got: str = ""
    note: str = ""  # what is wrong, in words; "" if the numbers say it

    @property
    def passed(self) -> bool:
        return self.ratio <= 1

    def describe(self) -> str:
        """One line for a report."""
        place = f" at {list(self.where)}" if self.where else ""
        values = f": expected {self.expected}, got {self.got}" if self.expected or self.got else ""
        size = f" (error {self.ratio:.3g} x the bound)" if self.ratio not in (0.0, float("inf")) else ""
        return f"{self.note or 'worst element'}{place}{values}{size}"


class Expectation(Protocol):
    """Judges one output, given as a CPU tensor."""

    def compare(self, got: Tensor) -> Verdict:
        """The verdict on `got`."""


def failed(note: str, expected: object = "", got: object = "", where: tuple[int, ...] = ()) -> Verdict:
    """A verdict that no number describes."""
    return Verdict(float("inf"), where, str(expected), str(got), note)


PASSED = Verdict(0.0)


@dataclass(frozen=True)
class Within:
    """Floats inside the interval of `want`, of the given dtype. NaN and infinity are never right unless the value itself is one."""

    want: Approx
    dtype: torch.dtype

    def compare(self, got: Tensor) -> Verdict:
        if problem := wrong_form(got, self.want.value.shape, self.dtype):
            return problem
        return worst(got.double(), self.want)


@dataclass(frozen=True)
class Exactly:
    """The very same values (a zero may have either sign), shape and dtype."""

    want: Tensor

    def compare(self, got: Tensor) -> Verdict:
        if problem := wrong_form(got, self.want.shape, self.want.dtype):
            return problem
        wrong = (got != self.want) & ~((got != got) & (self.want != self.want))
        if not wrong.any():
            return PASSED
        at = tuple(wrong.nonzero()[0].tolist())
        return failed(f"{int(wrong.sum())} of {wrong.numel()} elements differ, first", self.want[at].item(), got[at].item(), at)


@dataclass(frozen=True)
class Bits:
    """Bytes, one by one; where `free` is true anything may stand."""

    want: Tensor  # uint8
    free: Tensor | None = None
    meaning: Callable[[int], str] = str  # words for a flat byte offset

    def compare(self, got: Tensor) -> Verdict:
        wrong = got != self.want
        if self.free is not None:
            wrong &= ~self.free
        if not wrong.any():
            return PASSED
        at = int(wrong.flatten().nonzero()[0])
        want, have = (int(t.flatten()[at]) for t in (self.want, got))
        return failed(f"{int(wrong.sum())} bytes differ, first in {self.meaning(at)}", f"{want:#04x}", f"{have:#04x}", (at,))


@dataclass(frozen=True)
class Judged:
    """A comparison that needs its own code."""

    judge: Callable[[Tensor], Verdict]

    def compare(self, got: Tensor) -> Verdict:
        return self.judge(got)


def wrong_form(got: Any, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Verdict | None:
    """A failed verdict if `got` is no tensor of this shape and dtype."""
    if not isinstance(got, Tensor):
        return failed("the op did not return a tensor", f"{dtype} {list(shape)}", type(got).__name__)
    if tuple(got.shape) != tuple(shape) or got.dtype != dtype:
        return failed("wrong shape or dtype", f"{dtype} {list(shape)}", f"{got.dtype} {list(got.shape)}")
    return None


def worst(got: Tensor, want: Approx) -> Verdict:
    """The element of float64 `got` with the largest error relative to its radius."""
    if not got.numel():
        return PASSED
    error = torch.where(got == want.value, 0.0, (got - want.value).abs())
    ratio = torch.where(error == 0, 0.0, error / want.radius)
    ratio = torch.where(torch.isnan(ratio), torch.inf, ratio)
    ratio = torch.where(torch.isnan(got) & torch.isnan(want.value), 0.0, ratio)
    at = int(ratio.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), ratio.shape))
    expected, radius = float(want.value.flatten()[at]), float(want.radius.flatten()[at])
    return Verdict(float(ratio.flatten()[at]), where, f"{expected:.9g} +- {radius:.3g}", f"{float(got.flatten()[at]):.9g}")


def ranking(scores: Approx, chosen: Tensor, allowed: Tensor, count: Tensor) -> Verdict:
    """Whether each row's `chosen` ids are its `count` best allowed ones. Among scores that are certain, ties go to the lower id.

    scores [T, n]; chosen int64 [T, k], -1 padded, order irrelevant; allowed bool [T, n]; count int64 [T].
    """
    for row in range(chosen.shape[0]):
        ids = chosen[row][chosen[row] >= 0]
        want = int(count[row])
        if len(ids) != want or len(ids.unique()) != len(ids):
            return failed("wrong number of distinct entries", want, f"{len(ids)}: {ids.tolist()[:16]}", (row,))
        if want and (int(ids.max()) >= allowed.shape[1] or not allowed[row][ids].all()):
            return failed("an entry that may not be chosen", "allowed entries only", ids.tolist()[:16], (row,))
        verdict = _one_row(scores.low[row], scores.high[row], scores.value[row], ids, allowed[row], row)
        if verdict is not None:
            return verdict
    return PASSED


def _one_row(low: Tensor, high: Tensor, value: Tensor, ids: Tensor, allowed: Tensor, row: int) -> Verdict | None:
    taken = torch.zeros_like(allowed)
    taken[ids] = True
    left = allowed & ~taken
    if not left.any() or not taken.any():
        return None
    # A left-out entry must not be certainly better than a taken one, nor certainly equal to it with a lower id.
    best_left = torch.where(left, low, -torch.inf)
    worst_taken = torch.where(taken, high, torch.inf)
    a, b = int(best_left.argmax()), int(worst_taken.argmin())
    if best_left[a] > worst_taken[b]:
        return failed("a better entry was left out", f"{a} (score {value[a]:.6g})", f"{b} (score {value[b]:.6g})", (row,))
    certain = low == high
    for b in (taken & certain).nonzero()[:, 0].tolist():
        equal = left & certain & (value == value[b])
        equal[b:] = False
        if equal.any():
            a = int(equal.nonzero()[0])
            return failed("a tie was not broken towards the lower id", f"{a} (score {value[a]:.6g})", f"{b}, the same score", (row,))
    return None
