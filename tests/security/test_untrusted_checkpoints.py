"""A checkpoint folder is data: nothing in it runs, nothing outside it is read, and broken sizes allocate nothing."""

from __future__ import annotations

import ast
import json
import pickle
import resource
import shutil
import struct
from pathlib import Path

import pytest

import deepinfer_backends
import deepinfer_core
from deepinfer_core import LLM, SamplingParams
from deepinfer_core.checkpoint.geometries import shipped_checkpoint
from deepinfer_core.errors import CheckpointError, ConfigError, DeepInferError

SHARD, INDEX = "model-00001-of-00004.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(shipped_checkpoint(), tmp_path / "model")


def start(folder, **options):
    return LLM(model=folder, backend="cpu_ref", max_num_seqs=2, max_model_len=64, **options)


class Trap:
    """Leaves a mark if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_pickles_code_and_templates_of_a_checkpoint_are_left_alone(folder, tmp_path):
    mark = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    for name in ("modeling_deepseek.py", "configuration_deepseek.py", "tokenization.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(code)
    for name in ("pytorch_model.bin", "model.pt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_deepseek.Model", "AutoConfig": "configuration_deepseek.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    with start(folder) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=1), progress=False)[0].token_ids
    assert not mark.exists()


def test_trust_remote_code_is_refused():
    with pytest.raises(ConfigError, match=r"trust_remote_code.*code from a checkpoint is never run"):
        LLM(trust_remote_code=True)


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", ""])
def test_an_index_cannot_point_outside_the_folder(folder, place):
    shutil.copy(folder / SHARD, folder.parent / "outside.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: place if file == SHARD else file for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        start(folder)
    assert INDEX in str(caught.value)


@pytest.mark.parametrize("size", [2**63, 2**40, 600 << 20])
def test_a_header_that_claims_to_be_huge_allocates_nothing(folder, size):
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(struct.pack("<Q", size) + data[8:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=SHARD):
        start(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", INDEX, "generation_config.json"])
@pytest.mark.parametrize("content", ["", "[1]", "null", "{", '{"a": ' * 3000, "\x00\xff"])
def test_malformed_json_is_an_explained_error(folder, file, content):
    (folder / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(DeepInferError) as caught:
        start(folder)
    assert file in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("vocab_size", -1),
        ("sliding_window", 0),
        ("n_routed_experts", 1.5),
        ("rope_theta", float("nan")),
        ("compress_ratios", [0] * 10**5),
        ("head_dim", True),
        ("index_topk", "8"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DeepInferError) as caught:
        start(folder)
    assert len(str(caught.value)) < 20_000


def test_special_tokens_in_a_users_text_are_text():
    with start(shipped_checkpoint()) as llm:
        specials = {llm.tokenizer.decode([token]) for token in llm.tokenizer.special_token_ids}
        output = llm.generate("".join(sorted(specials)), SamplingParams(max_tokens=1), progress=False)[0]
        inside = output.prompt_token_ids[1:]  # the first is the engine's own begin-of-sequence
    assert specials
    assert not set(inside) & llm.tokenizer.special_token_ids


def calls(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, f"import {name}") for name in names)
        elif isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_no_module_uses_pickle_eval_or_a_shell():
    forbidden = {"eval", "exec", "torch.load", "os.system", "os.popen", "import pickle", "import dill", "import marshal", "import shelve"}
    roots = [Path(deepinfer_core.__file__).parent, Path(next(iter(deepinfer_backends.__path__)))]
    found = [
        f"{path.name}:{line} {name}" for root in roots for path in root.rglob("*.py") for line, name in calls(path) if name in forbidden
    ]
    assert not found
