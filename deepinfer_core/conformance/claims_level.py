"""The `claims` level: every field of `Capabilities` has proofs; what is claimed must pass them, what is not may.

A claim that holds is `passed`, one that does not is `failed`. A flag that is not set is `unsupported`; if its proof passes all the same,
the report says so as a hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deepinfer_core.backend.capabilities import Capabilities
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.conformance import runtime_proofs
from deepinfer_core.conformance.checks import Check, CheckError, UnsupportedError, expect
from deepinfer_core.conformance.collective_proofs import prove_collectives
from deepinfer_core.conformance.describe import Geometry, descriptions
from deepinfer_core.conformance.engine_level import prove_graphs, prove_load_independence
from deepinfer_core.conformance.invariance import check_model_rows, check_rows, row_ops
from deepinfer_core.conformance.op_level import OpCase, judge
from deepinfer_core.conformance.subject import Subject

Claimed = Callable[[Capabilities], bool]
Prove = Callable[[Subject], None]


@dataclass(frozen=True)
class Proof:
    """One proof of one claim."""

    field: str
    case: str
    prove: Prove
    claimed: Claimed
    hint: bool = False  # worth running when the flag is not set
    slow: bool = False

    def check(self) -> Check:
        """The proof as a check."""
        return Check("claims", self.field, self._run, self.case, self.slow, patience=4.0)

    def _run(self, subject: Subject) -> str | None:
        """Proves the claim. Returns the field's name if it is not claimed and could be."""
        if self.claimed(subject.claims):
            self.prove(subject)
            return None
        if self.hint:
            try:
                self.prove(subject)
            except Exception as error:
                raise UnsupportedError(f"{self.field} is not claimed") from error
            return self.field
        raise UnsupportedError(f"{self.field} is not claimed")


def _flag(name: str) -> Claimed:
    return lambda claims: bool(getattr(claims, name))


def _stores(field: str, fmt: str) -> Prove:
    """Every quick case of the `ops` level that needs the format."""
    attribute = {"weight_formats": "weights", "window_formats": "window", "entry_formats": "entry", "index_formats": "index"}[field]

    def prove(subject: Subject) -> None:
        count = 0
        for case in _cases(subject, lambda g: getattr(g, attribute) == fmt):
            bad = [f"{case.id}: {name}: {verdict.describe()}" for name, verdict in judge(subject, case).items() if not verdict.passed]
            expect(not bad, bad[0] if bad else "")
            count += 1
        expect(count, f"{field} names {fmt}, and no case of the ops level proves it in the arithmetic that is offered")

    return prove


def _cases(subject: Subject, wanted: Callable[[Geometry], bool]) -> Iterator[OpCase]:
    for description in descriptions().values():
        for geometry in description.geometries:
            if geometry.quick and wanted(geometry) and not geometry.unsupported(subject.claims):
                for numerics in subject.numerics():
                    if geometry.numerics in (None, numerics):
                        yield OpCase(description, geometry, numerics, 0)


def _numerics(numerics: Numerics) -> Prove:
    def prove(subject: Subject) -> None:
        kernels = subject.kernels(numerics)
        x = torch.full((2, 32), 1.0 + 2.0**-12, device=kernels.device)
        wide = kernels.rms_norm(x, torch.ones(32, dtype=torch.bfloat16, device=kernels.device), 0.0)
        dtype = torch.bfloat16 if numerics is Numerics.RELEASE else torch.float32
        expect(wide.dtype == dtype, f"activations of {numerics} are {wide.dtype}, expected {dtype}")
        for op in ("rms_norm", "quantized_linear", "hc_post"):
            for case in _cases(subject, lambda g: g.name == "rows"):
                if case.description.op == op and case.numerics is numerics:
                    bad = [v.describe() for v in judge(subject, case).values() if not v.passed]
                    expect(not bad, f"{case.id}: {bad[0] if bad else ''}")

    return prove


def _device_type(subject: Subject) -> None:
    for numerics in subject.numerics():
        kernels = subject.kernels(numerics)
        expect(kernels.device.type == subject.claims.device_type, f"kernels are on {kernels.device}, claimed {subject.claims.device_type}")
        out = kernels.rms_norm(torch.ones(1, 32, device=kernels.device), torch.ones(32, dtype=torch.bfloat16, device=kernels.device), 0.0)
        expect(out.device.type == subject.claims.device_type, f"results are on {out.device}, claimed {subject.claims.device_type}")


def _words(field: str) -> Prove:
    def prove(subject: Subject) -> None:
        words = getattr(subject.claims, field)
        expect(all(isinstance(w, str) and w.strip() == w and w for w in words), f"{field} is {words}, expected words")
        expect(len(set(words)) == len(words), f"{field} names something twice: {words}")

    return prove


def _max_context(subject: Subject) -> None:
    """Rotation and selection at the last position that is claimed."""
    length = subject.claims.max_context
    assert length is not None
    kernels = subject.kernels(subject.numerics()[0])
    from deepinfer_core.backend.types import Rope

    angles = torch.arange(length, dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.01])
    rope = Rope(torch.cat((angles.cos(), angles.sin()), 1).to(kernels.device), torch.tensor([length - 1], device=kernels.device))
    x = torch.ones(1, 32, dtype=torch.bfloat16 if kernels.numerics is Numerics.RELEASE else torch.float32, device=kernels.device)
    key = kernels.window_key(x, torch.ones(32, dtype=torch.bfloat16, device=kernels.device), 1e-20, rope).float().cpu()
    want = float(angles[-1, 0].cos() - angles[-1, 0].sin())
    expect(
        abs(float(key[0, 28]) - want) < 0.07, f"the rotation at position {length - 1} gives {float(key[0, 28]):.4g}, expected {want:.4g}"
    )


def _no_proof(field: str) -> Prove:
    def prove(subject: Subject) -> None:
        raise CheckError(f"{field} is claimed, and this version of the suite has no proof of it: do not claim it yet")

    return prove


def _sampling_rows(subject: Subject) -> None:
    for op in ("log_probs", "sample", "verify", "apply_token_bitmask"):
        if descriptions()[op].rows is not None:
            check_rows(subject, op)


def proofs() -> list[Proof]:
    """Every proof, field by field."""
    found = [
        Proof("device_type", "placement", _device_type, lambda claims: True),
        Proof("architectures", "words", _words("architectures"), lambda claims: True),
        Proof("tested_on", "words", _words("tested_on"), lambda claims: True),
        Proof("max_context", "last_position", _max_context, lambda claims: claims.max_context is not None),
        *(Proof("numerics", n, _numerics(n), lambda claims, n=n: n in claims.numerics) for n in Numerics),  # type: ignore[misc]
    ]
    for field in ("weight_formats", "window_formats", "entry_formats", "index_formats"):
        kinds = {"weight_formats": "weights", "window_formats": "window", "entry_formats": "entry", "index_formats": "index"}
        formats = sorted({fmt for d in descriptions().values() for g in d.geometries if (fmt := getattr(g, kinds[field])) is not None})
        for fmt in formats:
            found.append(Proof(field, fmt, _stores(field, fmt), lambda claims, f=field, m=fmt: m in getattr(claims, f)))  # type: ignore[misc]
    for op in row_ops():
        found.append(Proof("batch_invariant", op, lambda s, op=op: check_rows(s, op), _flag("batch_invariant"), hint=True))  # type: ignore[misc]
    found += [
        Proof("batch_invariant", "model", check_model_rows, _flag("batch_invariant"), hint=True, slow=True),
        Proof("deterministic_sampling", "ops", _sampling_rows, _flag("deterministic_sampling"), hint=True),
        Proof("deterministic_sampling", "loads", prove_load_independence, _flag("deterministic_sampling"), slow=True),
        Proof("graph_capture", "replay", runtime_proofs.prove_capture, _flag("graph_capture")),
        Proof("graph_capture", "buckets", prove_graphs, _flag("graph_capture"), slow=True),
        Proof("async_copy", "overlap", runtime_proofs.prove_overlap, _flag("async_copy"), hint=True),
        Proof("expert_parallel", "transport", _no_proof("expert_parallel"), _flag("expert_parallel")),
    ]
    for size in (2, 4):
        prove = prove_collectives(size)
        found.append(Proof("collectives", f"{size}_processes", prove, _flag("collectives"), slow=size > 2))
    return found


CHECKS: list[Check] = [proof.check() for proof in proofs()]
