"""Poisoned allocations: memory that an op allocates and forgets to write shows as NaN or as an absurd number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

POISON_BYTE = 0x7F
_ALLOCATORS = {torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, Tensor.new_empty, Tensor.new_empty_strided}


def poison(t: Tensor) -> Tensor:
    """Fills a tensor in place: floats with NaN, bools with True, other types with bytes 0x7F."""
    if t.dtype.is_complex or not t.numel() or t.device.type == "meta":
        return t
    if t.dtype is torch.bool:
        return t.fill_(True)
    if t.dtype.is_floating_point and t.element_size() > 1:
        return t.fill_(torch.nan)
    if t.element_size() == 1:
        t.view(torch.uint8).fill_(0xFF if t.dtype.is_floating_point else POISON_BYTE)
        return t
    return t.fill_(int.from_bytes(bytes([POISON_BYTE]) * t.element_size(), "little"))


class PoisonedAllocations(TorchFunctionMode):
    """Inside, the uninitialised tensors that Python code allocates are poisoned. Native libraries' own memory is out of reach."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return poison(result) if func in _ALLOCATORS and isinstance(result, Tensor) else result
