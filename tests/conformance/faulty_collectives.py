"""A backend whose collectives are wrong, in a module that other processes can import."""

from deepinfer_backends.cpu_ref.backend import CpuReference
from deepinfer_core.backend.collectives import TorchCollectives


class FirstRanksPart(TorchCollectives):
    def reduce_scatter(self, x):
        return self.all_reduce(x)[: x.shape[0] // self.group.size].clone()


class FaultyCollectives(CpuReference):
    name = "faulty_collectives"

    def collectives(self, group):
        return FirstRanksPart(group)
