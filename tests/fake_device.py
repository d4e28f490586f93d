"""A device for scheduler tests: it computes `token = f(all ids before)` from what its page and ring memory really holds.

Every cached position stores the id and a hash of the whole prefix, every window entry its position and that hash. A step reads the
memory as the model would and checks each entry it may attend to, so a page handed to two requests, a stale slot or a wrong position
shows at once. Rejected draft positions are poisoned after each step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.plan import StepPlan, StepResult
from deepinfer_core.engine.verification import allocate_drafts

MASK = (1 << 61) - 1
POISON = (-7, -7)


def mix(state: int, token: int) -> int:
    """Hash of a prefix extended by one id."""
    return ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF) % MASK


def next_token(state: int, vocab: int) -> int:
    """The only token that a prefix is followed by."""
    return (state >> 7) % vocab


def solo(prompt: list[int], count: int, vocab: int) -> list[int]:
    """The first `count` tokens that follow `prompt`, whatever ends the request."""
    state = 0
    for token in prompt:
        state = mix(state, token)
    out = []
    for _ in range(count):
        out.append(next_token(state, vocab))
        state = mix(state, out[-1])
    return out


@dataclass
class _Step:
    """What stays on the device for the next step."""

    sampled: list[int]
    accepted: list[int]
    verified: list[list[int]]  # drafts that were verified
    drafts: np.ndarray  # [S, D] new ones
    confidences: np.ndarray


class FakeDevice:
    """Runs plans in order. `hit_rate`: chance that a draft is right; `nan_rate`: chance that a confidence is NaN."""

    def __init__(
        self, limits: SchedulerLimits, pages: int, slots: int, rng: random.Random, hit_rate: float = 0.7, nan_rate: float = 0.0
    ) -> None:
        self.limits, self.rng, self.hit_rate, self.nan_rate = limits, rng, hit_rate, nan_rate
        self.ring_rows = limits.window + limits.backtracking
        self.pages = [[POISON] * limits.page_tokens for _ in range(pages)]
        self.rings = [[POISON] * self.ring_rows for _ in range(slots)]
        self.previous: _Step | None = None
        self.failed: set[str] = set()  # requests whose computation failed: whatever they hold is spoilt

    def run(self, plan: StepPlan) -> StepResult:
        """Executes one plan; checks all that it reads."""
        for copy in plan.slot_copies:
            self.rings[copy.target] = list(self.rings[copy.source])
        query_len = self._query_len(plan)
        most, size = self.limits.num_draft_tokens, plan.num_sequences
        now = _Step([0] * size, [0] * size, [[] for _ in range(size)], np.full((size, most), -1), np.full((size, most), np.nan, np.float32))
        tokens = np.full((size, 1 + most), -1)
        first = np.concatenate([[0], np.cumsum(plan.query_len)])
        for s in range(size):
            host = plan.tokens[first[s] : first[s + 1]].tolist()
            if plan.requests[s] not in self.failed:
                emitted = self._sequence(plan, s, host, int(query_len[s]), now)
                tokens[s, : len(emitted)] = emitted
        self.previous = now
        counts = np.where(plan.sample, np.array(now.accepted, np.int64) + 1, 0)
        return StepResult(tokens, counts, now.drafts, now.confidences, query_len if plan.reallocate_drafts >= 0 else None)

    def fail(self, plan: StepPlan, s: int) -> None:
        """Sequence `s` of the plan that ran last failed: what it wrote is garbage."""
        self.failed.add(plan.requests[s])
        self.rings[plan.state_slot[s]] = [POISON] * self.ring_rows
        begin = max(int(plan.start[s] - plan.pending_drafts[s]), int(plan.write_start[s]))
        for position in range(begin, int(plan.start[s] + plan.query_len[s])):
            self.pages[plan.block_table[s, position // self.limits.page_tokens]][position % self.limits.page_tokens] = POISON

    def _query_len(self, plan: StepPlan) -> np.ndarray:
        if plan.reallocate_drafts < 0:
            return plan.query_len
        assert self.previous is not None
        decode = np.flatnonzero(~plan.is_prefill)
        known = np.where(plan.remap[decode, None] >= 0, self.previous.confidences[plan.remap[decode]], 0.0)
        drafts = allocate_drafts(np.cumprod(np.nan_to_num(known, nan=0.0), axis=1), plan.reallocate_drafts)
        query_len = plan.query_len.copy()
        query_len[decode] = 1 + drafts
        assert query_len.sum() == plan.query_len.sum()
        return query_len

    def _sequence(self, plan: StepPlan, s: int, host: list[int], count: int, now: _Step) -> list[int]:
        start, before = self._resolve(plan, s)
        rows = host
        if plan.remap[s] >= 0:
            assert all(token == -1 for token in host), "the host must not claim to know tokens in flight"
            assert self.previous is not None
            rows = [self.previous.sampled[plan.remap[s]], *self.previous.drafts[plan.remap[s]].tolist()][:count]
        rows = (rows + [-1] * count)[:count]
        table, page = plan.block_table[s], self.limits.page_tokens
        chain = self._read_chain(table, start)
        self._check_history(plan.history[s], before, chain)
        state, current, rows_state = (chain[-1][1] if chain else 0), {}, []
        for j, token in enumerate(rows):
            position = start + j
            state = mix(state, token)
            rows_state.append(state)
            current[position] = state
            self._check_window(plan, s, start, position, current, chain)
            if position >= plan.write_start[s]:
                assert table[position // page] > 0, "a write to the null page"
                self.pages[table[position // page]][position % page] = (token, state)
            else:
                assert self.pages[table[position // page]][position % page] == (token, state), "a replayed row differs from its page"
        for position in list(current)[-self.ring_rows :]:
            self.rings[plan.state_slot[s]][position % self.ring_rows] = (position, current[position])
        return self._sample(plan, s, start, rows, rows_state, now) if plan.sample[s] else []

    def _resolve(self, plan: StepPlan, s: int) -> tuple[int, list[int]]:
        """(true start, ids that follow `history`)."""
        if plan.remap[s] < 0:
            return int(plan.start[s]), []
        assert self.previous is not None
        accepted = self.previous.accepted[plan.remap[s]]
        return int(plan.start[s]) - (int(plan.pending_drafts[s]) - accepted), self.previous.verified[plan.remap[s]][:accepted]

    def _read_chain(self, table: np.ndarray, start: int) -> list[tuple[int, int]]:
        page, chain, state = self.limits.page_tokens, [], 0
        for position in range(start):
            entry = self.pages[table[position // page]][position % page]
            state = mix(state, entry[0])
            assert entry[1] == state, f"position {position} holds another prefix"
            chain.append(entry)
        return chain

    def _check_history(self, history: np.ndarray, accepted: list[int], chain: list[tuple[int, int]]) -> None:
        size = self.limits.history
        want = ([-1] * size + [token for token, _ in chain])[-size:]
        assert (history.tolist() + accepted)[-size:] == want, "history"

    def _check_window(
        self, plan: StepPlan, s: int, start: int, position: int, current: dict[int, int], chain: list[tuple[int, int]]
    ) -> None:
        ring = self.rings[plan.state_slot[s]]
        for seen in range(max(position - self.limits.window + 1, int(plan.valid_start[s]), 0), start):
            assert ring[seen % self.ring_rows] == (seen, chain[seen][1]), f"window entry {seen} of the row at {position}"

    def _sample(self, plan: StepPlan, s: int, start: int, rows: list[int], states: list[int], now: _Step) -> list[int]:
        vocab = self.limits.vocab_size
        if plan.is_prefill[s]:
            rows, states = rows[-1:], states[-1:]
        accepted = 0
        while accepted + 1 < len(rows) and rows[accepted + 1] == next_token(states[accepted], vocab):
            accepted += 1
        now.accepted[s], now.verified[s] = accepted, rows[1:]
        now.sampled[s] = next_token(states[accepted], vocab)
        self._poison(plan, s, range(start + accepted + 1, start + len(rows)) if not plan.is_prefill[s] else range(0))
        if plan.draft[s]:
            self._make_drafts(s, mix(states[accepted], now.sampled[s]), now)
        return [*rows[1 : accepted + 1], now.sampled[s]]

    def _poison(self, plan: StepPlan, s: int, positions: range) -> None:
        for position in positions:
            self.pages[plan.block_table[s, position // self.limits.page_tokens]][position % self.limits.page_tokens] = POISON
            self.rings[plan.state_slot[s]][position % self.ring_rows] = POISON

    def _make_drafts(self, s: int, state: int, now: _Step) -> None:
        for j in range(self.rng.choice([0, self.limits.num_draft_tokens, self.limits.num_draft_tokens])):
            right = next_token(state, self.limits.vocab_size)
            token = right if self.rng.random() < self.hit_rate else self.rng.randrange(self.limits.vocab_size)
            now.drafts[s, j] = token
            now.confidences[s, j] = np.nan if self.rng.random() < self.nan_rate else self.rng.random()
            state = mix(state, token)
