"""THE OPS: every device computation of the model graph and the sampler, as methods of one class.

`Kernels` is a table of ops. It holds no configuration and answers no questions about vendors; the core calls it with tensors and the
small named tuples of `deepinfer_core.backend.types`. `deepinfer_backends.cpu_ref.ReferenceKernels` implements every op in plain
PyTorch on any device and is the base class of other backends, which override what they do natively.

Rules that hold for every op:
* "activation dtype" is bfloat16 in `release` numerics and float32 in `ideal` numerics. Where a docstring says "rounded", the value is
  rounded once, to nearest even, in `release` and not at all in `ideal`; fake quantisation is the identity in `ideal`.
* Accumulation is float32 whatever the inputs.
* Inputs are never modified unless the docstring says "Mutates". Results never alias inputs unless it says so.
* Every op accepts zero rows. Row inputs may be strided in dim 0; their last dim is contiguous.
* A row's result depends on that row's inputs only. Whether it is also bitwise independent of the other rows of the call is the
  `batch_invariant` capability.
* No op needs a value on the host, except `prepare_*`. An implementation that reads one back (the reference does) cannot be captured.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.types import (
    Activation,
    CandidateSpec,
    CompressorRing,
    CompressorRows,
    EngramHashTables,
    ExpertTensors,
    HcConstants,
    HcInput,
    HcWeights,
    IndexQuery,
    PagedEntries,
    QuantTensor,
    RandomRows,
    Rope,
    Routing,
    SamplingRows,
    SelectedEntries,
    Selection,
    Verification,
    Weight,
    WindowKeys,
    WindowRing,
)


class KernelContractError(TypeError):
    """A `Kernels` subclass does not fit the contract; the message lists every problem. `kernels` is the class."""

    def __init__(self, kernels: type[Kernels], problems: Sequence[str]) -> None:
        super().__init__(f"{kernels.__module__}.{kernels.__qualname__} breaks the Kernels contract:\n  " + "\n  ".join(problems))
        self.kernels = kernels


class Kernels(ABC):
    """The ops of one device. Subclasses are checked when they are defined: see `contract_problems`."""

    def __init__(self, device: torch.device, numerics: Numerics = Numerics.RELEASE) -> None:
        self.device = device
        self.numerics = numerics

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        problems = contract_problems(cls)
        if problems:
            raise KernelContractError(cls, problems)

    # ------------------------------------------------------------------ weights, once at load

    @abstractmethod
    def prepare_linear(self, parts: Sequence[QuantTensor]) -> Weight:
        """A weight for `linear` or `quantized_linear` made of `parts` stacked along their outputs.

        Parts share the input size and the format; e4m3 parts have output sizes that are multiples of 32. May keep a reference to the
        given tensors.
        """

    @abstractmethod
    def prepare_experts(self, experts: Iterable[ExpertTensors], count: int) -> Weight:
        """The weights of `count` routed experts, or of one shared expert, for `moe`. `experts` yields them in order of id.

        Formats: e2m1 with scales (routed), e4m3 with scales (shared) or bf16. Consumes the iterator one expert at a time.
        """

    @abstractmethod
    def prepare_engram_table(self, table: QuantTensor) -> Weight:
        """An Engram table for `engram_gather`: weight e4m3 [rows, c], scale e8m0 [rows, c/32]. May keep a reference."""

    # ------------------------------------------------------------------ embedding, norms, linears

    @abstractmethod
    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of `table` [V, D] bf16 at `ids` [T] int64, as [T, D] activation dtype. Ids are in [0, V)."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x * rsqrt(mean(x^2) + eps) * weight` in float32, rounded once. x [T, d] activation dtype or float32; weight [d] bf16."""

    @abstractmethod
    def rms_norm_quantize(self, x: Tensor, weight: Tensor, eps: float) -> Activation:
        """`quantize(rms_norm(x, weight, eps))`."""

    @abstractmethod
    def quantize(self, x: Tensor) -> Activation:
        """FP8 activation quantisation of x [T, d], d a multiple of 32, activation dtype.

        Per block of 32: amax = max(max|x|, 1e-4); scale = 2^ceil(log2(amax / 448)); values e4m3(x / scale) to nearest even.
        """

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        """`x @ weight.T` for an unquantised x [T, in]; float32 accumulation, result [T, out] rounded to the activation dtype.

        With `out_dtype=torch.float32` the accumulator is returned unrounded (router, compressor, head).
        """

    @abstractmethod
    def quantized_linear(self, x: Activation, weight: Weight) -> Tensor:
        """`dequantised(x) @ dequantised(weight).T`, float32 accumulation, rounded: [T, out] activation dtype."""

    # ------------------------------------------------------------------ hyper-connections

    @abstractmethod
    def hc_pre(self, streams: Tensor, pre: Tensor, weights: HcWeights, norm_weight: Tensor, constants: HcConstants) -> HcInput:
        """Coefficients of a sub-layer from `streams`, and its input: the streams collapsed with the PREVIOUS sub-layer's `pre`.

        streams [T, m, D] activation dtype, pre [T, m] float32, norm_weight [D] bf16. With f = float32(streams) flattened stream by
        stream: mix = (f @ fn.T) * rsqrt(mean(f^2) + norm_eps); pre' = sigmoid(mix[:m]*scale[0] + base[:m]) + hc_eps;
        post = 2 sigmoid(mix[m:2m]*scale[1] + base[m:2m]); comb = Sinkhorn of mix[2m:]*scale[2] + base[2m:] seen as [m, m]: softmax of
        rows + hc_eps, then division of columns by (sum + hc_eps), then iters - 1 times rows, columns.
        x = rms_norm(rounded(sum_j pre[j] * streams[j]), norm_weight, norm_eps).
        """

    @abstractmethod
    def hc_post(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """New streams: `post[t, k] * y[t] + sum_j comb[t, j, k] * streams[t, j]` in float32, rounded once: [T, m, D].

        Aliasing: may overwrite and return `streams`.
        """

    @abstractmethod
    def hc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """`sum_j pre[t, j] * streams[t, j]` in float32, rounded once: [T, D] activation dtype."""

    # ------------------------------------------------------------------ attention and caches

    @abstractmethod
    def window_key(self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope) -> Tensor:
        """The shared key/value vector of each row: rms_norm (rounded), rotation of the last rd dims (rounded), FP8 quantise-dequantise
        of all dims in blocks of 32 (rule of `quantize`). kv [T, hd]; result [T, hd] activation dtype.

        Rotation: interleaved pairs, (a, b) -> (a cos - b sin, a sin + b cos).
        """

    @abstractmethod
    def store_window(self, key: Tensor, ring: WindowRing, slots: Tensor) -> None:
        """Stores `key` [T, hd] (from `window_key`) at flat ring rows `slots` [T] int32 = slot*R + offset; -1 stores nothing.

        Mutates: ring.data. Slots >= 0 are distinct. Storing is exact: keys already lie on the format's grid.
        """

    @abstractmethod
    def compress(self, rows: Tensor, ring: CompressorRing, index: CompressorRows, norm_weight: Tensor, eps: float) -> Tensor:
        """Pools the group that each row completes. rows [T, 2*hd] float32: latent, then gate.

        Per channel: a = softmax of the members' gates; pooled = rounded(sum a_i * latent_i); result rms_norm(pooled) [T, hd]. Rows with
        members -1 give zeros. Then keeps `rows` in the ring at `index.slots`. Mutates: ring.data, after all reads.
        """

    @abstractmethod
    def store_entries(self, latent: Tensor, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        """Stores compressed entries: latent [T, hd] rotated (rounded), then quantised to `pages.format`.

        `rope.positions` are the positions of the groups' first tokens. slots [T] int32 = page*n + entry, -1 stores nothing. FP4: per 16
        values, amax = max(max|x|, 6*2^-9), s = e4m3(min(amax/6, 448)), e2m1(clamp(x/s, -6, 6)) to nearest, ties to the even code.
        Mutates: pages.data.
        """

    @abstractmethod
    def store_index_keys(self, key: Tensor, norm_weight: Tensor, eps: float, rope: Rope, pages: PagedEntries, slots: Tensor) -> None:
        """Stores index keys: key [T, d] -> rms_norm (rounded) -> rotation of the last rd dims (rounded) -> `pages.format`.

        FP4_INDEX: per 32 values, amax = max(max|x|, 6*2^-126), s = 2^ceil(log2(amax/6)), e2m1(x/s); in `release` other formats keep
        values of this grid, as queries have it. Slots as in `store_entries`.
        Mutates: pages.data.
        """

    @abstractmethod
    def index_query(self, query: Tensor, rope: Rope) -> IndexQuery:
        """Index queries: query [T, heads, d] rotated (last rd dims, rounded), then FP4 quantised as index keys are."""

    @abstractmethod
    def select_entries(
        self,
        query: IndexQuery,
        head_weights: Tensor,
        keys: PagedEntries,
        visible: Tensor,
        topk: int,
        candidates: Tensor | None = None,
        emit: CandidateSpec | None = None,
        block_size: int = 0,
    ) -> Selection:
        """The `topk` visible entries of each row with the highest score; among equal scores the lower entry wins.

        score[t, j] = sum_h head_weights[t, h] * relu(query[t, h] . key_j), in float32. head_weights [T, heads] float32, the
        constant d^-0.5 * heads^-0.5 already in. visible [T] int32: entries 0 .. visible-1 may be chosen. All are taken if they fit.
        candidates int32 [T, C] (with `block_size`): only entries of these blocks may be chosen. `emit`: also return the best
        `emit.blocks` blocks of `emit.block_size` entries by their highest visible score, among equals the lower block; a row's last
        visible block is always kept.
        """

    @abstractmethod
    def sparse_attention(
        self, query: Tensor, window: WindowKeys, selected: SelectedEntries | None, sink: Tensor, scale: float, rope: Rope
    ) -> Tensor:
        """Attention of query [T, H, hd] over window keys and selected entries, each both key and value for every head.

        The query is rotated first and the output un-rotated last (last rd dims, angle of the row, both rounded).
        s = (q . k) * scale; p = exp(s - max); out = sum p*k / (sum p + exp(sink[h] - max)); sink [H] float32 adds no value. In
        `release` p is rounded to bf16 before the sum over values. A key listed in both sets counts twice. A row without keys gives zeros.
        Result [T, H, hd] activation dtype.
        """

    @abstractmethod
    def attention_output(self, out: Tensor, wo_a: Weight, wo_b: Weight, groups: int) -> Tensor:
        """Grouped low-rank output projection: out [T, H, hd] -> [T, D].

        wo_a is a `prepare_linear` weight [groups * o, H*hd/groups]: group g maps its H/groups consecutive heads to rows g*o .. of it,
        unquantised input, rounded. Then `quantize` and `quantized_linear` with wo_b.
        """

    # ------------------------------------------------------------------ Engram

    @abstractmethod
    def engram_hash(self, ngrams: Tensor, tables: EngramHashTables) -> Tensor:
        """Table rows of each token: ngrams int64 [T, N], own token first; result int64 [T, C].

        h = t_0*mult_0; for i = 1 .. N-1: h ^= t_i*mult_i, giving rows h mod prime + offset for the heads of n-gram size i+1. A row with
        ngrams[t, 0] < 0 has no lookup: -1 in all columns.
        """

    @abstractmethod
    def engram_gather(self, table: Weight, rows: Tensor) -> Activation:
        """The stored rows `rows` [T, C] side by side, as a quantised activation of C*c values; rows of -1 give zeros."""

    @abstractmethod
    def engram_gate(
        self, streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, mask: Tensor | None = None
    ) -> Tensor:
        """Adds the gated Engram value to each stream. streams [T, m, D]; kv [T, m+1, D]: m keys, then the value; weights [m, D] bf16.

        Per stream j in float32: d = sum(H_j * k_j * q_weight_j * k_weight_j) * rsqrt(mean(H_j^2)+eps) * rsqrt(mean(k_j^2)+eps) * D^-0.5;
        g = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)); H_j' = rounded(H_j + g*value). Rows where mask [T] bool is False keep their
        streams. Aliasing: may overwrite and return `streams`.
        """

    # ------------------------------------------------------------------ mixture of experts

    @abstractmethod
    def moe_gate(self, x: Tensor, weight: Weight, bias: Tensor, top_k: int, scale: float) -> Routing:
        """Routing: l = linear(x, weight) in float32; s = sqrt(softplus(l)); the top_k of s + bias, ties to the lower expert;
        weights s / (sum of chosen s + 1e-20) * scale. x [T, D]; bias float32 [E] or [T, E].
        """

    @abstractmethod
    def moe(self, x: Activation, routing: Routing, experts: Weight, shared: Weight | None, limit: float) -> Tensor:
        """Sum of the chosen experts and the shared expert: [T, D] activation dtype.

        Per expert: gate, up = rounded products of x with w1, w3; a = silu(min(gate, limit)) * clamp(up, -limit, limit) * routing weight
        in float32, rounded, quantised; out = rounded(product with w2). y = rounded(sum over experts, ascending expert id, in float32,
        shared expert last with weight 1). Ids of -1 contribute nothing. Backends may keep gate, up and out in float32.
        """

    # ------------------------------------------------------------------ drafting

    @abstractmethod
    def stream_mean(self, streams: Tensor) -> Tensor:
        """Mean over the m streams in float32, rounded: [T, D]. The drafter's view of a layer's input."""

    @abstractmethod
    def markov_logits(self, base: Tensor, previous: Tensor, embed: Tensor, head: Weight) -> Tensor:
        """`base + float32(embed[previous]) @ head.T`: base [Q, V] float32, previous int64 [Q], embed [V, rank]; result [Q, V] float32."""

    @abstractmethod
    def confidence(self, hidden: Tensor, previous: Tensor, embed: Tensor, weight: Tensor, temperature: float) -> Tensor:
        """`sigmoid(clamp(weight . concat(hidden, embed[previous]) / temperature, -60, 60))` in float32: [Q].

        hidden [Q, D] activation dtype, weight [1, D + rank] bf16.
        """

    # ------------------------------------------------------------------ sampling

    @abstractmethod
    def log_probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Log-probabilities after temperature, top-k, top-p and min-p: [Q, V] float32, -inf for removed ids. logits [Q, V] float32.

        p0 = softmax(logits / temperature). Ids ordered by p0 falling, ties by lower id; the kept set is the shortest prefix whose
        mass is strictly greater than top_p, or of top_k ids, whichever is shorter, less ids with p0 < min_p * max p0; never empty. Then
        renormalised. temperature 0: 0 at the lowest argmax, -inf elsewhere.
        """

    @abstractmethod
    def sample(self, log_probs: Tensor, random: RandomRows) -> Tensor:
        """One id per row, int64 [Q], by the canonical draw.

        Integer weights w_i = floor(exp(log_prob_i) * 2^31), to the last bit as in `canonical.integer_exp`, total t; words w0, w1 of
        Philox4x32-10 with key = seed and counter (0, 0, subsequence), subsequence = 3*position (case 0); r = (w1*2^32 + w0) mod t; the
        id whose interval of the running sum, in ascending id order, contains r. A row whose weights are all zero gives the lowest id of
        highest probability.
        """

    @abstractmethod
    def verify(self, target: Tensor, draft: Tensor, drafts: Tensor, random: RandomRows, greedy: Tensor) -> Verification:
        """Rejection sampling of drafts. target, draft [Q, V] float32 log-probabilities; drafts int64 [Q], -1 = no draft in this row.

        Row with a draft x: accepted iff 2*word + 1 <= floor(exp(min(0, target[x] - draft[x])) * 2^33), word = first word of case 2;
        otherwise the token is drawn (case 1) from the integer weights max(w_target - (w_draft * floor(alpha * 2^31) >> 31), 0), alpha =
        exp(-5e-5), or is the argmax of target if they have no mass. Exponentials are `canonical.integer_exp`, weights as in `sample`.
        Row without a draft: `sample`. Rows with greedy [Q] True: accepted iff x is the lowest argmax of target, token = that argmax.
        """

    @abstractmethod
    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Sets logits[rows[i], id] to -inf where bit id & 31 of bitmask[i, id >> 5] is 0. bitmask int32 [n, ceil(V/32)], rows int64 [n].

        Mutates: logits.
        """


OPS: tuple[str, ...] = tuple(sorted(Kernels.__abstractmethods__))
"""Names of all ops of the contract."""


def contract_problems(cls: type[Kernels]) -> list[str]:
    """Every way in which class `cls` does not fit the contract; empty if it does.

    Missing ops are a problem unless the class is abstract on purpose (its name starts with `_`). Public names that the core does not
    know, and signatures that the core could not call, are problems always.
    """
    known = {name for name, _ in inspect.getmembers(Kernels, inspect.isfunction)} | {"device", "numerics"}
    problems = []
    if not cls.__name__.startswith("_"):
        missing = [name for name in OPS if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]
        problems += [f"op {name!r} is missing: implement it or inherit it from ReferenceKernels" for name in missing]
    for owner in cls.__mro__[: cls.__mro__.index(Kernels)]:
        for name, member in vars(owner).items():
            if name.startswith("_"):
                continue
            if name not in known:
                problems.append(
                    f"public name {name!r} ({owner.__name__}) is not in the contract: the core never calls it; rename it to '_{name}'"
                )
            elif name in OPS:
                problems += _signature_problems(name, member)
    return sorted(set(problems))


def _signature_problems(name: str, member: object) -> list[str]:
    want = list(inspect.signature(getattr(Kernels, name)).parameters.values())
    try:
        got = list(inspect.signature(member).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return [f"op {name!r} is not a method"]
    if [(p.name, p.default) for p in want] != [(p.name, p.default) for p in got[: len(want)]]:
        return [f"op {name!r} has parameters ({', '.join(p.name for p in got)}), the core passes ({', '.join(p.name for p in want)})"]
    extra = [p.name for p in got[len(want) :] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [f"op {name!r} needs {', '.join(extra)}, which the core does not pass"] if extra else []
