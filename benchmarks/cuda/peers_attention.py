"""Sparse attention against FlashMLA's kernels for Hopper (`sgl-flash-mla`, use_legacy=True).

Both get the same keys: 128 of the window and 512 selected ones, none masked, positions at which the rotation is the identity. FlashMLA's
kernels know neither V4.1's cache rows nor its rotation: prefill reads bfloat16 keys that somebody decoded before, decode reads rows of
512 e4m3 values with one float32 scale for 128 of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from cuda_checks.inputs import RELEASED
from peer_pairs import DEVICE, Comparison, Pair, difference, inputs, kernels
from torch import Tensor

from deepinfer_backends.cpu_ref import quant
from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import PagedEntries, Rope, SelectedEntries, WindowKeys, WindowRing

G = RELEASED
SCALE = G.head_dim**-0.5
PAGE = 16
ENTRIES = 4096  # from which rows select
BLOCK = 64  # FlashMLA's page of keys


def still(rows: int) -> Rope:
    """No rotation."""
    table = torch.cat((torch.ones(1, G.rope_dim // 2), torch.zeros(1, G.rope_dim // 2)), 1).to(DEVICE)
    return Rope(table, torch.zeros(rows, dtype=torch.int64, device=DEVICE))


def prefill(rows: int) -> Pair:
    """One sequence; window keys are rows of this step."""
    import flash_mla

    i = inputs(rows)
    query, sink = i.bf16(rows, G.heads, G.head_dim), i.f32(G.heads)
    ring = i.ring(2, G.window + 6, G.head_dim)
    current = i.window(rows, G.window, ring, G.head_dim).current
    own = (torch.arange(rows, device=DEVICE)[:, None] - torch.arange(G.window, device=DEVICE)) % rows
    window = WindowKeys(ring, current, (own + ring.data.shape[0] * ring.data.shape[1]).int())
    pages = i.pages(CacheFormat.FP8, G.head_dim, PAGE, ENTRIES // PAGE, rows, 1, False)
    index = torch.stack([i.distinct(ENTRIES, ENTRIES)[: G.index_topk].sort().values for _ in range(64)])
    index = index[torch.arange(rows, device=DEVICE) % 64].contiguous()
    stored = pages.data[:, : PAGE * CacheFormat.FP8.entry_bytes(G.head_dim)].unflatten(1, (PAGE, -1))[pages.block_table[0].long()]
    data, scales = stored.flatten(0, 1).tensor_split((G.head_dim,), 1)
    entries = quant.decode(data.contiguous(), scales.contiguous(), CacheFormat.FP8).bfloat16()
    keys = torch.cat((current, entries))[:, None].contiguous()
    chosen = torch.cat((own.int(), index + rows), 1)[:, None].contiguous()
    rope = still(rows)

    def theirs() -> Tensor:
        return flash_mla.flash_mla_sparse_fwd(query, keys, chosen, SCALE, G.head_dim, sink, use_legacy=True, return_log2_lse=False)[0]

    def ours() -> Tensor:
        return kernels().sparse_attention(query, window, SelectedEntries(pages, index), sink, SCALE, rope)

    return Pair(ours, theirs, lambda: difference(ours(), theirs()))


def _rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The same random keys as rows of ours (scale bytes for 32 values) and of theirs (float32 scales for 128)."""
    i = inputs(seed)
    codes = i.f32(count, G.head_dim).to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = i.ints(118, 122, count, G.head_dim // 128, dtype=torch.uint8)
    scales = torch.exp2(exponents.float() - 127).view(torch.uint8)
    return torch.cat((codes, exponents.repeat_interleave(4, 1)), 1), torch.cat((codes, scales), 1)


def decode(rows: int) -> Pair:
    """`rows` sequences, one query each; window keys are in the ring."""
    import flash_mla

    i = inputs(rows)
    length = G.window + 6
    query, sink = i.bf16(rows, G.heads, G.head_dim), i.f32(G.heads)
    per = ENTRIES // PAGE
    ring_count, page_count = (rows + 1) * length, (rows * per + 1) * PAGE
    pad = -(ring_count + page_count) % BLOCK
    ours_rows, their_rows = _rows(ring_count + page_count + pad, 3)
    ring = WindowRing(ours_rows[:ring_count].view(rows + 1, length, -1), CacheFormat.FP8)
    pool = ours_rows[ring_count : ring_count + page_count].view(rows * per + 1, -1)
    table = (i.distinct(rows * per, rows * per) + 1).view(rows, per)
    pages = PagedEntries(pool, CacheFormat.FP8, G.head_dim, PAGE, False, table, torch.arange(rows, device=DEVICE).int())
    own = torch.arange(1, rows + 1, device=DEVICE)[:, None] * length + torch.arange(G.window, device=DEVICE)
    index = torch.stack([i.distinct(ENTRIES, ENTRIES)[: G.index_topk].sort().values for _ in range(rows)])
    window = WindowKeys(ring, i.bf16(rows, G.head_dim), own.int())
    place = table.gather(1, (index // PAGE).long()) * PAGE + index % PAGE + ring_count
    cache = their_rows.view(-1, BLOCK, 1, their_rows.shape[1])
    chosen = torch.cat((own.int(), place.int()), 1)[:, None].contiguous()
    plan, _ = flash_mla.get_mla_metadata()
    rope = still(rows)

    def theirs() -> Tensor:
        out, _ = flash_mla.flash_mla_with_kvcache(
            query[:, None],
            cache,
            None,
            None,
            G.head_dim,
            plan,
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=chosen,
            attn_sink=sink,
            use_legacy=True,
            kv_format="V32_NO_ROPE",
        )
        return out[:, 0]

    def ours() -> Tensor:
        return kernels().sparse_attention(query, window, SelectedEntries(pages, index), sink, SCALE, rope)

    return Pair(ours, theirs, lambda: difference(ours(), theirs()))


def comparisons(rows: int) -> Iterator[Comparison]:
    """Decode up to 64 rows; prefill at 1024 and 8192."""
    if rows <= 64:
        yield Comparison(
            "sparse_attention fp8", rows, "FlashMLA sparse decode", lambda: decode(rows), differs="rows with float32 scales for 128 values"
        )
        return
    note = "reads keys that were decoded to bfloat16 before; no rotation"
    for count in dict.fromkeys((1024, rows)):
        yield Comparison("sparse_attention fp8", count, "FlashMLA sparse prefill", lambda count=count: prefill(count), differs=note)
