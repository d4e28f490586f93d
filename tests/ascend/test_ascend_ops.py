"""The unchanged Ascend kernels on emulated operators, against the reference, op by op."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ascend_cases import CASES, RELEASED, SMALL, Dims, Source

from deepinfer_backends.ascend950 import emulation
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend import Numerics

NMSE = 1e-7
"""Squared error over squared reference. Two float32 sums in different orders put about one value in 500 on the other side of a bf16
rounding (2^-9 of it): 2^-18 / 500 = 8e-9. A wrong block, scale or key gives 1e-3 and more."""

# Few rows and few experts, because the CPU computes every product; all widths are the released ones.
WIDE = dataclasses.replace(RELEASED, rows=3, experts=2, chosen=2, pages=40, vocabulary=1000)


def compare(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """What differs, in words; empty if nothing does."""
    problems = []
    for key, expected in want.items():
        result = got[key]
        if result.shape != expected.shape or result.dtype != expected.dtype:
            problems.append(f"{key}: {result.dtype} {tuple(result.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
        elif key.startswith("exact"):
            if not torch.equal(result, expected):
                problems.append(f"{key}: {int((result != expected).sum())} values differ")
        elif expected.numel():
            error = (result.double() - expected.double()).square().sum() / expected.double().square().sum().clamp_min(1e-30)
            if not error <= NMSE:
                problems.append(f"{key}: normalised error {error:.1e}")
    return problems


def problems_of(name: str, kernels: Any, dims: Dims, seed: int) -> list[str]:
    """Differences between `kernels` and the reference in one case."""
    reference = ReferenceKernels(torch.device("cpu"))
    return compare(CASES[name](kernels, Source(seed=seed), dims), CASES[name](reference, Source(seed=seed), dims))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 7, 13])
@pytest.mark.parametrize("name", CASES)
def test_small(name: str, rows: int, seed: int, emulated: Any) -> None:
    assert problems_of(name, emulated, dataclasses.replace(SMALL, rows=rows), seed) == []


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("moe_fp8", "moe_bf16")])
def test_released_widths(name: str, emulated: Any) -> None:
    assert problems_of(name, emulated, WIDE, 3) == []


@pytest.mark.parametrize("seed", range(5))
def test_what_cann_leaves_open_does_not_matter(seed: int, emulated: Any) -> None:
    """Order of the indexer's results, order among its ties, scales of blocks of zeros."""
    emulation.seed(seed)
    for name in ("select_entries", "store_index_keys", "moe"):
        assert problems_of(name, emulated, SMALL, 5) == []


def test_chunks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch, emulated: Any) -> None:
    from deepinfer_backends.ascend950.kernels import attention, indexer, linears

    monkeypatch.setattr(attention, "_KEY_VALUES", 2 * (SMALL.window + SMALL.topk) * SMALL.head)
    monkeypatch.setattr(indexer, "_KEY_VALUES", 3 * 32 * SMALL.index_head)
    monkeypatch.setattr(linears, "_F32_BLOCK", 10 * SMALL.hidden)
    for name in ("sparse_attention", "select_entries", "select_entries_and_blocks", "linear", "moe_gate", "markov_logits"):
        assert problems_of(name, emulated, SMALL, 6) == []


def test_other_numerics_are_refused(emulated_backend: Any) -> None:
    with pytest.raises(ValueError, match="'release' only, not 'ideal': use backend cpu_ref"):
        emulated_backend.kernels("", Numerics.IDEAL)


def test_weights_of_other_formats_are_refused(emulated: Any) -> None:
    source = Source()
    with pytest.raises(ValueError, match="takes bfloat16, or float8_e4m3fn with scales"):
        emulated.prepare_linear([source.fp4(64, 64)])
    with pytest.raises(ValueError, match="one format per weight"):
        emulated.prepare_linear([source.fp8(64, 64), source.bf16(64, 64)])


def test_a_wrong_number_of_experts_is_refused(emulated: Any) -> None:
    experts = Source().experts(SMALL, 3, Source().fp4)
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"got 3 experts, expected {count}"):
            emulated.prepare_experts(experts, count)


def test_mixed_experts_are_refused(emulated: Any) -> None:
    source = Source()
    with pytest.raises(ValueError, match=r"expert 1 has weights of torch\.float8_e4m3fn"):
        emulated.prepare_experts(source.experts(SMALL, 1, source.fp4) + source.experts(SMALL, 1, source.fp8), 2)


def test_emulated_results_say_so(emulated_backend: Any) -> None:
    assert emulated_backend.name == "ascend950_emulated"
    assert "no NPU was used" in emulated_backend.probe().devices[0]
    claims = emulated_backend.capabilities()
    assert (claims.device_type, claims.collectives) == ("cpu", {"gloo"})
