"""Faulty backends: Engram, experts, drafting, sampling; and faults that show only in company, over time, or beside the ops."""

from __future__ import annotations

import torch
from mutants import mutant

from deepinfer_backends.cpu_ref import quant
from deepinfer_backends.cpu_ref.hyper import sigmoid
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cpu_ref.linear import matmul
from deepinfer_core.backend.types import EngramHashTables, ExpertTensors, QuantTensor, RandomRows, Routing

# ------------------------------------------------------------------ Engram


@mutant("engram_hash")
class HashInFloatingPoint(ReferenceKernels):
    def engram_hash(self, ngrams, tables):
        rows = super().engram_hash(ngrams, tables)
        h = (ngrams[:, 0] * tables.multipliers[0]) ^ (ngrams[:, 1] * tables.multipliers[1])
        wrong = h.double() % tables.primes[0].double()
        return torch.where(torch.arange(rows.shape[1]) == 0, torch.where(ngrams[:, :1] < 0, -1, wrong.long()[:, None]), rows)


@mutant("engram_hash")
class OffsetsForgotten(ReferenceKernels):
    def engram_hash(self, ngrams, tables):
        return super().engram_hash(ngrams, EngramHashTables(tables.multipliers, tables.primes, torch.zeros_like(tables.offsets)))


@mutant("engram_gather")
class MissingRowIsTheLastRow(ReferenceKernels):
    def engram_gather(self, table, rows):
        return super().engram_gather(table, torch.where(rows < 0, len(table.weight) - 1, rows))


@mutant("prepare_engram_table")
class ScalesOfTheNextRow(ReferenceKernels):
    def prepare_engram_table(self, table):
        return QuantTensor(table.weight, table.scale.view(torch.uint8).roll(-1, 0).view(table.scale.dtype))


@mutant("engram_gate")
class GateWithoutSign(ReferenceKernels):
    def engram_gate(self, streams, kv, q_weight, k_weight, eps, mask=None):
        h, m = streams.float(), streams.shape[1]
        k, v = kv[:, :m].float(), kv[:, m:].float()
        norms = ((h * h).mean(-1) + eps).rsqrt() * ((k * k).mean(-1) + eps).rsqrt()
        d = (h * k * q_weight.float() * k_weight.float()).sum(-1) * norms * h.shape[-1] ** -0.5
        result = self._round(h + sigmoid(d.abs().clamp_min(1e-6).sqrt())[..., None] * v)
        return result if mask is None else torch.where(mask[:, None, None], result, streams)


@mutant("engram_gate")
class MaskIgnored(ReferenceKernels):
    def engram_gate(self, streams, kv, q_weight, k_weight, eps, mask=None):
        return super().engram_gate(streams, kv, q_weight, k_weight, eps)


# ------------------------------------------------------------------ experts


@mutant("moe_gate")
class WeightsNormalisedTwice(ReferenceKernels):
    def moe_gate(self, x, weight, bias, top_k, scale):
        routing = super().moe_gate(x, weight, bias, top_k, scale)
        return Routing(routing.ids, routing.weights / routing.weights.sum(1, keepdim=True))


@mutant("moe_gate")
class BiasInTheWeights(ReferenceKernels):
    def moe_gate(self, x, weight, bias, top_k, scale):
        ids = super().moe_gate(x, weight, bias, top_k, scale).ids
        logits = self.linear(x, weight, torch.float32)
        chosen = (torch.nn.functional.softplus(logits).sqrt() + bias).gather(1, ids.long())
        return Routing(ids, chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale)


@mutant("moe_gate")
class TiesToTheHigherExpert(ReferenceKernels):
    def moe_gate(self, x, weight, bias, top_k, scale):
        return super().moe_gate(x, weight, bias + torch.arange(bias.shape[-1]) * 1e-6, top_k, scale)


@mutant("moe_gate")
class SoftplusOverflows(ReferenceKernels):
    def moe_gate(self, x, weight, bias, top_k, scale):
        scores = self.linear(x, weight, torch.float32).exp().log1p().sqrt()
        ids = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        chosen = scores.gather(1, ids)
        return Routing(ids.int(), chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale)


@mutant("moe")
class ClampMissing(ReferenceKernels):
    def moe(self, x, routing, experts, shared, limit):
        return super().moe(x, routing, experts, shared, 1e30)


@mutant("moe")
class DroppedRowsGoToTheLastExpert(ReferenceKernels):
    def moe(self, x, routing, experts, shared, limit):
        ids = torch.where(routing.ids < 0, len(experts.w13) - 1, routing.ids)
        return super().moe(x, Routing(ids, routing.weights), experts, shared, limit)


@mutant("moe")
class SharedExpertDropped(ReferenceKernels):
    def moe(self, x, routing, experts, shared, limit):
        return super().moe(x, routing, experts, None, limit)


@mutant("moe")
class RoutingWeightIgnored(ReferenceKernels):
    def moe(self, x, routing, experts, shared, limit):
        return super().moe(x, Routing(routing.ids, torch.ones_like(routing.weights)), experts, shared, limit)


@mutant("moe")
class GateAndUpSwapped(ReferenceKernels):
    def _experts(self, x, weights, counts, experts, limit):
        up, gate = self._grouped(x, counts, experts.w13).chunk(2, 1)
        gate = gate.clamp_max(limit)
        a = gate / (1.0 + (-gate).exp()) * up.clamp(-limit, limit)
        a = a if weights is None else a * weights[:, None]
        return self._grouped(self.quantize(self._round(a)), counts, experts.w2)


def _fp4_nibbles_swapped(part: QuantTensor) -> QuantTensor:
    if part.weight.dtype != torch.int8:
        return part
    data = part.weight.view(torch.uint8)
    return QuantTensor(((data >> 4) | (data << 4)).view(torch.int8), part.scale)


@mutant("prepare_experts")
class ExpertNibblesSwapped(ReferenceKernels):
    def prepare_experts(self, experts, count):
        return super().prepare_experts((ExpertTensors(*map(_fp4_nibbles_swapped, e)) for e in experts), count)


@mutant("prepare_experts")
class FirstExpertForAll(ReferenceKernels):
    def prepare_experts(self, experts, count):
        several = list(experts)
        return super().prepare_experts([several[0]] * len(several), count)


@mutant("expert_count_is_checked", "contract")
class AnyNumberOfExpertsTaken(ReferenceKernels):
    def prepare_experts(self, experts, count):
        several = list(experts)
        return super().prepare_experts(several, len(several))


# ------------------------------------------------------------------ drafting


@mutant("markov_logits")
class FirstPreviousTokenForAll(ReferenceKernels):
    def markov_logits(self, base, previous, embed, head):
        return super().markov_logits(base, previous[:1].expand_as(previous), embed, head)


@mutant("confidence")
class TemperatureIgnored(ReferenceKernels):
    def confidence(self, hidden, previous, embed, weight, temperature):
        return super().confidence(hidden, previous, embed, weight, 1.0)


@mutant("confidence")
class ArgumentNotClamped(ReferenceKernels):
    def confidence(self, hidden, previous, embed, weight, temperature):
        return sigmoid(matmul(torch.cat((hidden.float(), embed[previous].float()), 1), weight.float())[:, 0] / temperature)


# ------------------------------------------------------------------ sampling


@mutant("log_probs")
class TopPNotStrict(ReferenceKernels):
    def log_probs(self, logits, rows):
        out = super().log_probs(logits, rows)
        sorted_out, order = out.sort(dim=1, descending=True, stable=True)
        before = sorted_out.exp().cumsum(1) - sorted_out.exp()
        drop = (before > rows.top_p[:, None] * 0.9) & (rows.top_p[:, None] < 1)
        return out.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -torch.inf).log_softmax(-1)


@mutant("log_probs")
class TiesCutAtTheHigherId(ReferenceKernels):
    def log_probs(self, logits, rows):
        return super().log_probs(logits.flip(1), rows).flip(1)


@mutant("log_probs")
class MinPOfTheTopKOnly(ReferenceKernels):
    def log_probs(self, logits, rows):
        return super().log_probs(logits, rows._replace(min_p=torch.zeros_like(rows.min_p)))


@mutant("sample")
class SeedIgnoredBehindTheFirstRow(ReferenceKernels):
    def sample(self, log_probs, random):
        return super().sample(log_probs, RandomRows(random.seeds[:1].expand_as(random.seeds), random.positions))


@mutant("sample")
class SeedTruncatedTo32Bits(ReferenceKernels):
    def sample(self, log_probs, random):
        return super().sample(log_probs, RandomRows(random.seeds & 0xFFFFFFFF, random.positions))


@mutant("verify")
class ResidualKeepsTheDraft(ReferenceKernels):
    def verify(self, target, draft, drafts, random, greedy):
        result = super().verify(target, draft, drafts, random, greedy)
        fresh = super().sample(target, random)
        return result._replace(tokens=torch.where(greedy, result.tokens, fresh))


@mutant("verify")
class GreedyRowsUseTheRandomTest(ReferenceKernels):
    def verify(self, target, draft, drafts, random, greedy):
        return super().verify(target, draft, drafts, random, torch.zeros_like(greedy))


@mutant("apply_token_bitmask")
class BitsFromTheTop(ReferenceKernels):
    def apply_token_bitmask(self, logits, bitmask, rows):
        bits = torch.arange(31, -1, -1, dtype=torch.int32)
        allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


@mutant("apply_token_bitmask")
class MasksAppliedInRowOrder(ReferenceKernels):
    def apply_token_bitmask(self, logits, bitmask, rows):
        super().apply_token_bitmask(logits, bitmask, torch.arange(len(rows)))


# ------------------------------------------------------------------ only in company, only over time


@mutant("batch_invariant(linear)", "claims")
class SumOrderDependsOnTheBatch(ReferenceKernels):
    def linear(self, x, weight, out_dtype=None):
        if len(x) % 2 or weight.expanded is None:
            return super().linear(x, weight, out_dtype)
        half = x.shape[1] // 2
        parts = [matmul(x.float()[:, s], weight.expanded[:, s]) for s in (slice(half, None), slice(0, half))]
        return self._round(parts[0] + parts[1]) if out_dtype is None else parts[0] + parts[1]


@mutant("batch_invariant(rms_norm)", "claims")
class LargeBatchesInHalfPrecision(ReferenceKernels):
    def rms_norm(self, x, weight, eps):
        if len(x) < 100:
            return super().rms_norm(x, weight, eps)
        f = x.float()
        scale = f.square().mean(-1, keepdim=True).add(eps).rsqrt()
        return self._round(f * (scale * (1 + 2.0**-22)) * weight.float())


@mutant("batch_invariant(sample)", "claims")
class RowNumberInTheRandomStream(ReferenceKernels):
    def sample(self, log_probs, random):
        late = torch.arange(len(log_probs)) >= 50
        return super().sample(log_probs, RandomRows(random.seeds + late, random.positions))


@mutant("decode_equals_prefill(release)", "model")
class FirstBlockTableRemembered(ReferenceKernels):
    """Gathers pages by the table of the first call: right in any single call, wrong once there are two sequences."""

    _table = None

    def _gather_selected(self, selected, rows):
        if self._table is None:
            self._table = selected.pages.block_table.clone()
        table = self._table if self._table.shape == selected.pages.block_table.shape else selected.pages.block_table
        pages = type(selected.pages)(**{**vars(selected.pages), "block_table": table})
        return super()._gather_selected(type(selected)(pages, selected.index), rows)


@mutant("seeds_decide", "engine")
class RandomNumbersFromAGenerator(ReferenceKernels):
    """Right for a few calls, then another stream: random state that lives in the kernels instead of in the request."""

    _calls = 0

    def sample(self, log_probs, random):
        type(self)._calls += 1
        return super().sample(log_probs, RandomRows(random.seeds + type(self)._calls // 12, random.positions))


@mutant("logits(p33)", "model")
class WeightsRememberedByShape(ReferenceKernels):
    """Prepares a weight once for each shape: layers of equal shape share the first one's numbers."""

    def prepare_linear(self, parts):
        cache = self.__dict__.setdefault("_seen", {})
        key = tuple((tuple(p.weight.shape), p.weight.dtype, float(quant.decode_weight(*p)[0, 0]) > 1e9) for p in parts)
        if key not in cache:
            cache[key] = super().prepare_linear(parts)
        return cache[key]
