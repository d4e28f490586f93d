"""Hyper-connections, Engram, gate, casts and rotary against TileKernels (`tile-kernels` on `tilelang`, compiled when first used)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from cuda_checks.inputs import RELEASED
from peer_pairs import DEVICE, Comparison, Pair, difference, inputs, kernels
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import EngramHashTables, HcConstants

G = RELEASED
CONSTANTS = HcConstants(1e-20, 1e-6, 20)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


@contextmanager
def tf32_products() -> Iterator[None]:
    """cuBLAS multiplies float32 matrices on tensor cores."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def hc_pre(rows: int) -> Pair:
    """Their fused kernel takes the mix products, which here come from cuBLAS in TF32 with a sum of squares by torch."""
    from tile_kernels.mhc import mhc_pre_big_fuse_fwd

    i, m = inputs(rows), G.streams
    streams, pre, weights, norm = i.bf16(rows, m, G.hidden), i.pre(rows, m), i.hc_weights(G), i.bf16(G.hidden)
    post, comb, x = empty(rows, m), empty(rows, m * m), empty(rows, G.hidden, dtype=torch.bfloat16)

    def theirs() -> tuple[Tensor, Tensor]:
        flat = streams.view(rows, -1).float()
        with tf32_products():
            mix = (flat @ weights.fn.t())[None]
        squares = (flat * flat).sum(1)[None]
        mhc_pre_big_fuse_fwd(
            mix, squares, weights.scale, weights.base, streams, post, comb, x, CONSTANTS.norm_eps, CONSTANTS.hc_eps, CONSTANTS.hc_eps,
            2.0, CONSTANTS.sinkhorn_iters, n_splits=1,
        )  # fmt: skip
        return post, comb

    def ours() -> tuple[Tensor, Tensor]:
        result = kernels().hc_pre(streams, pre, weights, norm, CONSTANTS)
        return result.post, result.comb.flatten(1)

    return Pair(ours, theirs, lambda: max(difference(a, b) for a, b in zip(theirs(), ours(), strict=True)))


def sinkhorn(rows: int) -> Pair:
    """Their Sinkhorn alone against our whole `hc_pre`: an upper bound of what ours spends on it."""
    from tile_kernels.mhc import mhc_sinkhorn_fwd

    i = inputs(rows)
    logits, out = i.f32(rows, G.streams, G.streams), empty(rows, G.streams, G.streams)
    pair = hc_pre(rows)
    return Pair(pair.ours, lambda: mhc_sinkhorn_fwd(logits, out, CONSTANTS.sinkhorn_iters, CONSTANTS.hc_eps))


def hc_post(rows: int) -> Pair:
    from tile_kernels.mhc import mhc_post_fwd

    i, m = inputs(rows), G.streams
    streams, y, post, comb = i.bf16(rows, m, G.hidden), i.bf16(rows, G.hidden), i.pre(rows, m), i.pre(rows, m * m).view(rows, m, m)
    own, out = streams.clone(), torch.empty_like(streams)[None]

    def theirs() -> Tensor:
        return mhc_post_fwd(y[None], streams[None], post[None, ..., None], comb[None], out)[0]

    return Pair(
        lambda: kernels().hc_post(own, y, post, comb),
        theirs,
        lambda: difference(theirs(), kernels().hc_post(streams.clone(), y, post, comb)),
    )


def hc_collapse(rows: int) -> Pair:
    from tile_kernels.mhc import mhc_pre_apply_mix_fwd

    i = inputs(rows)
    streams, pre, out = i.bf16(rows, G.streams, G.hidden), i.pre(rows, G.streams), empty(rows, G.hidden, dtype=torch.bfloat16)

    def theirs() -> Tensor:
        mhc_pre_apply_mix_fwd(streams, pre, out)
        return out

    def ours() -> Tensor:
        return kernels().hc_collapse(streams, pre)

    return Pair(ours, theirs, lambda: difference(theirs(), ours()))


def engram_hash(rows: int) -> Pair:
    from tile_kernels.engram import engram_hash

    i, columns, size = inputs(rows), G.engram_columns, 4
    ngrams = i.ints(0, 90000, rows, size, dtype=torch.int64)
    multipliers = i.ints(1, 1 << 44, size, dtype=torch.int64) * 2 + 1
    primes, offsets = i.ints(16_000_000, 17_000_000, columns, dtype=torch.int64), i.ints(0, 1 << 29, columns, dtype=torch.int64)
    tables = EngramHashTables(multipliers, primes, offsets)
    narrow = ngrams.int(), multipliers[None], primes.int().view(1, size - 1, -1), offsets.int()[None]
    return Pair(
        lambda: kernels().engram_hash(ngrams, tables),
        lambda: engram_hash(*narrow),
        lambda: float((kernels().engram_hash(ngrams, tables) != engram_hash(*narrow)[0]).double().mean()),
    )


def engram_gate(rows: int) -> Pair:
    from tile_kernels.engram import engram_gate_fwd

    i, m = inputs(rows), G.streams
    streams, kv, q, k = i.bf16(rows, m, G.hidden), i.bf16(rows, m + 1, G.hidden), i.bf16(m, G.hidden), i.bf16(m, G.hidden)
    mask, own, fused = i.ints(0, 2, rows).bool(), streams.clone(), q.float() * k.float()
    left_out = ~mask

    def theirs() -> Tensor:
        return engram_gate_fwd(streams, kv, fused, 1e-20, 1e-6, save_for_backward=False, image_token_mask=left_out)[0]

    return Pair(
        lambda: kernels().engram_gate(own, kv, q, k, 1e-20, mask),
        theirs,
        lambda: difference(theirs(), kernels().engram_gate(streams.clone(), kv, q, k, 1e-20, mask)),
    )


def moe_gate(rows: int) -> Pair:
    """Their selection behind cuBLAS's product of bfloat16 values with float32 results."""
    from tile_kernels.moe import moe_topk_gate

    i = inputs(rows)
    x, bias, weight = i.bf16(rows, G.hidden), i.f32(G.experts, scale=0.1), i.bf16_weight(G.experts, G.hidden)
    prepared = kernels().prepare_linear([weight])

    def theirs() -> tuple[Tensor, Tensor]:
        logits = torch.mm(x, weight.weight.t(), out_dtype=torch.float32)
        return moe_topk_gate(logits, G.top_k, False, 0, 1.5, 0, bias=bias)

    def same() -> float:
        mine, (ids, weights) = kernels().moe_gate(x, prepared, bias, G.top_k, 1.5), theirs()
        dense = [torch.zeros(rows, G.experts, device=DEVICE).scatter(1, a.long(), b) for a, b in ((mine.ids, mine.weights), (ids, weights))]
        return difference(*dense)

    return Pair(lambda: kernels().moe_gate(x, prepared, bias, G.top_k, 1.5), theirs, same)


def quantize(rows: int) -> Pair:
    from tile_kernels.quant import per_token_cast

    x = inputs(rows).bf16(rows, G.hidden)
    return Pair(lambda: kernels().quantize(x), lambda: per_token_cast(x, "e4m3", 32, round_sf=True))


def norm_quantize(rows: int) -> Pair:
    from tile_kernels.quant import norm_forward_and_per_token_cast

    i = inputs(rows)
    x, weight = i.bf16(rows, G.hidden), i.bf16(G.hidden)

    def theirs() -> object:
        return norm_forward_and_per_token_cast(x, weight, 1e-6, "e4m3", 32, round_sf=True)

    return Pair(lambda: kernels().rms_norm_quantize(x, weight, 1e-6), theirs)


def norm(rows: int) -> Pair:
    from tile_kernels.quant import norm_forward

    i = inputs(rows)
    x, weight = i.bf16(rows, G.hidden), i.bf16(G.hidden)

    def theirs() -> Tensor:
        return norm_forward(x, weight, 1e-6)[0]

    def ours() -> Tensor:
        return kernels().rms_norm(x, weight, 1e-6)

    return Pair(ours, theirs, lambda: difference(theirs(), ours()))


def index_query(rows: int) -> Pair:
    """Rotation of the last 64 of 128 values and e2m1 in groups of 32: one kernel of ours, two of theirs (the rotation in place)."""
    from tile_kernels.quant import per_token_cast
    from tile_kernels.transform import apply_rotary

    i = inputs(rows)
    query, rope = i.bf16(rows, G.index_heads, G.index_dim), i.rope(rows, G.rope_dim)
    own = query.clone()

    def theirs() -> object:
        apply_rotary(own[..., -G.rope_dim :], rope.table, positions=rope.positions, interleaved=True)
        return per_token_cast(own.view(-1, G.index_dim), "e2m1", 32, round_sf=True)

    return Pair(lambda: kernels().index_query(query, rope), theirs)


def store_entries(rows: int) -> Pair:
    """Rotation and e2m1 in groups of 16 with e4m3 scales; ours also writes the rows to their pages."""
    from tile_kernels.quant import per_token_cast
    from tile_kernels.transform import apply_rotary

    i = inputs(rows)
    kv, rope = i.bf16(rows, G.head_dim), i.rope(rows, G.rope_dim)
    per = max(2, -(-rows // 8))
    pages, slots = i.pages(CacheFormat.FP4, G.head_dim, 8, per, rows, 2, False), i.distinct(rows, 8 * per)
    own = kv.clone()

    def theirs() -> object:
        apply_rotary(own[:, None, -G.rope_dim :], rope.table, positions=rope.positions, interleaved=True)
        return per_token_cast(own, "e2m1", 16, use_e4m3_sf=True)

    return Pair(lambda: kernels().store_entries(kv, rope, pages, slots), theirs)


Row = tuple[str, str, Callable[[int], Pair], str]
ROWS: tuple[Row, ...] = (
    ("hc_pre", "cuBLAS TF32 + TileKernels pre_big_fuse", hc_pre, "theirs collapses with this layer's mix; no RMSNorm, no e4m3"),
    ("hc_pre", "TileKernels Sinkhorn alone", sinkhorn, "a part of ours: not a comparison"),
    ("hc_post", "TileKernels post", hc_post, ""),
    ("hc_collapse", "TileKernels pre_apply_mix", hc_collapse, ""),
    ("engram_hash", "TileKernels", engram_hash, "theirs has 32-bit ids"),
    ("engram_gate", "TileKernels", engram_gate, "ours in place"),
    ("moe_gate", "cuBLAS + TileKernels", moe_gate, ""),
    ("quantize", "TileKernels per_token_cast", quantize, "layouts of the results"),
    ("rms_norm", "TileKernels norm", norm, ""),
    ("rms_norm_quantize", "TileKernels norm + cast", norm_quantize, "layouts of the results"),
    ("index_query", "TileKernels rotary, cast", index_query, "layouts of the results"),
    ("store_entries fp4", "TileKernels rotary, cast", store_entries, "theirs does not write to pages"),
)  # fmt: skip


def comparisons(rows: int) -> Iterator[Comparison]:
    """Everything of the package that this backend has, too. Its SwiGLU with cast has no counterpart: ours is a part of `moe`."""
    for op, peer, build, differs in ROWS:
        yield Comparison(op, rows, peer, lambda build=build: build(rows), differs=differs)
