"""Checks NCCL collectives on several GPUs of one host against what they must return.

    PYTHONPATH=tests/cuda python3 tests/cuda/nccl_check.py

Starts one process per GPU. Prints one line per operation and exits 0 if all are right. Needs no pytest.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deepinfer_backends.cuda_sm100.backend import CudaBackend
from deepinfer_core.backend.collectives import Group


def check(rank: int, size: int, rendezvous: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    group = CudaBackend().collectives(Group(rank, size))
    wrong = []

    def expect(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(got.cpu(), wanted):
            wrong.append(f"rank {rank}: {name} gave {got.cpu().flatten()[:8].tolist()}, expected {wanted.flatten()[:8].tolist()}")

    mine = torch.arange(6.0).view(3, 2) + 10 * rank
    parts = [torch.arange(6.0).view(3, 2) + 10 * r for r in range(size)]
    expect("all_gather", group.all_gather(mine.cuda()), torch.cat(parts))
    expect("all_reduce sum", group.all_reduce(mine.cuda()), torch.stack(parts).sum(0))
    expect("all_reduce min", group.all_reduce(mine.cuda(), "min"), parts[0])
    expect("all_reduce max", group.all_reduce(mine.cuda(), "max"), parts[-1])
    whole = torch.arange(4.0 * size).view(2 * size, 2) * (rank + 1)
    total = torch.arange(4.0 * size).view(2 * size, 2) * sum(range(1, size + 1))
    expect("reduce_scatter", group.reduce_scatter(whole.cuda()), total[2 * rank : 2 * rank + 2])
    send = [r + 1 for r in range(size)]  # r + 1 rows to rank r
    rows = torch.cat([torch.full((r + 1, 2), 10 * rank + r, dtype=torch.uint8) for r in range(size)])
    got = group.all_to_all(rows.cuda(), send, [rank + 1] * size)
    expect("all_to_all, uneven, uint8", got, torch.cat([torch.full((rank + 1, 2), 10 * r + rank, dtype=torch.uint8) for r in range(size)]))
    expect("broadcast", group.broadcast(torch.full((4,), float(rank)).cuda(), source=size - 1), torch.full((4,), size - 1.0))
    if rank == 0:
        group.send(torch.arange(5.0).cuda(), to=1)
    elif rank == 1:
        expect("send/receive", group.receive(torch.zeros(5).cuda(), source=0), torch.arange(5.0))
    group.barrier()
    failures = [None] * size
    dist.all_gather_object(failures, wrong)
    dist.destroy_process_group()
    if rank == 0:
        problems = [problem for found in failures for problem in found or []]
        print("\n".join(problems) or f"NCCL collectives on {size} GPUs: 8 operations right")
        sys.stdout.flush()
    if wrong:
        os._exit(1)


if __name__ == "__main__":
    count = torch.cuda.device_count()
    if count < 2:
        sys.exit(f"nccl_check: {count} GPU(s); needs at least 2")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(check, (count, os.path.join(folder, "rendezvous")), nprocs=count)
