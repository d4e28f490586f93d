"""What each layer does, derived from the id lists of the config, and the rules these lists must obey.

Source: structure of the DeepSeek-V4.1-Flash release and DeepInfer 0.1.0's config checks (model notes, section 1.5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_core.checkpoint.hashing import table_primes

if TYPE_CHECKING:
    from deepinfer_core.checkpoint.schema import ModelConfig, TextConfig

BLOCK = 32  # side of a quantisation block of fp8 linears and length of a scale group


@dataclass(frozen=True)
class LayerSpec:
    """What one layer reads and produces."""

    index: int  # layer number, or number of the draft block
    ratio: int  # tokens per compressed entry; 0: sliding window only
    kv_source: int | None = None  # layer whose compressed entries it attends to; the three sources are None iff ratio is 0
    index_source: int | None = None  # layer whose selection of entries it uses
    index_k_source: int | None = None  # layer whose index keys that selection scores
    is_kv_source: bool = False  # has a compressor
    is_index_source: bool = False  # runs the indexer
    is_index_k_source: bool = False  # stores index keys
    is_candidate_source: bool = False  # publishes candidate blocks
    uses_candidates: bool = False  # runs the indexer inside the candidate blocks of an earlier layer
    engram: int | None = None  # position in the engram lists, or None
    is_decoder: bool = False  # at or after the first layer with ratio 1


def source_of(ids: Sequence[int], layer: int) -> int | None:
    """The largest listed id that is not above `layer`, or None."""
    return max((source for source in ids if source <= layer), default=None)


def layer_specs(text: TextConfig) -> tuple[LayerSpec, ...]:
    """The backbone layers of a structurally valid config."""
    return tuple(_layer_spec(text, layer) for layer in range(text.num_hidden_layers))


def draft_specs(text: TextConfig) -> tuple[LayerSpec, ...]:
    """The draft blocks."""
    return tuple(LayerSpec(index=block, ratio=0) for block in range(text.num_nextn_predict_layers))


def _layer_spec(text: TextConfig, layer: int) -> LayerSpec:
    ratio = text.compress_ratios[layer]
    engram = text.engram_layer_ids.index(layer) if layer in text.engram_layer_ids else None
    is_decoder = text.boundary is not None and layer >= text.boundary
    if ratio == 0:
        return LayerSpec(index=layer, ratio=0, engram=engram, is_decoder=is_decoder)
    index_source = source_of(text.index_source_layer_ids, layer)
    candidate = text.candidate_source
    return LayerSpec(
        index=layer,
        ratio=ratio,
        kv_source=source_of(text.kv_source_layer_ids, layer),
        index_source=index_source,
        index_k_source=source_of(text.index_k_sources, layer),
        is_kv_source=layer in text.kv_source_layer_ids,
        is_index_source=index_source == layer,
        is_index_k_source=layer in text.index_k_sources,
        is_candidate_source=layer == candidate,
        uses_candidates=index_source == layer and candidate is not None and layer > candidate,
        engram=engram,
        is_decoder=is_decoder,
    )


def structural_problems(config: ModelConfig) -> list[str]:
    """Every rule that a field-wise valid config breaks: field, value, expectation, remedy."""
    text = config.text_config
    if len(text.compress_ratios) not in (text.num_hidden_layers, text.num_hidden_layers + text.num_nextn_predict_layers):
        return [
            f"text_config.compress_ratios has {len(text.compress_ratios)} entries; expected {text.num_hidden_layers} (num_hidden_layers), "
            f"or {text.num_nextn_predict_layers} more (num_nextn_predict_layers); correct one of the three fields"
        ]
    checks = (_source_problems, _segment_problems, _candidate_problems, _engram_problems, _draft_problems, _size_problems)
    problems = [problem for check in checks for problem in check(text)]
    return problems + list(_token_problems(config)) + list(_vision_problems(config))


def _source_problems(text: TextConfig) -> Iterator[str]:
    n = text.num_hidden_layers
    if any(text.compress_ratios[n:]):
        yield f"text_config.compress_ratios ends with {list(text.compress_ratios[n:])}; expected 0 for each draft block; write zeros there"
    lists = {
        "kv_source_layer_ids": text.kv_source_layer_ids,
        "index_k_source_layer_ids": text.index_k_sources,
        "index_source_layer_ids": text.index_source_layer_ids,
    }
    for name, ids in lists.items():
        if list(ids) != sorted(set(ids)) or any(source >= n for source in ids):
            yield f"text_config.{name} is {list(ids)}; expected ascending layer numbers below {n}; correct the list"
        flat = [source for source in ids if source < n and text.compress_ratios[source] == 0]
        if flat:
            yield f"text_config.{name} names layers {flat} with compress ratio 0; expected ratio 1 or 2 there; correct one of the lists"
    for (inner, inner_ids), (outer, outer_ids) in zip(list(lists.items()), list(lists.items())[1:], strict=False):
        if set(inner_ids) - set(outer_ids):
            yield f"text_config.{inner} is {list(inner_ids)}; expected a subset of {outer} {list(outer_ids)}; correct one of the lists"
    boundary = text.boundary
    if boundary is not None and boundary not in text.kv_source_layer_ids:
        yield (
            f"text_config.kv_source_layer_ids is {list(text.kv_source_layer_ids)}; expected it to hold {boundary}, the first layer with "
            "ratio 1, because no entries are shared across the encoder/decoder boundary; add it"
        )


def _segment_problems(text: TextConfig) -> Iterator[str]:
    for name, ids in (("kv_source_layer_ids", text.kv_source_layer_ids), ("index_source_layer_ids", text.index_source_layer_ids)):
        for layer in range(text.num_hidden_layers):
            ratio, source = text.compress_ratios[layer], source_of(ids, layer)
            if source is None and ratio:
                yield f"text_config.{name} is {list(ids)}; expected a source at or before layer {layer}, whose ratio is {ratio}; add one"
            elif source is not None and ratio != text.compress_ratios[source]:
                yield (
                    f"text_config.compress_ratios[{layer}] is {ratio}; expected {text.compress_ratios[source]} as of its source "
                    f"layer {source} in {name}; make layer {layer} a source or change its ratio"
                )


def _candidate_problems(text: TextConfig) -> Iterator[str]:
    source = text.candidate_source
    if source is None:
        return
    if source not in text.index_source_layer_ids:
        yield (
            f"text_config.candidate_source_layer_id is {source}; expected null or one of index_source_layer_ids "
            f"{list(text.index_source_layer_ids)}; correct it"
        )
        return
    ratios = set(text.compress_ratios[source : text.num_hidden_layers])
    if len(ratios) > 1:
        yield f"text_config.candidate_source_layer_id is {source}; expected one ratio from there on, not {sorted(ratios)}; correct the list"
    covered = text.candidate_topk_blocks * text.candidate_block_size
    if covered < text.index_topk:
        yield (
            f"text_config.candidate_topk_blocks * candidate_block_size is {covered}; expected at least index_topk {text.index_topk}; "
            "correct the three fields"
        )


def _engram_problems(text: TextConfig) -> Iterator[str]:
    ids = text.engram_layer_ids
    if not ids:
        return
    limit = text.num_hidden_layers if text.boundary is None else text.boundary
    if list(ids) != sorted(set(ids)) or ids[-1] >= limit:
        yield f"text_config.engram_layer_ids is {list(ids)}; expected ascending encoder layers, below {limit}; correct the list"
    if text.engram_max_ngram_size < 2:
        yield f"text_config.engram_max_ngram_size is {text.engram_max_ngram_size}; expected at least 2; correct it"
        return
    for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim"):
        if getattr(text, name) < 1:
            yield f"text_config.{name} is missing or 0; expected a positive integer when there are engram layers; add it"
            return
    rows = [int(primes.sum()) for primes in table_primes(text)]
    if list(text.engram_num_embeddings) != rows:
        yield (
            f"text_config.engram_num_embeddings is {list(text.engram_num_embeddings)}; expected {rows}, the sums of the hash primes that "
            "follow from the other engram fields; correct whichever is wrong"
        )


def _draft_problems(text: TextConfig) -> Iterator[str]:
    if not text.num_nextn_predict_layers:
        return
    names = ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok")
    for name in names:
        if getattr(text, name) < 1:
            yield f"text_config.{name} is missing or 0; expected a positive integer when there are draft blocks; add it"
    targets = text.dspark_target_layer_ids
    if not targets or list(targets) != sorted(set(targets)) or targets[-1] >= text.num_hidden_layers:
        yield (
            f"text_config.dspark_target_layer_ids is {list(targets)}; expected ascending layer numbers below {text.num_hidden_layers}, "
            "at least one; correct the list"
        )
    if text.dspark_num_experts_per_tok > text.dspark_n_routed_experts:
        yield (
            f"text_config.dspark_num_experts_per_tok is {text.dspark_num_experts_per_tok}; expected at most dspark_n_routed_experts "
            f"{text.dspark_n_routed_experts}; correct one of them"
        )


def _size_problems(text: TextConfig) -> Iterator[str]:
    if text.num_attention_heads % text.o_groups:
        yield f"text_config.o_groups is {text.o_groups}; expected a divisor of num_attention_heads {text.num_attention_heads}; correct one"
        return
    sizes = {
        "hidden_size": text.hidden_size,
        "q_lora_rank": text.q_lora_rank,
        "head_dim": text.head_dim,
        "index_head_dim": text.index_head_dim,
        "moe_intermediate_size": text.moe_intermediate_size,
        "num_attention_heads * head_dim / o_groups": text.num_attention_heads * text.head_dim // text.o_groups,
        "o_groups * o_lora_rank": text.o_groups * text.o_lora_rank,
    }
    if text.engram_layer_ids:
        sizes["engram_head_dim"] = text.engram_head_dim
    for name, size in sizes.items():
        if size % BLOCK:
            yield f"text_config.{name} is {size}; expected a multiple of {BLOCK}, the quantisation block; the release format cannot hold it"
    rotary = text.qk_rope_head_dim
    if rotary % 2 or rotary > min(text.head_dim, text.index_head_dim):
        yield (
            f"text_config.qk_rope_head_dim is {rotary}; expected an even number up to head_dim {text.head_dim} and index_head_dim "
            f"{text.index_head_dim}; correct it"
        )
    if text.num_experts_per_tok > text.n_routed_experts:
        yield (
            f"text_config.num_experts_per_tok is {text.num_experts_per_tok}; expected at most n_routed_experts {text.n_routed_experts}; "
            "correct one of them"
        )


def _token_problems(config: ModelConfig) -> Iterator[str]:
    text = config.text_config
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
    ids["text_config.dspark_noise_token_id"] = text.dspark_noise_token_id
    ids["text_config.engram_pad_token_id"] = text.engram_pad_token_id
    for name, value in ids.items():
        if value >= text.vocab_size:
            yield f"{name} is {value}; expected an id below vocab_size {text.vocab_size}; correct it"


def _vision_problems(config: ModelConfig) -> Iterator[str]:
    vision = config.vision_config
    if vision.hidden_size % (4 * vision.num_attention_heads):
        yield (
            f"vision_config.num_attention_heads is {vision.num_attention_heads}; expected hidden_size {vision.hidden_size} to give heads "
            "whose size is a multiple of 4 (two rotary axes); correct one of them"
        )
