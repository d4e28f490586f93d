"""Is there an Ascend 950 that this process can use? Every question in the order in which its answer can be had, none raising."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deepinfer_core.errors import BackendError

WHEEL = "torch-npu"
MINIMUM_CANN = (9, 2)
"""Older kernels ignore `max_low_bound` and refuse `scale_alg=2` (torch-npu 2.13.0, notes of npu_dynamic_mx_quant)."""

SOC_PREFIX = "Ascend950"
_OTHER_SOCS = {
    "Ascend910B": "Atlas A2",
    "Ascend910_93": "Atlas A3",
}
_DIFFERENCES = "it has no MX (block-scaled fp8/fp4) formats, no hyper-connection operators and no fused MX SwiGLU"

DEFAULTS = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "TASK_QUEUE_ENABLE": "0",  # graph capture refuses the task queue
    "HCCL_BUFFSIZE": "16",  # MB per communicator; DeepInfer 0.1.0 sets the same
    "HCCL_DETERMINISTIC": "true",
}
"""Environment variables that must be set before torch_npu is imported; a value of the user's is kept."""

_LIBRARIES = ("libascendcl.so", "libhccl.so", "libge_runner.so")


@dataclass(frozen=True)
class Check:
    """One answered question. `problem` is "" if all is well, else a sentence that says what to do."""

    name: str
    found: str
    problem: str = ""


def apply_defaults() -> dict[str, str]:
    """Sets the variables of `DEFAULTS` that are unset and returns all of them with the values in force."""
    return {name: os.environ.setdefault(name, value) for name, value in DEFAULTS.items()}


def checks() -> Iterator[Check]:
    """Answers one after the other, up to and including the first problem: later questions cannot be asked then."""
    for question in (_wheel, _versions, _libraries, _import, _cann, _devices, _soc):
        answer = question()
        yield answer
        if answer.problem:
            return


def _wheel() -> Check:
    version = installed_version(WHEEL)
    problem = f"{WHEEL} is not installed: pip install 'deepinfer-core[ascend950]' in an environment of its own"
    return Check("torch_npu wheel", version or "none", "" if version else problem)


def _versions() -> Check:
    torch, npu = installed_version("torch") or "none", installed_version(WHEEL) or "none"
    same = torch.split(".")[:2] == npu.split(".")[:2]
    problem = f"torch {torch} and {WHEEL} {npu} do not belong together: install torch {'.'.join(npu.split('.')[:2])}.* for this wheel"
    return Check("torch version", torch, "" if same else problem)


def _libraries() -> Check:
    home = os.environ.get("ASCEND_HOME_PATH", "unset")
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            problem = f"the CANN library {name} does not load ({error}): install CANN 9.2 or later and source its set_env.sh in this shell"
            return Check("CANN libraries", f"ASCEND_HOME_PATH {home}", problem)
    return Check("CANN libraries", f"ASCEND_HOME_PATH {home}")


def _import() -> Check:
    apply_defaults()
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        return Check("torch_npu import", "failed", f"torch_npu does not import: {error}. Check that CANN's set_env.sh was sourced")
    return Check("torch_npu import", str(torch_npu.__version__))


def _cann() -> Check:
    import torch_npu

    found = str(torch_npu.npu.utils.get_cann_version())
    version = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    wanted = ".".join(map(str, MINIMUM_CANN))
    problem = f"CANN {found} is too old or not recognised: install CANN {wanted} or later (its kernels know this model's scale rules)"
    return Check("CANN version", found, "" if version >= MINIMUM_CANN else problem)


def _devices() -> Check:
    import torch_npu

    count = int(torch_npu.npu.device_count())
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "unset")
    problem = (
        f"no NPU is visible (ASCEND_RT_VISIBLE_DEVICES {visible}): run npu-smi info, check the driver and the permissions of /dev/davinci*"
    )
    return Check("NPU count", str(count), "" if count else problem)


def _soc() -> Check:
    import torch_npu

    return judge_soc(str(torch_npu.npu.get_device_name(0)))


def judge_soc(name: str) -> Check:
    """Whether the device called `name` is an Ascend 950."""
    if name.startswith(SOC_PREFIX):
        return Check("device", name)
    family = next((f"{name} ({family})" for prefix, family in _OTHER_SOCS.items() if name.startswith(prefix)), name)
    problem = f"the device is {family}, not an Ascend 950: {_DIFFERENCES}. Use another backend, for example cpu_ref"
    return Check("device", name, problem)


def device_names() -> tuple[str, ...]:
    """The NPUs of this machine in words. Only after `checks` found no problem."""
    import torch_npu

    return tuple(f"npu:{i} {torch_npu.npu.get_device_name(i)}" for i in range(torch_npu.npu.device_count()))


def configure() -> Any:
    """Imports torch_npu with the switches this backend needs, and returns torch.npu. Idempotent."""
    apply_defaults()
    import torch
    import torch_npu  # noqa: F401 (registers torch.npu)

    torch.npu.set_compile_mode(jit_compile=False)
    torch.npu.matmul.allow_hf32 = False  # router, hyper-connections and head multiply in full float32
    torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.npu


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, found without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def npu_device(name: str) -> str:
    """The torch device that the configuration means by `name`: "" is the first NPU. Raises BackendError for anything but npu:N."""
    kind, _, index = (name or "npu:0").partition(":")
    if kind != "npu" or not (index or "0").isdigit():
        raise BackendError(f"backend 'ascend950' has no device {name!r}: set backend.device to '' or 'npu:N'")
    return f"npu:{index or 0}"


def require() -> None:
    """Raises BackendError with the first problem, if there is one."""
    problem = first_problem()
    if problem:
        raise BackendError(f"backend 'ascend950' is not available here: {problem}")


def first_problem(answers: Callable[[], Iterator[Check]] = checks) -> str:
    """The first problem's sentence, "" if there is none."""
    return next((answer.problem for answer in answers() if answer.problem), "")
