"""Cache memory on the device, and each layer's view of it."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import CompressorRing, PagedEntries, WindowRing
from deepinfer_core.cache.layout import COMPRESSOR_PARTS, CacheLayout, Section
from deepinfer_core.checkpoint.schema import TextConfig


class ModelCaches:
    """Pages and state slots of one device.

    `pages` uint8 [pages, page stride] holds page images; `slots` uint8 [state slots, slot bytes] holds window and compressor rings.
    Neither is cleared on reuse: what a row may read follows from positions. Page 0 and slot 0 belong to padding.
    """

    def __init__(self, config: TextConfig, layout: CacheLayout, pages: int, state_slots: int, device: torch.device) -> None:
        self.config, self.layout = config, layout
        self.pages = torch.zeros(pages, layout.page_stride, dtype=torch.uint8, device=device)
        self.slots = torch.zeros(state_slots, layout.slot_bytes, dtype=torch.uint8, device=device)
        drafts = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
        self.window = tuple(self._window(spec.index) for spec in config.layers)
        self.draft_window = tuple(self._window(layer) for layer in drafts)
        self._sections = {(section.layer, section.kind): self._section(section) for section in layout.sections}
        self.compressor = {ring.layer: self._compressor(ring.layer) for ring in layout.rings if ring.kind == "compressor"}

    def entries(self, layer: int, block_table: Tensor, sequence: Tensor) -> PagedEntries:
        """The compressed entries of kv source `layer`, for rows of the given sequences."""
        return PagedEntries(*self._sections[layer, "main"], block_table, sequence)

    def index_keys(self, layer: int, block_table: Tensor, sequence: Tensor) -> PagedEntries:
        """The index keys of index key source `layer`, for rows of the given sequences."""
        return PagedEntries(*self._sections[layer, "index"], block_table, sequence)

    def _section(self, section: Section) -> tuple[Tensor, CacheFormat, int, int, bool]:
        """What `PagedEntries` says of a section in every step."""
        sectioned = section.kind == "index"
        dim = self.config.index_head_dim if sectioned else self.config.head_dim
        return self.pages[:, section.offset : section.offset + section.length], section.format, dim, section.entries, sectioned

    def _window(self, layer: int) -> WindowRing:
        ring = self.layout.ring(layer)
        data = self.slots[:, ring.offset : ring.offset + ring.length].unflatten(1, (ring.rows, ring.row_bytes))
        return WindowRing(data, self.layout.window_format)

    def _compressor(self, layer: int) -> CompressorRing:
        ring = self.layout.ring(layer, "compressor")
        data = self.slots[:, ring.offset : ring.offset + ring.length].view(torch.float32)
        return CompressorRing(data.unflatten(1, (ring.rows, COMPRESSOR_PARTS, -1)))
