"""Compiles the Triton kernels of the end-to-end benchmark on all cores, into Triton's cache, before a GPU waits for them.

    PYTHONPATH=tests/cuda python benchmarks/cuda/precompile_model.py [--batches 1,8,32,128] [--context 8192] [--arch 90]

The model runs on meta tensors, where kernel launches are only recorded: no GPU is needed, and none is touched.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path

import torch
from cuda_checks.precompile import compile_all, key
from released_model import RandomWeights, Shape, model_config, share_experts

from deepinfer_backends.cuda_sm100.kernels import CudaKernels
from deepinfer_backends.cuda_sm100.launch import Launch, observed_launches
from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.backend.types import RandomRows, SamplingRows
from deepinfer_core.cache.layout import CacheLayout
from deepinfer_core.model.batch import SequenceInputs
from deepinfer_core.model.loaded import CacheSizes, LoadedModel

META = torch.device("meta")


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=META)


def launches(shape: Shape, steps: list[tuple[int, int]], arch: int) -> list[Launch]:
    """Every launch of the given steps (sequences, rows) and of their sampling, once."""
    kernels = CudaKernels(META)
    kernels._arch = arch
    share_experts(kernels)
    config = model_config(shape)
    text = config.text_config
    layout = CacheLayout.of(text, CacheFormat.FP8, CacheFormat.FP4, CacheFormat.FP4_INDEX, 0)
    longest = shape.context + shape.new_tokens + 2
    pages = layout.pages_for(longest)
    sizes = CacheSizes(2 + pages * shape.batch, 2 + shape.batch, longest)
    loaded = LoadedModel(RandomWeights(config, META), Path(), kernels, layout, sizes)
    seen: dict[str, Launch] = {}
    for sequences, rows in steps:
        some: list[Launch] = []
        numbers = [zeros(sequences) for _ in range(5)]
        table = zeros(sequences, pages, dtype=torch.int32)
        inputs = SequenceInputs(*numbers[:3], table, *numbers[3:], zeros(sequences, text.engram_max_ngram_size - 1), zeros(rows))
        with observed_launches(some.append), torch.inference_mode():
            hidden = loaded.model.forward(loaded.batch(inputs), loaded.caches).hidden
            logits = loaded.model.logits(hidden[-sequences:])
            flat, ids = zeros(sequences, dtype=torch.float32), zeros(sequences)
            for filtered, greedy in product((False, True), repeat=2):
                settings = SamplingRows(flat, zeros(sequences, dtype=torch.int32), flat, flat, filtered, greedy)
                kernels.sample(kernels.log_probs(logits, settings), RandomRows(ids, ids))
        for launch in some:
            seen.setdefault(key(launch), launch)
    return list(seen.values())


def main() -> None:
    """Records, compiles, reports."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12, help="enough for a layer of every kind: the kernels do not depend on it")
    parser.add_argument("--arch", type=int, default=90)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    shape = Shape(layers=options.layers, context=options.context, batch=max(batches))
    begin = time.monotonic()
    longest = shape.context + shape.new_tokens  # the profile run that sizes the caches
    found = launches(shape, [*((b, b) for b in batches), (1, shape.context), (1, longest)], options.arch)
    recorded = time.monotonic()
    count = compile_all(found, options.arch)
    print(
        f"{count} of {len(found)} kernels: recorded in {recorded - begin:.1f} s, compiled in {time.monotonic() - recorded:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
