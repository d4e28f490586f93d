"""Per-op benchmark: median time, bytes/s and FLOP/s, and their share of the device's ceilings, measured in the same run."""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_core.backend.formats import Numerics
from deepinfer_core.conformance import trees
from deepinfer_core.conformance.describe import Cost, OpDescription, descriptions
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.subject import Subject

PRESETS = ("decode-1", "decode-64", "prefill-8k")

_REPEATS = 7
_WINDOW = 0.02  # seconds of work between two looks at the clock


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches on one large copy and one large matrix product."""

    bytes_per_second: float
    flops_per_second: float
    how: str


@dataclass(frozen=True)
class Timing:
    """One op in one preset."""

    op: str
    preset: str
    seconds: float  # median of one call; 0 if it was not run
    cost: Cost
    skipped: str = ""  # why it was not run

    def share(self, ceilings: Ceilings) -> float:
        """Time that the ceilings allow, divided by the time taken: 1 is as fast as a copy or product of that size can be."""
        best = max(self.cost.bytes / ceilings.bytes_per_second, self.cost.flops / ceilings.flops_per_second)
        return best / self.seconds if self.seconds else 0.0


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copies a tensor far larger than any cache and multiplies two large matrices."""
    on_cpu = device.type == "cpu"
    size, side = (1 << 28, 2048) if on_cpu else (1 << 31, 8192)
    copied = _copy_seconds(size, device)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    x = torch.ones(side, side, dtype=dtype, device=device)
    multiplied = _median(lambda: x @ x, device)
    how = f"copy of {size >> 20} MiB (read and written), {dtype} product of {side} x {side} matrices"
    return Ceilings(2 * size / copied, 2.0 * side**3 / multiplied, how.replace("torch.", ""))


def _copy_seconds(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _median(lambda: target.copy_(source), device)


def run_benchmark(subject: Subject, presets: list[str], ops: str, ceilings: Ceilings, most_seconds: float) -> Iterator[Timing]:
    """Times every op that matches, in every preset it has. An op that would need too much time or memory is skipped, with the reason."""
    numerics = subject.numerics()[0]
    runtime = subject.backend.runtime(subject.device)
    available = runtime.memory().available
    runtime.close()
    for description in descriptions().values():
        for preset in presets:
            if fnmatch.fnmatchcase(description.op, ops) and preset in description.presets:
                yield _time(subject, description, preset, numerics, (ceilings, most_seconds, available))


def _time(subject: Subject, description: OpDescription, preset: str, numerics: Numerics, limits: tuple[Ceilings, float, float]) -> Timing:
    ceilings, most_seconds, available = limits
    dims = description.presets[preset]
    needed = description.workspace(dims) if description.workspace else 0.0
    if needed > 0.6 * available:
        text = f"a plain implementation needs about {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are available"
        return Timing(description.op, preset, 0.0, Cost(0, 0), text)
    inputs = description.make(dims, Draw(1, numerics))
    cost = description.cost(inputs)
    least = max(cost.flops / ceilings.flops_per_second, cost.bytes / ceilings.bytes_per_second)
    if least > most_seconds:
        return Timing(description.op, preset, 0.0, cost, f"takes {least:.0f} s at the ceilings; --max-seconds is {most_seconds:g}")
    kernels = subject.kernels(numerics)
    given = trees.copy_to(inputs, kernels.device)
    del inputs
    with torch.no_grad():
        work = description.prepare(kernels, given) if description.prepare else lambda: description.run(kernels, given)
        return Timing(description.op, preset, _median(work, kernels.device), cost)


def _median(work: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one call, after two warm-up calls. Short calls are timed in groups; the caches stay warm."""
    work()
    started = time.perf_counter()
    work()
    _wait(device)
    once = time.perf_counter() - started
    count = max(1, int(_WINDOW / max(once, 1e-9)))
    times = []
    for _ in range(_REPEATS if once < 1 else 3):
        started = time.perf_counter()
        for _ in range(count):
            work()
        _wait(device)
        times.append((time.perf_counter() - started) / count)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
