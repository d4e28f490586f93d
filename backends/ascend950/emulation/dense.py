"""Norms, plain products, rotary embedding, hyper-connections, SwiGLU and scatter.

Source: notes of the torch-npu 2.13.0 wheel on these operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_backends.ascend950.emulation.support import expect, expect_contiguous, expect_not_empty, poisoned, require

_FLOATS = {torch.float16, torch.bfloat16, torch.float32}
_HALVES = {torch.float16, torch.bfloat16}
_F32 = {torch.float32}


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Root mean square norm over gamma's dims, and the reciprocal root."""
    op = "npu_rms_norm"
    expect(op, "self", x, _FLOATS)
    expect(op, "gamma", gamma, {x.dtype})
    expect_not_empty(op, self=x)
    require(2 <= x.dim() <= 8 and x.shape[-gamma.dim() :] == gamma.shape, op, f"gamma {tuple(gamma.shape)} does not end {tuple(x.shape)}")
    f = x.float()
    dims = tuple(range(-gamma.dim(), 0))
    rstd = (f.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    # Whether 16-bit results are rounded before the product with gamma is not said. Assume the worse: twice.
    return ((f * rstd).to(x.dtype).float() * gamma.float()).to(x.dtype), rstd


def transpose_batchmatmul(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """Batched product of permuted operands, permuted."""
    op = "npu_transpose_batchmatmul"
    require(bias is None and scale is None and batch_split_factor == 1, op, "bias, scale and splitting are not emulated")
    expect(op, "input", x, _FLOATS, (None, None, None))
    expect(op, "weight", weight, {x.dtype}, (None, None, None))
    expect_contiguous(op, input=x, weight=weight)
    expect_not_empty(op, input=x)
    left, right = x.permute(perm_x1 or [0, 1, 2]).float(), weight.permute(perm_x2 or [0, 1, 2]).float()
    require(left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1], op, f"{tuple(left.shape)} times {tuple(right.shape)}")
    return torch.einsum("bmk,bkn->bmn", left, right).permute(perm_y or [0, 1, 2]).to(x.dtype).contiguous()


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """r1 * x + r2 * (x with each pair turned by a right angle)."""
    op = "npu_rotary_mul"
    require(rotary_mode in ("half", "interleave") and rotate is None, op, f"rotary_mode {rotary_mode!r} or a rotate matrix is not emulated")
    expect(op, "input", x, _FLOATS, (None, None, None, None))
    batch, length, heads, dim = x.shape
    require(batch * heads < 1000, op, f"B * N must be below 1000, it is {batch * heads}")
    require(dim < 896 and dim % 2 == 0, op, f"D must be even and below 896, it is {dim}")
    for name, r in {"r1": r1, "r2": r2}.items():
        expect(op, name, r, {x.dtype}, (1, length, 1, dim))
        require(bool((r.abs() <= 1).all()), op, f"{name} must lie in [-1, 1]")
    if rotary_mode == "half":
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return r1 * x + r2 * turned


def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    gamma: Tensor | None = None,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    out_flag: int = 0,
    inner_precise: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(h_in, h_post, h_res, inv_rms, h_mix, h_pre) of streams x [T, n, D]; the last three are defined with out_flag 1 only."""
    op = "npu_mhc_pre"
    expect(op, "x", x, _HALVES, (None, None, None))
    rows, n, width = x.shape
    expect_not_empty(op, x=x)
    require(n in (4, 6, 8), op, f"n must be 4, 6 or 8, it is {n}")
    require(gamma is None and inner_precise == 0, op, "gamma and HF32 are not emulated")
    expect(op, "phi", phi, _F32, (n * n + 2 * n, n * width))
    expect(op, "alpha", alpha, _F32, (3,))
    expect(op, "bias", bias, _F32, (n * n + 2 * n,))
    flat = x.float().reshape(rows, -1)
    inverse = (flat.square().mean(-1) + norm_eps).rsqrt()
    product = flat @ phi.t()
    mix = product * inverse[:, None]
    pre = torch.sigmoid(alpha[0] * mix[:, :n] + bias[:n]) + hc_eps
    post = 2 * torch.sigmoid(alpha[1] * mix[:, n : 2 * n] + bias[n : 2 * n])
    res = (alpha[2] * mix[:, 2 * n :] + bias[2 * n :]).view(rows, n, n)
    h_in = torch.einsum("tn,tnd->td", pre, x.float()).to(x.dtype)
    if not out_flag:
        inverse, product, pre = (poisoned(tuple(t.shape), t.dtype) for t in (inverse, product, pre))
    return h_in, post, res, inverse, product, pre


def mhc_sinkhorn(x: Tensor, *, eps: float = 1e-6, num_iters: int = 20, out_flag: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the last dim plus eps, a column division, then num_iters - 1 times a row and a column division."""
    op = "npu_mhc_sinkhorn"
    expect(op, "x", x, _F32, (None, None, None))
    expect_not_empty(op, x=x)
    require(x.shape[1] == x.shape[2] and x.shape[1] in (4, 6, 8), op, f"n must be 4, 6 or 8, x is {tuple(x.shape)}")
    require(1 <= num_iters <= 100 and not out_flag, op, "num_iters must lie in [1, 100]; out_flag is not emulated")
    out = torch.softmax(x, 2) + eps
    out = out / (out.sum(1, keepdim=True) + eps)
    for _ in range(1, num_iters):
        out = out / (out.sum(2, keepdim=True) + eps)
        out = out / (out.sum(1, keepdim=True) + eps)
    return out, poisoned((0,), torch.float32), poisoned((0,), torch.float32)


def mhc_post(x: Tensor, h_res: Tensor | None, h_out: Tensor, h_post: Tensor) -> Tensor:
    """h_res transposed times x, plus the outer product of h_post and h_out."""
    op = "npu_mhc_post"
    expect(op, "x", x, _HALVES, (None, None, None))
    rows, n, width = x.shape
    expect_not_empty(op, x=x)
    require(h_res is not None, op, "h_res None is not emulated")
    assert h_res is not None
    expect(op, "h_res", h_res, _F32, (rows, n, n))
    expect(op, "h_out", h_out, {x.dtype}, (rows, width))
    expect(op, "h_post", h_post, _F32, (rows, n))
    mixed = torch.einsum("tjk,tjd->tkd", h_res, x.float()) + h_post[:, :, None] * h_out.float()[:, None]
    return mixed.to(x.dtype)


def clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """A sigmoid(alpha A) (B + bias) with A clamped from above and B from both sides."""
    op = "npu_clipped_swiglu"
    expect(op, "x", x, _FLOATS, (None, None))
    expect_contiguous(op, x=x)
    expect_not_empty(op, x=x)
    require(group_index is None and dim in (-1, 1), op, "emulated: all rows, last dim")
    require(x.shape[1] % 2 == 0, op, f"the split dim must be even, it is {x.shape[1]}")
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, 1)
    a, b = a.float().clamp(max=limit), b.float().clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)


def scatter_nd_update_(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """x with rows at indices [T, 1] replaced. Equal indices with different rows have no defined result, so they are refused."""
    op = "npu_scatter_nd_update_"
    expect(op, "input", x, {torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8}, (None, None))
    expect(op, "indices", indices, {torch.int32, torch.int64}, (None, 1))
    expect(op, "updates", updates, {x.dtype}, (indices.shape[0], x.shape[1]))
    expect_not_empty(op, indices=indices)
    at = indices[:, 0].long()
    require(
        bool(((at >= 0) & (at < x.shape[0])).all()),
        op,
        f"indices must lie in [0, {x.shape[0]}): {at.tolist()[:9]}",
    )
    where, group = at.unique(return_inverse=True)
    first = torch.full_like(where, len(at)).scatter_reduce(0, group, torch.arange(len(at)), "amin")
    same = updates.view(torch.uint8) if updates.dtype.is_floating_point else updates
    require(bool((same == same[first[group]]).all()), op, "equal indices carry different updates: the result would be undefined")
    x[at] = updates
    return x
