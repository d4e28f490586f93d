"""A checkpoint on a device: weights, caches, and the sizes that turn a step's numbers into metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_core.backend.formats import CacheFormat, Numerics
from deepinfer_core.backend.kernels import Kernels
from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.checkpoint.engram import engram_tables
from deepinfer_core.checkpoint.schema import TextConfig
from deepinfer_core.model.batch import BatchGeometry, SequenceInputs, StepBatch, build_batch
from deepinfer_core.model.caches import ModelCaches
from deepinfer_core.model.drafter import Drafter
from deepinfer_core.model.graph import Model
from deepinfer_core.model.weights import TensorSource, WeightLoader


@dataclass(frozen=True)
class CacheFormats:
    """Storage of the three kinds of cached vectors."""

    window: CacheFormat
    entry: CacheFormat
    index: CacheFormat

    @classmethod
    def default(cls, config: TextConfig, numerics: Numerics) -> CacheFormats:
        """The release's byte formats, or float32 for `ideal` numerics."""
        if numerics is Numerics.IDEAL:
            return cls(CacheFormat.F32, CacheFormat.F32, CacheFormat.F32)
        entry = CacheFormat.FP4 if config.use_fp4_sparse_kv else CacheFormat.FP8
        return cls(CacheFormat.FP8, entry, CacheFormat.FP4_INDEX)


@dataclass(frozen=True)
class CacheSizes:
    """How much cache to allocate."""

    pages: int  # the null page included
    state_slots: int  # the placeholder slot included
    max_positions: int  # exclusive bound of any position ever touched


class LoadedModel:
    """Everything one process keeps on its device for one checkpoint.

    `resize` replaces the caches, once the memory that is left is known.
    """

    def __init__(
        self,
        source: TensorSource,
        tokenizer_path: Path,
        kernels: Kernels,
        layout: CacheLayout,
        sizes: CacheSizes,
        drafter: bool = False,
        progress: Callable[[str], None] = lambda part: None,
    ) -> None:
        config = source.config.text_config
        engram = engram_tables(source.config, tokenizer_path) if config.engram_layer_ids else None
        weights = WeightLoader(source, kernels, engram).load(drafter, progress)
        self.config, self.kernels, self.layout = config, kernels, layout
        self.token_map = torch.from_numpy(engram.token_map).to(kernels.device) if engram else None
        self.pad_id = engram.pad_id if engram else 0
        self.model = Model(config, kernels, weights, sizes.max_positions)
        self.drafts = drafter
        self.resize(sizes)

    def resize(self, sizes: CacheSizes) -> None:
        """Drops the caches and allocates new ones. `sizes.max_positions` must not grow."""
        config, layout = self.config, self.layout
        compressors = [ring.rows for ring in layout.rings if ring.kind == "compressor"]
        self.geometry = BatchGeometry(
            window=config.sliding_window,
            ring=layout.ring_rows,
            compressor_ring=max(compressors, default=1),
            state_slots=sizes.state_slots,
            page_tokens=layout.page_tokens,
            ratios=tuple(sorted({spec.ratio for spec in config.layers if spec.ratio})),
            ngram=config.engram_max_ngram_size if self.token_map is not None else 0,
        )
        self.__dict__.pop("caches", None)  # freed before the new ones are allocated
        self.caches = ModelCaches(config, layout, sizes.pages, sizes.state_slots, self.kernels.device)
        self.drafter = Drafter(self.model, self.geometry) if self.drafts else None

    def batch(self, sequences: SequenceInputs) -> StepBatch:
        """Metadata of one step."""
        return build_batch(self.geometry, sequences, self.token_map, self.pad_id)
