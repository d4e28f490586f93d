"""Inspect, verify and make checkpoints in the release format."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from deepinfer_core.backend.formats import CacheFormat
from deepinfer_core.cache.layout import CacheLayout, CacheReport
from deepinfer_core.checkpoint.geometries import NAMES, geometry, shipped_checkpoint
from deepinfer_core.checkpoint.hub import resolve_model
from deepinfer_core.checkpoint.inspect import CheckpointReport, inspect
from deepinfer_core.checkpoint.names import expected_tensors
from deepinfer_core.checkpoint.reader import Checkpoint
from deepinfer_core.checkpoint.schema import TextConfig
from deepinfer_core.checkpoint.verify import verify
from deepinfer_core.checkpoint.writer import SHARD_BYTES, write_checkpoint
from deepinfer_core.errors import CheckpointError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Inspect, verify and make checkpoints in the release format. Example: deepinfer checkpoint inspect DIR",
)

Directory = Annotated[str, typer.Argument(metavar="DIR", help="Checkpoint folder or Hugging Face id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("inspect")
def inspect_command(directory: Directory, json: Json = False) -> None:
    """Check names, shapes and formats, and print components, sizes and cache bytes. Reads no weights."""
    with Checkpoint.open(resolve_model(directory)) as checkpoint:
        report, cache = inspect(checkpoint.config), release_cache(checkpoint.config.text_config)
    if json:
        print(json_format.dumps(_as_json(report, cache), indent=2))
    else:
        _print(report, cache)


@app.command("verify")
def verify_command(directory: Directory) -> None:
    """Read every byte and list everything that no valid checkpoint holds: NaN codes, NaN scales, a tokenizer that does not fit."""
    with Checkpoint.open(resolve_model(directory)) as checkpoint:
        with _progress(checkpoint.total_bytes, "verify") as bar:
            problems = verify(checkpoint, bar.update)
        if problems:
            raise CheckpointError(problems, directory)
        print(f"{directory}: {len(checkpoint.names)} tensors, {checkpoint.total_bytes} bytes, no problems")


@app.command("make")
def make_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")],
    geometry_name: Annotated[str, typer.Option("--geometry", help=f"{', '.join(NAMES)}, or the path of a config.json.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    layers: Annotated[int | None, typer.Option(help="Keep this many leading layers.")] = None,
    engram_vocab_size: Annotated[int | None, typer.Option(help="Rows of the smallest Engram sub-table, to shrink the tables.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to copy; else one is made up.")] = None,
    shard_bytes: Annotated[int, typer.Option(min=1, help="Largest shard (an Engram table has its own).")] = SHARD_BYTES,
) -> None:
    """Write a checkpoint with random weights. Example: deepinfer checkpoint make DIR --geometry tiny --seed 1"""
    config = geometry(geometry_name, layers=layers, engram_vocab_size=engram_vocab_size)
    if tokenizer is None and geometry_name == "small":
        tokenizer = shipped_checkpoint()
    total = sum(spec.nbytes for spec in expected_tensors(config).values())
    with _progress(total, "make") as bar:
        write_checkpoint(directory, config, seed, tokenizer=tokenizer, shard_bytes=shard_bytes, on_bytes=bar.update)
    print(f"{directory}: geometry {geometry_name}, seed {seed}, {total} bytes of random weights")


def release_cache(text: TextConfig) -> CacheReport:
    """Cache sizes of a model in the release's storage formats, with drafts as deep as its drafter goes."""
    entries = CacheFormat.FP4 if text.use_fp4_sparse_kv else CacheFormat.FP8
    return CacheLayout.of(text, CacheFormat.FP8, entries, CacheFormat.FP4_INDEX, num_draft_tokens=text.dspark_block_size).report()


def _progress(total: int, what: str) -> Any:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty())


def _as_json(report: CheckpointReport, cache: CacheReport) -> dict[str, Any]:
    return {
        "total": report.total._asdict(),
        "components": [row._asdict() for row in report.components],
        "formats": [row._asdict() for row in report.formats],
        "cache": asdict(cache),
    }


def _print(report: CheckpointReport, cache: CacheReport) -> None:
    _table("component", [*report.components, report.total])
    _table("format", report.formats)
    print("cache in the release's formats, bytes")
    print(f"  per token, compressed entries and index keys: {cache.bytes_per_token}")
    for layer, main, index in cache.per_layer:
        print(f"    source layer {layer}: {main:g} + {index:g}")
    print(f"  page, padded: {cache.page_stride}")
    print(
        f"  state slot of a sequence: {cache.slot_bytes} (window rings of {cache.ring_rows} rows: {cache.stored_bytes} encoder, "
        f"{cache.dropped_bytes} decoder and drafts; compressor rings: {cache.compressor_bytes})"
    )


def _table(title: str, rows: Any) -> None:
    width = max(len(title), *(len(row.name) for row in rows))
    print(f"{title:<{width}} {'tensors':>9} {'parameters':>19} {'bytes':>19}")
    for row in rows:
        print(f"{row.name:<{width}} {row.tensors:>9,} {row.parameters:>19,} {row.nbytes:>19,}")
    print()
