"""Communication between the processes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend.capabilities import Capabilities


@dataclass(frozen=True)
class Group:
    """The processes that take part: this one is `rank` of `size`. `handle` is a torch.distributed group, None for the default one."""

    rank: int = 0
    size: int = 1
    handle: Any = None


class Collectives(ABC):
    """Collective operations of one group. All ranks call the same operations in the same order. Tensors are contiguous."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenation of every rank's x [rows, ...] (equal shapes) along dim 0, in rank order."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum of x [size*rows, ...] over ranks: [rows, ...]."""

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Sum, "min" or "max" of x over ranks; x itself is left alone."""

    @abstractmethod
    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Sends send[i] rows of x to rank i (in order) and returns the receive[i] rows that come from each rank i."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Rank `source`'s x on every rank (in place on the others)."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Sends x to rank `to`, which calls `receive` with the same shape and dtype."""

    @abstractmethod
    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fills and returns x with what rank `source` sends."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""


class SingleProcess(Collectives):
    """The group of one."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x.clone()

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return x[: receive[0]].clone()

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError(f"a group of one process has no rank {to} to send to")

    def receive(self, x: Tensor, source: int) -> Tensor:
        raise ValueError(f"a group of one process has no rank {source} to receive from")

    def barrier(self) -> None:
        return None


class TorchCollectives(Collectives):
    """torch.distributed (gloo, NCCL, HCCL) behind the contract. The process group must be initialised."""

    def all_gather(self, x: Tensor) -> Tensor:
        out = [torch.empty_like(x) for _ in range(self.group.size)]
        torch.distributed.all_gather(out, x, group=self.group.handle)
        return torch.cat(out)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.group.size
        return self.all_reduce(x)[self.group.rank * rows : (self.group.rank + 1) * rows].clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        out = x.clone()
        torch.distributed.all_reduce(out, op=getattr(torch.distributed.ReduceOp, op.upper()), group=self.group.handle)
        return out

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        torch.distributed.all_to_all_single(out, x, receive, send, group=self.group.handle)
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        torch.distributed.broadcast(x, group_src=source, group=self.group.handle)
        return x

    def send(self, x: Tensor, to: int) -> None:
        torch.distributed.send(x, group_dst=to, group=self.group.handle)

    def receive(self, x: Tensor, source: int) -> Tensor:
        torch.distributed.recv(x, group_src=source, group=self.group.handle)
        return x

    def barrier(self) -> None:
        torch.distributed.barrier(group=self.group.handle)


def default_collectives(group: Group, capabilities: Capabilities) -> Collectives:
    """`SingleProcess` for a group of one, else torch.distributed if the backend claims it."""
    if group.size == 1:
        return SingleProcess(group)
    if not capabilities.collectives:
        raise ValueError(f"a group of {group.size} processes needs collectives, which this backend does not claim; use one process")
    return TorchCollectives(group)
