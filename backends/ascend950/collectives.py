"""HCCL behind the contract: torch.distributed, with one-byte floating-point types moved as plain bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.backend.capabilities import Capabilities
from deepinfer_core.backend.collectives import Collectives, Group, TorchCollectives, default_collectives

_BYTE_FLOATS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu})
_REDUCIBLE = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.int32})


class AscendCollectives(TorchCollectives):
    """`TorchCollectives` for HCCL. Which of its collectives take fp8 is not documented, so fp8 and e8m0 travel as uint8."""

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(_bytes(x)).view(x.dtype)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        if x.dtype not in _REDUCIBLE:
            names = ", ".join(sorted(str(dtype) for dtype in _REDUCIBLE))
            raise TypeError(f"all_reduce of {x.dtype}: HCCL reduces {names}; convert before, or gather the bytes")
        return super().all_reduce(x, op)

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return super().all_to_all(_bytes(x), send, receive).view(x.dtype)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        super().broadcast(_bytes(x), source)
        return x

    def send(self, x: Tensor, to: int) -> None:
        super().send(_bytes(x), to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        super().receive(_bytes(x), source)
        return x


def ascend_collectives(group: Group, capabilities: Capabilities) -> Collectives:
    """Collectives of `group`: `SingleProcess` for a group of one, else HCCL."""
    return default_collectives(group, capabilities) if group.size == 1 else AscendCollectives(group)


def _bytes(x: Tensor) -> Tensor:
    """`x`, or its bytes (the same memory) if it holds a one-byte floating-point type."""
    return x.view(torch.uint8) if x.dtype in _BYTE_FLOATS else x
