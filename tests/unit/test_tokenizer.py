"""The tokenizer: golden prompts, the special-token policy, and incremental text that equals the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from deepinfer_core.checkpoint.geometries import raw_geometry, shipped_checkpoint
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.checkpoint.tokenizer import Tokenizer
from deepinfer_core.errors import CheckpointError

GOLDENS = Path(__file__).parents[1] / "data" / "goldens_small"
CONFIG = ModelConfig.load(shipped_checkpoint())
TOKENIZER = Tokenizer.load(shipped_checkpoint(), CONFIG)
LIBRARY = RawTokenizer.from_file(str(shipped_checkpoint() / "tokenizer.json"))
IDS = st.lists(st.integers(0, 767), max_size=40)
TEXT = st.text(max_size=40) | st.text("日本語中文한국어😀👩‍👩‍👧🇫🇷éa\n ", max_size=20)


def test_golden_prompts():
    prompts = json.loads((GOLDENS / "prompts.json").read_text())
    assert prompts
    for prompt in prompts.values():
        assert TOKENIZER.encode(prompt["text"], parse_special=True) == prompt["ids"]
        assert TOKENIZER.decode(prompt["ids"]) == prompt["text"]


def test_bos_policy():
    plain = TOKENIZER.encode("Con", add_bos=False)
    assert TOKENIZER.encode("Con") == [0, *plain] == TOKENIZER.encode("Con", add_bos=True)
    assert TOKENIZER.encode("") == [0]
    rendered = "<｜begin▁of▁sentence｜>Con"
    assert TOKENIZER.encode(rendered, parse_special=True) == [0, *plain]
    assert TOKENIZER.encode(rendered, parse_special=True, add_bos=True) == [0, 0, *plain]
    native = Tokenizer.load(shipped_checkpoint(), CONFIG.model_copy(update={"tokenizer_compatibility": "native"}))
    assert native.encode("Con") == plain


def test_special_spellings_in_user_text_are_text():
    added = LIBRARY.get_added_tokens_decoder()
    assert len(added) == 35
    for number, token in added.items():
        ids = TOKENIZER.encode(f"a{token.content}b", add_bos=False)
        assert not set(ids) & added.keys(), token.content
        assert TOKENIZER.decode(ids) == f"a{token.content}b"
        assert number in TOKENIZER.encode(f"a{token.content}b", parse_special=True)


def test_special_tokens_can_be_skipped():
    think = TOKENIZER.token_id("<think>")
    ids = [0, think, *TOKENIZER.encode("Con", add_bos=False), 1]
    assert TOKENIZER.decode(ids) == "<｜begin▁of▁sentence｜><think>Con<｜end▁of▁sentence｜>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>Con" == LIBRARY.decode(ids, skip_special_tokens=True)
    stream = TOKENIZER.incremental(skip_special_tokens=True)
    assert stream.feed(ids) + stream.flush() == "<think>Con"


def test_ids_of_the_config():
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, TOKENIZER.vocab_size) == (0, 1, 2, 768)
    assert TOKENIZER.token_id("no such token") is None
    assert TOKENIZER.token_bytes(1) == "<｜end▁of▁sentence｜>".encode()


@given(TEXT)
def test_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_bos=False)) == text
    if not any(token.content in text for token in LIBRARY.get_added_tokens_decoder().values()):
        assert TOKENIZER.encode(text, add_bos=False) == LIBRARY.encode(text, add_special_tokens=False).ids


@given(IDS)
def test_decode_equals_the_library(ids):
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)


@settings(max_examples=300)
@given(IDS | TEXT.map(TOKENIZER.encode), st.integers(1, 5))
def test_deltas_join_to_the_whole(ids, step):
    stream = TOKENIZER.incremental()
    deltas = [stream.feed(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join(deltas) + stream.flush() == TOKENIZER.decode(ids)


@given(TEXT)
def test_valid_text_never_shows_a_broken_character(text):
    stream = TOKENIZER.incremental()
    for token in TOKENIZER.encode(text.replace("\ufffd", ""), add_bos=False):
        assert "\ufffd" not in stream.feed([token])
    assert stream.flush() == ""


def test_unfinished_character_is_flushed_once():
    ids = TOKENIZER.encode("😀", add_bos=False)
    assert len(ids) > 1
    stream = TOKENIZER.incremental()
    assert stream.feed(ids[:-1]) == ""
    assert stream.flush() == "\ufffd" == TOKENIZER.decode(ids[:-1])
    assert stream.flush() == ""
    assert stream.feed(ids) == "😀"


@pytest.mark.parametrize("token", [-1, 768, 1 << 40])
def test_id_outside_the_vocabulary(token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 768"):
        TOKENIZER.decode([token])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        TOKENIZER.incremental().feed([5, token])


def test_unusable_files(tmp_path):
    def refused(pattern, config=CONFIG):
        with pytest.raises(CheckpointError, match=pattern):
            Tokenizer.load(tmp_path, config)

    refused(r"tokenizer\.json does not exist")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(r"tokenizer\.json is no tokenizer")
    content = json.loads((shipped_checkpoint() / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"decoder": {"type": "Fuse"}}))
    refused(r"decoder is 'Fuse'; expected 'ByteLevel'; use the tokenizer\.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused(
        r"has 768 tokens with ids up to 767; expected every id of text_config\.vocab_size = 512", ModelConfig.parse(raw_geometry("tiny"))
    )
