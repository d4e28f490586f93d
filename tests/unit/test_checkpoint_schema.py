"""config.json: every rule is refused with field, value and expectation; layer specs of the known geometries."""

from __future__ import annotations

import json

import pytest

from deepinfer_core.checkpoint.geometries import geometry, raw_geometry, shipped_checkpoint
from deepinfer_core.checkpoint.schema import ModelConfig
from deepinfer_core.errors import CheckpointError, ConfigError

TOP = {"architectures", "model_type", "dtype", "tie_word_embeddings", "tokenizer_compatibility", "eos_token_id"}


def changed(name="tiny", **fields):
    """A geometry's raw config with fields replaced, or removed where the value is `...`; `section__field` names another section."""
    raw = raw_geometry(name)
    for key, value in fields.items():
        section, _, field = key.rpartition("__")
        target = raw if field in TOP else raw[section or "text_config"]
        target[field] = value
        if value is ...:
            del target[field]
    return raw


def problems(raw):
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.parse(raw)
    return caught.value.problems


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM", "DeepseekV41ForCausalLM"]),
        ({"model_type": "deepseek_v3"}, ["model_type", "deepseek_v3", "deepseek_v41"]),
        ({"dtype": "float16"}, ["dtype", "float16", "bfloat16"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings", "True", "False"]),
        ({"tokenizer_compatibility": "fast"}, ["tokenizer_compatibility", "fast", "release", "native"]),
        ({"quantization_config__expert_dtype": "fp8"}, ["quantization_config.expert_dtype", "fp8", "fp4"]),
        ({"quantization_config__weight_block_size": [128, 128]}, ["weight_block_size[0]", "128", "32"]),
        ({"scoring_func": "softmax"}, ["text_config.scoring_func", "softmax", "sqrtsoftplus"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads", "8", "expected 1"]),
        ({"gate_temp": 2.0}, ["gate_temp", "2.0"]),
        ({"hc_shifted": False}, ["hc_shifted", "False", "True"]),
        ({"hidden_size": 0}, ["hidden_size", "0", "greater than 0"]),
        ({"hidden_size": "256"}, ["hidden_size", "'256'", "integer"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.rope_type", "linear", "yarn"]),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 3, 0, 0]}, ["compress_ratios[7]", "3", "0, 1 or 2"]),
        ({"compress_ratios": [0, 2, 2]}, ["compress_ratios", "3 entries", "expected 8"]),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 1]}, ["compress_ratios", "draft block"]),
        ({"kv_source_layer_ids": [4, 1]}, ["kv_source_layer_ids", "[4, 1]", "ascending"]),
        ({"kv_source_layer_ids": [0, 1, 4], "index_source_layer_ids": [0, 1, 3, 4, 6]}, ["layers [0]", "ratio 0"]),
        ({"index_source_layer_ids": [1, 3, 6]}, ["index_k_source_layer_ids", "subset of index_source_layer_ids"]),
        ({"kv_source_layer_ids": [1], "candidate_source_layer_id": None}, ["kv_source_layer_ids", "hold 4", "boundary"]),
        ({"kv_source_layer_ids": [4]}, ["kv_source_layer_ids", "source at or before layer 1"]),
        ({"compress_ratios": [0, 2, 0, 2, 1, 1, 1, 1]}, ["compress_ratios[2]", "0", "expected 2", "layer 1", "kv_source_layer_ids"]),
        ({"candidate_source_layer_id": 5}, ["candidate_source_layer_id", "5", "index_source_layer_ids"]),
        ({"candidate_source_layer_id": 1}, ["candidate_source_layer_id", "one ratio", "[1, 2]"]),
        ({"candidate_topk_blocks": 1}, ["candidate_topk_blocks", "8", "index_topk 16"]),
        ({"engram_layer_ids": [0, 4]}, ["engram_layer_ids", "[0, 4]", "below 4"]),
        ({"engram_num_embeddings": [630, 835]}, ["engram_num_embeddings", "835", "[630, 834]"]),
        ({"engram_n_heads": 0}, ["engram_n_heads", "missing or 0"]),
        ({"engram_max_ngram_size": 1}, ["engram_max_ngram_size", "at least 2"]),
        ({"dspark_block_size": ...}, ["dspark_block_size", "missing or 0"]),
        ({"dspark_target_layer_ids": [7, 8]}, ["dspark_target_layer_ids", "[7, 8]", "below 8"]),
        ({"dspark_num_experts_per_tok": 5}, ["dspark_num_experts_per_tok", "5", "dspark_n_routed_experts 4"]),
        ({"o_groups": 3}, ["o_groups", "3", "num_attention_heads 4"]),
        ({"moe_intermediate_size": 48}, ["moe_intermediate_size", "48", "multiple of 32"]),
        ({"qk_rope_head_dim": 129}, ["qk_rope_head_dim", "129", "even"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "n_routed_experts 8"]),
        ({"eos_token_id": 512}, ["eos_token_id", "512", "vocab_size 512"]),
        ({"vision_config__num_attention_heads": 3}, ["vision_config.num_attention_heads", "3", "multiple of 4"]),
        ({"vision_config__max_wh_ratio": 0.5}, ["max_wh_ratio", "0.5", "greater than or equal to 1"]),
    ],
)
def test_refused(fields, words):
    found = problems(changed(**fields))
    assert any(all(word in problem for word in words) for problem in found), found


def test_all_problems_at_once():
    found = problems(changed(scoring_func="softmax", hidden_size=-1, eos_token_id=-3))
    assert len(found) == 3


def test_missing_field_names_the_close_one():
    raw = changed(n_routed_experts=...)
    raw["text_config"]["n_routed_expert"] = 8
    assert any("did you mean 'n_routed_expert'" in problem for problem in problems(raw))


def test_optional_fields_and_spellings():
    raw = changed(index_k_source_layer_ids=None, candidate_source_layer_id=-1, engram_layer_ids=[], num_nextn_predict_layers=0)
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:8]
    scaling = raw["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    text = ModelConfig.parse(raw).text_config
    assert text.candidate_source is None
    assert text.index_k_sources == text.kv_source_layer_ids
    assert text.rope_scaling.rope_type == "yarn"
    assert text.draft_layers == ()
    assert not any(layer.uses_candidates or layer.is_candidate_source or layer.engram is not None for layer in text.layers)


def test_ratios_without_draft_entries():
    assert ModelConfig.parse(changed(compress_ratios=[0, 2, 2, 2, 1, 1, 1, 1])).text_config.layers == geometry("tiny").text_config.layers


def test_layers_of_the_release():
    text = geometry("flash").text_config
    layers = text.layers
    assert [layer.ratio for layer in layers] == [0, 0] + [2] * 18 + [1] * 20
    assert [layer.index for layer in layers if layer.is_kv_source] == [2, 8, 14, 20]
    assert [layer.index for layer in layers if layer.is_index_source] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layer.index for layer in layers if layer.uses_candidates] == [24, 28, 32, 36]
    assert [layer.index for layer in layers if layer.is_candidate_source] == [20]
    assert [(layer.index, layer.engram) for layer in layers if layer.engram is not None] == [(1, 0), (14, 1)]
    assert text.boundary == 20
    assert [layer.index for layer in layers if layer.is_decoder] == list(range(20, 40))
    assert (layers[39].kv_source, layers[39].index_source, layers[39].index_k_source) == (20, 36, 20)
    assert (layers[7].kv_source, layers[7].index_source, layers[1].kv_source) == (2, 2, None)
    assert [layer.ratio for layer in text.draft_layers] == [0, 0, 0]


@pytest.mark.parametrize("name", ["tiny", "small", "flash"])
def test_every_prefix_of_layers_is_valid(name):
    for layers in range(1, geometry(name).text_config.num_hidden_layers + 1):
        assert len(geometry(name, layers=layers).text_config.layers) == layers


def test_geometry_refusals():
    with pytest.raises(ConfigError, match="geometry 'tinny' is unknown; did you mean 'tiny'"):
        geometry("tinny")
    with pytest.raises(ConfigError, match="layers is 9; expected 1 to 8"):
        geometry("tiny", layers=9)


def test_geometry_of_a_config_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_geometry("tiny")))
    assert geometry(tmp_path) == geometry("tiny") == geometry(str(tmp_path / "config.json"))


def test_load(tmp_path):
    assert ModelConfig.load(shipped_checkpoint()).text_config.vocab_size == 768
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        ModelConfig.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"directory .*absent does not exist"):
        ModelConfig.load(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds a list; expected an object"):
        ModelConfig.load(tmp_path)


def test_config_is_immutable():
    config = geometry("tiny")
    with pytest.raises(ValueError, match="frozen"):
        config.dtype = "float32"
