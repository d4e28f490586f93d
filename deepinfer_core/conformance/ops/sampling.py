"""Sampling: the transform, the canonical draw, verification, grammar masks.

`sample`, `verify` and `apply_token_bitmask` are defined on integers, so they are compared exactly. Their reference is written here with
Python's integers; only `canonical.integer_exp`, which the contract itself names, is shared. Philox is checked by published answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.backend import canonical
from deepinfer_core.backend.types import RandomRows, SamplingRows
from deepinfer_core.conformance.analysis import U32, Approx, Arithmetic
from deepinfer_core.conformance.describe import Cost, Geometry, Inputs, OpDescription, Outputs
from deepinfer_core.conformance.expect import Exactly, Expectation, Judged, Verdict, Within, failed, worst, wrong_form
from deepinfer_core.conformance.generate import Draw
from deepinfer_core.conformance.ops.shapes import VOCAB, rows_of, tree_bytes

Dims = Mapping[str, Any]
_ALPHA = 2147376276  # floor(exp(-5e-5) * 2^31)
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1

# ------------------------------------------------------------------ log_probs


def _make_log_probs(g: Dims, draw: Draw) -> Inputs:
    rows, vocab = g["rows"], g["vocab"]
    logits = draw.normal(rows, vocab, scale=3.0)
    if g.get("content") == "ties":  # many equal logits: order by id decides what is cut
        logits = draw.integers(-3, 4, rows, vocab).float()
    logits[1::4, ::3] = -torch.inf  # masked ids
    kinds = torch.arange(rows) % 6
    temperature = torch.where(kinds == 5, 0.0, 0.3 + draw.uniform(rows) * 1.5)
    top_k = torch.where((kinds == 1) | (kinds == 4), draw.integers(1, vocab + 3, rows), -1).int()
    top_p = torch.where((kinds == 2) | (kinds == 4), draw.uniform(rows), 1.0)
    min_p = torch.where((kinds == 3) | (kinds == 4), draw.uniform(rows) * 0.3, 0.0)
    if g.get("edges"):
        top_k[:3] = torch.tensor([1, vocab, vocab + 7], dtype=torch.int32)
        top_p[3:6] = torch.tensor([1e-9, 0.0, 1.0 - 2**-24])
        min_p[6:8] = torch.tensor([1.0, 0.999])
    if g.get("plain"):
        temperature, top_k = temperature.clamp_min(0.3), torch.full_like(top_k, -1)
        top_p, min_p = torch.ones(rows), torch.zeros(rows)
    flags = not g.get("plain"), bool((temperature == 0).any())
    return {"logits": logits, "rows": SamplingRows(temperature, top_k, top_p, min_p, *flags)}


def _expect_log_probs(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    def judge(out: Tensor) -> Verdict:
        if problem := wrong_form(out, i["logits"].shape, torch.float32):
            return problem
        verdicts = [Verdict(0.0)]
        for row in range(len(out)):
            verdict = _judge_row(out[row].double(), i["logits"][row], *(float(t[row]) for t in i["rows"][:4]))
            verdicts.append(Verdict(verdict.ratio, (row, *verdict.where), verdict.expected, verdict.got, verdict.note))
        return max(verdicts, key=lambda v: v.ratio)

    return {"out": Judged(judge)}


def _judge_row(out: Tensor, logits: Tensor, temperature: float, top_k: float, top_p: float, min_p: float) -> Verdict:
    """One row: which ids may be kept, and their values given the ids that were kept."""
    x = logits.double()
    order = torch.sort(x, descending=True, stable=True).indices
    if temperature == 0:
        want = torch.full_like(x, -torch.inf)
        want[order[0]] = 0.0
        return worst(out, Approx(want, torch.zeros_like(want)))
    scaled = (x - x.max()) / temperature
    error = 4 * U32 * scaled.abs().nan_to_num(posinf=0.0) + 4 * U32  # of a float32 logit difference divided by a temperature
    kept = out > -torch.inf
    verdict = _judge_kept(kept, order, scaled, error, top_k, top_p, min_p)
    if verdict is not None:
        return verdict
    value = torch.where(kept, scaled - scaled[kept].logsumexp(0), -torch.inf)
    return worst(out, Approx(value, torch.where(kept, error + 16 * U32 + 8 * U32 * value.abs().nan_to_num(posinf=0.0), 0.0)))


def _judge_kept(kept: Tensor, order: Tensor, scaled: Tensor, error: Tensor, top_k: float, top_p: float, min_p: float) -> Verdict | None:
    """None if `kept` may be the kept set. An id may go either way only if its mass or probability is uncertain at the cut."""
    if not kept[order[0]]:
        return failed("the most probable id was removed", int(order[0]), "removed")
    p = scaled.exp() / scaled.exp().sum()
    slack = 2.0**-20  # masses are sums of float32 exponentials truncated to 2^-31
    before = p[order].cumsum(0) - p[order]
    rank = torch.arange(len(order))
    limit = top_p if top_p < 1 else 2.0
    ratio = scaled[order].exp()
    must = (before < limit - slack) & (ratio > min_p * (1 + 1e-5) + 1e-30)
    may = (before <= limit + slack) & (ratio >= min_p * (1 - 1e-5))
    if top_k > 0:
        must, may = must & (rank < top_k), may & (rank < top_k)
    may = may & (scaled[order] > -torch.inf)
    must = must & (scaled[order] > -torch.inf)
    have = kept[order]
    wrong = (must & ~have) | (have & ~may)
    wrong[0] = False
    if wrong.any():
        at = int(wrong.nonzero()[0])
        state = ("kept", "removed") if bool(must[at]) else ("removed", "kept")
        return failed(f"id {int(order[at])} (rank {at}, mass before it {float(before[at]):.7g})", *state, (int(order[at]),))
    return None


def _vocab_presets(**more: Any) -> dict[str, Dims]:
    return {"decode-1": {"rows": 1, "vocab": VOCAB, **more}, "decode-64": {"rows": 64, "vocab": VOCAB, **more}}


LOG_PROBS = OpDescription(
    op="log_probs",
    bound="float32 exponents and sums; an id may be kept or not only if its mass is within 2^-20 of the cut. Ties by id: exact",
    geometries=(
        Geometry("rows", {"rows": 24, "vocab": 130}, "all kinds of filters"),
        Geometry("no_rows", {"rows": 0, "vocab": 64}),
        Geometry("one_row", {"rows": 1, "vocab": 33}),
        Geometry("ties", {"rows": 24, "vocab": 90, "content": "ties"}, "equal logits at the cut"),
        Geometry("edges", {"rows": 12, "vocab": 70, "edges": True}, "top_k = 1 and above V, top_p next to 0 and 1, min_p = 1"),
        Geometry("plain", {"rows": 9, "vocab": 64, "plain": True}, "no filter, nobody greedy"),
        Geometry("large_vocab", {"rows": 7, "vocab": 5003}),
    ),
    make=_make_log_probs,
    run=lambda k, i: {"out": k.log_probs(i["logits"], i["rows"])},
    expect=_expect_log_probs,
    cost=lambda i: Cost(2 * tree_bytes(i["logits"]), 6.0 * i["logits"].numel()),
    rows=lambda i, index: {"logits": i["logits"][index], "rows": SamplingRows(*(t[index] for t in i["rows"][:4]), *i["rows"][4:])},
    presets=_vocab_presets(),
)

# ------------------------------------------------------------------ sample

# (seed, position, case, first word, second word): the published Philox vector and further answers (model notes, runtime section 5.4).
KNOWN_WORDS = (
    (0, 0, 0, 0x6627E8D5, 0xE169C58D),
    (42, 100, 0, 0x841351AF, 0x02DAC0ED),
    (42, 100, 1, 0x334CBE60, 0xA10CE7F0),
    (42, 100, 2, 0x2F6ACA86, 0x2155CCEE),
    (42 + 1000000007, 101, 0, 0xD08AAB6D, 0xECF4BF39),
    (2**64 - 1, 131072, 0, 0xCED2C878, 0xB08BFFEA),
)


def philox(seed: int, subsequence: int) -> tuple[int, int]:
    """Words 0 and 1 of Philox4x32-10 with key = seed and counter (0, 0, subsequence), in Python's integers."""
    seed, subsequence = seed & _MASK64, subsequence & _MASK64
    k0, k1 = seed & _MASK32, seed >> 32
    c0, c1, c2, c3 = 0, 0, subsequence & _MASK32, subsequence >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1


def _random(draw: Draw, rows: int) -> RandomRows:
    seeds = draw.integers(-(2**62), 2**62, rows)
    seeds[:2] = torch.tensor([0, -1])[:rows]
    return RandomRows(seeds, draw.integers(0, 2**33, rows))


def _distributions(g: Dims, draw: Draw, rows: int) -> Tensor:
    """float32 log-probabilities of several kinds: normal, filtered, one-hot, nearly flat, and without any mass of 2^-31."""
    logits = draw.normal(rows, g["vocab"], scale=3.0)
    logits[1::5, ::2] = -torch.inf
    logits[2::5] = -torch.inf
    if rows > 2:
        logits[2::5, g["vocab"] - 1] = 0.0
    logits[3::5] *= 1e-3
    out = logits.log_softmax(-1)
    if g.get("massless"):
        out[4::5] = -30.0 - draw.uniform(len(out[4::5]), g["vocab"])
    return out


def _make_sample(g: Dims, draw: Draw) -> Inputs:
    if g.get("known"):  # uniform over 2^16 ids: the token is the top of the 64-bit draw, so the words can be read off
        keys = [entry for entry in KNOWN_WORDS if entry[2] == 0]
        seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed, *_ in keys])
        flat = torch.full((len(keys), 1 << 12), -12 * 0.6931471805599453)
        return {"log_probs": flat, "random": RandomRows(seeds, torch.tensor([position for _, position, *_ in keys]))}
    return {"log_probs": _distributions(g, draw, g["rows"]), "random": _random(draw, g["rows"])}


def _pick(weights: list[int], words: tuple[int, int], fallback: int) -> int:
    total = sum(weights)
    if not total:
        return fallback
    r = (words[1] * 2**32 + words[0]) % total
    for token, weight in enumerate(weights):
        if r < weight:
            return token
        r -= weight
    raise AssertionError("the draw lies outside the total")


def _lowest_argmax(row: Tensor) -> int:
    return int((row == row.max()).nonzero()[0])


def _expect_sample(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    weights = canonical.integer_exp(i["log_probs"].clone())
    tokens = []
    for row, (seed, position) in enumerate(zip(i["random"].seeds.tolist(), i["random"].positions.tolist(), strict=True)):
        words = philox(seed, 3 * position)
        for known in KNOWN_WORDS:
            if (known[0] & _MASK64, known[1], known[2]) == (seed & _MASK64, position, 0):
                words = known[3:]
        tokens.append(_pick(weights[row].tolist(), words, _lowest_argmax(i["log_probs"][row])))
    return {"tokens": Exactly(torch.tensor(tokens, dtype=torch.int64))}


SAMPLE = OpDescription(
    op="sample",
    bound="exact integers",
    geometries=(
        Geometry("rows", {"rows": 40, "vocab": 70}),
        Geometry("no_rows", {"rows": 0, "vocab": 64}),
        Geometry("one_row", {"rows": 1, "vocab": 33}),
        Geometry("massless", {"rows": 20, "vocab": 40, "massless": True}, "no weight reaches 2^-31: the most probable id"),
        Geometry("known_answers", {"known": True}, "published random words"),
        Geometry("large_vocab", {"rows": 10, "vocab": 5003}),
    ),
    make=_make_sample,
    run=lambda k, i: {"tokens": k.sample(i["log_probs"], i["random"])},
    expect=_expect_sample,
    cost=lambda i: Cost(tree_bytes(i["log_probs"]), 2.0 * i["log_probs"].numel()),
    rows=rows_of("log_probs", "random"),
    presets=_vocab_presets(),
)

# ------------------------------------------------------------------ verify


def _make_verify(g: Dims, draw: Draw) -> Inputs:
    rows, vocab = g["rows"], g["vocab"]
    target, draft = _distributions(g, draw, rows), draw.normal(rows, vocab, scale=3.0).log_softmax(-1)
    near = draw.uniform(rows) < 0.5  # half of the drafts come from almost the target's distribution
    draft = torch.where(near[:, None], (target.clamp_min(-20) + draw.normal(rows, vocab, scale=0.3)).log_softmax(-1), draft)
    if g.get("equal"):
        draft = target.clone()
    drafts = torch.where(draw.uniform(rows) < 0.7, draft.argmax(-1), draw.integers(0, vocab, rows))
    drafts[5::6] = -1
    draft[5::6] = -torch.inf
    return {
        "target": target,
        "draft": draft,
        "drafts": drafts,
        "random": _random(draw, rows),
        "greedy": (torch.arange(rows) % 4 == 3) if g.get("greedy") else torch.zeros(rows, dtype=torch.bool),
    }


def _verified(i: Inputs, row: int, weights: tuple[Tensor, Tensor], threshold: int) -> tuple[bool, int, float]:
    """(accepted, token, estimate) of one row."""
    draft, target = int(i["drafts"][row]), i["target"][row]
    best = _lowest_argmax(target)
    seed, position = int(i["random"].seeds[row]), int(i["random"].positions[row])
    target_weights = weights[0][row].tolist()
    residual, estimate = target_weights, 0.0
    if draft >= 0:
        shrunk = [w * _ALPHA >> 31 for w in weights[1][row].tolist()]
        residual = [max(t - d, 0) for t, d in zip(target_weights, shrunk, strict=True)]
        estimate = max(1 - sum(residual) * 2.0**-31, 0.0)
    if bool(i["greedy"][row]):
        return draft == best, best, estimate
    accepted = draft >= 0 and 2 * philox(seed, 3 * position + 2)[0] + 1 <= threshold
    return accepted, _pick(residual, philox(seed, 3 * position + (draft >= 0)), best), estimate


def _expect_verify(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    weights = canonical.integer_exp(i["target"].clone()), canonical.integer_exp(i["draft"].clone())
    at = i["drafts"].clamp_min(0)[:, None]
    thresholds = canonical.integer_exp((i["target"].gather(1, at) - i["draft"].gather(1, at))[:, 0], canonical.ACCEPT_BITS).tolist()
    rows = [_verified(i, row, weights, thresholds[row]) for row in range(len(at))]
    drafted = i["drafts"] >= 0
    accepted = torch.tensor([r[0] for r in rows], dtype=torch.bool)
    estimate = torch.tensor([r[2] for r in rows], dtype=torch.float64)
    slack = i["target"].shape[1] * 2.0**-31 + 2.0**-23
    return {
        "accepted": Exactly(accepted),
        "tokens": Exactly(torch.tensor([r[1] for r in rows], dtype=torch.int64)),
        "estimate": Within(Approx(estimate, torch.where(drafted, slack, 0.0).double()), torch.float32),
    }


def _run_verify(k: Any, i: Inputs) -> Outputs:
    return k.verify(i["target"], i["draft"], i["drafts"], i["random"], i["greedy"])._asdict()


VERIFY = OpDescription(
    op="verify",
    bound="exact integers; the estimate within V * 2^-31",
    geometries=(
        Geometry("rows", {"rows": 48, "vocab": 50}),
        Geometry("no_rows", {"rows": 0, "vocab": 50}),
        Geometry("one_row", {"rows": 1, "vocab": 50}),
        Geometry("greedy", {"rows": 40, "vocab": 50, "greedy": True}, "greedy and sampled rows in one call"),
        Geometry("equal", {"rows": 30, "vocab": 50, "equal": True}, "draft and target alike: everything is accepted"),
        Geometry("massless", {"rows": 30, "vocab": 40, "massless": True}),
        Geometry("large_vocab", {"rows": 8, "vocab": 5003}),
    ),
    make=_make_verify,
    run=_run_verify,
    expect=_expect_verify,
    cost=lambda i: Cost(tree_bytes((i["target"], i["draft"])), 6.0 * i["target"].numel()),
    rows=rows_of("target", "draft", "drafts", "random", "greedy"),
    presets=_vocab_presets(),
)

# ------------------------------------------------------------------ apply_token_bitmask


def _make_mask(g: Dims, draw: Draw) -> Inputs:
    words = -(-g["vocab"] // 32)
    masks = draw.integers(-(2**31), 2**31, g["masks"], words).int()
    return {"logits": draw.normal(g["rows"], g["vocab"]), "bitmask": masks, "rows": draw.permutation(g["rows"])[: g["masks"]]}


def _run_mask(k: Any, i: Inputs) -> Outputs:
    k.apply_token_bitmask(i["logits"], i["bitmask"], i["rows"])
    return {"logits": i["logits"]}


def _expect_mask(a: Arithmetic, i: Inputs, got: Outputs) -> dict[str, Expectation]:
    want = i["logits"].clone()
    for n, row in enumerate(i["rows"].tolist()):
        for token in range(want.shape[1]):
            if not int(i["bitmask"][n, token >> 5]) >> (token & 31) & 1:
                want[row, token] = -torch.inf
    return {"logits": Exactly(want)}


APPLY_TOKEN_BITMASK = OpDescription(
    op="apply_token_bitmask",
    bound="exact: logits stay as they are or become -inf",
    geometries=(
        Geometry("rows", {"rows": 9, "masks": 5, "vocab": 100}, "some rows have no mask; V is no multiple of 32"),
        Geometry("no_masks", {"rows": 3, "masks": 0, "vocab": 64}),
        Geometry("one_row", {"rows": 1, "masks": 1, "vocab": 32}),
        Geometry("one_past_a_word", {"rows": 4, "masks": 4, "vocab": 33}),
    ),
    make=_make_mask,
    run=_run_mask,
    expect=_expect_mask,
    cost=lambda i: Cost(2.0 * len(i["rows"]) * i["logits"].shape[1] * 4, 0),
    mutates=frozenset({"logits"}),
    may_alias=True,
    presets={"decode-1": {"rows": 1, "masks": 1, "vocab": VOCAB}, "decode-64": {"rows": 64, "masks": 64, "vocab": VOCAB}},
)

OPS = (LOG_PROBS, SAMPLE, VERIFY, APPLY_TOKEN_BITMASK)
