"""`AscendBackend`: the Huawei Ascend 950 through torch_npu and CANN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_core.backend import API_VERSION, Backend, CacheFormat, Capabilities, Numerics, Probe, WeightFormat

if TYPE_CHECKING:
    from deepinfer_core.backend.collectives import Collectives, Group
    from deepinfer_core.backend.kernels import Kernels
    from deepinfer_core.backend.runtime import DeviceRuntime

_CLAIMS = Capabilities(
    device_type="npu",
    architectures=("Ascend950",),
    numerics=frozenset({Numerics.RELEASE}),
    weight_formats=frozenset({WeightFormat.BF16, WeightFormat.FP8_B32, WeightFormat.FP4_G32, WeightFormat.FP8_G32}),
    window_formats=frozenset({CacheFormat.FP8}),
    entry_formats=frozenset({CacheFormat.FP4, CacheFormat.FP8}),
    index_formats=frozenset({CacheFormat.FP4_INDEX}),
    batch_invariant=False,  # CANN chooses tiles and split reductions by shape
    deterministic_sampling=False,  # needs batch invariance
    graph_capture=True,
    async_copy=True,
    collectives=frozenset({"hccl"}),
    tested_on=(),
)


class AscendBackend(Backend):
    """Ascend 950PR and 950DT. Written without a device: docs/ascend.md says what was verified and how."""

    api_version = API_VERSION
    name = "ascend950"

    def probe(self) -> Probe:
        from deepinfer_backends.ascend950 import environment

        problem = environment.first_problem()
        if problem:
            return Probe(available=False, reasons=(problem,))
        from deepinfer_backends.ascend950.arithmetic import wrong_rules

        wrong = wrong_rules("npu:0")
        return Probe(available=not wrong, reasons=tuple(wrong), devices=environment.device_names())

    def capabilities(self) -> Capabilities:
        return _CLAIMS

    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> Kernels:
        from deepinfer_backends.ascend950 import environment

        place = environment.npu_device(device)
        environment.require()
        environment.configure()
        import torch

        from deepinfer_backends.ascend950.kernels import AscendKernels

        return AscendKernels(torch.device(place), numerics)

    def runtime(self, device: str) -> DeviceRuntime:
        from deepinfer_backends.ascend950 import environment

        place = environment.npu_device(device)
        environment.require()
        from deepinfer_backends.ascend950.runtime import AscendRuntime

        return AscendRuntime(place)

    def emulated(self) -> Backend:
        from deepinfer_backends.ascend950.emulated import EmulatedAscend

        return EmulatedAscend()

    def collectives(self, group: Group) -> Collectives:
        from deepinfer_backends.ascend950.collectives import ascend_collectives

        return ascend_collectives(group, self.capabilities())
