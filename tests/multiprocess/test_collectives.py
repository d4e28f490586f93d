"""torch.distributed collectives (gloo) on 2 and 4 processes, against what they must return."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deepinfer_core.backend import Capabilities
from deepinfer_core.backend.collectives import Group, SingleProcess, TorchCollectives, default_collectives


def run(rank: int, size: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    group = default_collectives(Group(rank, size), Capabilities(collectives=frozenset({"gloo"})))
    assert isinstance(group, TorchCollectives)
    parts = [torch.arange(6.0).view(3, 2) + 10 * r for r in range(size)]
    mine = parts[rank].clone()
    assert torch.equal(group.all_gather(mine), torch.cat(parts))
    assert torch.equal(group.all_reduce(mine), torch.stack(parts).sum(0))
    assert torch.equal(group.all_reduce(mine, "min"), parts[0])
    assert torch.equal(group.all_reduce(mine, "max"), parts[-1])
    assert torch.equal(mine, parts[rank])  # inputs are left alone
    whole = torch.arange(4.0 * size).view(2 * size, 2)
    scaled = whole * sum(range(1, size + 1))
    assert torch.equal(group.reduce_scatter(whole * (rank + 1)), scaled[2 * rank : 2 * rank + 2])
    rows = torch.cat([torch.full((r + 1, 2), 10 * rank + r, dtype=torch.uint8) for r in range(size)])
    got = group.all_to_all(rows, [r + 1 for r in range(size)], [rank + 1] * size)
    assert torch.equal(got, torch.cat([torch.full((rank + 1, 2), 10 * r + rank, dtype=torch.uint8) for r in range(size)]))
    assert torch.equal(group.broadcast(torch.full((4,), float(rank)), source=1), torch.ones(4))
    if rank == 0:
        group.send(torch.arange(5.0), to=1)
    elif rank == 1:
        assert torch.equal(group.receive(torch.zeros(5), source=0), torch.arange(5.0))
    group.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_gloo(size, tmp_path):
    mp.spawn(run, (size, str(tmp_path / "rendezvous")), nprocs=size)


def test_a_group_of_one_communicates_with_nobody():
    group = default_collectives(Group(), Capabilities())
    assert isinstance(group, SingleProcess)
    x = torch.arange(3)
    for same in (group.all_gather(x), group.reduce_scatter(x), group.all_reduce(x), group.broadcast(x)):
        assert torch.equal(same, x)
    assert torch.equal(group.all_to_all(x, [3], [3]), x)
    with pytest.raises(ValueError, match="no rank 1 to send to"):
        group.send(x, 1)
    with pytest.raises(ValueError, match="no rank 1 to receive from"):
        group.receive(x, 1)


def test_a_backend_without_collectives_is_refused_for_several_processes():
    with pytest.raises(ValueError, match=r"2 processes needs collectives.*use one process"):
        default_collectives(Group(0, 2), Capabilities())
