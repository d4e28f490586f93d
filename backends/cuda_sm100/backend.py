"""`CudaBackend`: NVIDIA GPUs of compute capability 9.0 (Hopper) and 10.x (Blackwell)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_core.backend import API_VERSION, Backend, CacheFormat, Capabilities, Numerics, Probe, WeightFormat
from deepinfer_core.errors import BackendError

if TYPE_CHECKING:
    from deepinfer_core.backend.kernels import Kernels
    from deepinfer_core.backend.runtime import DeviceRuntime

_CLAIMS = Capabilities(
    device_type="cuda",
    architectures=("sm_90a", "sm_100a"),
    numerics=frozenset({Numerics.RELEASE}),
    weight_formats=frozenset(WeightFormat),
    window_formats=frozenset({CacheFormat.FP8}),
    entry_formats=frozenset({CacheFormat.FP4, CacheFormat.FP8}),
    index_formats=frozenset({CacheFormat.FP4_INDEX}),
    batch_invariant=True,
    deterministic_sampling=True,
    graph_capture=True,
    async_copy=True,
    collectives=frozenset({"nccl"}),
    tested_on=("NVIDIA H200 (SM90): every level of the conformance suite, 2026-11-30",),
)
_TRITON = "Triton is not installed: pip install 'deepinfer-core[cuda_sm100]' (Triton 3.6 or newer)"


@dataclass(frozen=True)
class Device:
    """One GPU as the driver describes it."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes


@dataclass(frozen=True)
class Machine:
    """What decides whether the backend can run."""

    torch_cuda: str | None  # CUDA version torch was built for, None for a build without CUDA
    driver: int  # newest CUDA version the driver supports, 1000 * major + 10 * minor; 0 without a driver
    devices: tuple[Device, ...]
    has_triton: bool


def examine() -> Machine:
    """Facts about this machine. Imports torch, creates no CUDA context unless a GPU is there."""
    import torch

    version = torch.version.cuda
    devices = []
    if version and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(Device(properties.name, (properties.major, properties.minor), properties.total_memory))
    # Not every torch build tells the driver's version. A driver that shows devices to torch is new enough for it.
    driver = int(torch._C._cuda_getDriverVersion()) if version and hasattr(torch._C, "_cuda_getDriverVersion") else 0
    if version and devices:
        driver = max(driver, 1000 * int(version.split(".")[0]))
    return Machine(version, driver_version(), tuple(devices), importlib.util.find_spec("triton") is not None)


def driver_version() -> int:
    """Newest CUDA version the driver supports, as `Machine.driver` has it; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def probe_machine(machine: Machine) -> Probe:
    """The answer for a machine; every reason says what to do."""
    reasons = [] if machine.has_triton else [_TRITON]
    usable = [device for device in machine.devices if device.capability[0] in (9, 10)]
    if machine.torch_cuda is None:
        reasons.append("this build of torch has no CUDA: install a CUDA build of torch 2.11 or newer (https://pytorch.org)")
    elif machine.driver == 0 and not machine.devices:
        reasons.append("no NVIDIA driver answers: install one, or use backend 'cpu_ref' on a machine without a GPU")
    elif machine.driver // 1000 < int(machine.torch_cuda.split(".")[0]) and not machine.devices:
        have = f"{machine.driver // 1000}.{machine.driver % 1000 // 10}"
        reasons.append(
            f"the NVIDIA driver is too old: it supports CUDA {have}, torch was built for CUDA {machine.torch_cuda}; "
            "update the driver or install a torch build for an older CUDA"
        )
    elif not machine.devices:
        reasons.append("the driver shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    elif not usable:
        found = ", ".join(f"{d.name} (compute capability {d.capability[0]}.{d.capability[1]})" for d in machine.devices)
        reasons.append(f"no GPU of compute capability 9.0 (Hopper) or 10.x (Blackwell), only {found}: use backend 'cpu_ref' here")
    names = tuple(f"{d.name}, compute capability {d.capability[0]}.{d.capability[1]}, {d.memory / 2**30:.0f} GiB" for d in usable)
    return Probe(available=not reasons, reasons=tuple(reasons), devices=names)


class CudaBackend(Backend):
    """Triton kernels, CUDA graphs, NCCL."""

    api_version = API_VERSION
    name = "cuda_sm100"

    def probe(self) -> Probe:
        try:
            return probe_machine(examine())
        except (ImportError, OSError, RuntimeError) as error:
            return Probe(available=False, reasons=(f"looking for a GPU failed: {type(error).__name__}: {error}",))

    def capabilities(self) -> Capabilities:
        return _CLAIMS

    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> Kernels:
        """The ops on `device` ("" is "cuda:0"). Raises BackendError without Triton or for numerics other than `release`.

        `batch_invariant` fixes every order of additions, which costs speed at small batches.
        """
        import torch

        if importlib.util.find_spec("triton") is None:
            raise BackendError(f"backend 'cuda_sm100': {_TRITON}")
        from deepinfer_backends.cuda_sm100.kernels import CudaKernels

        return CudaKernels(torch.device(device or "cuda:0"), numerics, batch_invariant)

    def runtime(self, device: str) -> DeviceRuntime:
        """Streams, graphs and memory figures of `device` ("" is "cuda:0")."""
        from deepinfer_backends.cuda_sm100.runtime import CudaRuntime

        return CudaRuntime(device or "cuda:0")

    def emulated(self) -> Backend | None:
        """These kernels in Triton's interpreter, on the CPU; None without Triton and ml_dtypes, or if Triton was imported before
        without TRITON_INTERPRET=1."""
        if importlib.util.find_spec("triton") is None or importlib.util.find_spec("ml_dtypes") is None:
            return None
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        return InterpretedCuda() if os.environ.get("TRITON_INTERPRET") == "1" else None


class InterpretedCuda(CudaBackend):
    """The kernels of `CudaBackend` interpreted on CPU tensors: their arithmetic and addressing, nothing of a GPU's timing or races."""

    name = "cuda_sm100_interpreted"

    def probe(self) -> Probe:
        return Probe(available=True, devices=("Triton's interpreter on the CPU",))

    def capabilities(self) -> Capabilities:
        keep = {"device_type": "cpu", "graph_capture": False, "collectives": frozenset(), "expert_parallel": frozenset()}
        return _CLAIMS.model_copy(update=keep)

    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> Kernels:
        return super().kernels("cpu", numerics, batch_invariant)

    def runtime(self, device: str) -> DeviceRuntime:
        from deepinfer_backends.cpu_ref.runtime import CpuRuntime

        return CpuRuntime("cpu")
