"""`AscendBackend`: Huawei Ascend 950."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_core.backend import API_VERSION, Backend, Capabilities, Numerics, Probe
from deepinfer_core.errors import BackendError

if TYPE_CHECKING:
    from deepinfer_core.backend.kernels import Kernels
    from deepinfer_core.backend.runtime import DeviceRuntime

_ABSENT = "this version of deepinfer-core carries no Ascend kernels yet; use backend 'cpu_ref'."


class AscendBackend(Backend):
    """Placeholder that claims nothing, until the kernels land."""

    api_version = API_VERSION
    name = "ascend950"

    def probe(self) -> Probe:
        return Probe(available=False, reasons=(_ABSENT,))

    def capabilities(self) -> Capabilities:
        return Capabilities(device_type="npu")

    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE) -> Kernels:
        raise BackendError(f"backend 'ascend950': {_ABSENT}")

    def runtime(self, device: str) -> DeviceRuntime:
        raise BackendError(f"backend 'ascend950': {_ABSENT}")
