"""Where a step's time goes: kernels by device time, launches, idle time between them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME_WIDTH = 100


@dataclass(frozen=True)
class Profile:
    """One profiled piece of work. Milliseconds."""

    title: str
    wall: float  # by the host's clock, the profiler's own cost included
    span: float  # from the start of the first kernel to the end of the last
    busy: float  # sum of kernel times
    launches: int  # kernels and copies that ran on the device
    kernels: list[tuple[str, int, float]]  # name, how often, total

    def markdown(self, rows: int = 25) -> str:
        """A table, largest first."""
        idle = max(self.span - self.busy, 0.0)
        head = (
            f"### {self.title}\n\n{self.launches} kernels, busy {self.busy:.3f} ms, span {self.span:.3f} ms (idle between kernels "
            f"{idle:.3f} ms = {idle / self.span if self.span else 0:.0%}), host {self.wall:.3f} ms under the profiler\n\n"
            "| kernel | calls | ms | share | mean us |\n|---|---:|---:|---:|---:|\n"
        )
        lines = [
            f"| `{name[:NAME_WIDTH]}` | {count} | {ms:.3f} | {ms / self.busy if self.busy else 0:.1%} | {1e3 * ms / count:.1f} |"
            for name, count, ms in self.kernels[:rows]
        ]
        rest = self.kernels[rows:]
        if rest:
            ms = sum(kernel[2] for kernel in rest)
            lines.append(f"| {len(rest)} others | {sum(k[1] for k in rest)} | {ms:.3f} | {ms / self.busy:.1%} | |")
        return head + "\n".join(lines) + "\n"

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"wall": self.wall, "span": self.span, "busy": self.busy, "launches": self.launches, "kernels": self.kernels[:60]}


def profiled(title: str, device: torch.device, work: Callable[[], None]) -> Profile:
    """Runs `work` once under torch's profiler. `work` ends with a wait for the device."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as recorded:
        begin = time.perf_counter()
        work()
        wall = 1e3 * (time.perf_counter() - begin)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    begins, ends = [], []
    for event in recorded.events():
        if event.device_type != wanted:
            continue
        ms = (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e3
        totals[event.name][0] += 1
        totals[event.name][1] += ms
        begins.append(event.time_range.start)
        ends.append(event.time_range.end)
    kernels = sorted(((name, int(count), ms) for name, (count, ms) in totals.items()), key=lambda kernel: -kernel[2])
    span = (max(ends) - min(begins)) / 1e3 if ends else 0.0
    return Profile(title, wall, span, sum(kernel[2] for kernel in kernels), sum(kernel[1] for kernel in kernels), kernels)
