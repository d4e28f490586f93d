"""A byte-level tokenizer of any size for random checkpoints: all bytes, pseudo-words, and the special tokens of the config."""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase
from typing import Any

from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.tokenizer import byte_alphabet
from deepinfer_core.errors import ConfigError

BOS, EOS, PAD, IMAGE, NOISE = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜deepseek_image｜>",
    "<｜place▁holder▁no▁799｜>",
)
SPACE = "Ġ"  # the byte alphabet's character for a space


def synthetic_tokenizer(config: ModelConfig) -> dict[str, Any]:
    """The content of a tokenizer.json with exactly the ids 0..vocab_size-1. Raises: ConfigError if the bytes do not fit."""
    size = config.text_config.vocab_size
    special = {config.bos_token_id: BOS, config.eos_token_id: EOS, config.pad_token_id: PAD, config.image_token_id: IMAGE}
    if config.text_config.num_nextn_predict_layers:
        special[config.text_config.dspark_noise_token_id] = NOISE
    free = [number for number in range(size) if number not in special]
    alphabet = byte_alphabet()
    if len(free) < len(alphabet):
        raise ConfigError(
            f"text_config.vocab_size is {size}; expected at least {len(alphabet) + len(special)}, all bytes and special tokens; enlarge it"
        )
    merges = _merges(len(free) - len(alphabet))
    words = [*alphabet, *(left + right for left, right in merges)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for number, content in sorted(special.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(zip(words, free, strict=True)) | {content: number for number, content in special.items()},
            "merges": [list(pair) for pair in merges],
        },
    }


def _merges(count: int) -> list[tuple[str, str]]:
    """The first `count` pairs that build pseudo-words, short ones first: a word is its own prefix plus one letter."""
    merges: list[tuple[str, str]] = []
    prefixes = [SPACE, *ascii_lowercase]
    while len(merges) < count:
        fresh = list(product(prefixes, ascii_lowercase))[: count - len(merges)]
        merges += fresh
        prefixes = [left + right for left, right in fresh]
    return merges
