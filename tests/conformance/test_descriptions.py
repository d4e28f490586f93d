"""Descriptions are complete, and their arithmetic is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_backends.cpu_ref import quant
from deepinfer_core.backend.capabilities import Capabilities
from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.kernels import OPS
from deepinfer_core.conformance import grids, op_docs, trees
from deepinfer_core.conformance.analysis import Approx, Arithmetic, exact
from deepinfer_core.conformance.bench import PRESETS
from deepinfer_core.conformance.claims_level import proofs
from deepinfer_core.conformance.describe import case_seed, descriptions
from deepinfer_core.conformance.expect import ranking, worst
from deepinfer_core.conformance.generate import Draw, picker
from deepinfer_core.conformance.poison import PoisonedAllocations
from deepinfer_core.conformance.results import LEVELS

FORMATS = list(CacheFormat)


def test_every_op_of_the_contract_is_described():
    assert set(descriptions()) == set(OPS)


def test_every_field_of_the_claims_has_a_proof():
    assert {proof.field for proof in proofs()} == set(Capabilities.model_fields)


@pytest.mark.parametrize("op", OPS)
def test_description_is_complete(op):
    description = descriptions()[op]
    names = [geometry.name for geometry in description.geometries]
    assert len(set(names)) == len(names) >= 2
    assert description.bound
    rows = [geometry.dims["rows"] for geometry in description.geometries if "rows" in geometry.dims]
    if description.rows is not None and "engram_hash" not in op:
        assert {0, 1} <= set(rows), "zero rows and one row are edge cases of every op on rows"
    assert set(description.presets) <= set(PRESETS)
    geometry = description.geometries[0]
    numerics = geometry.numerics or Numerics.RELEASE
    inputs = description.inputs(geometry, numerics, 3)
    cost = description.cost(inputs)
    assert cost.bytes > 0
    assert cost.flops >= 0
    again = description.inputs(geometry, numerics, 3)
    for (path, a), (_, b) in zip(trees.tensors(inputs), trees.tensors(again), strict=True):
        assert torch.equal(trees.storage_bytes(a), trees.storage_bytes(b)), f"{path} is not a function of the seed"
    assert {path for path, _ in trees.tensors(inputs)} >= description.mutates


def test_seeds_differ_by_op_geometry_and_seed():
    assert len({case_seed(op, geometry, seed) for op in "ab" for geometry in "xy" for seed in (0, 1)}) == 8


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_agree_with_the_reference_backend_bit_for_bit(fmt):
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x * torch.exp2(torch.randint(-30, 31, (200, 1), generator=torch.Generator().manual_seed(2)).float()).bfloat16()
    data, scales = grids.encode(x.double(), fmt)
    want_data, want_scales = quant.encode(x.float(), fmt)
    assert torch.equal(scales, want_scales)
    assert torch.equal(data, want_data)
    assert torch.equal(grids.decode(data, scales, fmt).float(), quant.decode(data, scales, fmt))


def test_every_code_of_the_small_formats_is_its_own_rounding():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    finite = values[~values.isnan()]
    assert torch.equal(grids.e4m3(finite), finite)
    assert torch.equal(grids.e2m1(grids.nibbles(codes)), grids.nibbles(codes))
    assert torch.equal(grids.bfloat16(finite), finite.bfloat16().double())


@settings(max_examples=200, deadline=None)
@given(st.floats(-500, 500, width=32))
def test_rounding_agrees_with_torch(value):
    x = torch.tensor([value], dtype=torch.float64)
    assert torch.equal(grids.bfloat16(x), x.bfloat16().double())
    if abs(value) <= 448:
        assert torch.equal(grids.e4m3(x), x.float().to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("numerics", list(Numerics))
def test_running_error_bounds_hold_for_float32(numerics):
    draw = Draw(5, numerics)
    a = Arithmetic(numerics)
    x, weight = draw.activation(40, 256), draw.normal(30, 256)
    assert worst((x.float() @ weight.t()).double(), a.product(exact(x), weight)).passed
    norm = draw.norm_weight(256)
    got = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.float()
    assert worst(got.double(), a.rms_norm(exact(x), norm, 1e-6)).passed


def test_intervals_are_exact_away_from_rounding_boundaries():
    a = Arithmetic(Numerics.RELEASE)
    x = Approx(torch.tensor([1.001, 1.0 + 2.0**-8], dtype=torch.float64), torch.full((2,), 1e-6, dtype=torch.float64))
    rounded = a.rounded(x)
    assert rounded.radius[0] == 0
    assert rounded.radius[1] == pytest.approx(2.0**-7), "halfway between two bfloat16 values either may come out"


def test_ranking_takes_ties_to_the_lower_id_and_swaps_only_within_error():
    value = torch.tensor([[3.0, 2.0, 2.0, 1.0]], dtype=torch.float64)
    allowed, count = torch.ones(1, 4, dtype=torch.bool), torch.tensor([2])

    def judge(ids, radius=0.0):
        return ranking(Approx(value, torch.full_like(value, radius)), torch.tensor([ids]), allowed, count)

    assert judge([0, 1]).passed
    assert "lower id" in judge([0, 2]).note
    assert judge([0, 2], radius=0.1).passed
    assert "left out" in judge([0, 3], radius=0.1).note
    assert "number" in judge([0, -1]).note


def test_worst_never_passes_nan():
    want = exact(torch.zeros(2))
    assert not worst(torch.tensor([0.0, torch.nan], dtype=torch.float64), want).passed
    assert worst(torch.tensor([0.0, -0.0], dtype=torch.float64), want).passed


def test_picker_covers_the_whole_width():
    part, columns = picker(5120)
    assert part.weight.shape == (512, 5120)
    assert columns[0] == 0
    assert columns[-1] >= 5110
    assert len(columns.unique()) == 512


def test_poisoned_allocations_fill_what_python_allocates():
    with PoisonedAllocations():
        assert torch.empty(3).isnan().all()
        assert (torch.zeros(2).new_empty(3, dtype=torch.int32) == 0x7F7F7F7F).all()
        assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
        assert torch.equal(torch.zeros(2), torch.tensor([0.0, 0.0]))


def test_copies_keep_strides_and_shared_storage():
    x = trees.strided(torch.arange(6.0).view(3, 2))
    copy = trees.copy_to({"a": x, "b": x[1:]}, torch.device("cpu"))
    assert copy["a"].stride() == x.stride()
    assert torch.equal(copy["a"], x)
    copy["a"][1, 0] = 99
    assert copy["b"][0, 0] == 99
    assert x[1, 0] == 2


def test_the_page_of_ops_is_current():
    page = Path(__file__).parents[2] / "docs" / "ops.md"
    assert page.read_text(encoding="utf-8") == op_docs.page(), "run: python -m deepinfer_core.conformance.op_docs > docs/ops.md"


def test_the_guide_names_every_level_and_claim():
    text = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in (*LEVELS, *Capabilities.model_fields))
