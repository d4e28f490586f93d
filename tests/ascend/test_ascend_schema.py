"""Every operator call of the backend, on meta tensors of the released shapes, under the real torch_npu.

Wrong argument names, types, ranks and result shapes fail here. Meta kernels look at little else: this says "Python would accept it and
it has this shape", not "it is right". That no call needs a value on the host is proved on the way: meta tensors have none.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ascend_cases import CASES, RELEASED, SMALL, Source
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_backends.ascend950 import codes, emulation
from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels

pytestmark = pytest.mark.usefixtures("emulated_backend")


class _Calls(TorchDispatchMode):
    """Names of the npu operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "npu":
            self.seen.add(func._schema.name.removeprefix("npu::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def meta_kernels() -> object:
    from deepinfer_backends.ascend950.kernels import AscendKernels
    from deepinfer_backends.ascend950.layout import PlainLayout

    return AscendKernels(torch.device("meta"), layout=PlainLayout())


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_reference_shapes_and_types(name: str, meta_kernels, capsys: pytest.CaptureFixture[str]) -> None:
    got = CASES[name](meta_kernels, Source("meta"), RELEASED)
    want = CASES[name](ReferenceKernels(torch.device("cpu")), Source(), SMALL)
    capsys.readouterr()  # the Meta kernel of npu_moe_init_routing_v2 prints a stray line
    assert {key: (value.dtype, value.dim()) for key, value in got.items()} == {key: (v.dtype, v.dim()) for key, v in want.items()}
    assert all(value.shape[0] == RELEASED.rows for key, value in got.items() if not key.startswith("exact"))


def test_every_operator_is_called(meta_kernels) -> None:
    with _Calls() as log:
        for name in CASES:
            CASES[name](meta_kernels, Source("meta"), RELEASED)
    source = Path(calls.__file__).read_text()
    assert log.seen == set(re.findall(r"torch\.ops\.npu\.(\w+)\(", source)) == set(emulation.OPERATORS)


def test_only_two_modules_name_operators() -> None:
    """`calls`, and `layout` for the tiling at load."""
    root = Path(calls.__file__).parents[1]
    sources = [path.relative_to(root) for path in root.rglob("*.py") if path.parent.name != "tools"]
    named = {path.as_posix() for path in sources if "torch.ops.npu." in (root / path).read_text()}
    assert named <= {"kernels/calls.py", "layout.py"}


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class TestRefusals:
    """Layout mistakes that the Meta kernels do notice."""

    def _matmul(self, weight: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor) -> None:
        types = {"scale_dtype": codes.SCALE, "pertoken_scale_dtype": codes.SCALE, "group_sizes": [1, 1, 32], "output_dtype": codes.BF16}
        x = _meta(5, 128, dtype=torch.float8_e4m3fn)
        torch.ops.npu.npu_quant_matmul(x, weight, scale, pertoken_scale=x_scale, **types)

    @pytest.mark.parametrize("fault", ["none", "weight", "scale", "pairs"])
    def test_quant_matmul(self, fault: str) -> None:
        weight = _meta(128, 64, dtype=torch.float8_e4m3fn)
        scale, x_scale = _meta(2, 64, 2, dtype=torch.uint8), _meta(5, 2, 2, dtype=torch.uint8)
        if fault == "none":
            return self._matmul(weight, scale, x_scale)
        broken = {
            "weight": (weight.t(), scale, x_scale),
            "scale": (weight, scale.transpose(0, 1), x_scale),
            "pairs": (weight, scale, x_scale.flatten(1)),
        }[fault]
        with pytest.raises(RuntimeError):
            self._matmul(*broken)
        return None

    def test_grouped_matmul_takes_no_type_for_fp8_rows(self) -> None:
        fp8, byte = torch.float8_e4m3fn, torch.uint8
        with pytest.raises(RuntimeError):
            torch.ops.npu.npu_grouped_matmul(
                [_meta(5, 128, dtype=fp8)],
                [_meta(2, 64, 64, dtype=byte).transpose(1, 2)],
                antiquant_scale=[_meta(2, 64, 2, 2, dtype=byte).transpose(1, 2)],
                per_token_scale=[_meta(5, 2, 2, dtype=byte)],
                per_token_scale_dtype=codes.SCALE,
                weight_dtype=codes.FP4,
                x_dtype=codes.FP8,
                split_item=2,
                group_type=0,
                group_list=_meta(2, dtype=torch.int64),
                group_list_type=1,
                output_dtype=codes.BF16,
            )

    def test_misspelt_arguments(self) -> None:
        with pytest.raises((RuntimeError, TypeError), match="scale_algorithm"):
            torch.ops.npu.npu_dynamic_mx_quant(_meta(5, 128), scale_algorithm=1)


class TestKnownDeviations:
    """What the wheel's Meta kernels get wrong. A wheel that mends one of these fails here: then simplify what works around it."""

    def test_format_cast_has_no_meta_kernel(self) -> None:
        with pytest.raises(NotImplementedError):
            torch.ops.npu.npu_format_cast(_meta(2, 64, 64, dtype=torch.uint8), codes.NZ, customize_dtype=codes.FP8, input_dtype=codes.FP4)

    def test_sinkhorn_has_no_tensors_for_two_of_its_results(self) -> None:
        results = torch.ops.npu.npu_mhc_sinkhorn(_meta(5, 4, 4, dtype=torch.float32), out_flag=0)
        assert [result is None for result in results] == [False, True, True]

    def test_swiglu_group_quant_reports_bytes_and_no_scales(self) -> None:
        """Why the experts' SwiGLU is a composition: the fused operator's result cannot be checked, nor is its scale rule documented."""
        options = {"quant_mode": 1, "dst_type": codes.FP8, "block_size": 32, "round_scale": True, "clamp_limit": 10.0}
        values, scales, _ = torch.ops.npu.npu_swiglu_group_quant(_meta(5, 128), **options)
        assert values.dtype is torch.uint8
        assert scales is None or scales.numel() == 0

    def test_init_routing_prints_a_stray_line(self, meta_kernels, capsys: pytest.CaptureFixture[str]) -> None:
        CASES["moe"](meta_kernels, Source("meta"), SMALL)
        assert capsys.readouterr().out.strip()

    def test_versions_are_compared_as_text(self) -> None:
        """npu_sparse_flash_attention(value=None) would refuse CANN 10. The backend passes the value."""
        import inspect

        from torch_npu.op_plugin.meta import _meta_registrations

        assert 'get_cann_version() >= "9.2.0"' in inspect.getsource(_meta_registrations.npu_sparse_flash_attention_forward)
