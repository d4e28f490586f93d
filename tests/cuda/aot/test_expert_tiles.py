"""How the rows of experts are cut into tiles, and which kernels multiply them. Nothing runs on a GPU."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'deepinfer-core[cuda_sm100]')")

import torch

from deepinfer_backends.cuda_sm100 import grouped
from deepinfer_backends.cuda_sm100.experts import tile_rows
from deepinfer_backends.cuda_sm100.launch import INTERPRETED
from deepinfer_backends.cuda_sm100.weights import ExpertWeights, MatrixWeight
from deepinfer_core.backend.formats import WeightFormat


@pytest.mark.parametrize(("rows", "least", "expected"), [(1, 8, 8), (1, 16, 16), (384, 8, 8), (385, 8, 16), (1537, 8, 64), (8192, 8, 128)])
def test_tiles_hold_a_third_more_than_an_expert_gets(rows: int, least: int, expected: int) -> None:
    assert tile_rows(rows, 6, 384, least) == expected


def packed(outputs: int, inputs: int) -> MatrixWeight:
    words = torch.empty(2, inputs // 128, outputs, 16, dtype=torch.int32, device="meta")
    return MatrixWeight(WeightFormat.FP4_G32, 2, outputs, inputs, words, words[..., 0], True)


@pytest.mark.skipif(INTERPRETED, reason="grouped products are compiled only")
def test_grouped_products_take_whole_tiles_of_packed_e2m1() -> None:
    good = ExpertWeights(packed(512, 256), packed(256, 256))
    assert grouped.takes(good, 90, rows=100, top_k=2)
    assert not grouped.takes(good, 100, rows=100, top_k=2)
    assert not grouped.takes(good, 90, rows=1 << 24, top_k=2)
    assert not grouped.takes(dataclasses.replace(good, w13=packed(384, 256)), 90, rows=100, top_k=2)
    assert not grouped.takes(dataclasses.replace(good, w2=packed(256, 384 - 64)), 90, rows=100, top_k=2)
    decoded = dataclasses.replace(packed(256, 256), format=WeightFormat.BF16, packed=False)
    assert not grouped.takes(dataclasses.replace(good, w2=decoded), 90, rows=100, top_k=2)
