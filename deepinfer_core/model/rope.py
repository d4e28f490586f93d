"""Rotary tables.

Source: DeepSeek reference inference code for V4.1-Flash; YaRN as in DeepInfer 0.1.0. Angles are float32 products, as in both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_core.checkpoint.schema import RopeScaling, TextConfig


def inverse_frequencies(dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """float32 [dim/2] rotation speeds, in radians per position; with YaRN if `scaling` is given."""
    f = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return f

    def corr(rotations: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(corr(scaling.beta_fast)), 0)
    high = min(math.ceil(corr(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return f / scaling.factor * ramp + f * (1 - ramp)


def rope_table(config: TextConfig, positions: int, compressed: bool) -> Tensor:
    """float32 [positions, rd]: cosines, then sines. `compressed`: the table of layers with ratio >= 1, else of window-only layers."""
    if compressed:
        speeds = inverse_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    else:
        speeds = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, None)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * speeds
    return torch.cat((angles.cos(), angles.sin()), 1)
