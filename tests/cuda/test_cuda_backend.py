"""Probing, claims and refusals of the NVIDIA backend: no GPU needed."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer_backends.cuda_sm100.backend import CudaBackend, Device, Machine, probe_machine
from deepinfer_core.backend import Numerics
from deepinfer_core.errors import BackendError

H200 = Device("NVIDIA H200", (9, 0), 150754820096)
GOOD = Machine("13.0", 13000, (H200,), True)


def test_a_hopper_machine_is_available_and_described() -> None:
    probe = probe_machine(GOOD)
    assert probe.available
    assert probe.devices == ("NVIDIA H200, compute capability 9.0, 140 GiB",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"has_triton": False}, r"Triton is not installed: pip install 'deepinfer-core\[cuda_sm100\]'"),
        ({"torch_cuda": None, "devices": ()}, "build of torch has no CUDA: install a CUDA build"),
        ({"driver": 0, "devices": ()}, "no NVIDIA driver answers"),
        ({"driver": 12040, "devices": ()}, r"driver is too old: it supports CUDA 12\.4, torch was built for CUDA 13\.0; update the driver"),
        ({"devices": ()}, "driver shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (
            {"devices": (Device("NVIDIA A100", (8, 0), 1), Device("NVIDIA RTX 5090", (12, 0), 1))},
            r"no GPU of compute capability 9\.0 .* only NVIDIA A100 \(compute capability 8\.0\), NVIDIA RTX 5090",
        ),
    ],
)
def test_reasons_say_what_to_do(change: dict, words: str) -> None:
    probe = probe_machine(dataclasses.replace(GOOD, **change))
    assert not probe.available
    assert len(probe.reasons) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(probe.reasons[0])


def test_a_second_unusable_gpu_does_not_matter() -> None:
    assert probe_machine(dataclasses.replace(GOOD, devices=(Device("NVIDIA A100", (8, 0), 1), H200))).available


def test_probe_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Machine:
        raise OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr("deepinfer_backends.cuda_sm100.backend.examine", broken)
    probe = CudaBackend().probe()
    assert not probe.available
    assert "looking for a GPU failed: OSError: libcuda.so.1" in probe.reasons[0]


def test_kernels_without_triton_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="backend 'cuda_sm100': Triton is not installed"):
        CudaBackend().kernels("")


def test_ideal_numerics_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(BackendError, match="computes numerics 'release' only, not 'ideal'"):
        CudaBackend().kernels("cpu", Numerics.IDEAL)


def test_a_runtime_wants_a_cuda_device() -> None:
    with pytest.raises(BackendError, match="no runtime for device 'cpu'"):
        CudaBackend().runtime("cpu")


def test_every_op_is_native() -> None:
    pytest.importorskip("triton")
    from deepinfer_backends.cuda_sm100.kernels import CudaKernels
    from deepinfer_core.backend.kernels import OPS

    owners = {op: next(cls for cls in CudaKernels.__mro__ if op in vars(cls)).__module__ for op in OPS}
    assert [op for op, module in owners.items() if not module.startswith("deepinfer_backends.cuda_sm100")] == []


def test_a_gpu_that_answers_settles_the_question_of_the_driver() -> None:
    assert probe_machine(dataclasses.replace(GOOD, driver=0)).available
