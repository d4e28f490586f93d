"""Random inputs of the ops, at any size, on any device (on the meta device: shapes only)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import (
    CompressorRing,
    CompressorRows,
    ExpertTensors,
    HcWeights,
    PagedEntries,
    QuantTensor,
    Rope,
    Routing,
    SelectedEntries,
    WindowKeys,
    WindowRing,
)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model, in the checkpoint's words."""

    hidden: int
    streams: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_blocks: int
    experts: int
    top_k: int
    intermediate: int
    engram_columns: int
    engram_dim: int
    vocab: int
    markov_rank: int


SMALL = Geometry(160, 4, 4, 64, 16, 96, 32, 2, 12, 4, 64, 16, 4, 10, 3, 96, 6, 32, 301, 32)
RELEASED = Geometry(5120, 4, 64, 512, 64, 1280, 1024, 8, 128, 32, 128, 512, 2048, 384, 6, 2304, 24, 256, 129280, 256)


class Inputs:
    """Seeded random values. Every call draws new ones."""

    def __init__(self, device: str | torch.device, seed: int = 0) -> None:
        self.device = torch.device(device)
        self._generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def f32(self, *shape: int, scale: float = 1.0) -> Tensor:
        if self._generator is None:
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, generator=self._generator, device=self.device) * scale

    def bf16(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.f32(*shape, scale=scale).bfloat16()

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Uniform in [low, high)."""
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randint(low, high, shape, generator=self._generator, device=self.device).to(dtype)

    def distinct(self, count: int, high: int) -> Tensor:
        """int32 [count] distinct numbers below `high`."""
        if self._generator is None:
            return torch.empty(count, dtype=torch.int32, device=self.device)
        return torch.randperm(high, generator=self._generator, device=self.device)[:count].int()

    def scales(self, *shape: int, low: int = 116, high: int = 123) -> Tensor:
        return self.ints(low, high, *shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    def bf16_weight(self, outputs: int, inputs: int) -> QuantTensor:
        return QuantTensor(self.bf16(outputs, inputs, scale=inputs**-0.5))

    def fp8_weight(self, outputs: int, inputs: int) -> QuantTensor:
        return QuantTensor(self.f32(outputs, inputs).to(torch.float8_e4m3fn), self.scales(-(-outputs // 32), -(-inputs // 32)))

    def fp4_weight(self, outputs: int, inputs: int) -> QuantTensor:
        return QuantTensor(self.ints(-128, 128, outputs, inputs // 2, dtype=torch.int8), self.scales(outputs, inputs // 32))

    def expert(self, g: Geometry, fp4: bool = True, bf16: bool = False) -> ExpertTensors:
        make = self.bf16_weight if bf16 else self.fp4_weight if fp4 else self.fp8_weight
        return ExpertTensors(make(g.intermediate, g.hidden), make(g.hidden, g.intermediate), make(g.intermediate, g.hidden))

    def rope(self, rows: int, rd: int, length: int = 512) -> Rope:
        angles = torch.arange(length, device=self.device)[:, None] * 10000.0 ** (-torch.arange(0, rd, 2, device=self.device) / rd)
        table = torch.cat((angles.cos(), angles.sin()), 1).float()
        return Rope(table, self.ints(0, length, rows, dtype=torch.int64))

    def hc_weights(self, g: Geometry) -> HcWeights:
        m = g.streams
        return HcWeights(self.f32(m * (m + 2), m * g.hidden, scale=0.02), self.f32(m * (m + 2)), self.f32(3))

    def pre(self, rows: int, m: int) -> Tensor:
        return self.f32(rows, m).sigmoid() if self._generator is not None else self.f32(rows, m)

    def routing(self, rows: int, top_k: int, experts: int) -> Routing:
        if self._generator is None:
            return Routing(self.ints(0, experts, rows, top_k), self.f32(rows, top_k))
        ids = self.f32(rows, experts).topk(top_k, 1).indices.int()
        return Routing(ids, self.f32(rows, top_k).softmax(1) * 1.5)

    def ring(self, slots: int, length: int, dim: int) -> WindowRing:
        """A ring of valid FP8 entries; slots are 32 bytes further apart than they need to be."""
        entry = CacheFormat.FP8.entry_bytes(dim)
        pool = torch.empty(slots, length * entry + 32, dtype=torch.uint8, device=self.device)
        data = pool[:, : length * entry].unflatten(1, (length, entry))
        data[..., :dim] = self.f32(slots, length, dim).to(torch.float8_e4m3fn).view(torch.uint8)
        data[..., dim:] = self.ints(118, 122, slots, length, dim // 32, dtype=torch.uint8)
        return WindowRing(data, CacheFormat.FP8)

    def window(self, rows: int, columns: int, ring: WindowRing, dim: int) -> WindowKeys:
        """Keys of half-empty windows, some of the ring, some of this step."""
        slots, length, _ = ring.data.shape
        current = self.ring(1, max(rows, 1), dim).data[0]
        values = current[:, :dim].view(torch.float8_e4m3fn).float().unflatten(1, (-1, 32))
        values = (values * torch.exp2(current[:, dim:].float() - 127)[..., None]).flatten(1).bfloat16()[:rows]
        index = self.ints(0, slots * length + rows, rows, columns)
        if self._generator is not None:
            index = torch.where(self.f32(rows, columns) > 0.8, -1, index)
        return WindowKeys(ring, values, index)

    def pages(self, fmt: CacheFormat, dim: int, n: int, per_sequence: int, rows: int, sequences: int, sectioned: bool) -> PagedEntries:
        """Pages of valid entries; sequences use shuffled pages, rows belong to ascending sequences."""
        count = sequences * per_sequence + 1
        pool = torch.empty(count, n * fmt.entry_bytes(dim) + 64, dtype=torch.uint8, device=self.device)
        data_bytes, scale_bytes = fmt.data_bytes(dim), fmt.scale_bytes(dim)
        if fmt is CacheFormat.FP8:
            data = self.f32(count, n, dim).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            data = self.ints(0, 256, count, n, data_bytes, dtype=torch.uint8)
        low, high = (48, 72) if fmt is CacheFormat.FP4 else (118, 122)
        scales = self.ints(low, high, count, n, scale_bytes, dtype=torch.uint8)
        if sectioned:
            pool[:, : n * data_bytes] = data.flatten(1)
            pool[:, n * data_bytes : n * (data_bytes + scale_bytes)] = scales.flatten(1)
        else:
            pool[:, : n * (data_bytes + scale_bytes)] = torch.cat((data, scales), 2).flatten(1)
        table = (self.distinct(count - 1, count - 1) + 1).view(sequences, per_sequence)
        sequence = (torch.arange(rows, device=self.device) * sequences // max(rows, 1)).int()
        return PagedEntries(pool, fmt, dim, n, sectioned, table, sequence)

    def selected(self, pages: PagedEntries, rows: int, topk: int) -> SelectedEntries:
        """Ascending distinct entries, -1 padded, of different counts."""
        width = pages.block_table.shape[1] * pages.entries_per_page
        if self._generator is None:
            return SelectedEntries(pages, self.ints(0, width, rows, topk))
        index = self.f32(rows, width).topk(min(topk, width), 1).indices.sort(1).values
        index = torch.nn.functional.pad(index, (0, topk - index.shape[1]), value=-1)
        count = self.ints(0, topk + 1, rows)
        return SelectedEntries(pages, torch.where(torch.arange(topk, device=self.device) < count[:, None], index, -1).int())

    def compressor(self, rows: int, ratio: int, slots: int, length: int, hd: int) -> tuple[CompressorRing, CompressorRows]:
        ring = CompressorRing(self.f32(slots, length, 2, hd))
        members = self.ints(0, slots * length + rows, rows, ratio)
        if self._generator is not None:
            members = torch.where(self.f32(rows, 1) > 0.3, -1, members)
        return ring, CompressorRows(members, self.distinct(rows, slots * length))
