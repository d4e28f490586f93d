"""Engram constants: published values of the release, and the golden tables of the small checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_core.checkpoint.engram import engram_tables
from deepinfer_core.checkpoint.geometries import geometry, raw_geometry, shipped_checkpoint
from deepinfer_core.checkpoint.hashing import multipliers, primes_above, table_offsets, table_primes
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.errors import CheckpointError

GOLDENS = Path(__file__).parents[1] / "data" / "goldens_small"


def test_release_multipliers():
    assert multipliers(1, 99092, 4).tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert multipliers(14, 99092, 4).tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_release_primes():
    first, second = table_primes(geometry("flash").text_config)
    assert (first - 16000000).tolist() == [
        *(57, 79, 81, 97, 121, 129, 133, 183),
        *(189, 207, 211, 253, 277, 289, 307, 321),
        *(339, 381, 393, 399, 403, 409, 447, 463),
    ]
    assert (second - 16000000).tolist() == [
        *(477, 487, 499, 507, 511, 573, 609, 627),
        *(667, 669, 693, 697, 711, 729, 759, 769),
        *(781, 799, 813, 819, 841, 877, 879, 889),
    ]
    assert (int(first.sum()), int(second.sum())) == (384006168, 384016682)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (
            [0, 2, 2, 2],
            "5702652 24393184 39183301 61503783 78984481 90144770 103724983 121476532 131476717 152385926 164143652 191599181 198145581 "
            "217419202 238329687 247482304 257520185 283540304 288689443 315264704 322314652 348890037 367865216 380066193",
        ),
        (
            [5, 4, 3, 0],
            "22259 23259088 41371678 58272182 67624233 92075454 96301072 117124931 142558994 150547688 162989874 181633912 192289736 "
            "213618501 237612242 249163395 257158353 275816573 297148738 315815167 328259509 346926106 353147228 370926102",
        ),
    ],
)
def test_release_rows(tokens, rows):
    """The hash of a token and its three predecessors (nearest first), written out with the tables."""
    primes = table_primes(geometry("flash").text_config)[0]
    offsets, factors = table_offsets(primes), multipliers(1, 99092, 4)
    found, state = [], tokens[0] * factors[0]
    for size in range(1, 4):
        state = state ^ (tokens[size] * factors[size])
        columns = slice((size - 1) * 8, size * 8)
        found += (state % primes[columns] + offsets[columns]).tolist()
    assert found == [int(row) for row in rows.split()]


def test_tiny_values():
    text = geometry("tiny").text_config
    assert [row.tolist() for row in table_primes(text)] == [[97, 101, 103, 107, 109, 113], [127, 131, 137, 139, 149, 151]]
    assert multipliers(0, 512, 4).tolist() == [11474481670680735, 4860045374305909, 738113388524411, 297735412830395]
    assert multipliers(2, 512, 4).tolist() == [14807183965884349, 7179874451713115, 4383153767543747, 13823440822075059]


def test_goldens_of_the_shipped_checkpoint():
    directory = shipped_checkpoint()
    tables = engram_tables(ModelConfig.load(directory), directory)
    golden = json.loads((GOLDENS / "engram_tables.json").read_text())
    assert tables.token_map.dtype == np.int64
    assert tables.token_map.tolist() == golden["token_map"]
    assert tables.pad_id == golden["pad_id"]
    assert tables.multipliers.tolist() == golden["multipliers"]
    assert tables.primes.reshape(2, 3, 2).tolist() == golden["primes"]
    assert tables.offsets.tolist() == golden["offsets"]


def test_without_token_map(tmp_path):
    tables = engram_tables(geometry("tiny"), tmp_path)
    assert tables.token_map.tolist() == list(range(512))
    assert tables.pad_id == 2


def test_wrong_map_size_is_refused():
    raw = raw_geometry("small")
    raw["text_config"]["engram_compressed_vocab_size"] = 616
    with pytest.raises(
        CheckpointError, match=r"token map has 615 entries; expected .*engram_compressed_vocab_size = 616; use the tokenizer"
    ):
        engram_tables(ModelConfig.parse(raw), shipped_checkpoint())


def test_primes():
    primes = primes_above(-1)
    assert [next(primes) for _ in range(8)] == [2, 3, 5, 7, 11, 13, 17, 19]
