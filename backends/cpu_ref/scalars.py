"""Numbers as tensors.

An op with a Python number builds a tensor of that number first. On the few rows of a decode step that takes longer than the op itself,
and a step has thousands of ops.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1024)
def scalar(value: float) -> Tensor:
    """`value` as a 0-dim CPU tensor, float32 or int64: an operand for tensors on any device (not of clamp, which
    wants a Python number there), which does not change their dtype.

    Shared by all callers: never modified.
    """
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float32)
