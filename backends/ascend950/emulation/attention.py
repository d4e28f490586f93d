"""`npu_sparse_flash_attention` and `npu_lightning_indexer`. Source: notes of the torch-npu 2.13.0 wheel and public operator notes.

Not documented, and assumed here: sinks join the denominator unscaled; probabilities are rounded to the input's type before the product
with the values. The documented head size of the attention is 512; smaller ones are accepted, so that small models run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.emulation.support import disorder, expect, expect_contiguous, expect_not_empty, poisoned, require

_HALVES = {torch.float16, torch.bfloat16}
_I32 = {torch.int32}
_MAX = (1 << 63) - 1
_ROPE = 64
_NO_MASK, _CAUSAL = 0, 3


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _MAX,
    next_tokens: int = _MAX,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the listed keys only."""
    op = "npu_sparse_flash_attention"
    require(layout_query == layout_kv == "BSND" and block_table is None, op, "emulated: layout BSND")
    require(actual_seq_lengths_query is None and actual_seq_lengths_kv is None, op, "emulated: full lengths")
    require(sparse_block_size == 1 and sparse_mode in (_NO_MASK, _CAUSAL), op, "sparse_block_size must be 1, sparse_mode 0 or 3")
    require(pre_tokens == next_tokens == _MAX and not return_softmax_lse, op, "emulated: no band, no softmax results")
    expect(op, "query", query, _HALVES, (None, None, None, None))
    batch, length, heads, dim = query.shape
    require(heads <= 128 and heads & (heads - 1) == 0, op, f"the number of heads must be a power of two up to 128, it is {heads}")
    expect(op, "key", key, {query.dtype}, (batch, None, 1, dim))
    require(value is not None and value.shape == key.shape and value.dtype is key.dtype, op, "value must be shaped like key")
    assert value is not None
    keys = key.shape[1]
    expect(op, "sparse_indices", sparse_indices, _I32, (batch, length, 1, None))
    expect_not_empty(op, query=query, key=key, sparse_indices=sparse_indices)
    expect_contiguous(op, query=query, key=key, value=value, sparse_indices=sparse_indices)
    valid = sparse_indices[:, :, 0] >= 0  # [B, S, n]
    require(bool((valid[..., :-1] | ~valid[..., 1:]).all()), op, "valid indices must come first in each row, -1 after them")
    require(bool((sparse_indices < keys).all()), op, f"an index is beyond the {keys} keys")

    q, k = query.float(), key[:, :, 0].float()
    if attention_mode == 2:
        require(query_rope is not None and key_rope is not None, op, "attention_mode 2 needs query_rope and key_rope")
        assert query_rope is not None
        assert key_rope is not None
        expect(op, "query_rope", query_rope, {query.dtype}, (batch, length, heads, _ROPE))
        expect(op, "key_rope", key_rope, {query.dtype}, (batch, keys, 1, _ROPE))
        q, k = torch.cat((q, query_rope.float()), -1), torch.cat((k, key_rope[:, :, 0].float()), -1)
    if sinks is not None:
        expect(op, "sinks", sinks, {torch.float32}, (heads,))
    if sparse_mode == _CAUSAL:
        position = torch.arange(keys - length, keys)[None, :, None]
        valid = valid & (sparse_indices[:, :, 0] <= position)

    at = sparse_indices[:, :, 0].long().clamp_min(0)
    rows = torch.arange(batch)[:, None, None]
    scores = torch.einsum("bshd,bsnd->bshn", q, k[rows, at]) * scale_value
    scores = scores.masked_fill(~valid[:, :, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None] - top).exp()
    picked = torch.where(valid[..., None], value[:, :, 0].float()[rows, at], 0.0)
    out = torch.einsum("bshn,bsnd->bshd", weights.to(query.dtype).float(), picked) / total
    out = torch.where(valid.any(-1)[:, :, None, None], out, torch.nan)  # nothing is said about a row without keys
    return out.to(query.dtype), poisoned((0,), torch.float32), poisoned((0,), torch.float32)


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = _MAX,
    next_tokens: int = _MAX,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The sparse_count keys of highest sum over heads of weight * relu(q . k), in an order that is not specified."""
    op = "npu_lightning_indexer"
    require(layout_query == "TND" and layout_key == "PA_BSND", op, "emulated: packed queries, paged keys")
    require(pre_tokens == next_tokens == _MAX and not return_value, op, "emulated: no band, no values")
    require(sparse_mode in (_NO_MASK, _CAUSAL), op, f"sparse_mode {sparse_mode}, expected 0 or 3")
    expect(op, "query", query, _HALVES, (None, None, None))
    rows, heads, dim = query.shape
    require(heads <= 64, op, f"at most 64 heads, got {heads}")
    expect(op, "key", key, {query.dtype}, (None, None, 1, dim))
    expect(op, "weights", weights, {query.dtype}, (rows, heads))
    expect_contiguous(op, query=query, key=key, weights=weights)
    expect_not_empty(op, query=query, key=key)
    require(1 <= sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024), op, f"sparse_count {sparse_count} is not supported")
    require(
        None not in (actual_seq_lengths_query, actual_seq_lengths_key, block_table), op, "this layout needs both lengths and block_table"
    )
    assert actual_seq_lengths_query is not None
    assert actual_seq_lengths_key is not None
    assert block_table is not None
    expect(op, "actual_seq_lengths_query", actual_seq_lengths_query, _I32, (None,))
    batch = len(actual_seq_lengths_query)
    expect(op, "actual_seq_lengths_key", actual_seq_lengths_key, _I32, (batch,))
    expect(op, "block_table", block_table, _I32, (batch, None))
    ends = actual_seq_lengths_query.tolist()
    ordered = all(a <= b for a, b in zip([0, *ends], ends, strict=False)) and ends[-1] == rows
    require(ordered, op, f"query lengths of layout TND are running sums that end at {rows}, got {ends[:8]}")
    out = torch.full((rows, 1, sparse_count), -1, dtype=torch.int32)
    for b, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        visible = int(actual_seq_lengths_key[b])
        blocks = -(-visible // key.shape[1])
        require(visible > 0 and blocks <= block_table.shape[1], op, f"key length {visible} of sequence {b}: none, or too long")
        keys = key[block_table[b, :blocks].long(), :, 0].flatten(0, 1)[:visible].float()
        for row in range(first, last):
            seen = visible if sparse_mode == _NO_MASK else max(visible - (last - 1 - row), 0)
            score = (torch.relu(query[row].float() @ keys[:seen].t()) * weights[row].float()[:, None]).sum(0)
            out[row, 0, : min(sparse_count, seen)] = _top_in_any_order(score, sparse_count)
    return out, poisoned((0,), query.dtype)


def _top_in_any_order(score: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores; ties and the order of the result are random."""
    shuffled = disorder(len(score)).argsort()
    best = shuffled[score[shuffled].argsort(descending=True, stable=True)[:count]]
    return best[disorder(len(best)).argsort()].int()
