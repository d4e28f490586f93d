"""The fields of a release `config.json`, one pydantic model per object, named as in the file.

Every field the model computes with is here. Fields documented as optional in the release format have a default, all others are
required. Keys the engine does not know are ignored: converters add informative ones.
Source: config.json of the DeepSeek-V4.1-Flash release; rules of DeepInfer 0.1.0's config reader (model notes, section 1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer_core.checkpoint.structure import LayerSpec, draft_specs, layer_specs, structural_problems
from deepinfer_core.errors import CheckpointError, nearest

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"

Count = Annotated[int, Field(strict=True, gt=0)]
Index = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), populate_by_name=True)


class RopeScaling(_Section):
    """YaRN parameters of layers with compressed entries. The kind is spelt `rope_type` or `type`."""

    rope_type: Literal["yarn"]
    factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    original_max_position_embeddings: Count

    @model_validator(mode="before")
    @classmethod
    def _accept_both_spellings(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or "type" not in raw:
            return raw
        return {"rope_type": raw["type"], **raw}


class QuantizationConfig(_Section):
    """Storage formats of the weights; the release knows one combination."""

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic"]
    weight_block_size: tuple[Literal[32], Literal[32]]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: Literal["fp4"]


class VisionConfig(_Section):
    """The image tower and the limits of image preprocessing."""

    model_type: str = "deepseek_v41_vision"
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    patch_size: Count
    downsample_ratio: Count
    rope_theta: Positive
    max_image_tokens: Count
    min_pixels: Count
    max_wh_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None


class TextConfig(_Section):
    """The language model. `layers` says what each layer does; read it instead of the id lists."""

    model_type: str = "deepseek_v41_text"
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Literal[1]
    head_dim: Count
    qk_rope_head_dim: Count
    q_lora_rank: Count
    o_lora_rank: Count
    o_groups: Count
    attention_bias: Literal[False]
    attention_dropout: Zero
    hidden_act: Literal["silu"]
    swiglu_limit: Positive
    rms_norm_eps: Positive
    max_position_embeddings: Count
    rope_theta: Positive
    compress_rope_theta: Positive
    rope_scaling: RopeScaling | None = None
    sliding_window: Count
    compress_ratios: tuple[Literal[0, 1, 2], ...]  # one per layer, then optionally a 0 for each draft block
    kv_source_layer_ids: tuple[Index, ...]
    index_source_layer_ids: tuple[Index, ...]
    index_k_source_layer_ids: tuple[Index, ...] | None = None  # None: the kv sources
    index_n_heads: Count
    index_head_dim: Count
    index_topk: Count
    candidate_source_layer_id: Annotated[int, Field(strict=True)] | None = None  # None or negative: off
    candidate_topk_blocks: Index = 0  # required when there is a candidate source
    candidate_block_size: Index = 0
    use_fp4_sparse_kv: Annotated[bool, Field(strict=True)] = True  # False: compressed entries are FP8 as the window's
    moe_intermediate_size: Count
    n_routed_experts: Count
    n_shared_experts: Count
    num_experts_per_tok: Count
    scoring_func: Literal["sqrtsoftplus"]
    topk_method: Literal["noaux_tc"]
    norm_topk_prob: Literal[True]
    routed_scaling_factor: Positive
    gate_temp: One = 1.0
    hc_mult: Count
    hc_sinkhorn_iters: Count
    hc_eps: Positive
    hc_shifted: Literal[True] = True
    engram_layer_ids: tuple[Index, ...] = ()
    engram_num_embeddings: tuple[Count, ...] = ()  # rows of each table; the engram fields are required when there are engram layers
    engram_max_ngram_size: Index = 0
    engram_vocab_size: Index = 0
    engram_n_heads: Index = 0
    engram_head_dim: Index = 0
    engram_pad_token_id: Index = 2  # before the token map
    engram_compressed_vocab_size: Index | None = None  # None or 0: no token map
    num_nextn_predict_layers: Index = 0
    dspark_block_size: Index = 0  # the dspark fields are required when there are draft blocks
    dspark_noise_token_id: Index = 0
    dspark_target_layer_ids: tuple[Index, ...] = ()
    dspark_target_attn_input: Literal[True] = True
    dspark_markov_rank: Index = 0
    dspark_n_routed_experts: Index = 0
    dspark_num_experts_per_tok: Index = 0
    sample_from_anchor: Literal[True] = True

    @property
    def index_k_sources(self) -> tuple[int, ...]:
        """Layers that produce index keys."""
        return self.kv_source_layer_ids if self.index_k_source_layer_ids is None else self.index_k_source_layer_ids

    @property
    def candidate_source(self) -> int | None:
        """The layer that publishes candidate blocks, or None when two-level selection is off."""
        source = self.candidate_source_layer_id
        return None if source is None or source < 0 else source

    @property
    def boundary(self) -> int | None:
        """Index of the first decoder layer (the first with ratio 1), or None."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else None

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each backbone layer does, in order."""
        return layer_specs(self)

    @cached_property
    def draft_layers(self) -> tuple[LayerSpec, ...]:
        """The draft blocks `mtp.0`, `mtp.1` …: window-only layers; `index` is the number of the block."""
        return draft_specs(self)


class ModelConfig(_Section):
    """A whole `config.json`. `load` and `parse` check everything; the constructor checks single fields only."""

    architectures: tuple[Literal["DeepseekV41ForCausalLM"]]
    model_type: Literal["deepseek_v41"]
    dtype: Literal["bfloat16"]
    bos_token_id: Index
    eos_token_id: Index
    pad_token_id: Index
    image_token_id: Count
    tie_word_embeddings: Literal[False]
    tokenizer_compatibility: Literal["release", "native"] = "release"
    text_config: TextConfig
    vision_config: VisionConfig
    quantization_config: QuantizationConfig

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Read and check `directory/config.json`.

        Raises: CheckpointError listing every problem: field, value, what was expected, what to do.
        """
        return cls.parse(read_json(Path(directory) / "config.json"), where=str(directory))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "") -> ModelConfig:
        """Check the content of a `config.json`; errors as of `load`, naming `where`."""
        problems = _architecture_problems(raw)
        if problems:
            raise CheckpointError(problems, where)
        try:
            config = cls.model_validate(raw)
        except ValidationError as error:
            raise CheckpointError([_describe(item, raw) for item in error.errors()], where) from None
        problems = structural_problems(config)
        if problems:
            raise CheckpointError([f"config.json: {problem}" for problem in problems], where)
        return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises: CheckpointError if it is missing, unreadable or no object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        where = path.name if path.parent.is_dir() else f"directory {path.parent}"
        raise CheckpointError(
            f"{where} does not exist; expected a DeepSeek-V4.1 checkpoint directory; check the path", str(path.parent)
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON ({error}); download the file again", str(path.parent)) from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path.name} holds a {type(raw).__name__}; expected an object; download the file again", str(path.parent))
    return raw


def _architecture_problems(raw: Mapping[str, Any]) -> list[str]:
    found = {"architectures": raw.get("architectures"), "model_type": raw.get("model_type")}
    expected = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
    return [
        f"config.json: {key} is {found[key]!r}; expected {expected[key]!r}; this engine runs DeepSeek-V4.1 checkpoints only"
        for key in found
        if found[key] != expected[key]
    ]


def _describe(item: Any, raw: Mapping[str, Any]) -> str:
    """One pydantic error as: field, value, expectation, remedy."""
    field = ""
    for part in item["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    if item["type"] == "missing":
        section: Any = raw
        for part in item["loc"][:-1]:
            section = section[part] if isinstance(section, Mapping) and part in section else {}
        hint = nearest(str(item["loc"][-1]), section) if section else ""
        hint = hint if "did you mean" in hint else ""
        return f"config.json: {field} is missing; expected a value{hint}; restore the release's config.json or add the field"
    value = repr(item["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    expected = item["msg"].replace("Input should be ", "").replace("Tuple should have at most", "at most")
    return (
        f"config.json: {field} is {value}; expected {expected}; the engine supports no other value: use a release checkpoint or correct it"
    )
