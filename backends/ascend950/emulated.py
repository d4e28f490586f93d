"""`EmulatedAscend`: the unchanged Ascend kernels on CPU stand-ins for CANN's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_backends.ascend950.backend import AscendBackend
from deepinfer_core.backend import Capabilities, Numerics, Probe
from deepinfer_core.errors import BackendError

if TYPE_CHECKING:
    from deepinfer_core.backend.kernels import Kernels
    from deepinfer_core.backend.runtime import DeviceRuntime

_WHAT = "CPU emulation of CANN operators for ascend950: no NPU was used"


class EmulatedAscend(AscendBackend):
    """Kernels of `ascend950` on the CPU. Proves composition, layouts and arguments; says nothing about a device's arithmetic or speed."""

    name = "ascend950_emulated"

    def probe(self) -> Probe:
        from deepinfer_backends.ascend950.emulation.host import prepare_host

        reason = prepare_host()
        return Probe(available=not reason, reasons=(reason,) if reason else (), devices=() if reason else (_WHAT,))

    def capabilities(self) -> Capabilities:
        device = {"device_type": "cpu", "architectures": (), "collectives": frozenset({"gloo"})}
        return super().capabilities().model_copy(update=device)

    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> Kernels:
        from deepinfer_backends.ascend950.emulation.host import prepare_host

        if device not in ("", "cpu"):
            raise BackendError(
                f"backend {self.name!r} has no device {device!r}: it emulates CANN's operators on the CPU, so leave it empty"
            )
        reason = prepare_host()
        if reason:
            raise BackendError(f"backend {self.name!r}: {reason}")
        import torch

        from deepinfer_backends.ascend950.kernels import AscendKernels
        from deepinfer_backends.ascend950.layout import PlainLayout

        return AscendKernels(torch.device("cpu"), numerics, PlainLayout())

    def runtime(self, device: str) -> DeviceRuntime:
        """The CPU reference's runtime: immediate execution on a worker thread stands for streams and events."""
        from deepinfer_backends.cpu_ref.runtime import CpuRuntime

        return CpuRuntime("cpu")
