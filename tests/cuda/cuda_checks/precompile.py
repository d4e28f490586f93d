"""Compiles the kernels that a set of cases will launch, on many cores at once, into Triton's cache: a GPU should not wait for compilers."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from cuda_checks.cases import all_cases
from cuda_checks.compiling import compile_launch, signature
from cuda_checks.inputs import RELEASED, SMALL, Inputs
from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_backends.cuda_sm100.launch import Launch, observed_launches

GEOMETRIES = {"small": (SMALL, 96), "released": (RELEASED, 8192)}
Plan = tuple[tuple[str, int], ...]  # (geometry, rows)


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
                    found.setdefault(f"{launch.kernel.__name__} {launch.constants} {launch.warps} {signature(launch)}", launch)
    return list(found.values())


def _compile_share(plan: Plan, arch: int, share: int, shares: int) -> int:
    torch.set_num_threads(1)
    mine = launches(plan, arch)[share::shares]
    done = 0
    for launch in mine:
        try:
            compile_launch(launch, arch)
            done += 1
        except Exception as error:  # noqa: BLE001 - the launch itself will say it again, with its inputs
            print(f"precompile {launch.kernel.__name__}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return done


def precompile(plan: Plan, arch: int = 90, workers: int | None = None) -> int:
    """Number of kernels compiled."""
    workers = workers or max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return sum(pool.map(_compile_share, [plan] * workers, [arch] * workers, range(workers), [workers] * workers))
