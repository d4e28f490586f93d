"""The emulated operators against second, naive formulations and hand-computed values; and what they refuse.

Imports no torch_npu: the functions are called directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_backends.ascend950 import emulation
from deepinfer_backends.ascend950.emulation import OperatorError, attention, dense, mx, routing

E4M3 = [b for b in range(256) if b & 127 != 127]
E4M3_VALUES = dict(zip(E4M3, torch.tensor(E4M3, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist(), strict=True))
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = {"dst_type": 292, "scale_alg": 1}
FP4 = {"dst_type": 296, "scale_alg": 2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp8(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return mx.dynamic_mx_quant(normal(*shape, seed=seed) * 3, **FP8, max_low_bound=1e-4)


class TestMxQuant:
    def test_spec_example(self) -> None:
        """Scale 2: the largest value, 500, needs it. 0.007 becomes 0.0078125 (model notes, self-check values)."""
        x = torch.tensor([[1.0, -3.0, 0.007, 500.0] + [0.0] * 28], dtype=torch.bfloat16)
        q, scale = mx.dynamic_mx_quant(x, **FP8, max_low_bound=1e-4)
        assert int(scale[0, 0, 0]) == 128
        assert (q.float() * 2)[0, :4].tolist() == [1.0, -3.0, 0.0078125, 512.0]

    def test_truncating_rule_saturates(self) -> None:
        x = torch.full((1, 32), 500.0)
        q, scale = mx.dynamic_mx_quant(x, dst_type=292, scale_alg=0)
        assert (int(scale[0, 0, 0]), float(q[0, 0])) == (127, 448.0)

    @pytest.mark.parametrize(("rule", "largest", "values"), [(FP8, 448.0, "e4m3"), (FP4, 6.0, "e2m1")])
    def test_by_search(self, rule: dict[str, Any], largest: float, values: str) -> None:
        """The smallest power of two that fits, and the nearest code by trying all of them."""
        x = normal(3, 64) * torch.tensor([[1.0], [1e3], [1e-3]])
        q, scale = mx.dynamic_mx_quant(x, **rule)
        decoded = mx.anti_mx_quant(q, scale, dst_type=6, src_type=rule["dst_type"])
        for row in range(3):
            for block in range(2):
                part = x[row, 32 * block : 32 * block + 32].double()
                exponent = next(e for e in range(-60, 60) if float(part.abs().max()) <= largest * 2.0**e)
                assert int(scale[row, 0, block]) == exponent + 127
                grid = list(E4M3_VALUES.values()) if values == "e4m3" else [s * v for v in E2M1_VALUES for s in (1, -1)]
                for got, want in zip(decoded[row, 32 * block : 32 * block + 32].tolist(), part.tolist(), strict=True):
                    best = min(abs(want - g * 2.0**exponent) for g in grid)
                    assert math.isclose(abs(got - want), best, abs_tol=1e-12)

    def test_ties_go_to_the_even_code(self) -> None:
        ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 24])
        q, scale = mx.dynamic_mx_quant(ties, **FP4)
        assert mx.anti_mx_quant(q, scale, dst_type=6, src_type=296)[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]

    def test_even_values_are_the_low_nibbles(self) -> None:
        q, _ = mx.dynamic_mx_quant(torch.tensor([[6.0, -0.5] + [0.0] * 30]), **FP4)
        assert int(q[0, 0]) == 0x97

    def test_floor(self) -> None:
        _, scale = mx.dynamic_mx_quant(torch.full((1, 32), 1e-9), **FP8, max_low_bound=1e-4)
        assert int(scale[0, 0, 0]) == 127 - 22

    def test_an_odd_block_is_padded_with_poison(self) -> None:
        _, scale = mx.dynamic_mx_quant(normal(2, 96), **FP8)
        assert scale.shape == (2, 2, 2)
        assert (scale[:, 1, 1] == 255).all()

    def test_a_block_of_zeros_has_any_scale(self) -> None:
        scales = set()
        for seed in range(5):
            emulation.seed(seed)
            scales.add(int(mx.dynamic_mx_quant(torch.zeros(1, 32), **FP4)[1][0, 0, 0]))
        assert len(scales) > 1


class TestProducts:
    def _exact(self, x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor]) -> Tensor:
        """Sum over blocks of (sum over the block) * 2^(sx - 127) * 2^(sw - 127), in double."""
        (xq, xs), (wq, ws) = x, w
        total = torch.zeros(xq.shape[0], wq.shape[0], dtype=torch.float64)
        for block in range(xq.shape[1] // 32):
            part = xq[:, 32 * block : 32 * block + 32].double() @ wq[:, 32 * block : 32 * block + 32].double().t()
            powers = (xs.flatten(1)[:, block, None].double() + ws.flatten(1)[None, :, block].double() - 254).exp2()
            total += part * powers
        return total

    @pytest.mark.parametrize("k", [64, 96])
    def test_quant_matmul(self, k: int) -> None:
        x, w = fp8(5, k), fp8(7, k, seed=1)
        types = {"scale_dtype": 293, "pertoken_scale_dtype": 293, "group_sizes": [1, 1, 32], "output_dtype": 6}
        y = mx.quant_matmul(x[0], w[0].t(), w[1].transpose(0, 1).contiguous(), pertoken_scale=x[1], **types)
        torch.testing.assert_close(y.double(), self._exact(x, w), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("kind", [0, 1])
    def test_grouped_matmul(self, kind: int) -> None:
        x = fp8(6, 64)
        w = mx.dynamic_mx_quant(normal(3, 8, 64, seed=2), **FP4)
        values = torch.stack([mx.unpack(w[0][e]) for e in range(3)])
        counts = torch.tensor([2, 0, 3])
        (y,) = mx.grouped_matmul(
            [x[0]],
            [w[0].transpose(1, 2)],
            antiquant_scale=[w[1].transpose(1, 2)],
            per_token_scale=[x[1]],
            per_token_scale_dtype=293,
            weight_dtype=296,
            split_item=2,
            group_type=0,
            group_list=counts if kind else counts.cumsum(0),
            group_list_type=kind,
            output_dtype=6,
        )
        for row, expert in enumerate([0, 0, 2, 2, 2]):
            want = self._exact((x[0][row : row + 1], x[1][row : row + 1]), (values[expert], w[1][expert]))
            torch.testing.assert_close(y[row : row + 1].double(), want, rtol=1e-5, atol=1e-5)
        assert y[5].isnan().all()  # past the last group

    def test_transpose_batchmatmul(self) -> None:
        x, w = normal(5, 2, 8, dtype=torch.bfloat16), normal(2, 8, 3, dtype=torch.bfloat16)
        y = dense.transpose_batchmatmul(x, w, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
        want = torch.stack([x[:, g].double() @ w[g].double() for g in range(2)], 1)
        torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-3)


class TestDense:
    def test_rms_norm(self) -> None:
        x, gamma = normal(3, 8), normal(8)
        y, rstd = dense.rms_norm(x, gamma, 1e-6)
        for row in range(3):
            root = math.sqrt(sum(v * v for v in x[row].tolist()) / 8 + 1e-6)
            assert math.isclose(float(rstd[row, 0]), 1 / root, rel_tol=1e-6)
            torch.testing.assert_close(y[row], x[row] / root * gamma)

    def test_rotary_by_complex_numbers(self) -> None:
        x, angle = normal(1, 4, 3, 8), normal(4, 4)
        cos, sin = (f(angle).repeat_interleave(2, 1)[None, :, None] for f in (torch.cos, torch.sin))
        turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones(4, 4), angle)[None, :, None]
        torch.testing.assert_close(dense.rotary_mul(x, cos, sin, "interleave"), torch.view_as_real(turned).flatten(-2))

    def test_clipped_swiglu(self) -> None:
        x = torch.tensor([[20.0, -20.0, 1.0, 30.0, -30.0, 2.0]])
        silu = [v / (1 + math.exp(-v)) for v in (10.0, -20.0, 1.0)]
        want = [silu[0] * 10, silu[1] * -10, silu[2] * 2]
        got = dense.clipped_swiglu(x, alpha=1.0, limit=10.0, bias=0.0, interleaved=False)
        assert got[0].tolist() == pytest.approx(want)
        other = dense.clipped_swiglu(x[:, [0, 3, 1, 4, 2, 5]], alpha=1.0, limit=10.0, bias=0.0)
        torch.testing.assert_close(other, got)

    def test_sinkhorn_of_the_model_notes(self) -> None:
        logits = torch.tensor([[[3.0, 0, 0, 0], [0, 2, 1, 0], [1, 0, 2, -1], [-2, 0, 0.5, 1]]])
        want = [0.7633593, 0.0720355, 0.0484637, 0.1161401]
        assert dense.mhc_sinkhorn(logits)[0][0, 0].tolist() == pytest.approx(want, abs=2e-7)
        assert dense.mhc_sinkhorn(logits, num_iters=1)[0][0, 0].tolist() == pytest.approx(
            [0.7166052, 0.0469572, 0.0357590, 0.0664391], abs=2e-7
        )

    def test_mhc_pre_by_hand(self) -> None:
        x, phi = normal(2, 4, 8, dtype=torch.bfloat16), normal(24, 32)
        alpha, bias = torch.tensor([0.5, 0.7, 0.9]), normal(24, seed=3)
        h_in, post, res, inverse, product, pre = dense.mhc_pre(x, phi, alpha, bias, norm_eps=1e-6, hc_eps=1e-3, out_flag=1)
        for t in range(2):
            flat = [float(v) for v in x[t].flatten()]
            rstd = 1 / math.sqrt(sum(v * v for v in flat) / 32 + 1e-6)
            dots = [sum(a * b for a, b in zip(flat, phi[i].tolist(), strict=True)) for i in range(24)]
            logit = [dots[i] * rstd * float(alpha[0 if i < 4 else 1 if i < 8 else 2]) + float(bias[i]) for i in range(24)]
            sigmoid = [1 / (1 + math.exp(-v)) for v in logit[:8]]
            assert float(inverse[t]) == pytest.approx(rstd)
            assert product[t].tolist() == pytest.approx(dots, rel=1e-4, abs=1e-4)
            assert pre[t].tolist() == pytest.approx([v + 1e-3 for v in sigmoid[:4]], rel=1e-4)
            assert post[t].tolist() == pytest.approx([2 * v for v in sigmoid[4:]], rel=1e-4)
            assert res[t].flatten().tolist() == pytest.approx(logit[8:], rel=1e-4, abs=1e-4)
            want = sum(float(pre[t, j]) * x[t, j].float() for j in range(4))
            torch.testing.assert_close(h_in[t].float(), want, rtol=2**-7, atol=1e-3)
        assert dense.mhc_pre(x, phi, alpha, bias)[5].isnan().all()  # not defined without out_flag

    def test_mhc_post_by_hand(self) -> None:
        x, y = normal(2, 4, 8, dtype=torch.bfloat16), normal(2, 8, dtype=torch.bfloat16)
        res, post = normal(2, 4, 4), normal(2, 4)
        got = dense.mhc_post(x, res, y, post)
        for t in range(2):
            for new in range(4):
                want = float(post[t, new]) * y[t].float() + sum(float(res[t, old, new]) * x[t, old].float() for old in range(4))
                torch.testing.assert_close(got[t, new].float(), want, rtol=2**-7, atol=1e-2)

    def test_scatter(self) -> None:
        table, rows = torch.zeros(5, 2), torch.tensor([[3.0, 4.0], [1.0, 2.0], [1.0, 2.0]])
        assert dense.scatter_nd_update_(table, torch.tensor([[4], [0], [0]]), rows) is table
        assert table.tolist() == [[1.0, 2.0], [0, 0], [0, 0], [0, 0], [3.0, 4.0]]


class TestRouting:
    def test_by_a_stable_sort(self) -> None:
        x, scale = fp8(4, 64)
        ids = torch.tensor([[2, 0], [1, 2], [3, 0], [0, 4]], dtype=torch.int32)
        options = {"active_num": 8, "expert_num": 5, "expert_tokens_num_flag": True, "active_expert_range": [0, 4]}
        rows, place, counts, scales = routing.moe_init_routing_v2(x, ids, scale=scale, expert_tokens_num_type=1, **options)
        assert counts.tolist() == [3, 1, 2, 1]
        assert place.tolist() == [4, 0, 3, 5, 6, 1, 2, -1]
        order = ids.flatten().sort(stable=True).indices[:7]
        assert torch.equal(rows[:7].view(torch.uint8), x[order // 2].view(torch.uint8))
        assert torch.equal(scales[:7].view(torch.uint8), scale[order // 2])
        assert rows[7].float().isnan().all()
        assert (scales[7].view(torch.uint8) == 255).all()
        sums = routing.moe_init_routing_v2(x, ids, scale=scale, expert_tokens_num_type=0, **options)[2]
        assert sums.tolist() == [3, 4, 6, 7]


class TestAttention:
    def _call(self, **changes: Any) -> Tensor:
        q, k = normal(2, 1, 4, 16, dtype=torch.bfloat16), normal(2, 6, 1, 16, dtype=torch.bfloat16, seed=1)
        index = torch.tensor([[[[4, 0, 2, -1]]], [[[5, -1, -1, -1]]]], dtype=torch.int32)
        arguments = {"query": q, "key": k, "value": k, "sparse_indices": index, "scale_value": 0.25, "sparse_mode": 0, **changes}
        return attention.sparse_flash_attention(**arguments)[0]

    def test_by_a_dense_softmax_with_a_sink_column(self) -> None:
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        q, k = normal(2, 1, 4, 16, dtype=torch.bfloat16), normal(2, 6, 1, 16, dtype=torch.bfloat16, seed=1)
        out = self._call(sinks=sinks)
        for b, chosen in enumerate([[4, 0, 2], [5]]):
            for h in range(4):
                scores = (k[b, chosen, 0].double() @ q[b, 0, h].double()) * 0.25
                p = torch.cat((scores, sinks[h : h + 1].double())).softmax(0)[:-1]
                torch.testing.assert_close(out[b, 0, h].double(), p @ k[b, chosen, 0].double(), rtol=2**-6, atol=5e-3)

    def test_zero_rotary_parts_change_nothing(self) -> None:
        zeros = {"query_rope": torch.zeros(2, 1, 4, 64).bfloat16(), "key_rope": torch.zeros(2, 6, 1, 64).bfloat16()}
        assert torch.equal(self._call(attention_mode=2, **zeros), self._call())

    def test_causal_mask_counts_key_positions(self) -> None:
        index = torch.tensor([[[[0, 3, -1]], [[0, 5, -1]]]], dtype=torch.int32)
        q, k = normal(1, 2, 4, 16, dtype=torch.bfloat16), normal(1, 5, 1, 16, dtype=torch.bfloat16, seed=1)
        index[0, 1, 0, 1] = 4
        masked = self._call(query=q, key=k, value=k, sparse_indices=index, sparse_mode=3)
        assert torch.equal(masked, self._call(query=q, key=k, value=k, sparse_indices=index))
        index[0, 0, 0, 1] = 4  # beyond the first query's last position, 3
        masked = self._call(query=q, key=k, value=k, sparse_indices=index, sparse_mode=3)
        assert torch.equal(masked[0, 0, 0], k[0, 0, 0])

    def test_a_row_without_keys_is_undefined(self) -> None:
        out = self._call(sparse_indices=torch.tensor([[[[0, 1]]], [[[-1, -1]]]], dtype=torch.int32))
        assert out[1].isnan().all()
        assert not out[0].isnan().any()


class TestIndexer:
    def _call(self, visible: list[int], count: int = 3, **changes: Any) -> Tensor:
        q, k = normal(3, 2, 8, dtype=torch.bfloat16), normal(4, 4, 1, 8, dtype=torch.bfloat16, seed=1)
        arguments = {
            "query": q,
            "key": k,
            "weights": normal(3, 2, dtype=torch.bfloat16, seed=2),
            "actual_seq_lengths_query": torch.tensor([1, 2, 3], dtype=torch.int32),
            "actual_seq_lengths_key": torch.tensor(visible, dtype=torch.int32),
            "block_table": torch.tensor([[2, 1], [0, 3], [3, 3]], dtype=torch.int32),
            "layout_query": "TND",
            "layout_key": "PA_BSND",
            "sparse_count": count,
            "sparse_mode": 0,
            **changes,
        }
        return attention.lightning_indexer(**arguments)[0]

    @pytest.mark.parametrize("seed", range(4))
    def test_as_sets(self, seed: int) -> None:
        emulation.seed(seed)
        q, k = normal(3, 2, 8, dtype=torch.bfloat16).double(), normal(4, 4, 1, 8, dtype=torch.bfloat16, seed=1).double()
        w = normal(3, 2, dtype=torch.bfloat16, seed=2).double()
        visible, table = [8, 5, 2], [[2, 1], [0, 3], [3, 3]]
        found = self._call(visible)
        for row in range(3):
            keys = torch.cat([k[b, :, 0] for b in table[row]])[: visible[row]]
            scores = sum(w[row, h] * (keys @ q[row, h]).clamp_min(0) for h in range(2))
            chosen = sorted(i for i in found[row, 0].tolist() if i >= 0)
            assert len(chosen) == min(3, visible[row])
            assert min(scores[chosen]) >= max([s for i, s in enumerate(scores) if i not in chosen], default=-math.inf)

    def test_order_and_ties_vary(self) -> None:
        results = []
        for seed in range(6):
            emulation.seed(seed)
            results.append(tuple(self._call([8, 8, 8], weights=torch.zeros(3, 2).bfloat16())[0, 0].tolist()))
        assert len({tuple(sorted(r)) for r in results}) > 1


def _bad_mx(**changes: Any) -> Callable[[], object]:
    return lambda: mx.dynamic_mx_quant(changes.pop("x", normal(2, 64)), **{**FP8, **changes})


def _bad_matmul(**changes: Any) -> Callable[[], object]:
    x, w = fp8(2, 64), fp8(3, 64)
    arguments = {
        "x1": x[0],
        "x2": w[0].t(),
        "scale": w[1].transpose(0, 1),
        "pertoken_scale": x[1],
        "scale_dtype": 293,
        "pertoken_scale_dtype": 293,
        "group_sizes": [1, 1, 32],
        "output_dtype": 15,
        **changes,
    }
    return lambda: mx.quant_matmul(**arguments)


def _bad_scatter(rows: list[list[int]], updates: Tensor, table: Tensor | None = None) -> Callable[[], object]:
    return lambda: dense.scatter_nd_update_(torch.zeros(4, 2) if table is None else table, torch.tensor(rows), updates)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "fp4 rule for fp8": (_bad_mx(scale_alg=2), "scale_alg 2 is not supported"),
    "floor without its rule": (_bad_mx(scale_alg=0, max_low_bound=1e-4), "max_low_bound must be 0"),
    "odd fp4 row": (_bad_mx(**FP4, x=normal(2, 63)), "the last dim must be even"),
    "short float32 row": (_bad_mx(x=normal(2, 16)), "at least 32 values"),
    "integers": (_bad_mx(x=torch.zeros(2, 64, dtype=torch.int32)), "dtype torch.int32"),
    "no rows": (_bad_mx(x=normal(0, 64)), "empty"),
    "scales not paired": (_bad_matmul(pertoken_scale=fp8(2, 64)[1].flatten(1)), "pertoken_scale has shape"),
    "weight not transposed": (_bad_matmul(x2=fp8(3, 64)[0]), "x2 has shape"),
    "scale not transposed": (_bad_matmul(scale=fp8(3, 64)[1]), "scale has shape"),
    "float scales": (_bad_matmul(scale_dtype=6), "293"),
    "group sizes": (_bad_matmul(group_sizes=[1, 1, 128]), "group_sizes"),
    "no output type": (_bad_matmul(output_dtype=None), "output_dtype"),
    "row out of range": (_bad_scatter([[4]], torch.zeros(1, 2)), "indices must lie in [0, 4)"),
    "negative row": (_bad_scatter([[-1]], torch.zeros(1, 2)), "indices must lie in [0, 4)"),
    "rows that collide": (_bad_scatter([[1], [1]], torch.tensor([[0.0, 1.0], [0.0, 2.0]])), "equal indices"),
    "bytes as uint8": (_bad_scatter([[1]], torch.zeros(1, 2).byte(), torch.zeros(4, 2).byte()), "dtype torch.uint8"),
    "norm weight of another type": (lambda: dense.rms_norm(normal(2, 8), normal(8).bfloat16()), "gamma has dtype"),
    "rotation table per head": (
        lambda: dense.rotary_mul(normal(1, 2, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), "interleave"),
        "r1 has shape",
    ),
    "rotation beyond one": (
        lambda: dense.rotary_mul(normal(1, 2, 3, 8), 2 * torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), "interleave"),
        "[-1, 1]",
    ),
    "too many heads to rotate": (
        lambda: dense.rotary_mul(normal(1, 1, 1000, 2), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), "interleave"),
        "below 1000",
    ),
    "three streams": (lambda: dense.mhc_sinkhorn(normal(2, 3, 3)), "n must be 4, 6 or 8"),
    "no tokens": (lambda: dense.mhc_post(normal(0, 4, 8).bfloat16(), normal(0, 4, 4), normal(0, 8).bfloat16(), normal(0, 4)), "empty"),
    "float32 streams": (lambda: dense.mhc_post(normal(1, 4, 8), normal(1, 4, 4), normal(1, 8), normal(1, 4)), "dtype torch.float32"),
    "-1 before valid keys": (
        lambda: TestAttention()._call(sparse_indices=torch.tensor([[[[-1, 1]]], [[[0, 1]]]]).int()),
        "first in each row",
    ),
    "key out of range": (lambda: TestAttention()._call(sparse_indices=torch.tensor([[[[6, 1]]], [[[0, 1]]]]).int()), "beyond the 6 keys"),
    "mode 2 without rotary parts": (lambda: TestAttention()._call(attention_mode=2), "needs query_rope and key_rope"),
    "plain query lengths": (
        lambda: TestIndexer()._call([8, 8, 8], actual_seq_lengths_query=torch.ones(3, dtype=torch.int32)),
        "running sums",
    ),
    "key length 0": (lambda: TestIndexer()._call([8, 0, 8]), "none, or too long"),
    "key length beyond the table": (lambda: TestIndexer()._call([8, 9, 8]), "none, or too long"),
    "too many results": (lambda: TestIndexer()._call([8, 8, 8], count=2049), "sparse_count 2049"),
    "expert out of range": (
        lambda: routing.moe_init_routing_v2(
            *(fp8(2, 64)[0], torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)),
            scale=fp8(2, 64)[1],
            expert_num=3,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
        ),
        "expert_idx must lie in [0, 3)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    call, words = REFUSED[what]
    with pytest.raises(OperatorError) as caught:
        call()
    assert words in str(caught.value)
