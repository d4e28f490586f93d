"""Running error analysis in float64: what an op should compute, and how far a correct implementation may be from it.

A quantity is an `Approx`: its value in float64 and, for every element, a radius. The operations below follow the contract's text
(`deepinfer_core.backend.kernels`), not any backend's code, and grow the radius by what the contract leaves free:

* sums of K products in float32, in any order: lambda*sqrt(K)*u*sum|x*w| with lambda = 8, at most K*u*sum|x*w|; u = 2^-24. This is the
  probabilistic rounding bound (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019); the worst case is K*u.
* radii of the terms of a sum: independent of each other, hence 4*sqrt(sum r^2), at most sum r.
* a float32 function: a few units in the last place (`noise`), plus its value at both ends of its argument's interval (`monotone`).
* rounding to bfloat16 and to the quantised grids: both ends of the interval are rounded. A value that lies well between two rounding
  boundaries gets radius 0: there the comparison is exact.

So a bound belongs to (op, arithmetic, the numbers at hand) and never to a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.conformance import grids

U32 = 2.0**-24
"""Unit roundoff of float32."""

_LAMBDA = 8.0
_INDEPENDENT = 4.0
_TINY = 2.0**-120  # below anything that matters; covers flushed subnormals


@dataclass(frozen=True)
class Approx:
    """Float64 values with a radius each: a correct result lies in [value - radius, value + radius]."""

    value: Tensor
    radius: Tensor

    @property
    def low(self) -> Tensor:
        return self.value - self.radius

    @property
    def high(self) -> Tensor:
        return self.value + self.radius

    def __getitem__(self, key: Any) -> Approx:
        return Approx(self.value[key], self.radius[key])

    def view(self, *shape: int) -> Approx:
        return Approx(self.value.reshape(*shape), self.radius.reshape(*shape))

    def plus(self, other: Approx) -> Approx:
        """Sum of two float32 quantities."""
        value = self.value + other.value
        return Approx(value, self.radius + other.radius + U32 * value.abs())

    def times(self, other: Approx) -> Approx:
        """Product of two float32 quantities, element by element."""
        value = self.value * other.value
        radius = self.radius * other.value.abs() + other.radius * self.value.abs() + self.radius * other.radius
        return Approx(value, radius + U32 * value.abs())

    def noise(self, units: float, magnitude: Tensor | None = None) -> Approx:
        """The same with `units` float32 roundings of `magnitude` (default: of the value) added to the radius."""
        size = self.value.abs() if magnitude is None else magnitude
        return Approx(self.value, self.radius + units * U32 * size + _TINY)

    def monotone(self, function: Callable[[Tensor], Tensor], units: float = 4.0) -> Approx:
        """A non-decreasing function of it, computed in float32 with an error of `units` roundings."""
        value = function(self.value)
        radius = torch.maximum(function(self.high) - value, value - function(self.low)).clamp_min(0)
        return Approx(value, radius).noise(units)


def exact(x: Tensor) -> Approx:
    """A quantity that is known exactly."""
    value = x.double()
    return Approx(value, torch.zeros_like(value))


def stack(parts: list[Approx], dim: int) -> Approx:
    """torch.stack."""
    return Approx(torch.stack([p.value for p in parts], dim), torch.stack([p.radius for p in parts], dim))


def cat(parts: list[Approx], dim: int) -> Approx:
    """torch.cat."""
    return Approx(torch.cat([p.value for p in parts], dim), torch.cat([p.radius for p in parts], dim))


def where(condition: Tensor, a: Approx, b: Approx) -> Approx:
    """torch.where."""
    return Approx(torch.where(condition, a.value, b.value), torch.where(condition, a.radius, b.radius))


class Arithmetic:
    """The rounding points of one `Numerics`. `exact_sums`: the case's numbers are integers so small that float32 sums them exactly."""

    def __init__(self, numerics: Numerics, exact_sums: bool = False) -> None:
        self.release = numerics is Numerics.RELEASE
        self.numerics = numerics
        self.dtype = torch.bfloat16 if self.release else torch.float32
        self.exact_sums = exact_sums

    def accumulation(self, count: int) -> float:
        """Error of a float32 sum of `count` terms relative to the sum of their magnitudes."""
        return 0.0 if self.exact_sums else min(count, _LAMBDA * count**0.5) * U32

    def sum(self, terms: Approx, dim: int, accurate: bool = False) -> Approx:
        """Float32 sum over `dim` in any order; `accurate`: no error of the sum itself."""
        value = terms.value.sum(dim)
        radius = torch.minimum(terms.radius.sum(dim), _INDEPENDENT * terms.radius.square().sum(dim).sqrt())
        if not accurate:
            radius = radius + self.accumulation(terms.value.shape[dim]) * terms.value.abs().sum(dim) + _TINY
        return Approx(value, radius)

    def product(self, x: Approx, weight: Tensor) -> Approx:
        """x [..., T, k] times exactly known weight [..., n, k], transposed; float32 accumulation."""
        w = weight.double()
        size, wt = w.abs().transpose(-1, -2), w.transpose(-1, -2)
        radius = self.accumulation(w.shape[-1]) * (x.value.abs() @ size) + (0.0 if self.exact_sums else _TINY)
        if x.radius.any():
            spread = _INDEPENDENT * (x.radius.square() @ wt.square()).sqrt()
            radius = radius + torch.minimum(spread, x.radius @ size)
        return Approx(x.value @ wt, radius)

    def rounded(self, x: Approx) -> Approx:
        """Rounded to the activation dtype: bfloat16, or float32 (one more float32 rounding) in ideal numerics."""
        if not self.release:
            return x.noise(1)
        return _at_ends(x, grids.bfloat16)

    def maybe_rounded(self, x: Approx) -> Approx:
        """An intermediate that may be kept in float32 or rounded."""
        return Approx(x.value, torch.maximum(x.radius, (self.rounded(x).value - x.value).abs() + x.radius))

    def fp8(self, x: Approx) -> Approx:
        """Fake FP8 quantisation in blocks of 32; the identity in ideal numerics."""
        return self.stored(x, CacheFormat.FP8) if self.release else x

    def fp4_index(self, x: Approx) -> Approx:
        """Fake FP4 quantisation of index queries and keys; the identity in ideal numerics."""
        return self.stored(x, CacheFormat.FP4_INDEX) if self.release else x

    def stored(self, x: Approx, fmt: CacheFormat) -> Approx:
        """What a cache in format `fmt` gives back."""
        if fmt is CacheFormat.BF16:
            return _at_ends(x, grids.bfloat16)
        if fmt is CacheFormat.F32:
            return x if self.release else x.noise(1)
        block = grids.BLOCK[fmt]
        blocks = Approx(x.value.unflatten(-1, (-1, block)), x.radius.unflatten(-1, (-1, block)))
        amax = blocks.value.abs().amax(-1, keepdim=True)
        slack = torch.where(blocks.value.abs() + blocks.radius >= amax, blocks.radius, 0.0).amax(-1, keepdim=True)
        scales = [grids.scale(a, fmt) for a in (amax, amax - slack, amax + slack)]
        centre = grids.to_grid(blocks.value, scales[0], fmt)
        ends = torch.stack([grids.to_grid(v, s, fmt) for s in scales for v in (blocks.low, blocks.value, blocks.high)])
        radius = torch.maximum(ends.amax(0) - centre, centre - ends.amin(0))
        return Approx(centre.flatten(-2), radius.flatten(-2))

    def rms_norm(self, x: Approx, weight: Tensor, eps: float) -> Approx:
        """x * rsqrt(mean(x^2) + eps) * weight, before rounding."""
        count = x.value.shape[-1]
        mean = x.value.square().mean(-1, keepdim=True) + eps
        spread = _INDEPENDENT * 2 * (x.value * x.radius).square().sum(-1, keepdim=True).sqrt() / count
        relative = 0.5 * spread / mean + (min(count, _LAMBDA * count**0.5) / 2 + 4) * U32
        scale = mean.rsqrt() * weight.double().abs()
        value = x.value * mean.rsqrt() * weight.double()
        return Approx(value, x.radius * scale + value.abs() * relative + _TINY)

    def rotated(self, x: Approx, table: Tensor, positions: Tensor, inverse: bool = False) -> Approx:
        """The last rd dims of x [rows, ..., d] rotated by the angle of `positions` [rows], before rounding."""
        rd = table.shape[1]
        angles = table.double()[positions].view(len(positions), *[1] * (x.value.dim() - 2), 2, rd // 2)
        cos, sin = angles.unbind(-2)
        sin = -sin if inverse else sin
        head, tail = x[..., :-rd], x[..., -rd:]
        a, b = tail[..., 0::2], tail[..., 1::2]
        first = a.value * cos - b.value * sin
        second = a.value * sin + b.value * cos
        size = (a.value * cos).abs() + (b.value * sin).abs(), (a.value * sin).abs() + (b.value * cos).abs()
        spread = a.radius * cos.abs() + b.radius * sin.abs(), a.radius * sin.abs() + b.radius * cos.abs()
        turned = [Approx(v, r).noise(2, s) for v, r, s in zip((first, second), spread, size, strict=True)]
        both = stack(turned, -1)
        return cat([head, Approx(both.value.flatten(-2), both.radius.flatten(-2))], -1)

    def softmax_weights(self, scores: Approx, dim: int) -> Approx:
        """exp(s - max s), unnormalised, with the error of a float32 exponential of an argument that is itself uncertain."""
        top = scores.value.amax(dim, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        value = (scores.value - top).exp()
        argument = (scores.value - top).abs().nan_to_num(posinf=0.0)
        relative = torch.expm1(scores.radius.nan_to_num(posinf=0.0)) + (4 + 2 * argument) * U32
        return Approx(value, value * relative)


def _at_ends(x: Approx, rounding: Callable[[Tensor], Tensor]) -> Approx:
    value = rounding(x.value)
    if not x.radius.any():
        return Approx(value, torch.zeros_like(value))
    return Approx(value, torch.maximum(rounding(x.high) - value, value - rounding(x.low)))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float64."""
    return torch.sigmoid(x)
