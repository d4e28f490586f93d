"""Bitwise independence of rows: the same row in any company gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepinfer_core.backend.formats import Numerics
from deepinfer_core.conformance import trees
from deepinfer_core.conformance.checks import SkippedError, UnsupportedError, expect
from deepinfer_core.conformance.describe import Geometry, OpDescription, Outputs, descriptions
from deepinfer_core.conformance.model_level import solo_model
from deepinfer_core.conformance.poison import PoisonedAllocations
from deepinfer_core.conformance.subject import Subject

_SIZES = (2, 7, 8, 9, 64, 129, 257)
"""Numbers of rows in the larger batches: around the sizes at which libraries choose another routine."""


def row_ops() -> list[str]:
    """Ops whose rows are claimed to be independent."""
    return [name for name, description in descriptions().items() if description.rows is not None]


def check_rows(subject: Subject, op: str) -> None:
    """Raises CheckError if a row of `op` changes a bit with the company it is in."""
    description = descriptions()[op]
    ran = 0
    for geometry in _geometries(description, subject):
        for numerics in subject.numerics():
            if geometry.numerics in (None, numerics):
                _check_case(subject, description, geometry, numerics)
                ran += 1
    if not ran:
        raise UnsupportedError("no geometry of this op runs in the formats that are claimed")


def _geometries(description: OpDescription, subject: Subject) -> Iterator[Geometry]:
    for geometry in description.geometries:
        rows = geometry.dims.get("rows", 0)
        if geometry.quick and rows >= 2 and not geometry.unsupported(subject.claims) and geometry.name != "released":
            yield geometry


def _compositions(rows: int) -> Iterator[tuple[str, Tensor]]:
    """Lists of row numbers: reversed, alone, the first half, and larger batches in which rows repeat."""
    order = torch.arange(rows)
    yield "reversed", order.flip(0)
    for row in sorted({0, rows // 2, rows - 1}):
        yield "alone", order[row : row + 1]
    yield "the first half", order[: (rows + 1) // 2]
    for size in _SIZES:
        yield f"a batch of {size}", torch.arange(size) * 5 % rows


def _check_case(subject: Subject, description: OpDescription, geometry: Geometry, numerics: Numerics) -> None:
    assert description.rows is not None
    inputs = description.inputs(geometry, numerics, 0)
    rows = geometry.dims["rows"]
    whole = _run(subject, description, inputs, numerics)
    for company, index in _compositions(rows):
        part = _run(subject, description, description.rows(inputs, index), numerics)
        for name, value in part.items():
            if value.shape[:1] != (len(index),) or whole[name].shape[:1] != (rows,):
                continue
            wrong = _different(value, whole[name][index])
            if len(wrong):
                row = int(index[wrong[0]])
                expect(
                    False,
                    f"{description.op}({geometry.name},{numerics}): output {name!r} of row {row} has other bits in company ({company}) "
                    f"than in the whole batch of {rows}",
                )


def _different(a: Tensor, b: Tensor) -> list[int]:
    """Rows whose bits differ."""
    same = a.contiguous().view(torch.uint8).flatten(1) == b.contiguous().view(torch.uint8).flatten(1) if a.dim() > 1 else _flat_same(a, b)
    return (~same.all(1)).nonzero().flatten().tolist()


def _flat_same(a: Tensor, b: Tensor) -> Tensor:
    return a.contiguous().view(torch.uint8).view(len(a), -1) == b.contiguous().view(torch.uint8).view(len(b), -1)


def _run(subject: Subject, description: OpDescription, inputs: dict, numerics: Numerics) -> Outputs:
    kernels = subject.invariant_kernels(numerics)
    with torch.no_grad(), PoisonedAllocations():
        out = description.run(kernels, trees.copy_to(inputs, kernels.device))
    return {name: value.cpu().clone() for name, value in out.items()}


def check_model_rows(subject: Subject) -> None:
    """Raises CheckError if a sequence's logits depend on the sequences beside it."""
    for numerics in subject.numerics():
        try:
            solo = solo_model(subject, numerics, sequences=3)
        except UnsupportedError as error:
            raise SkippedError(str(error)) from error
        random = torch.Generator().manual_seed(7)
        ids = [torch.randint(3, 700, (n,), generator=random).tolist() for n in (41, 9, 18)]
        alone = []
        for i in range(3):
            alone.append(solo.logits(ids[i], i).cpu())
            solo.forget(i)
        for order in ((2, 0, 1), (1, 2, 0)):
            parts: list[list[Tensor]] = [[], [], []]
            for piece in (slice(0, 8), slice(8, None)):
                new: dict[int, Sequence[int]] = {i: ids[i][piece] for i in order if ids[i][piece]}
                logits = solo.loaded.model.logits(solo.step(new).hidden).cpu()
                for i, rows in zip(new, logits.split([len(v) for v in new.values()]), strict=True):
                    parts[i].append(rows)
            for i in range(3):
                solo.forget(i)
                expect(torch.equal(torch.cat(parts[i]), alone[i]), f"{numerics}: sequence {i} has other logits beside two others ({order})")
