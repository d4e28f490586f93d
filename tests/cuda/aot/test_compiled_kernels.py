"""Kernels compiled for GPUs that are not here: which instructions come out, and that threads do not spill.

Every launch that the ops make at the released model's dimensions is recorded on meta tensors and compiled as it stands.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'deepinfer-core[cuda_sm100]')")

import torch
from cuda_checks.cases import all_cases
from cuda_checks.compiling import Compiled, compile_launch, signature
from cuda_checks.inputs import RELEASED, Inputs

from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_backends.cuda_sm100.launch import INTERPRETED, Launch, observed_launches

pytestmark = pytest.mark.skipif(INTERPRETED, reason="this process interprets kernels (TRITON_INTERPRET=1)")

GROUPED = {"_routed_up_kernel", "_routed_down_kernel"}  # SM90 only, steps of many rows only
HOPPER_ATTENTION = {"decode_kernel", "rows_kernel"}
MATRIX = {"_linear_kernel", "_up_kernel", "_down_kernel", "_score_kernel", "_attention_kernel", "_rows_kernel", *GROUPED, *HOPPER_ATTENTION}
STACK_LIMIT = 64  # bytes of local memory a thread may use
SHARED_LIMIT = 232_448  # bytes a program may use on both architectures
TENSOR_MEMORY_LIMIT = 512  # columns of a multiprocessor on SM100; Triton compiles a kernel that needs more to nothing


class Use(NamedTuple):
    """One launch and where it came from."""

    case: str
    launch: Launch


def recorded(arch: int, rows: tuple[int, ...]) -> list[Use]:
    """One launch of every kernel variant that the ops use at released dimensions, batch invariant or not."""
    meta = torch.device("meta")
    uses: dict[str, Use] = {}
    for count in rows:
        for invariant in (False, True):
            kernels = CudaKernels(meta, batch_invariant=invariant)
            kernels._arch = arch
            for case in all_cases(RELEASED, Inputs(meta), count, context=8192):
                seen: list[Launch] = []
                with observed_launches(seen.append):
                    case.run(kernels, case.prepare(kernels))
                for launch in seen:
                    key = f"{launch.kernel.__name__} {launch.constants} {launch.warps} {launch.stages} {signature(launch)[0]}"
                    uses.setdefault(key, Use(f"{case.op}({case.note}) rows={count}", launch))
    return list(uses.values())


def problems_of(compiled: Compiled, arch: int, launch: Launch) -> list[str]:
    problems = []
    if compiled.stack > STACK_LIMIT:
        problems.append(f"spills {compiled.stack} bytes")
    if compiled.shared > SHARED_LIMIT:
        problems.append(f"needs {compiled.shared} bytes of shared memory")
    if compiled.tensor_memory > TENSOR_MEMORY_LIMIT:
        problems.append(f"needs {compiled.tensor_memory} columns of tensor memory")
    wanted = r"tcgen05\.mma" if arch == 100 else r"wgmma\.mma_async" if launch.warps >= 4 else r"mma\.sync"
    if compiled.kernel in MATRIX and not compiled.count(wanted):
        problems.append(f"uses no {wanted}")
    if arch == 100 and launch.constants.get("X_SCALED") and launch.constants["FORMAT"] and not compiled.count("block_scale"):
        problems.append("uses no block-scaled product")
    return problems


def check(arch: int, uses: list[Use]) -> None:
    failures = []
    for use in uses:
        compiled = compile_launch(use.launch, arch)
        failures += [f"{compiled.kernel} in {use.case} on sm_{arch}a: {problem}" for problem in problems_of(compiled, arch, use.launch)]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("arch", [90, 100], ids=["sm90", "sm100"])
def test_products_for_decode_compile_as_meant(arch: int) -> None:
    """The kernels that carry a decode step; the slow test below compiles every variant of every kernel."""
    uses = recorded(arch, (8,))
    wanted = {"_linear_kernel", "_up_kernel", "_down_kernel"}
    check(arch, list({use.launch.kernel.__name__: use for use in uses if use.launch.kernel.__name__ in wanted}.values()))


def test_routed_experts_of_a_large_step_compile_as_meant() -> None:
    uses = [use for use in recorded(90, (8192,)) if use.launch.kernel.__name__ in GROUPED]
    assert {use.launch.kernel.__name__ for use in uses} == GROUPED
    check(90, uses)


def test_attention_for_hopper_compiles_as_meant() -> None:
    """The Gluon kernels, which no interpreter runs: wgmma, and accumulators that stay in registers."""
    uses = [use for use in recorded(90, (8, 8192)) if use.launch.kernel.__name__ in HOPPER_ATTENTION]
    assert {use.launch.kernel.__name__ for use in uses} == HOPPER_ATTENTION
    check(90, uses)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100], ids=["sm90", "sm100"])
def test_every_kernel_compiles_as_meant(arch: int) -> None:
    """About 90 variants, up to 10 s each: minutes."""
    check(arch, recorded(arch, (1, 64, 8192)))
