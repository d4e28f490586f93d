"""Every check that is not about one op is seen to fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from faulty_collectives import FaultyCollectives
from mutants import backend_of
from mutants_attention import CandidatesIgnored, HalfSplitRotary, NewestEntryInvisible, NibblesSwapped
from mutants_dense import PostNotDoubled
from mutants_rest import GateAndUpSwapped

from deepinfer_backends.cpu_ref.backend import CpuReference
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cpu_ref.runtime import CpuRuntime
from deepinfer_core.backend.capabilities import Probe
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.runtime import Graph
from deepinfer_core.backend.types import WindowKeys
from deepinfer_core.conformance import contract_level
from deepinfer_core.conformance.checks import run_check
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.conformance.suite import checks_of
from deepinfer_core.conformance.watchdog import Watchdog


def outcome(backend, level, check_id):
    """(status, message) of one check."""
    watchdog = Watchdog(120)
    check = next(check for check in checks_of(level) if check.id == check_id)
    result, _ = run_check(Subject(backend), check, watchdog)
    watchdog.close()
    return result.status, result.message


def claiming(**update):
    """The reference with other claims."""

    class Claiming(CpuReference):
        name = "claiming"

        def capabilities(self):
            return super().capabilities().model_copy(update=update)

    return Claiming()


def with_runtime(runtime, **update):
    """The reference on another runtime, with other claims."""

    class OtherRuntime(CpuReference):
        name = "other_runtime"

        def capabilities(self):
            return super().capabilities().model_copy(update=update)

        def runtime(self, device):
            return runtime(device or "cpu")

    return OtherRuntime()


class OldContract(CpuReference):
    api_version = 0


class AvailableWithReasons(CpuReference):
    def probe(self):
        return Probe(available=True, reasons=("Something is odd.",))


class AlwaysRelease(CpuReference):
    def kernels(self, device, numerics=Numerics.RELEASE, batch_invariant=False):
        return super().kernels(device, Numerics.RELEASE)


class AnyDevice(CpuReference):
    def kernels(self, device, numerics=Numerics.RELEASE, batch_invariant=False):
        return super().kernels("cpu", numerics)


class SharesHostArrays(CpuRuntime):
    def to_device(self, array, out=None):
        return torch.from_numpy(array) if out is None else super().to_device(array, out)


class SwallowsErrors(CpuRuntime):
    def submit(self, work):
        def quiet():
            try:
                return work()
            except ZeroDivisionError:
                return {"nothing": torch.zeros(1)}

        return super().submit(quiet)


class WaitsInSubmit(CpuRuntime):
    def submit(self, work):
        pending = super().submit(work)
        pending.wait()
        return pending


class RunsOnce(Graph):
    def replay(self):
        return None


class ReplaysNothing(CpuRuntime):
    def capture(self, work):
        work()
        return RunsOnce()


class ShortRotaryTable(ReferenceKernels):
    def window_key(self, kv, norm_weight, eps, rope):
        return super().window_key(kv, norm_weight, eps, rope._replace(positions=rope.positions.clamp_max(4095)))


class LastRowsInAnotherOrder(ReferenceKernels):
    """Products of more than 12 rows are rounded differently."""

    def linear(self, x, weight, out_dtype=None):
        y = super().linear(x, weight, out_dtype)
        return y * (1 + 2.0**-7) if len(x) > 12 else y


class AcceptsEveryDraft(ReferenceKernels):
    def verify(self, target, draft, drafts, random, greedy):
        result = super().verify(target, draft, drafts, random, greedy)
        return result._replace(accepted=drafts >= 0)


class MissingWindowKeyIsTheFirstSlot(ReferenceKernels):
    def _gather_window(self, window, rows):
        keys, valid = super()._gather_window(WindowKeys(window.ring, window.current, window.index.clamp_min(0)), rows)
        return keys, valid


FAULTS = [
    ("contract", "identity", OldContract(), "api_version is 0"),
    ("contract", "probe_is_repeatable", AvailableWithReasons(), "available=True with reasons"),
    ("contract", "claims_are_well_formed", claiming(batch_invariant=False), "without batch_invariant"),
    ("contract", "claims_are_well_formed", claiming(index_formats=frozenset()), "index_formats is empty"),
    ("contract", "every_op_resolves", AlwaysRelease(), "kernels for ideal say that they compute release"),
    ("contract", "unknown_device_is_refused", AnyDevice(), "expected an error that names the device"),
    ("contract", "runtime_copies", with_runtime(SharesHostArrays), "after its host array was reused"),
    ("contract", "runtime_order_and_errors", with_runtime(SwallowsErrors), "swallowed"),
    ("contract", "capture_is_refused_unless_claimed", with_runtime(ReplaysNothing, graph_capture=False), "although graph_capture"),
    ("claims", "device_type(placement)", claiming(device_type="cuda"), "claimed cuda"),
    ("claims", "numerics(ideal)", AlwaysRelease(), "activations of ideal are torch.bfloat16"),
    ("claims", "tested_on(words)", claiming(tested_on=("a card", "a card")), "twice"),
    ("claims", "architectures(words)", claiming(architectures=(" ",)), "expected words"),
    ("claims", "entry_formats(fp4)", backend_of(NibblesSwapped), "store_entries"),
    ("claims", "graph_capture(replay)", with_runtime(ReplaysNothing), "differs from eager"),
    ("claims", "async_copy(overlap)", with_runtime(WaitsInSubmit), "the host waited for the device"),
    ("claims", "batch_invariant(model)", backend_of(LastRowsInAnotherOrder), "other logits beside two others"),
    ("model", "logits(p33)", backend_of(HalfSplitRotary), "bound 1e-3"),
    ("model", "selections(p150)", backend_of(CandidatesIgnored), "entries chosen in layer 6"),
    ("model", "selections(p33)", backend_of(NewestEntryInvisible), "entries chosen in layer 1"),
    ("model", "hidden_states", backend_of(PostNotDoubled), "streams after layer 0"),
    ("model", "greedy_tokens(p33)", backend_of(GateAndUpSwapped), "greedy token"),
    ("model", "release_statistics", backend_of(GateAndUpSwapped), "bound"),
    ("model", "release_margins(p150)", backend_of(GateAndUpSwapped), "although the recording's margin"),
    ("model", "decode_equals_prefill(release)", backend_of(LastRowsInAnotherOrder), "although batch_invariant is claimed"),
    ("engine", "company_changes_nothing", backend_of(LastRowsInAnotherOrder), "at a time and all together"),
    ("engine", "poison_changes_nothing", backend_of(MissingWindowKeyIsTheFirstSlot), "NaN"),
    ("engine", "speculation_changes_nothing", backend_of(AcceptsEveryDraft), "beside a sampled request"),
]


@pytest.mark.parametrize(("level", "check", "backend", "words"), FAULTS, ids=[f"{f[0]}-{f[1]}-{type(f[2]).__name__}" for f in FAULTS])
def test_check_fails(level, check, backend, words):
    status, message = outcome(backend, level, check)
    assert status == "failed"
    assert words in message


def test_heavy_discovery_fails(monkeypatch):
    monkeypatch.setattr(contract_level, "_HEAVY", ("pluggy",))
    status, message = outcome(CpuReference(), "contract", "discovery_is_light")
    assert status == "failed"
    assert "imports pluggy" in message


def test_last_position_of_a_long_context(monkeypatch):
    class Long(CpuReference):
        name = "long"

        def capabilities(self):
            return super().capabilities().model_copy(update={"max_context": 70_000})

    assert outcome(Long(), "claims", "max_context(last_position)")[0] == "passed"
    monkeypatch.setattr(Long, "kernels", lambda self, device, numerics, invariant=False: ShortRotaryTable(torch.device("cpu"), numerics))
    status, message = outcome(Long(), "claims", "max_context(last_position)")
    assert status == "failed"
    assert "position 69999" in message


def test_wrong_collectives_fail_in_the_process_that_sees_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    status, message = outcome(FaultyCollectives(), "claims", "collectives(2_processes)")
    assert status == "failed"
    assert "rank 1 of 2 (gloo)" in message
    assert "reduce_scatter" in message
