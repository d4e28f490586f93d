"""The host's side of sampling one sequence: parameters, seed, and the little that penalties and limits must remember."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_core.sampling.params import GREEDY_TEMPERATURE, SamplingParams
from deepinfer_core.sampling.random import draft_seed, signed

NO_IDS = np.zeros(0, np.int64)


class SamplingState:
    """Sampling of one sequence, from its first to its last token. Survives preemption. Not thread safe.

    `seed` comes from `request_seed`; `eos_ids` are the ids that end a sequence in this model. With `greedy_compat` a temperature below
    1e-5 samples at 1e-5, as DeepInfer 0.1.0 does, instead of taking the exact argmax.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int] | np.ndarray = (),
        eos_ids: Sequence[int] = (),
        greedy_compat: bool = False,
    ) -> None:
        self.params = params
        self.generated = 0  # output tokens so far
        self.greedy = params.is_greedy and not greedy_compat
        self.filtered = not params.is_greedy and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
        self.seeds = (signed(seed), signed(draft_seed(seed)))
        temperature = max(params.temperature, GREEDY_TEMPERATURE)
        filters = (params.top_p, params.min_p) if self.filtered else (1.0, 0.0)
        # temperature that shapes the draw (0: argmax), temperature of reported log-probabilities, top_p, min_p
        self.floats = (0.0 if self.greedy else temperature, 1.0 if self.greedy else temperature, *filters)
        self.top_k = params.top_k if self.filtered else -1
        self.golden = params.golden_token_ids or ()
        self.bias_ids = np.fromiter(params.logit_bias, np.int64)
        self.bias_values = np.fromiter(params.logit_bias.values(), np.float32)
        self.has_penalties = params.has_penalties
        self.is_edited = self.has_penalties or len(self.bias_ids) > 0 or params.min_tokens > 0 or params.first_n_token_no_eos == 1
        self._eos = np.array(eos_ids, np.int64)
        self._stops = np.unique(np.array([*eos_ids, *params.stop_token_ids], np.int64))
        self._counts: dict[int, int] = {}
        self.prompt_ids = np.unique(np.asarray(prompt, np.int64)) if params.repetition_penalty != 1 else NO_IDS

    def append(self, tokens: Iterable[int]) -> None:
        """Records output tokens in the order in which they were emitted."""
        tokens = list(tokens)
        self.generated += len(tokens)
        if self.has_penalties:
            for token in tokens:
                self._counts[token] = self._counts.get(token, 0) + 1

    @property
    def needs_history(self) -> bool:
        """True if the next step's logits or tokens depend on how many or which tokens were generated so far.

        While it is False, a step may be launched before the tokens of the previous one have reached the host.
        """
        limited = self.generated < self.params.min_tokens or (self.params.first_n_token_no_eos == 1 and not self.generated)
        return self.has_penalties or limited or self.generated < len(self.golden)

    def output_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the output so far (int64) and how often each occurs (float32)."""
        return np.fromiter(self._counts, np.int64), np.fromiter(self._counts.values(), np.float32)

    def forbidden(self, row: int) -> np.ndarray:
        """Ids that cannot be generated as output token number `generated + row` (from 0)."""
        at = self.generated + row
        if at < self.params.min_tokens:
            return self._stops
        return self._eos if at == 0 and self.params.first_n_token_no_eos == 1 else NO_IDS

    def forced(self, row: int) -> int:
        """The golden token of output number `generated + row`, or -1."""
        at = self.generated + row
        return self.golden[at] if at < len(self.golden) else -1


@dataclass(frozen=True)
class RequestRows:
    """The rows that one sequence samples from in a step: `drafts` rows that each verify one draft, then one fresh row.

    `position` is the index, in the whole sequence, of the token that the first row generates; it selects the random numbers.
    """

    state: SamplingState
    position: int
    drafts: int = 0
    mask: np.ndarray | None = None  # int32 [drafts + 1, ceil(V/32)]: grammar masks of the rows, 1 = allowed
