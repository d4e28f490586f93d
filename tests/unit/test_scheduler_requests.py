"""From `add` to the end of a request: refusals, stop rules, aborts, failures, and misuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scheduler_bench import SMALL, answer, make, run_out, spec, step

from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.request import FinishReason
from deepinfer_core.errors import ConfigError, EngineError

D = 3  # drafts


@pytest.mark.parametrize(
    ("request_", "options", "reason", "words"),
    [
        (spec("r", []), {}, "invalid_request", ["'r'", "prompt is empty", "at least one"]),
        (spec("r", 3, max_tokens=0), {}, "invalid_request", ["max_tokens is 0", "at least 1"]),
        (spec("r", [5, 100]), {}, "invalid_request", ["token id 100", "outside the vocabulary", "0 .. 99"]),
        (spec("r", [-1]), {}, "invalid_request", ["token id -1"]),
        (spec("r", 3, stop_ids=frozenset({200})), {}, "invalid_request", ["token id 200"]),
        (spec("r", 3, prompt_logprobs=True), {"keep_tokens": 9}, "invalid_request", ["prompt_logprobs", "decoder-side replay", "last 9"]),
        (spec("r", 40, atomic_spans=((1, 39),), span_digests=(b"",)), {}, "invalid_request", ["tokens 1 to 39", "holds 32", "raise"]),
        (spec("r", [7] * 65), {}, "prompt_length_exceeded", ["65 tokens", "at most max_model_len 64", "shorten it"]),
        (spec("r", 20), {"pages": 6}, "prompt_length_exceeded", ["20 tokens", "never fit", "all 5 cache pages hold 19", "more memory"]),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(request_, options, reason, words):
    scheduler = make(**options)
    scheduler.add(request_)
    (end,) = scheduler.drain()
    assert (end.request_id, end.reason, end.num_outputs) == ("r", reason, 0)
    assert all(word in end.detail for word in words), end.detail
    assert not scheduler.has_unfinished
    assert scheduler.plan() is None
    assert scheduler.stats().finished == {reason: 1}


def test_ids_are_unique_among_unfinished_requests():
    scheduler = make()
    scheduler.add(spec("r", 3, max_tokens=1))
    with pytest.raises(ValueError, match=r"'r'.*same id"):
        scheduler.add(spec("r", 3))
    step(scheduler)
    scheduler.add(spec("r", 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_batched_tokens": 7, "num_draft_tokens": 1}, ["max_num_batched_tokens is 7", "at least 8", "max_num_seqs 4"]),
        ({"chunked_prefill": False}, ["max_num_batched_tokens is 32", "without chunked_prefill", "max_model_len 64"]),
        ({"keep_tokens": 4}, ["keep_tokens is 4", "at least 5", "sliding window 4 + backtracking 1"]),
        ({"keep_tokens": 8, "num_draft_tokens": 5, "max_backtracking": 2}, ["keep_tokens is 8", "at least 10"]),
        ({"vocab_size": 0, "history": -1}, ["vocab_size is 0", "history is -1"]),
        ({"max_prefill_seqlen": 64}, ["max_prefill_seqlen is 64", "more than max_model_len 64"]),
        ({"chunk_align": 64}, ["chunk_align is 64", "max_num_batched_tokens 32"]),
    ],
)
def test_contradictory_limits_are_listed(options, words):
    with pytest.raises(ConfigError) as error:
        SchedulerLimits(**{**SMALL, **options})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_too_few_slots_are_refused():
    with pytest.raises(EngineError, match="5 state slots; expected at least 7 = max_num_seqs 4"):
        make(slots=5, prefix_cache=True, window_snapshots=2)


@pytest.mark.parametrize("offset", range(D + 1))
def test_a_stop_id_at_each_draft_offset_ends_the_request_and_nothing_follows(offset):
    scheduler = make(num_draft_tokens=D)
    scheduler.add(spec("r", 3, max_tokens=20, stop_ids=frozenset({1})))
    step(scheduler, {"r": [50]}, {"r": [60, 61, 62]}, width=D)
    emitted = [60, 61, 62, 63]
    emitted[offset] = 1
    updates = step(scheduler, {"r": emitted}, width=D)
    (update,) = updates
    assert update.tokens.tolist() == emitted[: offset + 1]
    assert (update.first, update.verified, update.accepted) == (1, 3, 3)
    (end,) = updates.finished
    assert (end.reason, end.num_outputs) == ("stop", offset + 2)


@pytest.mark.parametrize("room", range(1, D + 2))
def test_max_tokens_inside_the_drafts(room):
    scheduler = make(num_draft_tokens=D)
    scheduler.add(spec("r", 3, max_tokens=1 + room))
    step(scheduler, {"r": [50]}, {"r": [60, 61, 62]}, width=D)
    updates = step(scheduler, {"r": [60, 61, 62, 63]}, width=D)
    (update,) = updates
    assert update.tokens.tolist() == [60, 61, 62, 63][:room]  # all drafts were verified; what exceeds the limit is dropped
    (end,) = updates.finished
    assert (end.reason, end.num_outputs) == ("length", 1 + room)


def test_the_model_length_caps_prompt_and_output():
    scheduler = make(max_model_len=6)
    scheduler.add(spec("r", 4, max_tokens=50))
    (end,) = run_out(scheduler)
    assert (end.reason, end.num_outputs) == ("length", 3)  # the last token needs no cache entry


def test_without_a_stop_id_eos_is_a_token_like_any_other():
    scheduler = make()
    scheduler.add(spec("r", 3, max_tokens=3))
    scheduler.add(spec("other", 3, max_tokens=3, stop_ids=frozenset({1})))
    updates = step(scheduler, {"r": [1], "other": [1]})
    assert [end.request_id for end in updates.finished] == ["other"]


def test_stop_ids_count_from_min_tokens_on():
    scheduler = make()
    scheduler.add(spec("r", 3, max_tokens=9, min_tokens=3, stop_ids=frozenset({1})))
    ends = [step(scheduler, {"r": [1]}).finished for _ in range(3)]
    assert [len(end) for end in ends] == [0, 0, 1]
    assert ends[2][0].num_outputs == 3


def test_a_request_longer_than_the_cache_ends_with_the_reason():
    scheduler = make(pages=4)
    scheduler.add(spec("r", 5, max_tokens=50))
    (end,) = run_out(scheduler)
    assert (end.reason, end.num_outputs) == ("insufficient_system_resource", 7)
    assert "3 pages holds 12 tokens" in end.detail
    assert scheduler.stats().preemptions == 0


def test_abort_in_every_state():
    scheduler = make(max_num_seqs=1)
    scheduler.add(spec("running", 3))
    scheduler.add(spec("waiting", 3))
    step(scheduler)
    assert scheduler.abort("waiting")
    assert scheduler.abort("running")
    assert not scheduler.abort("running")
    assert not scheduler.abort("unknown")
    ends = scheduler.drain()
    assert [(end.request_id, end.reason, end.num_outputs) for end in ends] == [("waiting", "abort", 0), ("running", "abort", 1)]
    assert scheduler.plan() is None
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_an_aborted_request_in_flight_emits_nothing_and_keeps_its_pages_until_the_commit():
    scheduler = make(asynchronous=True)
    scheduler.add(spec("r", 3))
    first = scheduler.plan()
    second = scheduler.plan()
    scheduler.abort("r")
    assert scheduler._ledger.pages.used == 1
    assert list(scheduler.commit(first, answer(first))) == []
    assert scheduler._ledger.pages.used == 1
    scheduler.commit(second, answer(second))
    assert scheduler._ledger.pages.used == 0
    assert scheduler.stats().wasted_rows == 4


def test_the_front_end_cuts_at_a_stop_string():
    scheduler = make()
    scheduler.add(spec("r", 3))
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_outputs("r") == 3
    assert scheduler.finish("r", FinishReason.STOP, keep_outputs=2)
    (end,) = scheduler.drain()
    assert (end.reason, end.num_outputs) == ("stop", 2)


def test_a_failed_computation_ends_its_request_alone():
    scheduler = make()
    scheduler.add(spec("bad", 3, max_tokens=2))
    scheduler.add(spec("good", 3, max_tokens=2))
    plan = scheduler.plan()
    updates = scheduler.commit(plan, answer(plan, errors={plan.requests.index("bad"): "logits are not finite"}))
    assert [update.request_id for update in updates] == ["good"]
    (end,) = updates.finished
    assert (end.request_id, end.reason) == ("bad", "error")
    assert "'bad': logits are not finite" in end.detail
    assert [end.reason for end in run_out(scheduler)] == ["length"]


def test_nan_confidence_ends_drafting_with_one_warning():
    scheduler = make(num_draft_tokens=D)
    scheduler.add(spec("r", 3, max_tokens=20))
    updates = step(scheduler, {}, {"r": [60, 61]}, {"r": [0.5, float("nan")]}, width=D)
    assert updates.warnings == ("request 'r': a draft confidence is NaN; it goes on without drafting",)
    plan = scheduler.plan()
    assert (plan.num_drafts.tolist(), plan.draft.tolist()) == ([0], [False])
    assert scheduler.commit(plan, answer(plan, {}, {"r": [60]}, width=D)).warnings == ()


def test_confidences_behind_the_last_draft_do_not_matter():
    scheduler = make(num_draft_tokens=D)
    scheduler.add(spec("r", 3, max_tokens=20))
    assert step(scheduler, {}, {"r": [60]}, width=D).warnings == ()
    assert scheduler.plan().num_drafts.tolist() == [1]


def test_requests_wait_until_they_are_schedulable():
    scheduler = make()
    scheduler.add(spec("image", 3, schedulable=False))
    assert scheduler.plan() is None
    scheduler.set_schedulable("image")
    scheduler.set_schedulable("unknown")
    assert scheduler.plan().requests == ("image",)


def test_plans_are_committed_in_order_and_once():
    scheduler = make(asynchronous=True)
    scheduler.add(spec("r", 3))
    first, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(EngineError, match="2 steps are uncommitted"):
        scheduler.plan()
    with pytest.raises(EngineError, match="step 1 is not the oldest uncommitted step"):
        scheduler.commit(second, answer(second))
    scheduler.commit(first, answer(first))
    with pytest.raises(EngineError, match="step 0 is not the oldest"):
        scheduler.commit(first, answer(first))


@pytest.mark.parametrize("count", [0, 3])
def test_a_result_that_does_not_fit_the_plan_is_refused(count):
    scheduler = make(num_draft_tokens=D)
    scheduler.add(spec("r", 3, max_tokens=20))
    step(scheduler, {}, {"r": [60]}, width=D)
    plan = scheduler.plan()
    result = replace(answer(plan, width=D), counts=np.array([count]))
    with pytest.raises(EngineError, match=f"'r' emitted {count} tokens; expected 1 to 2"):
        scheduler.commit(plan, result)


def test_statistics_count_what_happened():
    scheduler = make(num_draft_tokens=D)
    scheduler.add(spec("r", 5, max_tokens=5))
    step(scheduler, {}, {"r": [60, 61, 62]}, width=D)
    step(scheduler, {"r": [60, 70]}, width=D)
    stats = scheduler.stats()
    assert (stats.steps, stats.prefill_tokens, stats.decode_rows, stats.decode_requests, stats.output_tokens) == (2, 5, 4, 1, 3)
    assert (stats.verified.tolist(), stats.accepted.tolist()) == ([1, 1, 1], [1, 0, 0])
    assert (stats.acceptance_rate, stats.mean_verified) == (pytest.approx(1 / 3), 4)
    assert stats.page_usage == pytest.approx(3 / 39)
