"""The `contract` level: discovery, probing, claims, the shape of the kernels, the runtime, and errors for misuse."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch

from deepinfer_core.backend.base import API_VERSION
from deepinfer_core.backend.capabilities import Capabilities, Probe
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.kernels import OPS, Kernels, contract_problems
from deepinfer_core.backend.registry import discover
from deepinfer_core.conformance.checks import Check, CheckError, SkippedError, expect, named
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.subject import Subject

_HEAVY = ("torch", "triton", "torch_npu", "numba")


def _discovery_is_light(subject: Subject) -> None:
    """Listing backends imports no heavy module."""
    if subject.name not in discover().backends:
        raise SkippedError("the backend was not found through an entry point: nothing to discover")
    code = (
        "import sys\nfrom deepinfer_core.backend.registry import discover\n"
        f"found = discover().find({subject.name!r})\nfound.backend().name\n"
        f"print('loaded', *(m for m in {_HEAVY!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"discovery in a fresh process failed: {done.stderr.strip().splitlines()[-1:]}")
    loaded = done.stdout.split()[1:]
    expect(not loaded, f"discovery imports {', '.join(loaded)}; import them inside probe() or kernels()")


def _identity(subject: Subject) -> None:
    """Name and contract version."""
    backend = subject.backend
    expect(backend.api_version == API_VERSION, f"api_version is {backend.api_version!r}, this core has {API_VERSION}")
    expect(isinstance(backend.name, str) and backend.name.isidentifier(), f"name is {backend.name!r}, expected an identifier")


def _probe_is_repeatable(subject: Subject) -> None:
    """Probing says the same twice, and gives reasons exactly if the backend is not available."""
    first, second = subject.backend.probe(), subject.backend.probe()
    expect(isinstance(first, Probe), f"probe() returned {type(first).__name__}, expected Probe")
    expect(first == second, f"probe() said {first} and then {second}")
    expect(first.available != bool(first.reasons), f"available={first.available} with reasons {first.reasons}")


def _claims_are_well_formed(subject: Subject) -> None:
    """Claims are a Capabilities value that fits together."""
    claims = subject.backend.capabilities()
    expect(isinstance(claims, Capabilities), f"capabilities() returned {type(claims).__name__}, expected Capabilities")
    expect(claims == subject.backend.capabilities(), "capabilities() differs between two calls")
    expect(claims.numerics, "no numerics are claimed: nothing can run; name at least 'release'")
    for kind in ("weight_formats", "window_formats", "entry_formats", "index_formats"):
        expect(getattr(claims, kind), f"{kind} is empty: no checkpoint or cache could be used")
    expect(
        claims.batch_invariant or not claims.deterministic_sampling,
        "deterministic_sampling is claimed without batch_invariant: tokens follow logits, and these would depend on the batch",
    )
    expect(claims.max_context is None or claims.max_context > 0, f"max_context is {claims.max_context}, expected None or a positive number")


def _every_op_resolves(subject: Subject) -> None:
    """The kernels offer every op with a signature that the core can call, on the claimed device."""
    for numerics in subject.numerics():
        kernels = subject.kernels(numerics)
        expect(isinstance(kernels, Kernels), f"kernels() returned {type(kernels).__name__}, expected a subclass of Kernels")
        problems = contract_problems(type(kernels))
        expect(not problems, "; ".join(problems))
        expect(all(callable(getattr(kernels, op)) for op in OPS), "an op is not callable")
        expect(kernels.numerics is numerics, f"kernels for {numerics} say that they compute {kernels.numerics}")


def _unknown_device_is_refused(subject: Subject) -> None:
    """A device that does not exist is an error, not a silent default."""
    try:
        subject.backend.kernels("no_such_device:7")
    except Exception:  # noqa: BLE001 whatever it raises, it is no silent default
        return
    raise CheckError("kernels('no_such_device:7') returned kernels, expected an error that names the device")


def _expert_count_is_checked(subject: Subject) -> None:
    """`prepare_experts` refuses another number of experts than announced."""
    kernels = subject.kernels(subject.numerics()[0])
    draw = Draw(1, Numerics.RELEASE)
    kinds = {"fp4": "fp4_g32", "fp8": "fp8_b32", "bf16": "bf16"}
    kind = next(kind for kind, fmt in kinds.items() if fmt in subject.claims.weight_formats)
    for given, count in ((1, 2), (2, 1)):
        try:
            kernels.prepare_experts(iter([draw.expert(kind, 64, 32) for _ in range(given)]), count)
        except ValueError:
            continue
        raise CheckError(f"prepare_experts took {given} experts for count={count}, expected ValueError")


def _runtime_copies(subject: Subject) -> None:
    """Copies to and from the device; the host array may be reused at once."""
    runtime = subject.backend.runtime(subject.device)
    try:
        array = np.arange(12, dtype=np.int64).reshape(3, 4)
        there = runtime.to_device(array)
        array[:] = -1
        expect(
            there.device.type == subject.claims.device_type,
            f"to_device put the array on {there.device}, claimed {subject.claims.device_type}",
        )
        back = runtime.to_host({"x": there}).wait()["x"]
        expect((back == np.arange(12).reshape(3, 4)).all(), "to_device changed after its host array was reused, or to_host is wrong")
        out = torch.zeros(3, 4, dtype=torch.int64, device=there.device)
        runtime.to_device(back, out)
        pending = runtime.submit(lambda: {"y": out * 2})
        expect((pending.wait()["y"] == back * 2).all(), "submit did not see the copy that was enqueued before it")
        expect(pending.done(), "a copy that was waited for is not done")
    finally:
        runtime.close()
        runtime.close()


def _runtime_order_and_errors(subject: Subject) -> None:
    """Work runs in order; what work raises reaches whoever waits; memory figures make sense."""
    runtime = subject.backend.runtime(subject.device)
    try:
        total = runtime.to_device(np.zeros(1, dtype=np.int64))
        for step in range(5):
            runtime.submit(lambda step=step: {"t": total.mul_(10).add_(step)})  # type: ignore[misc]
        runtime.record().wait()
        expect(
            int(runtime.to_host({"t": total}).wait()["t"][0]) == 1234, "pieces of work did not run in the order in which they were enqueued"
        )
        memory = runtime.memory()
        expect(0 < memory.available <= memory.total, f"memory() says {memory.available} of {memory.total} bytes are available")
        with runtime.forbid_sync():
            pass
        runtime.synchronize()
        try:
            runtime.submit(_fails).wait()
        except ZeroDivisionError:
            return
        raise CheckError("an exception of submitted work was swallowed")
    finally:
        runtime.close()


def _fails() -> dict[str, torch.Tensor]:
    raise ZeroDivisionError("on purpose")


def _capture_is_refused_unless_claimed(subject: Subject) -> None:
    """Without the claim, capture raises instead of doing something else."""
    if subject.claims.graph_capture:
        raise SkippedError("graph_capture is claimed: the claims level replays graphs")
    runtime = subject.backend.runtime(subject.device)
    try:
        runtime.capture(lambda: None)
    except Exception:  # noqa: BLE001 any refusal will do
        return
    finally:
        runtime.close()
    raise CheckError("capture() worked although graph_capture is not claimed: claim it, or raise")


CHECKS: list[Check] = named(
    "contract",
    (
        _discovery_is_light,
        _identity,
        _probe_is_repeatable,
        _claims_are_well_formed,
        _every_op_resolves,
        _unknown_device_is_refused,
        _expert_count_is_checked,
        _runtime_copies,
        _runtime_order_and_errors,
        _capture_is_refused_unless_claimed,
    ),
)
