"""Window keys, compressor pooling and the stores of all caches."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.kernels import calls
from deepinfer_backends.ascend950.kernels.formats import encode
from deepinfer_backends.ascend950.kernels.linears import LinearOps
from deepinfer_backends.ascend950.kernels.rows import RowTable, page_table, page_tables
from deepinfer_core.backend.types import CompressorRing, CompressorRows, PagedEntries, Rope, WindowRing


def rotate(x: Tensor, rope: Rope, inverse: bool = False) -> Tensor:
    """bf16 x [T, ..., d] with its last rd dims rotated in float32 and rounded once."""
    cos, sin = rope.table[rope.positions].repeat_interleave(2, dim=1).chunk(2, dim=1)  # [T, rd], each angle twice in a row
    rd = cos.shape[1]
    heads = x[:, None] if x.dim() == 2 else x
    turned = calls.rotate_pairs(heads[..., -rd:].float(), cos, -sin if inverse else sin).to(x.dtype)
    return torch.cat((heads[..., :-rd], turned), -1).view(x.shape)


def ring_table(ring: WindowRing) -> RowTable:
    """Entries of a window ring by flat ring row."""
    return RowTable.of(ring.data, 0, ring.data.shape[1], ring.data.shape[2])


class CacheOps(LinearOps):
    """Ops of the contract's group "attention and caches" that make and store keys."""

    def window_key(self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope) -> Tensor:
        return calls.dequantize(calls.quantize_fp8(rotate(self.rms_norm(kv, norm_weight, eps), rope)))

    def store_window(self, key: Tensor, ring: WindowRing, slots: Tensor) -> None:
        ring_table(ring).store(slots, torch.cat(encode(key, ring.format), -1))

    def compress(self, rows: Tensor, ring: CompressorRing, index: CompressorRows, norm_weight: Tensor, eps: float) -> Tensor:
        slots, length, _, hd = ring.data.shape
        table = RowTable.of(ring.data, 0, length, 2 * hd)
        members, kept = index.members.long(), slots * length
        old = table.load(members.clamp(0, kept - 1))  # [T, r, 2*hd]
        if len(rows):
            new = rows[(members - kept).clamp_min(0)]
            old = torch.where((members < kept)[..., None], old, new)
        latent, gate = old.chunk(2, dim=-1)
        pooled = (gate.softmax(1) * latent).sum(1).bfloat16()
        pooled = torch.where(members[:, :1] >= 0, pooled, 0.0)
        result = self.rms_norm(pooled, norm_weight, eps)
        table.store(index.slots, rows)
        return result

    def store_entries(self, latent: Tensor, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        page_table(pages).store(slots, torch.cat(encode(rotate(latent, rope), pages.format), -1))

    def store_index_keys(self, key: Tensor, norm_weight: Tensor, eps: float, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        encoded = encode(rotate(self.rms_norm(key, norm_weight, eps), rope), pages.format)
        for table, part in zip(page_tables(pages), encoded, strict=True):
            table.store(slots, part)
