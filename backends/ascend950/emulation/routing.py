"""`npu_moe_init_routing_v2`: rows of tokens copied to their experts. Source: notes of the torch-npu 2.13.0 wheel."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.emulation.support import expect, expect_contiguous, expect_not_empty, poisoned, require


def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows sorted by expert, place of each choice, counts, scales). Rows past the number of active choices are undefined."""
    op = "npu_moe_init_routing_v2"
    expect(op, "x", x, {torch.float8_e4m3fn}, (None, None))
    tokens, width = x.shape
    expect(op, "expert_idx", expert_idx, {torch.int32}, (tokens, None))
    expect_contiguous(op, x=x, expert_idx=expert_idx)
    expect_not_empty(op, x=x, expert_idx=expert_idx)
    choices = expert_idx.shape[1]
    require(quant_mode == -1 and offset is None and drop_pad_mode == 0 and x_dtype is None, op, "emulated: no quantisation, no dropping")
    require(expert_tokens_num_type in (0, 1) and expert_tokens_num_flag, op, "counts need expert_tokens_num_type 0 or 1 and the flag")
    require(active_num in (-1, 0, tokens * choices), op, f"emulated: active_num of all {tokens * choices} choices")
    require(row_idx_type == 0, op, "emulated: row_idx_type 0")
    require(scale is not None, op, "MX rows need their scales")
    assert scale is not None
    expect(op, "scale", scale, {torch.float8_e8m0fnu, torch.uint8}, (tokens, -(-width // 64), 2))
    first, last = active_expert_range or [0, expert_num]
    require(0 <= first < last <= expert_num, op, f"active_expert_range {[first, last]} does not lie in [0, {expert_num}]")
    inside = (expert_idx >= 0) & (expert_idx < expert_num)
    require(bool(inside.all()), op, f"expert_idx must lie in [0, {expert_num}): {expert_idx.tolist()[:2]}")

    rows = poisoned((tokens * choices, width), x.dtype)
    scales = poisoned((tokens * choices, *scale.shape[1:]), torch.float8_e8m0fnu)
    place = torch.full((tokens * choices,), -1, dtype=torch.int32)
    counts = torch.zeros(last - first, dtype=torch.int64)
    filled = 0
    for expert in range(first, last):  # the documented order, written out: by expert, then by token and choice
        for flat in (expert_idx.flatten() == expert).nonzero()[:, 0].tolist():
            rows[filled], scales[filled] = x[flat // choices], scale[flat // choices].view(torch.float8_e8m0fnu)
            place[flat] = filled
            counts[expert - first] += 1
            filled += 1
    return rows, place, counts.cumsum(0) if expert_tokens_num_type == 0 else counts, scales
