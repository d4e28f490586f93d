"""HCCL's restrictions on types, over gloo."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as processes

from deepinfer_backends.ascend950.backend import AscendBackend
from deepinfer_backends.ascend950.collectives import AscendCollectives, ascend_collectives
from deepinfer_core.backend.collectives import Group, SingleProcess

FP8 = torch.float8_e4m3fn


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6).view(3, 2) + 10 * rank).to(torch.uint8).view(dtype)


def _check(rank: int, rendezvous: str) -> None:
    store = torch.distributed.FileStore(rendezvous, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300))
    group = AscendCollectives(Group(rank, 2))
    for dtype in (FP8, torch.float8_e8m0fnu, torch.uint8):
        gathered = group.all_gather(_values(rank, dtype))
        both = torch.cat([_values(0, torch.uint8), _values(1, torch.uint8)])
        assert gathered.dtype is dtype
        assert torch.equal(gathered.view(torch.uint8), both)
        sent = group.all_to_all(_values(rank, dtype), [1, 2], [1 + rank, 1 + rank])
        want = torch.cat([_values(0, torch.uint8)[rank : 1 + 2 * rank], _values(1, torch.uint8)[rank : 1 + 2 * rank]])
        assert sent.dtype is dtype
        assert torch.equal(sent.view(torch.uint8), want)
        shared = group.broadcast(_values(rank, dtype), source=1)
        assert torch.equal(shared.view(torch.uint8), _values(1, torch.uint8))
        passed = _values(rank, dtype)
        if rank == 0:
            group.send(passed, 1)
        else:
            assert torch.equal(group.receive(passed, 0).view(torch.uint8), _values(0, torch.uint8))
    assert group.all_reduce(torch.full((2,), 1.0 + rank)).tolist() == [3.0, 3.0]
    assert group.reduce_scatter(torch.arange(4.0).view(2, 2) + rank).tolist() == [[1.0 + 4 * rank, 3.0 + 4 * rank]]
    with pytest.raises(TypeError, match=r"all_reduce of torch\.float8_e4m3fn: HCCL reduces"):
        group.all_reduce(_values(rank, FP8))
    with pytest.raises(TypeError, match="uint8"):
        group.all_reduce(_values(rank, FP8).view(torch.uint8))
    group.barrier()
    torch.distributed.destroy_process_group()


def test_byte_floats_travel_as_bytes_and_are_never_reduced(tmp_path: Path) -> None:
    processes.spawn(_check, (str(tmp_path / "rendezvous"),), nprocs=2)


def test_a_group_of_one_needs_no_process_group() -> None:
    assert isinstance(ascend_collectives(Group(), AscendBackend().capabilities()), SingleProcess)
