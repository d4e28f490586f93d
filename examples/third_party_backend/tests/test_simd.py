"""What the conformance suite cannot know about this package: its messages, its fallbacks, threads, in-place results."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from deepinfer_simd import _library
from deepinfer_simd.backend import SimdBackend
from deepinfer_simd.tensors import owns_rows

from deepinfer_backends.cpu_ref import ReferenceKernels
from deepinfer_core.backend import Numerics
from deepinfer_core.backend.types import ExpertTensors, HcConstants, HcWeights, QuantTensor, Routing
from deepinfer_core.errors import BackendError


@pytest.fixture
def kernels():
    return SimdBackend().kernels("")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Where the library is looked for; nothing is there yet."""
    path = tmp_path / "_simd.so"
    monkeypatch.setattr(_library, "PATH", path)
    _library.load.cache_clear()
    yield path
    _library.load.cache_clear()


def reason() -> str:
    probe = SimdBackend().probe()
    assert not probe.available
    return " ".join(probe.reasons)


def test_available():
    probe = SimdBackend().probe()
    assert probe.available
    assert not probe.reasons


def test_a_library_that_was_not_built(library):
    assert "was not built" in reason()
    assert "g++" in reason()
    assert "pip install --force-reinstall" in reason()


def test_a_library_that_cannot_be_loaded(library):
    library.write_bytes(b"no library")
    assert "cannot be loaded" in reason()
    assert "rebuild it on this machine" in reason()


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_library_for_another_cpu(library, tmp_path):
    names = "\n".join(f"void {name}() {{}}" for name in _library.SIGNATURES)
    (tmp_path / "other.cpp").write_text(f'extern "C" {{ {names} const char* simd_missing() {{ return "avx512f"; }} }}')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "other.cpp")], check=True)
    assert "built for a CPU with avx512f" in reason()


def test_other_devices_are_refused():
    with pytest.raises(BackendError, match=r"no kernels for device 'cuda:0'.*backend\.device"):
        SimdBackend().kernels("cuda:0")


def test_experts_of_odd_sizes_are_refused(kernels):
    part = QuantTensor(torch.zeros(24, 40, dtype=torch.bfloat16))
    with pytest.raises(BackendError, match="multiples of 32"):
        kernels.prepare_experts([ExpertTensors(part, part, part)], 1)


def test_a_nan_in_an_fp8_weight_stays_visible(kernels):
    values = torch.ones(64, 64).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[5, 3] = 0x7F
    scale = torch.full((2, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    y = kernels.quantized_linear(torch.ones(1, 64), kernels.prepare_linear([QuantTensor(values, scale)]))
    assert y.isnan().nonzero()[:, 1].tolist() == [5]


def test_threads_change_nothing(kernels, threads):
    torch.manual_seed(0)
    part = QuantTensor(torch.randn(256, 256).bfloat16() / 16)
    experts = kernels.prepare_experts([ExpertTensors(part, part, part)] * 4, 4)
    linear = kernels.prepare_linear([part])
    x = kernels.quantize(torch.randn(40, 256).bfloat16())
    routing = Routing(torch.tensor([[0, 1], [3, 2]] * 20, dtype=torch.int32), torch.rand(40, 2))
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append((kernels.moe(x, routing, experts, None, 10.0), kernels.quantized_linear(x, linear)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("numerics", list(Numerics))
def test_results_in_place_only_where_rows_are_apart(numerics):
    kernels = SimdBackend().kernels("", numerics)
    one = torch.randn(3, 1, 64, dtype=kernels._dtype)
    expanded, y = one.expand(3, 4, 64), torch.randn(3, 64, dtype=kernels._dtype)
    post, comb = torch.rand(3, 4), torch.rand(3, 4, 4)
    kept, own = one.clone(), expanded.contiguous()
    result = kernels.hc_post(expanded, y, post, comb)
    assert torch.equal(one, kept)
    assert kernels.hc_post(own, y, post, comb).data_ptr() == own.data_ptr()
    assert torch.equal(own, result)
    assert not owns_rows(torch.zeros(1, 4, 64).expand(3, 4, 64))


def test_more_streams_than_fit_go_to_the_reference(kernels):
    m = 9
    streams, y = torch.randn(2, m, 32).bfloat16(), torch.randn(2, 32).bfloat16()
    post, comb = torch.rand(2, m), torch.rand(2, m, m)
    want = post[:, :, None] * y.float()[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams.float())
    torch.testing.assert_close(kernels.hc_post(streams, y, post, comb).float(), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("m", "dim"), [(3, 40), (3, 48), (4, 8)])
def test_streams_of_other_numbers_and_sizes(m, dim):
    torch.manual_seed(4)
    kernels, reference = SimdBackend().kernels("", Numerics.IDEAL), ReferenceKernels(torch.device("cpu"), Numerics.IDEAL)
    mixes = m * (m + 2)
    weights = HcWeights(torch.randn(mixes, m * dim) / dim, torch.randn(mixes), torch.ones(3))
    args = (torch.randn(11, m, dim), torch.rand(11, m), weights, torch.ones(dim).bfloat16(), HcConstants(1e-6, 1e-6, 20))
    for got, want in zip(kernels.hc_pre(*args), reference.hc_pre(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_nan_stays_visible(kernels):
    x = torch.randn(2, 64).bfloat16()
    x[1, 7] = torch.nan
    weight = torch.ones(64, dtype=torch.bfloat16)
    assert kernels.rms_norm(x, weight, 1e-6).isnan().any(1).tolist() == [False, True]
    assert kernels.quantize(x).isnan().any(1).tolist() == [False, True]
