"""`SimdBackend`: what the core sees of this package. Free of torch, because listing the backends imports it."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from deepinfer_core.backend import Backend, CacheFormat, Capabilities, Numerics, Probe, WeightFormat
from deepinfer_simd import _library

if TYPE_CHECKING:
    from deepinfer_core.backend.kernels import Kernels
    from deepinfer_core.backend.runtime import DeviceRuntime

# What is inherited is claimed as the reference claims it; what is native was proved with `deepinfer conformance --backend cpu_simd`.
_CLAIMS = Capabilities(
    device_type="cpu",
    numerics=frozenset(Numerics),
    weight_formats=frozenset(WeightFormat),
    window_formats=frozenset({CacheFormat.FP8, CacheFormat.BF16, CacheFormat.F32}),
    entry_formats=frozenset({CacheFormat.FP4, CacheFormat.FP8, CacheFormat.BF16, CacheFormat.F32}),
    index_formats=frozenset({CacheFormat.FP4_INDEX, CacheFormat.BF16, CacheFormat.F32}),
    batch_invariant=True,
    deterministic_sampling=True,
    graph_capture=True,
    async_copy=True,
    collectives=frozenset({"gloo"}),
    tested_on=("AMD EPYC (Zen 4), 2 cores, g++ 12",),
)


class SimdBackend(Backend):
    """The CPU with vectorised C++ kernels; ops that this package does not have are the reference's."""

    api_version = 1
    name = "cpu_simd"

    def probe(self) -> Probe:
        reason = _library.problem()
        if reason:
            return Probe(available=False, reasons=(reason,))
        return Probe(available=True, devices=(f"{platform.machine()} CPU, {os.cpu_count()} logical cores",))

    def capabilities(self) -> Capabilities:
        return _CLAIMS

    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> Kernels:
        """The ops, always batch invariant. Raises BackendError if `device` is not the CPU: the C++ code reads addresses of this process."""
        import torch

        from deepinfer_core.errors import BackendError
        from deepinfer_simd.kernels import SimdKernels

        if torch.device(device or "cpu").type != "cpu":
            raise BackendError(
                f"backend 'cpu_simd' has no kernels for device {device!r}, only for 'cpu': set backend.device to '' or 'cpu'"
            )
        return SimdKernels(torch.device("cpu"), numerics)

    def runtime(self, device: str) -> DeviceRuntime:
        """The reference's runtime: the CPU needs no other."""
        from deepinfer_backends.cpu_ref.runtime import CpuRuntime

        return CpuRuntime(device or "cpu")
