"""`CpuReference`: the backend that runs everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_core.backend import API_VERSION, Backend, CacheFormat, Capabilities, Numerics, Probe, WeightFormat

if TYPE_CHECKING:
    from deepinfer_core.backend.kernels import Kernels
    from deepinfer_core.backend.runtime import DeviceRuntime

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
)


class CpuReference(Backend):
    """Plain PyTorch on the CPU: the semantics of every op, and a worker thread as the device."""

    api_version = API_VERSION
    name = "cpu_ref"

    def probe(self) -> Probe:
        import os
        import platform

        return Probe(available=True, devices=(f"{platform.machine()} CPU, {os.cpu_count()} logical cores",))

    def capabilities(self) -> Capabilities:
        return _CLAIMS

    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> Kernels:
        """The ops on `device`: "" is the CPU; any other torch device works too, in plain PyTorch. Always batch invariant."""
        import torch

        from deepinfer_backends.cpu_ref.kernels import ReferenceKernels

        return ReferenceKernels(torch.device(device or "cpu"), numerics)

    def runtime(self, device: str) -> DeviceRuntime:
        """The worker-thread runtime. Raises BackendError if `device` is not the CPU."""
        from deepinfer_backends.cpu_ref.runtime import CpuRuntime

        return CpuRuntime(device or "cpu")
