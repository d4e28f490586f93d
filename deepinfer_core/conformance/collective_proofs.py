"""Collectives against what they are defined to do, on 2 and 4 processes."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from deepinfer_core.backend.collectives import Collectives, Group
from deepinfer_core.conformance.checks import CheckError, SkippedError
from deepinfer_core.conformance.subject import Subject

_WAIT = 120  # seconds for one group of processes


def prove_collectives(size: int) -> Callable[[Subject], None]:
    """A proof that starts `size` processes for each torch.distributed backend that is claimed."""

    def prove(subject: Subject) -> None:
        cls = type(subject.backend)
        if "<locals>" in cls.__qualname__:
            raise SkippedError("the backend's class is local to a function: other processes cannot import it")
        for transport in sorted(subject.claims.collectives):
            _start(f"{cls.__module__}:{cls.__qualname__}", transport, size, subject.claims.device_type)

    return prove


def _start(backend: str, transport: str, size: int, device: str) -> None:
    if device != "cpu" and (count := torch.get_device_module(device).device_count()) < size:
        raise SkippedError(f"{size} processes need {size} devices, this machine has {count}")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-m", __name__, backend, transport, str(size), device, str(store)]
        running = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(size)
        ]
        problems = []
        for rank, process in enumerate(running):
            try:
                text, _ = process.communicate(timeout=_WAIT)
            except subprocess.TimeoutExpired:
                text = f"no result after {_WAIT} s"
            finally:
                process.kill()
            if process.returncode != 0:
                last = (text.strip().splitlines() or ["no output"])[-1]
                problems.append(f"rank {rank} of {size} ({transport}): {last}")
        if problems:
            raise CheckError("; ".join(problems))


def _value(rank: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers that differ from rank to rank: every sum is exact."""
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) * 7 + rank * 13) % 31).view(shape).to(dtype).to(device)


def check_collectives(c: Collectives, device: torch.device) -> None:
    """Raises AssertionError with the name of the collective that is wrong."""
    rank, size = c.group.rank, c.group.size
    every = [_value(r, (3, 4), device) for r in range(size)]
    mine = every[rank].clone()
    _equal("all_gather", c.all_gather(mine), torch.cat(every))
    total = torch.stack(every).sum(0)
    _equal("all_reduce sum", c.all_reduce(mine), total)
    _equal("all_reduce min", c.all_reduce(mine, "min"), torch.stack(every).amin(0))
    _equal("all_reduce max", c.all_reduce(mine, "max"), torch.stack(every).amax(0))
    _equal("all_reduce leaves its input", mine, every[rank])
    parts = [_value(r, (size * 2, 3), device) for r in range(size)]
    _equal("reduce_scatter", c.reduce_scatter(parts[rank]), torch.stack(parts).sum(0)[rank * 2 : rank * 2 + 2])
    counts = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]  # rank i sends counts[i][j] rows to rank j, some none
    rows = [_value(i, (sum(counts[i]), 2), device) for i in range(size)]
    received = [rows[i][sum(counts[i][:rank]) : sum(counts[i][: rank + 1])] for i in range(size)]
    out = c.all_to_all(rows[rank], counts[rank], [counts[i][rank] for i in range(size)])
    _equal("all_to_all, uneven", out, torch.cat(received))
    _equal("broadcast", c.broadcast(_value(rank, (5,), device), size - 1), _value(size - 1, (5,), device))
    if rank == 0:
        c.send(_value(40, (4,), device), size - 1)
    elif rank == size - 1:
        _equal("send and receive", c.receive(torch.zeros(4, device=device), 0), _value(40, (4,), device))
    c.barrier()


def _equal(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert torch.equal(got, want), f"{what}: expected {want.flatten()[:6].tolist()}, got {got.flatten()[:6].tolist()}"


def _main(backend: str, transport: str, size: str, device: str, store: str, rank: str) -> None:
    module, _, name = backend.partition(":")
    cls = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    place = torch.device(device if device == "cpu" else f"{device}:{rank}")
    if device != "cpu":
        torch.get_device_module(device).set_device(int(rank))
    torch.distributed.init_process_group(transport, init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    try:
        check_collectives(cls().collectives(Group(int(rank), int(size))), place)  # type: ignore[operator]
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
