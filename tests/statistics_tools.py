"""Chi-square tests of observed ids against exact distributions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def critical(degrees: int) -> float:
    """The 99.9 % quantile of chi-square."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


def chi_square(tokens: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; rare ids are pooled with their neighbours by probability."""
    expected = probabilities * len(tokens)
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert observed[probabilities == 0].sum() == 0, "an impossible id was drawn"
    order = expected.argsort(descending=True)
    groups = ((expected[order].cumsum(0) - expected[order]) / 5).long()  # ids that start within the same five expected draws
    _, groups = groups.unique(return_inverse=True)
    pooled = torch.zeros(2, int(groups.max()) + 1, dtype=torch.float64).index_add_(1, groups, torch.stack((expected, observed))[:, order])
    pooled = pooled[:, pooled[0] > 2]
    return float(((pooled[1] - pooled[0]) ** 2 / pooled[0]).sum()), pooled.shape[1] - 1


def assert_law(tokens: Tensor, probabilities: Tensor) -> None:
    statistic, degrees = chi_square(tokens, probabilities)
    assert statistic < critical(degrees), f"chi-square {statistic:.1f} with {degrees} degrees of freedom"
