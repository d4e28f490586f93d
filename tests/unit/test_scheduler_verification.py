"""Confidence-scheduled verification (T-18 .. T-20 of the model notes) and the step-kind vote (T-25)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scheduler_bench import answer, make, spec

from deepinfer_core.engine.policy import is_vote_point, prefill_vote
from deepinfer_core.engine.verification import DraftingGauge, EagerCost, ProfiledCost, allocate_drafts, plan_budget

OLDER = np.array([[0.9, 0.72, 0.504], [0.6, 0.3, 0.12]])


class TestWorkedExample:
    @pytest.mark.parametrize(
        ("curve", "budget", "rows"),
        [({2: 10, 4: 10.5, 8: 18}, 4, [3, 1]), ({2: 10, 4: 10.5, 8: 14}, 8, [4, 4])],
        ids=["steep", "flat"],
    )
    def test_budget_and_split(self, curve, budget, rows):
        assert plan_budget(OLDER, ProfiledCost(curve)) == budget
        assert (1 + allocate_drafts(OLDER, budget - 2)).tolist() == rows

    def test_tokens_per_millisecond(self):
        cost = ProfiledCost({2: 10, 4: 10.5, 8: 18})
        expected = 2 + np.concatenate([[0], np.cumsum(np.sort(OLDER, axis=None)[::-1])])
        rate = expected / cost.step_ms(np.arange(2, 9), 2)
        assert rate.tolist() == pytest.approx([0.2, 0.2762, 0.3448, 0.2344, 0.2625, 0.2791, 0.2858], abs=1e-4)

    def test_slope_and_sampler_time(self):
        cost = ProfiledCost({2: 10, 4: 10.5, 8: 18})
        for _ in range(10):
            cost.observe(rows=4, requests=2, forward_ms=10.5 + 0.5 * 4, sampler_ms=1)
        assert (cost.slope, cost.sampler_ms(2)) == (0.5, 1)
        ms = cost.step_ms(np.array([2, 4, 8]), 2)
        assert np.round(np.array([2, 3.62, 5.144]) / ms, 4).tolist() == [0.1667, 0.2681, 0.2237]
        assert plan_budget(OLDER, cost) == 4

    def test_the_newest_rates_split_the_budget_of_older_ones(self):
        newest = np.array([[0.5, 0.25, 0.125], [0.95, 0.855, 0.171]])
        assert (1 + allocate_drafts(newest, 2)).tolist() == [1, 3]


survivals = arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(0, 1, width=32)).map(
    lambda rates: np.cumprod(rates, axis=1)
)


@settings(deadline=None)
@given(survivals, st.integers(0, 30))
def test_allocation_ranks_by_value_then_flat_index(survival, budget):
    budget = min(budget, survival.size)
    drafts = allocate_drafts(survival, budget)
    order = sorted(range(survival.size), key=lambda i: (-survival.flat[i], i))[:budget]
    assert drafts.tolist() == np.bincount(np.array(order, int) // survival.shape[1], minlength=len(survival)).tolist()
    assert drafts.sum() == budget
    if budget < survival.size:
        assert (allocate_drafts(survival, budget + 1) >= drafts).all()  # monotone in the budget


@settings(deadline=None)
@given(survivals, st.integers(0, 29), st.data())
def test_later_confidences_never_decide_about_a_draft(survival, budget, data):
    """T-19: changing what comes behind draft j of a request does not change whether j is verified."""
    r = data.draw(st.integers(0, len(survival) - 1))
    j = data.draw(st.integers(0, survival.shape[1] - 1))
    changed = survival.copy()
    changed[r, j + 1 :] = survival[r, j] * data.draw(st.floats(0, 1, width=32))
    budget = min(budget, survival.size)
    assert (allocate_drafts(survival, budget)[r] > j) == (allocate_drafts(changed, budget)[r] > j)


@settings(deadline=None)
@given(survivals)
def test_the_budget_stays_within_the_buckets(survival):
    requests, drafts = survival.shape
    budget = plan_budget(survival, ProfiledCost({requests: 1.0, requests + 2: 1.5}))
    assert requests <= budget <= min(requests * (1 + drafts), requests + 2)


def test_without_a_bucket_all_drafts_are_verified():
    assert plan_budget(OLDER, ProfiledCost({1: 1.0})) == 8


class TestCostModel:
    def test_too_few_samples_change_nothing(self):
        cost = ProfiledCost({4: 10})
        for _ in range(9):
            cost.observe(4, 2, 20, 1)
        assert cost.slope == 0
        cost.observe(4, 2, 20, 1)
        assert cost.slope == 2.5

    def test_the_slope_is_a_median_of_medians_and_never_negative(self):
        cost = ProfiledCost({2: 10, 4: 10, 8: 10})
        for rows, extra in ((2, 1.0), (4, 2.0), (8, 6.0)):
            for i in range(11):
                cost.observe(rows, 1, 10 + rows * (extra if i else 1000), 0)
        assert cost.slope == 2
        falling = ProfiledCost({4: 10})
        for _ in range(10):
            falling.observe(4, 1, 5, 0)
        assert falling.slope == 0

    def test_old_steps_are_forgotten(self):
        cost = ProfiledCost({4: 10})
        cost._steps = type(cost._steps)(maxlen=20)
        for forward in [50] * 20 + [14] * 20:
            cost.observe(4, 1, forward, 0)
        assert cost.slope == 1

    def test_sampler_time_is_per_request_count_then_global(self):
        cost = ProfiledCost({4: 10})
        for ms in (1, 1, 1, 1):
            cost.observe(4, 3, 10, ms)
        assert cost.sampler_ms(3) == 0
        for ms in (5, 5, 5, 5, 5):
            cost.observe(4, 7, 10, ms)
        assert (cost.sampler_ms(7), cost.sampler_ms(3), cost.sampler_ms(99)) == (5, 5, 5)
        for ms in [2] * 9:
            cost.observe(4, 7, 10, ms)
        assert cost.sampler_ms(7) == 2

    def test_rows_above_the_largest_bucket_cost_infinity(self):
        assert ProfiledCost({4: 10}).step_ms(np.array([4, 5]), 1).tolist() == [10, np.inf]

    def test_eager_times_lie_between_those_of_one_row_and_of_all_and_are_scaled(self):
        cost = EagerCost({1: 10, 3: 20}, {1: 14, 3: 32}, drafts=4)
        assert cost.step_ms(np.arange(1, 6), 1).tolist() == [10, 11, 12, 13, 14]
        assert cost.step_ms(np.array([2, 10]), 2).tolist() == [15, 23]
        for _ in range(EagerCost.MIN_STEPS):
            cost.observe(2, 1, 1.5 * 11, 0)
        assert cost.factor == 1.5
        assert cost.step_ms(np.array([3, 15]), 3).tolist() == [30, 48]
        assert cost.plain_ms(1) == 15

    def test_bad_tables_are_refused(self):
        with pytest.raises(ValueError, match="at least one bucket"):
            ProfiledCost({})


class Curve:
    """Costs that make the planner verify exactly `extra` drafts."""

    def __init__(self, extra: int) -> None:
        self.extra = extra

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        return np.where(rows == requests + self.extra, 1.0, 1e9)

    def plain_ms(self, requests: int) -> float:
        return np.inf


class TestDraftingGauge:
    @pytest.fixture
    def cost(self):
        """Sampling takes 1 ms, and 4 more with drafting."""
        cost = ProfiledCost({1: 10.0, 2: 12.0, 4: 20.0, 8: 40.0, 64: 400.0})
        for _ in range(5):
            cost.observe(1, 1, 10.0, 1.0, drafted=False)
            cost.observe(1, 1, 10.0, 5.0)
        return cost

    def test_the_worked_break_even(self, cost):
        """One request: 1 token in 11 ms, or 1 + a in 17 ms with one draft of survival a: 5 % more from a = 0.623 on."""
        assert cost.plain_ms(1) == 11
        assert cost.step_ms(np.array([1, 2]), 1).tolist() == [15, 17]
        for survival, pays in ((0.6, False), (0.64, True)):
            gauge = DraftingGauge(1, cost)
            gauge.mean[:] = survival
            assert gauge.decide(1) == pays

    def test_it_drafts_until_it_knows_better_and_probes_now_and_then(self, cost):
        gauge = DraftingGauge(2, cost)
        assert gauge.decide(1)
        gauge.learn(np.zeros((40, 2), np.float32))
        decisions = [gauge.decide(1) for _ in range(2 * DraftingGauge.PROBE + 2)]
        assert np.flatnonzero(decisions).tolist() == [DraftingGauge.PROBE, 2 * DraftingGauge.PROBE + 1]

    def test_it_returns_when_a_probe_finds_better_drafts(self, cost):
        gauge = DraftingGauge(1, cost)
        gauge.learn(np.full((100, 1), 0.1, np.float32))
        assert not gauge.decide(1)
        gauge.learn(np.full((100, 1), 0.9, np.float32))
        assert gauge.decide(1)

    def test_the_number_of_requests_decides_at_once(self, cost):
        """Rows are cheap up to two, then cost as much as they bring."""
        gauge = DraftingGauge(1, cost)
        gauge.mean[:] = 0.7
        assert [gauge.decide(requests) for requests in (1, 8, 1)] == [True, False, True]

    def test_while_it_does_not_pay_plans_make_no_drafts(self):
        class Dear(Curve):
            def plain_ms(self, requests: int) -> float:
                return 1e-6

        scheduler = make(num_draft_tokens=2, varlen_verification=True, cost=Dear(1))
        scheduler.add(spec("a", 3, max_tokens=9))
        plan = scheduler.plan()
        assert plan.draft.tolist() == [True]
        scheduler.commit(plan, answer(plan, {}, {"a": [60, 61]}, {"a": [0.5, 0.5]}, width=2))
        plan = scheduler.plan()
        assert (plan.num_drafts.tolist(), plan.draft.tolist()) == ([1], [False])
        scheduler.commit(plan, answer(plan, width=2))
        plan = scheduler.plan()
        assert (plan.num_drafts.tolist(), plan.draft.tolist()) == ([0], [False])


class TestInTheScheduler:
    def test_synchronous_budget_comes_from_the_step_before(self):
        older, newest = {"a": [0.9, 0.9], "b": [0.1, 0.1]}, {"a": [0.2, 0.2], "b": [0.8, 0.8]}
        scheduler = make(num_draft_tokens=2, varlen_verification=True, cost=Curve(1))
        for name in "ab":
            scheduler.add(spec(name, 3, max_tokens=30))
        for confidences in (older, newest):
            plan = scheduler.plan()
            scheduler.commit(plan, answer(plan, {}, {"a": [60, 61], "b": [60, 61]}, confidences, width=2))
        rows = scheduler._ledger.table
        budgeted = {request.request_id: rows.previous_rates[request.row].tolist() for request in scheduler._ledger.requests.values()}
        assert budgeted == {"a": pytest.approx([0.9, 0.81]), "b": pytest.approx([0.1, 0.01])}
        plan = scheduler.plan()
        assert dict(zip(plan.requests, plan.num_drafts.tolist(), strict=True)) == {"a": 0, "b": 1}
        assert plan.reallocate_drafts == -1

    def test_in_flight_the_device_spreads_the_budget(self):
        scheduler = make(num_draft_tokens=2, varlen_verification=True, asynchronous=True, cost=Curve(3), page_tokens=2)
        for name in "ab":
            scheduler.add(spec(name, 3, max_tokens=30))
        prefill = scheduler.plan()
        plan = scheduler.plan()
        assert (plan.reallocate_drafts, plan.num_rows) == (3, 5)
        assert plan.block_table.shape[1] == 3  # positions 3 .. 5 whatever the split
        scheduler.commit(prefill, answer(prefill, {}, {"a": [60, 61], "b": [60, 61]}, width=2))
        ahead = scheduler.plan()
        assert (ahead.start.tolist(), ahead.pending_drafts.tolist()) == ([6, 6], [2, 2])
        updates = scheduler.commit(plan, answer(plan, {"a": [60, 61, 62]}, width=2, query_len=np.array([3, 2])))
        assert len(list(updates)) == 2
        assert scheduler.stats().verified.tolist() == [2, 1]


class TestVote:
    def test_right_after_a_prefill_all_ranks_must_want(self):
        assert prefill_vote(0, [True, True])
        assert not prefill_vote(0, [True, False])

    def test_every_seventy_steps_all_every_hundred_any(self):
        assert [d for d in range(1, 301) if prefill_vote(d, [True, True])] == [70, 100, 140, 200, 210, 280, 300]
        assert [d for d in range(1, 301) if prefill_vote(d, [True, False])] == [100, 200, 300]
        assert not any(prefill_vote(d, [False, False]) for d in range(301))

    @settings(deadline=None)
    @given(st.integers(0, 2000), st.integers(1, 50), st.integers(1, 50))
    def test_ranks_exchange_only_where_the_answer_can_be_yes(self, steps, every, any_every):
        if not is_vote_point(steps, every, any_every):
            assert not prefill_vote(steps, [True], every, any_every)
        else:
            assert prefill_vote(steps, [True], every, any_every)


class TestAlternatePolicy:
    def test_steps_never_mix_and_a_lone_scheduler_does_not_wait_for_a_vote(self):
        scheduler = make(policy="alternate", prefill_interval=3, prefill_any_interval=100)
        scheduler.add(spec("a", 3, max_tokens=9))
        kinds = []
        for i in range(12):
            if i == 1:
                scheduler.add(spec("b", 3, max_tokens=2))
            if i == 3:
                scheduler.add(spec("c", 3, max_tokens=2))
            plan = scheduler.plan()
            if plan is None:
                break
            kinds.append(str(plan.kind)[0])
            assert len(set(plan.is_prefill.tolist())) == 1
            scheduler.commit(plan, answer(plan))
        # b starts right after a's prefill; c arrives later and waits for three decode steps
        assert "".join(kinds) == "ppdddpddddd"

    def test_ranks_always_run_the_same_kind_and_a_lone_request_starts_in_time(self):
        ranks, steps = 3, 60
        barrier, board = threading.Barrier(ranks), [False] * ranks
        kinds: list[list[str]] = [[] for _ in range(ranks)]
        failed: list[BaseException] = []

        def exchange_of(rank):
            def exchange(flag):
                board[rank] = flag
                barrier.wait(10)
                flags = list(board)
                barrier.wait(10)
                return flags

            return exchange

        def work(rank):
            try:
                limits = {"policy": "alternate", "prefill_interval": 4, "prefill_any_interval": 6, "max_num_seqs": 2}
                scheduler = make(exchange=exchange_of(rank), **limits)
                for i in range(steps):
                    if rank == 0 and i == 10:
                        scheduler.add(spec("lone", 5, max_tokens=3))
                    plan = scheduler.plan()
                    kinds[rank].append(str(plan.kind) + ("*" if "lone" in plan.requests and plan.is_prefill.all() else ""))
                    scheduler.commit(plan, answer(plan))
                assert not scheduler.has_unfinished
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                failed.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failed
        assert [kind.rstrip("*") for kind in kinds[0]] == kinds[1] == kinds[2]
        assert 10 <= kinds[0].index("prefill*") <= 10 + 6
