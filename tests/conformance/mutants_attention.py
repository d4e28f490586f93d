"""Faulty backends: window keys, compressor, stores, indexer, attention."""

from __future__ import annotations

import torch
from mutants import mutant

from deepinfer_backends.cpu_ref import attention, quant
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.types import PagedEntries, Rope, SelectedEntries, Selection, WindowKeys

# ------------------------------------------------------------------ window keys, compressor, stores


def _half_split(x, rope, inverse=False):
    rd = rope.table.shape[1]
    cos, sin = rope.table[rope.positions].view(x.shape[0], *[1] * (x.dim() - 2), 2, rd // 2).unbind(-2)
    sin = -sin if inverse else sin
    a, b = x[..., -rd:].chunk(2, -1)
    return torch.cat((x[..., :-rd], a * cos - b * sin, a * sin + b * cos), -1)


@mutant("window_key")
class HalfSplitRotary(ReferenceKernels):
    def window_key(self, kv, norm_weight, eps, rope):
        normed = self.rms_norm(kv, norm_weight, eps).float()
        return self._round(self.quantize(self._round(_half_split(normed, rope))))


@mutant("window_key")
class KeyNotQuantised(ReferenceKernels):
    def window_key(self, kv, norm_weight, eps, rope):
        return self._rotated(self.rms_norm(kv, norm_weight, eps), rope)


@mutant("store_window")
class MinusOneStoresInTheLastSlot(ReferenceKernels):
    def store_window(self, key, ring, slots):
        places = ring.data.shape[0] * ring.data.shape[1]
        super().store_window(key, ring, torch.where(slots < 0, places - 1, slots))


@mutant("store_window")
class SlotsCountWithoutTheRingStride(ReferenceKernels):
    def store_window(self, key, ring, slots):
        super().store_window(key, ring, torch.where(slots > 0, slots - 1, slots))


@mutant("compress")
class RingWrittenBeforeItIsRead(ReferenceKernels):
    def compress(self, rows, ring, index, norm_weight, eps):
        slots, length, _, hd = ring.data.shape
        keep = index.slots >= 0
        ring.data.view(slots * length, 2, hd)[index.slots[keep].long()] = rows.view(-1, 2, hd)[keep]
        return super().compress(rows, ring, index, norm_weight, eps)


@mutant("compress")
class GateAndLatentSwapped(ReferenceKernels):
    def compress(self, rows, ring, index, norm_weight, eps):
        hd = rows.shape[1] // 2
        swapped = torch.cat((rows[:, hd:], rows[:, :hd]), 1)
        old = ring.data.clone()
        result = super().compress(swapped, type(ring)(old.flip(2)), index, norm_weight, eps)
        super().compress(rows, ring, index, norm_weight, eps)
        return result


@mutant("store_entries")
class NibblesSwapped(ReferenceKernels):
    def store_entries(self, latent, rope, pages, slots):
        super().store_entries(latent, rope, pages, slots)
        data, _ = attention.page_entries(pages)
        kept = slots[slots >= 0].long()
        group, entry = kept // pages.entries_per_page, kept % pages.entries_per_page
        values = data[group, entry]
        data[group, entry] = (values >> 4) | (values << 4)


@mutant("store_entries")
class ScaleIsAPowerOfTwo(ReferenceKernels):
    def store_entries(self, latent, rope, pages, slots):
        x = self._rotated(latent, rope).float()
        blocks = x.unflatten(-1, (-1, 16))
        scale = quant.power_of_two_at_least(blocks.abs().amax(-1, keepdim=True).clamp_min(quant.FP4_AMAX_FLOOR) / 6)
        grid = quant.e2m1_values(quant.e2m1_codes(blocks / scale)) * scale
        attention.store_rows(grid.flatten(-2), slots, *attention.page_entries(pages), pages.format)


@mutant("store_entries")
class PositionOfTheLastTokenOfTheGroup(ReferenceKernels):
    def store_entries(self, latent, rope, pages, slots):
        later = Rope(rope.table, (rope.positions + 1).clamp_max(len(rope.table) - 1))
        super().store_entries(latent, later, pages, slots)


@mutant("store_index_keys")
class KeysQuantisedTwice(ReferenceKernels):
    def store_index_keys(self, key, norm_weight, eps, rope, pages, slots):
        values = self._rotated(self.rms_norm(key, norm_weight, eps), rope).float()
        attention.store_rows(self._index_grid(values), slots, *attention.page_entries(pages), pages.format)


@mutant("store_index_keys")
class ScalesBesideTheirEntries(ReferenceKernels):
    def store_index_keys(self, key, norm_weight, eps, rope, pages, slots):
        flat = PagedEntries(**{**vars(pages), "sectioned": False})
        super().store_index_keys(key, norm_weight, eps, rope, flat, slots)


@mutant("store_index_keys")
class PaddingBehindTheSectionOverwritten(ReferenceKernels):
    def store_index_keys(self, key, norm_weight, eps, rope, pages, slots):
        super().store_index_keys(key, norm_weight, eps, rope, pages, slots)
        if len(slots):
            whole = pages.data.as_strided((pages.data.shape[0], pages.data.shape[1] + 8), pages.data.stride(), pages.data.storage_offset())
            whole[:, -8:] = 0


# ------------------------------------------------------------------ indexer


@mutant("index_query")
class QueryNotQuantised(ReferenceKernels):
    def index_query(self, query, rope):
        return self._rotated(query, rope).float()


@mutant("index_query")
class OneScaleForAllHeads(ReferenceKernels):
    def index_query(self, query, rope):
        x = self._rotated(query, rope).float()
        if self.numerics is Numerics.IDEAL or not len(x):
            return x
        top = x.abs().amax((1, 2), keepdim=True)
        scale = quant.power_of_two_at_least(top.clamp_min(1e-30) / 6)
        return quant.e2m1_values(quant.e2m1_codes(x / scale)) * scale


class _Scored(ReferenceKernels):
    """Changes the scores before anything is chosen."""

    def _scores(self, scores, head_weights, keys):
        return scores

    def _index_scores(self, query, head_weights, keys):
        return self._scores(super()._index_scores(query, head_weights, keys), head_weights, keys)


@mutant("select_entries")
class TiesToTheHigherEntry(_Scored):
    def _scores(self, scores, head_weights, keys):
        return scores + torch.arange(scores.shape[1]) * 1e-6


@mutant("select_entries")
class HeadWeightsWithoutSign(_Scored):
    def _index_scores(self, query, head_weights, keys):
        return super()._index_scores(query, head_weights.abs(), keys)


@mutant("select_entries")
class NewestEntryInvisible(ReferenceKernels):
    def select_entries(self, query, head_weights, keys, visible, topk, candidates=None, emit=None, block_size=0):
        return super().select_entries(query, head_weights, keys, (visible - 1).clamp_min(0), topk, candidates, emit, block_size)


@mutant("select_entries")
class LastBlockNotPinned(ReferenceKernels):
    def select_entries(self, query, head_weights, keys, visible, topk, candidates=None, emit=None, block_size=0):
        chosen = super().select_entries(query, head_weights, keys, visible, topk, candidates, emit, block_size)
        if emit is None:
            return chosen
        scores = self._index_scores(query, head_weights.float(), keys)
        scores.masked_fill_(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)
        return Selection(chosen.index, attention._best_blocks(scores, torch.zeros_like(visible), emit))


@mutant("select_entries")
class CandidatesIgnored(ReferenceKernels):
    def select_entries(self, query, head_weights, keys, visible, topk, candidates=None, emit=None, block_size=0):
        return super().select_entries(query, head_weights, keys, visible, topk, None, emit, block_size)


@mutant("select_entries")
class FirstSequencesPagesForAll(ReferenceKernels):
    def select_entries(self, query, head_weights, keys, visible, topk, candidates=None, emit=None, block_size=0):
        first = PagedEntries(**{**vars(keys), "sequence": torch.zeros_like(keys.sequence)})
        return super().select_entries(query, head_weights, first, visible, topk, candidates, emit, block_size)


# ------------------------------------------------------------------ attention


@mutant("sparse_attention")
class InverseRotaryForgotten(ReferenceKernels):
    def sparse_attention(self, query, window, selected, sink, scale, rope):
        out = super().sparse_attention(query, window, selected, sink, scale, rope)
        return self._rotated(out, rope)


@mutant("sparse_attention")
class OldestWindowKeyDropped(ReferenceKernels):
    def sparse_attention(self, query, window, selected, sink, scale, rope):
        index = window.index.clone()
        index[:, 0] = -1
        return super().sparse_attention(query, WindowKeys(window.ring, window.current, index), selected, sink, scale, rope)


@mutant("sparse_attention")
class SinkAddedToTheOutput(ReferenceKernels):
    def sparse_attention(self, query, window, selected, sink, scale, rope):
        out = super().sparse_attention(query, window, selected, torch.full_like(sink, -1e30), scale, rope)
        return (out.float() + sink.exp()[:, None] * 1e-2).to(out.dtype)


@mutant("sparse_attention")
class MaximumNotSubtracted(ReferenceKernels):
    def _attend(self, q, keys, valid, sink, scale):
        p = (torch.bmm(q, keys.transpose(1, 2)) * scale).masked_fill(~valid[:, None], -torch.inf).exp()
        total = p.sum(-1, keepdim=True) + sink[:, None].exp()
        return self._round(torch.bmm(self._round(p).float(), keys) / total)


@mutant("sparse_attention")
class MissingKeysCountAsZeroKeys(ReferenceKernels):
    def _attend(self, q, keys, valid, sink, scale):
        return super()._attend(q, keys, torch.ones_like(valid), sink, scale)


@mutant("sparse_attention")
class StaleSlotRead(ReferenceKernels):
    def _gather_window(self, window, rows):
        slots, length, _ = window.ring.data.shape
        index = window.index
        stale = torch.where((index >= 0) & (index < slots * length), (index + 1) % (slots * length), index)
        return super()._gather_window(WindowKeys(window.ring, window.current, stale), rows)


@mutant("sparse_attention")
class PageBoundaryOffByOne(ReferenceKernels):
    def _gather_selected(self, selected, rows):
        n, index = selected.pages.entries_per_page, selected.index
        wrong = torch.where((index > 0) & (index % n == 0), index - 1, index)
        return super()._gather_selected(SelectedEntries(selected.pages, wrong), rows)


@mutant("attention_output")
class GroupsInterleaved(ReferenceKernels):
    def attention_output(self, out, wo_a, wo_b, groups):
        rows, heads, dim = out.shape
        mixed = out.reshape(rows, heads // groups, groups, dim).transpose(1, 2).reshape(rows, heads, dim)
        return super().attention_output(mixed, wo_a, wo_b, groups)


@mutant("attention_output")
class LowRankResultNotQuantised(ReferenceKernels):
    def attention_output(self, out, wo_a, wo_b, groups):
        weight = wo_a.decoded().unflatten(0, (groups, -1))
        z = torch.einsum("tgi,goi->tgo", out.float().flatten(1).unflatten(1, (groups, weight.shape[2])), weight).flatten(1)
        return self.quantized_linear(self._round(z).float(), wo_b)
