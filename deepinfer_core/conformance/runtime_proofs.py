"""Proofs about the runtime: captured work replays like eager work, and copies overlap with the host."""

from __future__ import annotations

import time

import numpy as np
import torch

from deepinfer_core.backend.runtime import DeviceRuntime
from deepinfer_core.conformance.checks import expect
from deepinfer_core.conformance.subject import Subject


def prove_capture(subject: Subject) -> None:
    """A captured piece of work, replayed over changed buffers, gives what eager work gives."""
    numerics = subject.numerics()[0]
    kernels, runtime = subject.kernels(numerics), subject.backend.runtime(subject.device)
    try:
        weight = torch.linspace(0.5, 1.5, 64, device=kernels.device).bfloat16()
        x = torch.zeros(5, 64, device=kernels.device)
        out = torch.zeros(5, 64, device=kernels.device)

        def work() -> None:
            out.copy_(kernels.rms_norm(x, weight, 1e-6))

        def warm() -> dict[str, torch.Tensor]:
            work()
            return {}

        runtime.submit(warm).wait()
        graph = runtime.capture(work)
        for seed in range(3):
            values = np.random.default_rng(seed).standard_normal((5, 64)).astype(np.float32)
            runtime.to_device(values, x)
            graph.replay()
            got = runtime.to_host({"out": out}).wait()["out"]
            want = kernels.rms_norm(torch.from_numpy(values).to(kernels.device), weight, 1e-6).float().cpu().numpy()
            expect(np.array_equal(got, want), f"replay {seed} of a captured graph differs from eager execution")
    finally:
        runtime.close()


def prove_overlap(subject: Subject) -> None:
    """`submit` returns while its work is still running."""
    runtime = subject.backend.runtime(subject.device)
    try:
        size = 512 if runtime.device.type == "cpu" else 4096
        x = torch.ones(size, size, device=runtime.device)
        repeats, seconds = 1, 0.0
        while seconds < 0.2 and repeats < 1 << 20:
            repeats *= 2
            seconds = _timed(runtime, x, repeats)
        started = time.perf_counter()
        pending = runtime.submit(lambda: _multiply(x, repeats))
        returned, done = time.perf_counter() - started, pending.done()
        pending.wait()
        expect(not done, f"submit returned after {returned:.3g} s with its work done: the host waited for the device")
    finally:
        runtime.close()


def _timed(runtime: DeviceRuntime, x: torch.Tensor, repeats: int) -> float:
    started = time.perf_counter()
    runtime.submit(lambda: _multiply(x, repeats)).wait()
    return time.perf_counter() - started


def _multiply(x: torch.Tensor, repeats: int) -> dict[str, torch.Tensor]:
    y = x
    for _ in range(repeats):
        y = (x @ y) * (1.0 / len(x))
    return {"y": y[:1, :1]}
