"""Named model geometries: configs of the exact release schema, from two megabytes to the released dimensions."""

from __future__ import annotations

import copy
from importlib.resources import files
from pathlib import Path
from typing import Any

from deepinfer_core.checkpoint.hashing import table_primes
from deepinfer_core.checkpoint.schema import ModelConfig, TextConfig, read_json
from deepinfer_core.errors import ConfigError, nearest

_HEADER: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "dspark_block_size": 5,
}

# Source: config.json of the DeepSeek-V4.1-Flash release.
_FLASH: dict[str, Any] = {
    **_HEADER,
    "transformers_version": "5.6.0",
    "image_token_id": 129264,
    "text_config": {
        **_TEXT,
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "max_position_embeddings": 1048576,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "downsample_ratio": 3,
        "rope_theta": 10000,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

# Every branch in eight layers: local; full, reuse, reindex (ratio 2); full + candidate source, reuse, reindex, reuse (ratio 1).
_TINY: dict[str, Any] = {
    **_HEADER,
    "image_token_id": 505,
    "text_config": {
        **_TEXT,
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64},
        "sliding_window": 16,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 3, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 16,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 8,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "engram_layer_ids": [0, 2],
        "engram_num_embeddings": [630, 834],
        "engram_vocab_size": 97,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": 0,
        "num_nextn_predict_layers": 2,
        "dspark_noise_token_id": 500,
        "dspark_target_layer_ids": [6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 14,
        "downsample_ratio": 3,
        "rope_theta": 10000,
        "max_image_tokens": 32,
        "min_pixels": 1764,
        "max_wh_ratio": None,
    },
}

NAMES = ("tiny", "small", "flash")


def shipped_checkpoint() -> Path:
    """Directory of the small random-weight checkpoint inside the installed package."""
    return Path(str(files("deepinfer_core"))) / "data" / "small_v41"


def raw_geometry(name: str | Path, *, layers: int | None = None, engram_vocab_size: int | None = None) -> dict[str, Any]:
    """The `config.json` content of a geometry.

    `name`: one of `NAMES`, or the path of a config.json or of a directory that holds one. `layers`: keep that many leading layers
    (sources, Engram layers and draft targets are adapted). `engram_vocab_size`: another size of the Engram tables.
    Raises: ConfigError for an unknown name or number of layers, CheckpointError for an unreadable config.json.
    """
    if name == "small":
        raw = read_json(shipped_checkpoint() / "config.json")
    elif name in ("tiny", "flash"):
        raw = copy.deepcopy({"tiny": _TINY, "flash": _FLASH}[str(name)])
    elif Path(name).exists():
        raw = read_json(Path(name) / "config.json" if Path(name).is_dir() else Path(name))
    else:
        raise ConfigError(
            f"geometry {str(name)!r} is unknown{nearest(str(name), NAMES)}; expected {', '.join(NAMES)} or the path of a config.json"
        )
    if layers is not None:
        _keep_layers(raw["text_config"], layers)
    if engram_vocab_size is not None:
        raw["text_config"]["engram_vocab_size"] = engram_vocab_size
    text = TextConfig.model_validate(raw["text_config"])
    if text.engram_layer_ids:
        raw["text_config"]["engram_num_embeddings"] = [int(primes.sum()) for primes in table_primes(text)]
    return raw


def geometry(name: str | Path, *, layers: int | None = None, engram_vocab_size: int | None = None) -> ModelConfig:
    """The checked config of a geometry; arguments and errors as of `raw_geometry`."""
    return ModelConfig.parse(raw_geometry(name, layers=layers, engram_vocab_size=engram_vocab_size), where=str(name))


def _keep_layers(text: dict[str, Any], layers: int) -> None:
    total, drafts = text["num_hidden_layers"], text.get("num_nextn_predict_layers", 0)
    if not 1 <= layers <= total:
        raise ConfigError(f"layers is {layers}; expected 1 to {total}, the layers of the geometry; choose a number in this range")
    text["num_hidden_layers"] = layers
    text["compress_ratios"] = text["compress_ratios"][:layers] + [0] * drafts
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "index_k_source_layer_ids", "engram_layer_ids"):
        if text.get(key) is not None:
            text[key] = [layer for layer in text[key] if layer < layers]
    source = text.get("candidate_source_layer_id")
    if source is not None and source >= layers:
        text["candidate_source_layer_id"] = None
    if drafts:
        targets = min(len(text["dspark_target_layer_ids"]), layers)
        text["dspark_target_layer_ids"] = list(range(layers - targets, layers))
