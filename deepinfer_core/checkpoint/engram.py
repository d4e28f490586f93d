"""Tables that the Engram hash needs besides the weights: none of them is stored in a checkpoint.

Source: DeepSeek reference inference code, Engram module (model notes, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_core.checkpoint.hashing import multipliers, table_offsets, table_primes
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.tokenizer import load_tokenizer_file
from deepinfer_core.errors import CheckpointError

REPLACEMENT = "\ufffd"
_ONE_SPACE = "\ue000"  # private-use stand-in that keeps a text of one space alive through the strip


@dataclass(frozen=True)
class EngramTables:
    """Constants of all Engram layers, in the order of `engram_layer_ids`. C = (max n-gram size - 1) * heads columns."""

    token_map: np.ndarray  # int64 [vocab_size]: token id -> compressed token number
    pad_id: int  # compressed number that stands for tokens before the start or behind an image
    multipliers: np.ndarray  # int64 [layers, max n-gram size]
    primes: np.ndarray  # int64 [layers, C]
    offsets: np.ndarray  # int64 [layers, C]


def engram_tables(config: ModelConfig, tokenizer_path: str | Path) -> EngramTables:
    """Build the tables of a config with Engram layers from `tokenizer_path` (the directory of tokenizer.json, or the file).

    Raises: CheckpointError if the token map has another size than `engram_compressed_vocab_size`, or the tokenizer is unusable.
    """
    text = config.text_config
    if text.engram_compressed_vocab_size:
        token_map = token_map_of(load_tokenizer_file(tokenizer_path, text.vocab_size))
        vocab = int(token_map.max()) + 1
        if vocab != text.engram_compressed_vocab_size:
            raise CheckpointError(
                f"tokenizer.json: its Engram token map has {vocab} entries; expected text_config.engram_compressed_vocab_size = "
                f"{text.engram_compressed_vocab_size}; use the tokenizer that was published with these weights",
                str(tokenizer_path),
            )
    else:
        token_map, vocab = np.arange(text.vocab_size, dtype=np.int64), text.vocab_size
    primes = np.stack(table_primes(text))
    return EngramTables(
        token_map=token_map,
        pad_id=int(token_map[text.engram_pad_token_id]),
        multipliers=np.stack([multipliers(layer, vocab, text.engram_max_ngram_size) for layer in text.engram_layer_ids]),
        primes=primes,
        offsets=np.stack([table_offsets(row) for row in primes]),
    )


def token_map_of(tokenizer: Tokenizer) -> np.ndarray:
    """Number of each token id after merging tokens whose text normalises alike: int64 [vocab_size], numbered by first appearance."""
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    token_map = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token in range(len(token_map)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = str(tokenizer.id_to_token(token)) if REPLACEMENT in text else normalizer.normalize_str(text) or text
        token_map[token] = numbers.setdefault(key, len(numbers))
    return token_map


def _normalizer() -> normalizers.Sequence:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _ONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_ONE_SPACE, " "),
        ]
    )
