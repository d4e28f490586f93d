"""Random driver: whatever arrives, aborts, is preempted, drafted or cached, each request gets the tokens it would get alone.

The fake device computes tokens from its memory, so equality with the solo run proves pages, slots, positions and windows right.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
from fake_device import FakeDevice, solo

from deepinfer_core.cache import PagePool, SlotPool, state_slots
from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.plan import StepPlan, StepResult
from deepinfer_core.engine.request import Finished, FinishReason, RequestSpec
from deepinfer_core.engine.scheduler import Scheduler

VOCAB, EOS = 50, 1


class RandomCost:
    """A jagged, changing cost curve."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        return np.array([self.rng.choice([1.0, 2.0, 5.0, np.inf]) for _ in rows])

    def plain_ms(self, requests: int) -> float:
        return self.rng.choice([0.1, 1.0, 5.0])


class Driver:
    """Feeds one scheduler at random and checks it after every step."""

    def __init__(self, seed: int, limits: SchedulerLimits, pages: int) -> None:
        self.rng = random.Random(seed)
        self.limits = limits
        self.pages, self.slots = PagePool(pages), SlotPool(state_slots(limits.max_num_seqs) + limits.window_snapshots)
        self.device = FakeDevice(limits, pages, self.slots.total, self.rng, hit_rate=self.rng.choice([0.0, 0.5, 0.9, 1.0]), nan_rate=0.002)
        self.scheduler = Scheduler(limits, self.pages, self.slots, cost=RandomCost(self.rng))
        self.specs: dict[str, RequestSpec] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finished] = {}
        self.parked: list[str] = []
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.documents = [[self.rng.randrange(2, VOCAB) for _ in range(60)] for _ in range(3)]
        self.steps = 0

    def run(self, steps: int, arrival: float) -> None:
        while self.steps < steps:
            self._disturb(arrival)
            self._step()
        for name in self.parked:
            self.scheduler.set_schedulable(name)
        quiet = 0
        while self.scheduler.has_unfinished or self.in_flight:
            before = (sum(map(len, self.outputs.values())), len(self.ended))
            self._step()
            quiet = quiet + 1 if before == (sum(map(len, self.outputs.values())), len(self.ended)) else 0
            assert quiet < 200, "requests are starved"
        self._check_idle()

    def _disturb(self, arrival: float) -> None:
        rng = self.rng
        while rng.random() < arrival:
            self._add()
        if rng.random() < 0.03 and self.specs:
            self.scheduler.abort(rng.choice(list(self.specs)))
        if rng.random() < 0.03:
            alive = [name for name in self.specs if name not in self.ended]
            if alive:
                name = rng.choice(alive)
                kept = rng.randint(0, len(self.outputs[name]))
                self.scheduler.finish(name, FinishReason.STOP, keep_outputs=kept, detail="stop string")
        if rng.random() < 0.3 and self.parked:
            self.scheduler.set_schedulable(self.parked.pop(rng.randrange(len(self.parked))))
        self._collect(self.scheduler.drain())

    def _add(self) -> None:
        rng = self.rng
        name = f"r{len(self.specs)}"
        shared = rng.choice(self.documents)[: rng.randint(0, 40)]
        prompt = shared + [rng.randrange(2, VOCAB) for _ in range(rng.randint(0 if shared else 1, 12))]
        begin = rng.randrange(len(prompt))
        spans = ((begin, min(begin + rng.randint(1, 6), len(prompt))),) if rng.random() < 0.2 else ()
        spec = RequestSpec(
            name,
            prompt,
            max_tokens=rng.randint(1, 30),
            stop_ids=frozenset([EOS] if rng.random() < 0.7 else []),
            min_tokens=rng.choice([0, 0, 5]),
            prompt_logprobs=rng.random() < 0.1 and not self.limits.keep_tokens,
            recomputable=rng.random() < 0.95,
            cache_salt=rng.choice([b"", b"", b"tenant"]),
            checkpoints=(rng.randint(1, 30),) if rng.random() < 0.2 else (),
            atomic_spans=spans,
            span_digests=tuple(b"image" for _ in spans),
            schedulable=rng.random() < 0.95,
        )
        self.specs[name], self.outputs[name] = spec, []
        if not spec.schedulable:
            self.parked.append(name)
        self.scheduler.add(spec)

    def _step(self) -> None:
        self.steps += 1
        plan = self.scheduler.plan()
        if plan is not None:
            self._check_plan(plan)
            result = self.device.run(plan)
            if self.rng.random() < 0.005:
                failing = self.rng.randrange(plan.num_sequences)
                self.device.fail(plan, failing)
                result = replace(result, errors={failing: "logits are not finite"})
            self.in_flight.append((plan, result))
        if self.in_flight and (plan is None or len(self.in_flight) > int(self.limits.asynchronous)):
            updates = self.scheduler.commit(*self.in_flight.popleft())
            for update in updates:
                assert update.first == len(self.outputs[update.request_id])
                self.outputs[update.request_id] += update.tokens.tolist()
            self._collect(updates.finished)
            self._check_chains()
        else:
            self._collect(self.scheduler.drain())

    def _collect(self, finished: tuple[Finished, ...]) -> None:
        for end in finished:
            assert end.request_id not in self.ended, "a request ended twice"
            self.ended[end.request_id] = end
            self._check_end(end)

    def _check_end(self, end: Finished) -> None:
        spec = self.specs[end.request_id]
        got = self.outputs[end.request_id] = self.outputs[end.request_id][: end.num_outputs]
        assert len(got) == end.num_outputs
        truth = solo(list(spec.prompt), spec.max_tokens, VOCAB)
        assert got == truth[: len(got)], "tokens differ from the solo run"
        stop = next((i + 1 for i, t in enumerate(truth) if t in spec.stop_ids and i + 1 >= spec.min_tokens), None)
        if end.reason is FinishReason.STOP and not end.detail:
            assert len(got) == stop
        elif end.reason is FinishReason.LENGTH:
            longest = min(spec.max_tokens, self.limits.max_model_len + 1 - len(spec.prompt))
            assert len(got) == longest
            assert stop is None or stop > longest
        elif end.reason in (FinishReason.INVALID, FinishReason.PROMPT_TOO_LONG):
            assert not got
        if stop is not None:
            assert len(got) <= stop, "tokens behind the stop"

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.limits
        assert 0 < plan.num_rows == plan.query_len.sum() <= limits.max_num_batched_tokens
        assert len(set(plan.requests)) == plan.num_sequences <= limits.max_num_seqs
        assert len(set(plan.state_slot.tolist())) == plan.num_sequences
        assert plan.state_slot.min() > 0
        assert (plan.start + plan.query_len).max() <= limits.max_positions
        if limits.policy == "alternate":
            assert len(set(plan.is_prefill.tolist())) == 1
        written: Counter[int] = Counter()
        for s in range(plan.num_sequences):
            first, end = plan.write_start[s] // limits.page_tokens, plan.start[s] + plan.query_len[s]
            pages = plan.block_table[s, : -(-end // limits.page_tokens)].tolist()
            assert 0 not in pages
            written.update(pages[first:])
            begin = max(plan.start[s] - plan.pending_drafts[s], plan.write_start[s]) // limits.page_tokens
            assert not self.pages._retained.intersection(pages[begin:]), "a row writes a page that others may reuse"
        assert all(count <= self.pages.references(page) for page, count in written.items()), "a page has two owners but one reference"

    def _check_chains(self) -> None:
        """A running request keeps its whole chain in the prefix index, whoever computed it."""
        table, prefix = self.scheduler._ledger.table, self.scheduler._ledger.prefix
        for row in table.running() if prefix is not None else ():
            assert all(prefix.has(key) for key in table.requests[row].hashes[: table.registered[row]]), "a chain lost its middle"

    def _check_idle(self) -> None:
        assert set(self.ended) == set(self.specs), "a request never ended"
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_uncommitted == 0
        assert self.pages.used == 0
        assert self.slots.available == self.slots.total - 1 - (self.limits.window_snapshots if self.limits.prefix_cache else 0)
        assert self.scheduler._ledger.table.free_rows == 2 * self.limits.max_num_seqs
        assert not self.scheduler._ledger.stop_users.any()


def random_limits(rng: random.Random) -> SchedulerLimits:
    drafts = rng.choice([0, 1, 3])
    seqs = rng.choice([1, 3, 6])
    page, window = rng.choice([(4, 4), (4, 6), (8, 4), (16, 8)])
    chunked = rng.random() < 0.7
    budget = max(seqs * (1 + drafts), rng.choice([8, 16, 32]), 0 if chunked else 70)
    cached = rng.random() < 0.6
    return SchedulerLimits(
        max_model_len=70,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        vocab_size=VOCAB,
        num_draft_tokens=drafts,
        page_tokens=page,
        window=window,
        chunked_prefill=chunked,
        policy=rng.choice(["mixed", "mixed", "alternate"]),
        asynchronous=rng.random() < 0.6,
        varlen_verification=rng.random() < 0.4,
        recompute_preempted=rng.random() < 0.9,
        keep_tokens=rng.choice([0, 0, window + drafts + 1, window + drafts + 5]),
        prefix_cache=cached,
        encoder_replay=rng.random() < 0.8,
        window_snapshots=rng.choice([0, 2]) if cached else 0,
        draft_after_prefill=rng.random() < 0.7,
        chunk_align=rng.choice([1, 1, 2]),
        prefill_interval=5,
        prefill_any_interval=7,
    )


def drive(seed: int, steps: int) -> Driver:
    rng = random.Random(seed)
    limits = random_limits(rng)
    enough = -(-75 // limits.page_tokens)
    pages = 1 + rng.choice([enough, enough + 3, 3 * enough, 10 * enough])
    driver = Driver(seed, limits, pages)
    driver.run(steps, arrival=rng.choice([0.1, 0.3, 0.5]))
    return driver


@pytest.mark.parametrize("seed", range(40))
def test_every_request_gets_its_solo_tokens(seed):
    drive(seed, 120)


def test_a_request_preempted_with_its_last_token_in_flight_ends():
    """Found by seed 1331: it stayed in the queue; without chunked prefill it was too long to be computed again and blocked all others."""
    drive(1331, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_every_request_gets_its_solo_tokens_long(seed):
    drive(seed, 300)
