"""Compiles the kernels that a set of cases will launch, on many cores at once, into Triton's cache: a GPU should not wait for compilers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context

import torch

from cuda_checks.cases import all_cases
from cuda_checks.compiling import compile_launch, signature
from cuda_checks.inputs import RELEASED, SMALL, Inputs
from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_backends.cuda_sm100.launch import Launch, observed_launches

GEOMETRIES = {"small": (SMALL, 96), "released": (RELEASED, 8192)}
Plan = tuple[tuple[str, int], ...]  # (geometry, rows)

_found: list[Launch] = []  # filled before workers are forked, which inherit it


def key(launch: Launch) -> str:
    """The same for launches that compile to the same code."""
    return f"{launch.kernel.__name__} {launch.constants} {launch.warps} {launch.stages} {signature(launch)}"


def launches(plan: Plan, arch: int) -> list[Launch]:
    """Every launch of the plan once, batch invariant or not."""
    meta = torch.device("meta")
    found: dict[str, Launch] = {}
    for name, rows in plan:
        geometry, context = GEOMETRIES[name]
        for invariant in (False, True):
            kernels = CudaKernels(meta, batch_invariant=invariant)
            kernels._arch = arch
            for case in all_cases(geometry, Inputs(meta), rows, context):
                seen: list[Launch] = []
                with observed_launches(seen.append):
                    case.run(kernels, case.prepare(kernels))
                for launch in seen:
                    found.setdefault(key(launch), launch)
    return list(found.values())


def _compile(task: tuple[int, int]) -> str:
    index, arch = task
    torch.set_num_threads(1)
    try:
        compile_launch(_found[index], arch)
    except Exception as error:  # noqa: BLE001 - the launch itself will say it again, with its inputs
        return f"precompile {_found[index].kernel.__name__}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(todo: Sequence[Launch], arch: int = 90, workers: int | None = None) -> int:
    """Compiles each launch; returns how many compiled. Workers are forked: call it before this process touches a GPU."""
    _found[:] = todo
    with get_context("fork").Pool(workers or os.cpu_count() or 1) as pool:
        problems = [text for text in pool.imap_unordered(_compile, [(i, arch) for i in range(len(todo))], 1) if text]
    for problem in problems:
        print(problem, file=sys.stderr)
    return len(todo) - len(problems)


def precompile(plan: Plan, arch: int = 90, workers: int | None = None) -> int:
    """Number of kernels compiled for the plan. Call it before this process touches a GPU."""
    return compile_all(launches(plan, arch), arch, workers)
