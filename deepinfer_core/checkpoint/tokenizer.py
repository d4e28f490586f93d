"""Text to token ids and back, with the checkpoint's own `tokenizer.json`. Byte-level BPE only, as in the release."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from deepinfer_core.checkpoint.schema import ModelConfig, read_json
from deepinfer_core.errors import CheckpointError


class Tokenizer:
    """Encoder and decoder of one checkpoint. Immutable; safe to share between threads."""

    def __init__(self, raw: RawTokenizer, config: ModelConfig) -> None:
        self._raw = raw
        self._plain = _without_added_tokens(raw)
        self._release = config.tokenizer_compatibility == "release"
        self.vocab_size = config.text_config.vocab_size
        self.bos_token_id = config.bos_token_id
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.image_token_id = config.image_token_id
        self.special_token_ids = frozenset(token for token, added in raw.get_added_tokens_decoder().items() if added.special)
        self._bytes = _token_bytes(raw)

    @classmethod
    def load(cls, directory: str | Path, config: ModelConfig) -> Tokenizer:
        """Read `directory/tokenizer.json`. Raises: CheckpointError as of `load_tokenizer_file`."""
        return cls(load_tokenizer_file(directory, config.text_config.vocab_size), config)

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_bos`: put the begin-of-sequence id in front. None follows the checkpoint: yes for the release policy (unless special
        tokens are parsed and the text already begins with it), no for `tokenizer_compatibility: native`.
        `parse_special`: recognise the spellings of added tokens (`<think>`, `<｜User｜>` …). By default they are ordinary text, so that
        a user's text can never forge a turn; set it only for prompts rendered by a trusted template.
        """
        ids = (self._raw if parse_special else self._plain).encode(text, add_special_tokens=False).ids
        if add_bos is None:
            add_bos = self._release and ids[:1] != [self.bos_token_id]
        return [self.bos_token_id, *ids] if add_bos else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises: ValueError for an id outside the vocabulary."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(token) for token in ids if token not in skipped).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for. Raises: ValueError for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}; expected 0..{self.vocab_size - 1}")
        return self._bytes[token]

    def token_id(self, spelling: str) -> int | None:
        """The id of the token spelt exactly so in tokenizer.json, or None."""
        return self._raw.token_to_id(spelling)

    def incremental(self, *, skip_special_tokens: bool = False) -> IncrementalDetokenizer:
        """A decoder of one growing output."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)


class IncrementalDetokenizer:
    """Turns a growing sequence of ids into text deltas.

    A delta never ends inside a character: bytes that may still become one wait for the next id. All deltas and the final flush joined
    are `Tokenizer.decode` of all ids. One object per output; not thread safe.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete, perhaps empty. Raises: ValueError for an id outside the vocabulary (nothing is consumed)."""
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(token) for token in ids if token not in self._skipped))

    def flush(self) -> str:
        """The rest at the end of the output: U+FFFD for an unfinished character, else nothing. The object can be used again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def load_tokenizer_file(path: str | Path, vocab_size: int) -> RawTokenizer:
    """The `tokenizers` object of a tokenizer.json (`path` is the file or its directory), checked against the config.

    Raises: CheckpointError if it is missing, cannot be parsed, is not byte-level, or its ids are not exactly 0..vocab_size-1.
    """
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    content = read_json(file)
    try:
        raw = RawTokenizer.from_str(json.dumps(content))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every malformed file
        raise CheckpointError(f"{file.name} is no tokenizer ({error}); download the file again", str(file.parent)) from None
    decoder = (content.get("decoder") or {}).get("type")
    if decoder != "ByteLevel":
        raise CheckpointError(
            f"{file.name}: decoder is {decoder!r}; expected 'ByteLevel'; use the tokenizer.json that was published with these weights",
            str(file.parent),
        )
    ids = set(raw.get_vocab(with_added_tokens=True).values())
    if ids != set(range(vocab_size)):
        raise CheckpointError(
            f"{file.name} has {len(ids)} tokens with ids up to {max(ids, default=-1)}; expected every id of text_config.vocab_size = "
            f"{vocab_size}; use the tokenizer.json that was published with these weights",
            str(file.parent),
        )
    return raw


def _without_added_tokens(raw: RawTokenizer) -> RawTokenizer:
    """The same tokenizer blind to added tokens, so that their spellings are split like any text."""
    content: dict[str, Any] = json.loads(raw.to_str())
    added = {token["content"] for token in content["added_tokens"]}
    content["added_tokens"] = []
    content["post_processor"] = None  # templates there name added tokens; nothing is post-processed here
    model = content["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in added}
    return RawTokenizer.from_str(json.dumps(content))


def _token_bytes(raw: RawTokenizer) -> list[bytes]:
    """Bytes of every id. A token outside the byte alphabet (an added one) stands for its own UTF-8 spelling."""
    alphabet = byte_alphabet()
    table = [b""] * raw.get_vocab_size(with_added_tokens=True)
    for token, number in raw.get_vocab(with_added_tokens=True).items():
        known = all(character in alphabet for character in token)
        table[number] = bytes(alphabet[character] for character in token) if known else token.encode()
    return table


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, inverted.

    Source: GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + position): byte for position, byte in enumerate(others)}
