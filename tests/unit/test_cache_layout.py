"""The byte tables of the model notes are reproduced from the config, and other geometries keep the alignment rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.cache import CacheLayout, CacheLayoutError, state_slots
from deepinfer_core.checkpoint.geometries import geometry

FP8, FP4, INDEX, BF16, F32 = CacheFormat.FP8, CacheFormat.FP4, CacheFormat.FP4_INDEX, CacheFormat.BF16, CacheFormat.F32


@dataclass(frozen=True)
class Layer:
    index: int
    ratio: int
    is_kv_source: bool
    is_index_k_source: bool
    is_decoder: bool


@dataclass(frozen=True)
class Text:
    """The fields of a text config that the layout reads."""

    sources: tuple[int, ...] = (2, 8, 14, 20)
    ratios: tuple[int, ...] = (0, 0) + (2,) * 18 + (1,) * 20
    head_dim: int = 512
    index_head_dim: int = 128
    sliding_window: int = 128
    num_nextn_predict_layers: int = 3
    layers: tuple[Layer, ...] = field(init=False)

    def __post_init__(self) -> None:
        layers = [
            Layer(i, ratio, i in self.sources, i in self.sources, i >= max(self.sources, default=len(self.ratios)))
            for i, ratio in enumerate(self.ratios)
        ]
        object.__setattr__(self, "layers", tuple(layers))

    @property
    def num_hidden_layers(self) -> int:
        return len(self.ratios)


RELEASE = Text()
TINY = Text((1, 4), (0, 2, 2, 2, 1, 1, 1, 1), head_dim=64, index_head_dim=32, sliding_window=8, num_nextn_predict_layers=2)


def test_released_sizes_in_the_default_formats():
    report = CacheLayout.of(RELEASE, FP8, FP4, INDEX, num_draft_tokens=5).report()
    assert report.bytes_per_token == 890
    assert (report.page_bytes, report.page_stride) == (113_920, 114_048)
    assert (report.ring_rows, report.window_ring_bytes) == (134, 70_752)
    assert (report.stored_bytes, report.dropped_bytes) == (1_415_040, 1_627_296)
    assert (report.compressor_rows, report.compressor_bytes) == ((7, 7, 7), 86_016)
    assert report.slot_bytes == 3_128_928
    assert report.per_layer == ((2, 144, 34), (8, 144, 34), (14, 144, 34), (20, 288, 68))


def test_the_stand_in_config_equals_the_real_one():
    real = CacheLayout.of(geometry("flash").text_config, FP8, FP4, INDEX, num_draft_tokens=5)
    assert real == CacheLayout.of(RELEASE, FP8, FP4, INDEX, num_draft_tokens=5)


@pytest.mark.parametrize(
    ("entry", "index", "window", "per_token", "stride"),
    [(FP4, INDEX, FP8, 890, 114_048), (FP8, INDEX, FP8, 1490, 194_304), (BF16, BF16, BF16, 3200, 409_600)],
)
def test_bytes_per_token_of_the_format_sets(entry, index, window, per_token, stride):
    layout = CacheLayout.of(RELEASE, window, entry, index, num_draft_tokens=5)
    assert layout.report().bytes_per_token == per_token
    assert layout.page_stride == stride
    assert layout.page_bytes == per_token * 128


def test_slot_with_extra_rows_for_a_store():
    layout = CacheLayout.of(RELEASE, FP8, FP4, INDEX, num_draft_tokens=5, ring_extra=128 + 140)
    assert (layout.ring_rows, layout.slot_bytes) == (402, 9_213_600)


@pytest.mark.parametrize(("tokens", "pages", "total"), [(8192, 7_299_072, 10_428_000), (131_072, 116_785_152, 119_914_080)])
def test_totals_of_a_sequence(tokens, pages, total):
    layout = CacheLayout.of(RELEASE, FP8, FP4, INDEX, num_draft_tokens=5)
    assert layout.pages_for(tokens) * layout.page_stride == pages
    assert layout.report().sequence_bytes(tokens, 128) == total
    assert layout.report().sequence_bytes(1_048_576, 128) == 937_410_144


def test_page_sections_lie_index_first_in_layer_order():
    layout = CacheLayout.of(RELEASE, FP8, FP4, INDEX, num_draft_tokens=5)
    found = [(s.layer, s.kind, s.offset, s.length) for s in layout.sections]
    assert found[:3] == [(2, "index", 0, 4352), (2, "main", 4352, 18_432), (8, "index", 22_784, 4352)]
    assert found[-2:] == [(20, "index", 68_352, 8704), (20, "main", 77_056, 36_864)]
    assert layout.section(20, "index").scales_offset == 128 * 64
    assert layout.section(2, "main").entries == 64


def test_slots_hold_encoder_rings_first_then_decoder_drafts_and_compressors():
    layout = CacheLayout.of(RELEASE, FP8, FP4, INDEX, num_draft_tokens=5)
    windows = [r for r in layout.rings if r.kind == "window"]
    assert [r.layer for r in windows] == list(range(43))
    assert [r.stored for r in windows] == [True] * 20 + [False] * 23
    assert [r.layer for r in layout.rings if r.kind == "compressor"] == [2, 8, 14]
    assert layout.ring(42).offset == 42 * 70_752
    assert layout.ring(2, "compressor").row_bytes == 2 * 512 * 4


@pytest.mark.parametrize("text", [RELEASE, TINY], ids=["release", "tiny"])
@pytest.mark.parametrize("drafts", [0, 3, 5])
@pytest.mark.parametrize("page_tokens", [2, 16, 128])
@pytest.mark.parametrize(("window", "entry", "index"), [(FP8, FP4, INDEX), (BF16, BF16, BF16), (F32, F32, F32)])
def test_any_geometry_keeps_the_rules(text, drafts, page_tokens, window, entry, index):
    layout = CacheLayout.of(text, window, entry, index, drafts, page_tokens=page_tokens)
    for parts, end in ((layout.sections, layout.page_stride), (layout.rings, layout.slot_bytes)):
        assert all(part.offset % 32 == 0 for part in parts)
        assert all(a.offset + a.length <= b.offset for a, b in pairwise(parts))
        assert parts[-1].offset + parts[-1].length <= end
    assert layout.page_stride % 128 == 0
    assert layout.page_stride % entry.entry_bytes(text.head_dim) == 0
    assert layout.slot_bytes % window.entry_bytes(text.head_dim) == 0
    assert layout.ring_rows == text.sliding_window + drafts + 1
    assert layout.max_backtracking == drafts + 1


def test_backtracking_lengthens_rings():
    layout = CacheLayout.of(TINY, FP8, FP4, INDEX, num_draft_tokens=2, max_backtracking=9)
    assert (layout.ring_rows, layout.ring(1, "compressor").rows) == (8 + 9, 2 + 8)


def test_a_model_without_sources_has_empty_pages():
    layout = CacheLayout.of(Text((), (0, 0)), FP8, FP4, INDEX, 0)
    assert (layout.page_bytes, layout.page_stride, layout.sections) == (0, 0, ())
    assert layout.pages_that_fit(10**9, 4) == 0


def test_memory_holds_slots_first_then_an_even_number_of_pages():
    layout = CacheLayout.of(TINY, FP8, FP4, INDEX, 0, page_tokens=16)
    assert layout.pages_that_fit(3 * layout.slot_bytes + 7 * layout.page_stride, slots=3) == 6
    assert layout.pages_that_fit(layout.slot_bytes, slots=3) == 0
    assert state_slots(256) == 308


def test_bad_sizes_name_the_field():
    with pytest.raises(CacheLayoutError, match=r"compress_ratios\[1\] = 2 .*page_tokens = 3"):
        CacheLayout.of(TINY, FP8, FP4, INDEX, 0, page_tokens=3)
    with pytest.raises(CacheLayoutError, match="num_draft_tokens=-1"):
        CacheLayout.of(TINY, FP8, FP4, INDEX, -1)
    with pytest.raises(KeyError, match="source layers: \\[1, 4\\]"):
        CacheLayout.of(TINY, FP8, FP4, INDEX, 0).section(0, "main")
    with pytest.raises(KeyError, match="no compressor ring"):
        CacheLayout.of(TINY, FP8, FP4, INDEX, 0).ring(4, "compressor")
