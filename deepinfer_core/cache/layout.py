"""How the caches of one model lie in memory: pages of compressed entries and fixed state slots, in bytes, computed from the config.

A page holds `page_tokens` tokens of every source layer in one contiguous byte range: per source layer in layer order an index-key
section, then a section of main entries. A state slot holds what a sequence needs besides pages: one window ring per layer (encoder
layers first: they are worth storing; then decoder layers and draft blocks: they are rebuilt), then one compressor ring per source
layer of ratio > 1. Nothing here allocates memory or knows a device.

Source of the rules: DeepInfer 0.1.0 cache layout (model notes, cache section).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.errors import ConfigError

SECTION_ALIGN = 32  # bytes; start of every section and ring
PAGE_STRIDE_ALIGN = 128  # bytes; the index-score kernels of DeepInfer 0.1.0 want a page stride that is a multiple of it
COMPRESSOR_PARTS = 2  # float32 latent and gate of each open row


class CacheLayoutError(ConfigError):
    """The config and the requested formats give no layout; the message names the field."""


@dataclass(frozen=True)
class Section:
    """One layer's byte range in a page."""

    layer: int
    kind: Literal["index", "main"]
    offset: int  # bytes from the start of the page, a multiple of 32
    length: int  # bytes, no padding
    entries: int  # entries in the section: page_tokens / ratio
    entry_bytes: int
    scales_offset: int  # bytes from the section's start to its scales; index sections only (data of all entries first), else 0
    format: CacheFormat


@dataclass(frozen=True)
class Ring:
    """One layer's byte range in a state slot."""

    layer: int  # draft block b is layer num_hidden_layers + b
    kind: Literal["window", "compressor"]
    stored: bool  # True: part of what is worth keeping outside the slot (encoder windows)
    offset: int  # bytes from the start of the slot, a multiple of 32
    length: int  # bytes, no padding
    rows: int  # position p lives in row p mod rows
    row_bytes: int


@dataclass(frozen=True)
class CacheReport:
    """Cache sizes in bytes, for people and for tests."""

    bytes_per_token: int | float  # compressed entries of all layers, no padding
    page_bytes: int
    page_stride: int
    ring_rows: int
    window_ring_bytes: int
    stored_bytes: int  # encoder window rings of one slot
    dropped_bytes: int  # decoder and draft window rings of one slot
    compressor_rows: tuple[int, ...]  # rows of each compressor ring
    compressor_bytes: int
    slot_bytes: int
    per_layer: tuple[tuple[int, float, float], ...]  # (source layer, main bytes per token, index bytes per token)

    def sequence_bytes(self, tokens: int, page_tokens: int) -> int:
        """Bytes of a sequence of `tokens` tokens: padded pages plus its slot."""
        return _ceil_div(tokens, page_tokens) * self.page_stride + self.slot_bytes


@dataclass(frozen=True)
class CacheLayout:
    """Byte layout of the pages and state slots of one model. Made by `CacheLayout.of`."""

    page_tokens: int
    page_bytes: int  # without padding at the end
    page_stride: int
    sections: tuple[Section, ...]
    rings: tuple[Ring, ...]
    ring_rows: int  # R = sliding_window + max_backtracking + ring_extra
    slot_bytes: int
    window: int
    max_backtracking: int  # B: tokens by which a sequence can go back
    window_format: CacheFormat
    entry_format: CacheFormat
    index_format: CacheFormat

    @classmethod
    def of(
        cls,
        text_config: Any,
        window_format: CacheFormat,
        entry_format: CacheFormat,
        index_format: CacheFormat,
        num_draft_tokens: int,
        max_backtracking: int | None = None,
        page_tokens: int = 128,
        ring_extra: int = 0,
    ) -> CacheLayout:
        """The layout of `text_config` (a `TextConfig`) in the given formats.

        `max_backtracking` grows to at least num_draft_tokens + 1; `ring_extra` lengthens every window ring, so that an external store
        can cut windows at earlier positions. Raises CacheLayoutError if a ratio does not divide `page_tokens`, or a size is negative.
        """
        back = max(max_backtracking or 0, num_draft_tokens + 1)
        if page_tokens < 1 or num_draft_tokens < 0 or ring_extra < 0:
            raise CacheLayoutError(
                f"cache layout: page_tokens={page_tokens}, num_draft_tokens={num_draft_tokens}, ring_extra={ring_extra}: "
                "page_tokens must be at least 1, the others at least 0"
            )
        sections, page_bytes = _page_sections(text_config, entry_format, index_format, page_tokens)
        ring_rows = text_config.sliding_window + back + ring_extra
        rings, used = _slot_rings(text_config, window_format, ring_rows, back)
        entry = entry_format.entry_bytes(text_config.head_dim)
        window_entry = window_format.entry_bytes(text_config.head_dim)
        return cls(
            page_tokens=page_tokens,
            page_bytes=page_bytes,
            page_stride=_align(page_bytes, lcm(PAGE_STRIDE_ALIGN, entry)),
            sections=sections,
            rings=rings,
            ring_rows=ring_rows,
            slot_bytes=_align(used, lcm(SECTION_ALIGN, window_entry)),
            window=text_config.sliding_window,
            max_backtracking=back,
            window_format=window_format,
            entry_format=entry_format,
            index_format=index_format,
        )

    def section(self, layer: int, kind: Literal["index", "main"]) -> Section:
        """The section of source layer `layer`. Raises KeyError if the layer owns none."""
        for section in self.sections:
            if (section.layer, section.kind) == (layer, kind):
                return section
        raise KeyError(f"layer {layer} owns no {kind} section; source layers: {sorted({s.layer for s in self.sections})}")

    def ring(self, layer: int, kind: Literal["window", "compressor"] = "window") -> Ring:
        """The ring of `layer`. Raises KeyError if the layer owns none."""
        for ring in self.rings:
            if (ring.layer, ring.kind) == (layer, kind):
                return ring
        raise KeyError(f"layer {layer} owns no {kind} ring")

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return _ceil_div(tokens, self.page_tokens)

    def pages_that_fit(self, memory_bytes: int, slots: int) -> int:
        """Pages, the null page included, that fit in `memory_bytes` beside `slots` state slots; rounded down to even, never negative."""
        free = memory_bytes - slots * self.slot_bytes
        return max(free // self.page_stride // 2 * 2, 0) if self.page_stride else 0

    def report(self) -> CacheReport:
        """Sizes of this layout."""
        main = {s.layer: s.length / self.page_tokens for s in self.sections if s.kind == "main"}
        index = {s.layer: s.length / self.page_tokens for s in self.sections if s.kind == "index"}
        windows = [ring for ring in self.rings if ring.kind == "window"]
        compressors = [ring for ring in self.rings if ring.kind == "compressor"]
        per_token = sum(s.length for s in self.sections) / self.page_tokens
        return CacheReport(
            bytes_per_token=int(per_token) if per_token == int(per_token) else per_token,
            page_bytes=self.page_bytes,
            page_stride=self.page_stride,
            ring_rows=self.ring_rows,
            window_ring_bytes=windows[0].length if windows else 0,
            stored_bytes=sum(_align(r.length) for r in windows if r.stored),
            dropped_bytes=sum(_align(r.length) for r in windows if not r.stored),
            compressor_rows=tuple(r.rows for r in compressors),
            compressor_bytes=sum(r.length for r in compressors),
            slot_bytes=self.slot_bytes,
            per_layer=tuple((layer, main.get(layer, 0.0), index.get(layer, 0.0)) for layer in sorted(main.keys() | index.keys())),
        )


def state_slots(max_num_seqs: int, ratio: float = 1.2) -> int:
    """State slots to allocate for `max_num_seqs` running requests, the placeholder slot 0 included.

    The surplus lets finished sequences keep a slot for a step while others start (rule of DeepInfer 0.1.0).
    """
    return int(max_num_seqs * ratio) + 1


def _page_sections(config: Any, entry_format: CacheFormat, index_format: CacheFormat, page_tokens: int) -> tuple[tuple[Section, ...], int]:
    sections: list[Section] = []
    end = 0
    for spec in config.layers:
        owned: dict[Literal["index", "main"], bool] = {"index": spec.is_index_k_source, "main": spec.is_kv_source}
        for kind in (kind for kind, is_owned in owned.items() if is_owned):
            if spec.ratio < 1 or page_tokens % spec.ratio:
                raise CacheLayoutError(
                    f"cache layout: compress_ratios[{spec.index}] = {spec.ratio} of a source layer must be at least 1 and divide "
                    f"page_tokens = {page_tokens}; choose another page_tokens"
                )
            fmt, dim = (index_format, config.index_head_dim) if kind == "index" else (entry_format, config.head_dim)
            entries = page_tokens // spec.ratio
            section = Section(
                layer=spec.index,
                kind=kind,
                offset=_align(end),
                length=entries * fmt.entry_bytes(dim),
                entries=entries,
                entry_bytes=fmt.entry_bytes(dim),
                scales_offset=entries * fmt.data_bytes(dim) if kind == "index" else 0,
                format=fmt,
            )
            sections.append(section)
            end = section.offset + section.length
    return tuple(sections), end


def _slot_rings(config: Any, window_format: CacheFormat, ring_rows: int, back: int) -> tuple[tuple[Ring, ...], int]:
    rings: list[Ring] = []
    end = 0

    def append(layer: int, kind: Literal["window", "compressor"], stored: bool, rows: int, row_bytes: int) -> None:
        nonlocal end
        rings.append(Ring(layer, kind, stored, _align(end), rows * row_bytes, rows, row_bytes))
        end = _align(end) + rows * row_bytes

    layers = config.layers[: config.num_hidden_layers]
    drafts = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    row_bytes = window_format.entry_bytes(config.head_dim)
    for spec in layers:
        if not spec.is_decoder:
            append(spec.index, "window", True, ring_rows, row_bytes)
    for layer in [spec.index for spec in layers if spec.is_decoder] + list(drafts):
        append(layer, "window", False, ring_rows, row_bytes)
    for spec in layers:
        if spec.is_kv_source and spec.ratio > 1:
            append(spec.index, "compressor", False, spec.ratio + max(0, back - 1), COMPRESSOR_PARTS * config.head_dim * 4)
    return tuple(rings), _align(end)


def _align(size: int, to: int = SECTION_ALIGN) -> int:
    return _ceil_div(size, to) * to


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
