"""What a plan says, number by number: chunks, drafts, placeholders, replay, snapshots, preemption."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_bench import answer, make, run_out, spec, step

from deepinfer_core.engine.plan import SlotCopy

D = 2


def test_a_prompt_is_computed_in_chunks_that_fill_the_budget():
    scheduler = make(max_num_batched_tokens=8, page_tokens=4)
    scheduler.add(spec("long", 11))
    scheduler.add(spec("next", 6))
    first = scheduler.plan()
    assert (first.requests, first.query_len.tolist(), first.start.tolist()) == (("long",), [8], [0])
    assert first.tokens.tolist() == list(range(10, 18))
    assert (first.is_prefill.tolist(), first.sample.tolist()) == ([True], [False])
    assert first.history.tolist() == [[-1, -1, -1]]
    assert len(first.block_table[0]) == 3  # pages of the whole prompt at once
    assert list(scheduler.commit(first, answer(first))) == []
    second = scheduler.plan()
    assert (second.requests, second.query_len.tolist(), second.start.tolist()) == (("long", "next"), [3, 5], [8, 0])
    assert second.history.tolist() == [[15, 16, 17], [-1, -1, -1]]
    assert second.sample.tolist() == [True, False]
    scheduler.commit(second, answer(second))
    third = scheduler.plan()  # decode rows first, then the rest of the prompt
    assert (third.requests, third.query_len.tolist(), third.start.tolist()) == (("long", "next"), [1, 1], [11, 5])
    assert third.is_prefill.tolist() == [False, True]
    assert third.tokens.tolist() == [50, 15]
    assert third.history.tolist() == [[18, 19, 20], [12, 13, 14]]


def test_plans_are_immutable():
    scheduler = make()
    scheduler.add(spec("r", 3))
    plan = scheduler.plan()
    with pytest.raises(ValueError, match="read-only"):
        plan.tokens[0] = 1
    with pytest.raises(AttributeError):
        plan.step = 2


def test_without_chunking_a_prompt_waits_for_room():
    scheduler = make(max_num_batched_tokens=64, chunked_prefill=False)
    scheduler.add(spec("a", 40))
    scheduler.add(spec("b", [7] * 30))
    scheduler.add(spec("c", 2))  # would fit, but the queue is served in order
    plan = scheduler.plan()
    assert plan.requests == ("a",)
    scheduler.commit(plan, answer(plan))
    assert scheduler.plan().requests == ("a", "b", "c")


def test_decode_verifies_the_drafts_of_the_step_before():
    scheduler = make(num_draft_tokens=D)
    scheduler.add(spec("r", 5, max_tokens=20))
    step(scheduler, {}, {"r": [60, 61]}, width=D)
    plan = scheduler.plan()
    assert (plan.query_len.tolist(), plan.start.tolist(), plan.tokens.tolist()) == ([3], [5], [50, 60, 61])
    assert (plan.num_drafts.tolist(), plan.remap.tolist(), plan.pending_drafts.tolist()) == ([2], [-1], [0])
    assert plan.num_outputs.tolist() == [1]
    scheduler.commit(plan, answer(plan, {"r": [60, 70]}, {"r": [80]}, width=D))
    plan = scheduler.plan()
    assert (plan.start.tolist(), plan.tokens.tolist(), plan.history.tolist()) == ([7], [70, 80], [[14, 50, 60]])


def test_in_flight_the_device_completes_the_plan():
    scheduler = make(num_draft_tokens=D, asynchronous=True)
    scheduler.add(spec("a", 5, max_tokens=20))
    scheduler.add(spec("b", 3, max_tokens=20))
    prefill = scheduler.plan()
    decode = scheduler.plan()
    assert decode.requests == ("a", "b")
    assert (decode.start.tolist(), decode.remap.tolist(), decode.pending_drafts.tolist()) == ([5, 3], [0, 1], [0, 0])
    assert (decode.num_drafts.tolist(), decode.tokens.tolist()) == ([2, 2], [-1] * 6)
    assert decode.history.tolist() == [[12, 13, 14], [10, 11, 12]]
    scheduler.commit(prefill, answer(prefill, {}, {"a": [60, 61], "b": [60, 61]}, width=D))
    ahead = scheduler.plan()  # as if all drafts of `decode` were accepted
    assert (ahead.start.tolist(), ahead.pending_drafts.tolist()) == ([8, 6], [2, 2])
    assert ahead.history.tolist() == [[13, 14, 50], [11, 12, 50]]
    scheduler.commit(decode, answer(decode, {"a": [60, 61, 62], "b": [70]}, width=D))
    last = scheduler.plan()  # `ahead` is in flight: true starts 8 and 4, and no drafts are there behind `decode`
    assert dict(zip(last.requests, last.start.tolist(), strict=True)) == {"a": 8 + 3, "b": 4 + 3}


def test_pages_cover_all_rows_in_flight():
    scheduler = make(num_draft_tokens=3, asynchronous=True, page_tokens=2)
    scheduler.add(spec("r", 3, max_tokens=30))
    queue = [scheduler.plan()]
    for _ in range(5):
        queue.append(scheduler.plan())
        assert np.count_nonzero(queue[-1].block_table) >= -(-(queue[-1].start[0] + queue[-1].query_len[0]) // 2)
        oldest = queue.pop(0)
        scheduler.commit(oldest, answer(oldest, width=3))


def test_a_request_that_surely_ends_in_flight_is_not_planned_again():
    scheduler = make(asynchronous=True)
    scheduler.add(spec("r", 3, max_tokens=1))
    plan = scheduler.plan()
    assert not plan.draft.any()
    assert scheduler.plan() is None
    assert [end.reason for end in scheduler.commit(plan, answer(plan)).finished] == ["length"]


def test_first_decode_step_without_drafts_if_prefill_makes_none():
    scheduler = make(num_draft_tokens=D, draft_after_prefill=False)
    scheduler.add(spec("r", 3, max_tokens=20))
    plan = scheduler.plan()
    assert plan.draft.tolist() == [False]
    scheduler.commit(plan, answer(plan, width=D))
    plan = scheduler.plan()
    assert (plan.num_drafts.tolist(), plan.draft.tolist()) == ([0], [True])


def test_prompt_logprobs_once_per_position():
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(spec("r", 9, prompt_logprobs=True))
    starts = []
    for _ in range(4):
        plan = scheduler.plan()
        starts.append(plan.logprob_start[0])
        updates = scheduler.commit(plan, answer(plan))
        assert [update.request_id for update in updates] == ["r"]
    assert starts == [0, 4, -1, -1]  # the last prompt row's follower is the first output


def test_chunks_end_at_checkpoints_and_never_inside_an_image():
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(spec("r", 20, checkpoints=(3,), atomic_spans=((9, 13), (14, 20)), span_digests=(b"", b"")))
    lengths = []
    while scheduler.num_outputs("r") == 0:
        plan = scheduler.plan()
        lengths.append(int(plan.query_len[0]))
        scheduler.commit(plan, answer(plan))
    assert lengths == [3, 6, 5, 6]


def test_the_first_request_of_a_step_may_run_past_a_checkpoint_inside_an_image():
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(spec("r", 10, checkpoints=(2,), atomic_spans=((0, 6),), span_digests=(b"",)))
    assert scheduler.plan().query_len.tolist() == [6]


def test_context_parallel_chunks_are_aligned():
    scheduler = make(max_num_batched_tokens=11, chunk_align=4)
    scheduler.add(spec("a", 13))
    scheduler.add(spec("b", 9))
    plan = scheduler.plan()
    assert plan.query_len.tolist() == [8]
    scheduler.commit(plan, answer(plan))
    assert scheduler.plan().query_len.tolist() == [5]  # counts as 8 of 8 rows


def test_a_step_bounds_the_sum_of_prefill_contexts():
    scheduler = make(max_num_batched_tokens=64, max_prefill_seqlen=65)
    scheduler.add(spec("a", 40))
    scheduler.add(spec("b", [7] * 20))
    scheduler.add(spec("c", [8] * 6))
    assert scheduler.plan().requests == ("a", "b")


def test_decoder_side_replay_counts_from_the_end_of_the_whole_prompt():
    scheduler = make(max_num_batched_tokens=8, keep_tokens=6)
    scheduler.add(spec("r", 20))
    seen = []
    for _ in range(4):
        plan = scheduler.plan()
        seen.append(int(plan.keep_from[0]))
        scheduler.commit(plan, answer(plan))
    assert seen == [14, 14, 14, 0]


def test_a_prefix_hit_is_replayed_from_a_window_before_its_end():
    scheduler = make(prefix_cache=True, page_tokens=4, window=3)
    scheduler.add(spec("cold", 14, max_tokens=1))
    (cold,) = step(scheduler).finished
    assert (cold.cached_tokens, cold.replayed) == (0, False)
    scheduler.add(spec("warm", [*range(10, 24), 30, 31], max_tokens=1))
    plan = scheduler.plan()
    assert (plan.start.tolist(), plan.valid_start.tolist(), plan.write_start.tolist()) == ([9], [9], [12])
    assert plan.tokens.tolist() == [*range(19, 24), 30, 31]
    assert plan.history.tolist() == [[16, 17, 18]]
    (warm,) = scheduler.commit(plan, answer(plan)).finished
    assert (warm.cached_tokens, warm.replayed) == (12, True)
    assert (scheduler.stats().cached_tokens, scheduler.stats().replayed_tokens) == (12, 3)


@pytest.mark.parametrize("options", [{"prompt_logprobs": True}, {"cache_salt": b"other"}])
def test_no_reuse_across_tenants_or_when_every_row_is_needed(options):
    scheduler = make(prefix_cache=True, window=2)
    scheduler.add(spec("cold", 14, max_tokens=1))
    step(scheduler)
    scheduler.add(spec("warm", 14, max_tokens=1, **options))
    assert scheduler.plan().start.tolist() == [0]


def test_uncommitted_pages_are_not_reused():
    scheduler = make(prefix_cache=True, window=2, asynchronous=True)
    scheduler.add(spec("cold", 14))
    scheduler.plan()
    scheduler.add(spec("same", 14))
    plan = scheduler.plan()
    assert plan.start[plan.requests.index("same")] == 0


def test_a_window_snapshot_makes_a_hit_exact():
    scheduler = make(prefix_cache=True, window_snapshots=1, max_num_batched_tokens=32)
    scheduler.add(spec("cold", 14, max_tokens=3))
    first = scheduler.plan()
    assert first.query_len.tolist() == [12]  # the chunk ends where a later request can start
    scheduler.commit(first, answer(first))
    second = scheduler.plan()
    (save,) = second.slot_copies
    assert save.source == first.state_slot[0]
    scheduler.commit(second, answer(second))
    scheduler.add(spec("warm", 14, max_tokens=1))
    plan = scheduler.plan()
    warm = plan.requests.index("warm")
    assert (plan.start[warm], plan.valid_start[warm], plan.write_start[warm]) == (12, 0, 12)
    assert plan.slot_copies == (SlotCopy(save.target, int(plan.state_slot[warm])),)
    ends = {end.request_id: end for end in run_out_from(scheduler, plan)}
    assert (ends["warm"].cached_tokens, ends["warm"].replayed) == (12, False)


def test_windows_of_a_failed_request_never_become_a_snapshot():
    scheduler = make(prefix_cache=True, window_snapshots=2, asynchronous=True)
    scheduler.add(spec("bad", 14))
    first = scheduler.plan()
    scheduler.add(spec("good", 14))
    second = scheduler.plan()  # copies the windows of "bad", and computes the same pages for "good"
    assert [copy.source for copy in second.slot_copies] == [first.state_slot[0]]
    scheduler.commit(first, answer(first, errors={0: "logits are not finite"}))
    scheduler.commit(second, answer(second))
    prefix = scheduler._ledger.prefix
    assert (len(prefix), prefix.num_snapshots) == (3, 0)


def run_out_from(scheduler, plan):
    """Commits `plan`, then steps until nothing is unfinished."""
    return [*scheduler.commit(plan, answer(plan)).finished, *run_out(scheduler)]


def test_equal_prompts_at_once_keep_one_chain():
    scheduler = make(prefix_cache=True, window=2, pages=12)
    for name in "ab":
        scheduler.add(spec(name, 8, max_tokens=9))
    ends = run_out(scheduler)
    assert len(ends) == 2
    pool, prefix = scheduler._ledger.pages, scheduler._ledger.prefix
    assert pool.used == 0
    assert len(prefix) == pool.num_retained == 4  # 8 + 9 tokens, of which 16 were computed


class TestPreemption:
    def test_only_when_a_page_is_really_needed(self):
        scheduler = make(pages=5, max_num_seqs=2)
        scheduler.add(spec("a", 5, max_tokens=3))
        scheduler.add(spec("b", 5, max_tokens=3))
        ends = run_out(scheduler)
        assert [end.num_outputs for end in ends] == [3, 3]
        assert scheduler.stats().preemptions == 0

    def test_the_longest_output_gives_way_and_comes_back_first(self):
        scheduler = make(pages=6, max_num_seqs=3)
        scheduler.add(spec("old", 5, max_tokens=10))
        for _ in range(3):
            step(scheduler)
        scheduler.add(spec("young", 4, max_tokens=10))
        while not scheduler.stats().preemptions:
            step(scheduler)
        assert scheduler._ledger.head().request_id == "old"
        scheduler.add(spec("later", 4, max_tokens=1))
        requests = []
        while "later" not in requests:
            plan = scheduler.plan()
            requests += plan.requests
            scheduler.commit(plan, answer(plan))
        assert requests.index("old") < requests.index("later")
        ends = {end.request_id: end for end in run_out(scheduler)}
        assert (ends["old"].preemptions, ends["old"].num_outputs) == (1, 10)

    def test_a_resumed_request_recomputes_prompt_and_outputs(self):
        scheduler = make()
        scheduler.add(spec("r", 5, max_tokens=10))
        for token in (60, 61, 62):
            step(scheduler, {"r": [token]})
        scheduler._ledger.preempt(scheduler._ledger.requests["r"].row)
        plan = scheduler.plan()
        assert (plan.start.tolist(), plan.query_len.tolist(), plan.sample.tolist()) == ([0], [8], [True])
        assert (plan.tokens.tolist(), plan.num_outputs.tolist()) == ([*range(10, 15), 60, 61, 62], [3])
        (update,) = scheduler.commit(plan, answer(plan, {"r": [63]}))
        assert (update.first, update.tokens.tolist()) == (3, [63])

    def test_tokens_of_a_step_in_flight_are_kept(self):
        scheduler = make(pages=6, max_num_seqs=3, asynchronous=True)
        scheduler.add(spec("old", 7, max_tokens=10))
        scheduler.add(spec("young", 4, max_tokens=10))
        queue, got = [], []
        while scheduler.has_unfinished:
            plan = scheduler.plan()
            queue += [plan] if plan is not None else []
            if len(queue) > 1 or plan is None:
                oldest = queue.pop(0)
                got += [(u.request_id, u.first) for u in scheduler.commit(oldest, answer(oldest))]
        assert scheduler.stats().preemptions > 0
        assert sorted(got) == sorted((name, i) for name in ("old", "young") for i in range(10))

    @pytest.mark.parametrize(("request_options", "limits"), [({"recomputable": False}, {}), ({}, {"recompute_preempted": False})])
    def test_a_request_that_may_not_be_recomputed_ends(self, request_options, limits):
        scheduler = make(pages=6, max_num_seqs=3, **limits)
        scheduler.add(spec("old", 5, max_tokens=10, **request_options))
        for _ in range(3):
            step(scheduler)
        scheduler.add(spec("young", 4, max_tokens=10, **request_options))
        ends = {end.request_id: end for end in run_out(scheduler)}
        assert ends["old"].reason == "insufficient_system_resource"
        assert "all 5 cache pages are in use" in ends["old"].detail
        assert ends["old"].num_outputs > 3
        assert ends["young"].reason == "length"

    def test_no_new_request_starts_while_a_preempted_one_is_recomputed(self):
        scheduler = make(pages=12, max_num_batched_tokens=4, max_num_seqs=4, max_model_len=30)
        scheduler.add(spec("old", 20, max_tokens=10))
        while scheduler.num_outputs("old") < 2:
            step(scheduler)
        scheduler._ledger.preempt(scheduler._ledger.requests["old"].row)
        scheduler.add(spec("new", 2, max_tokens=1))
        seen = []
        while scheduler.has_unfinished:
            plan = scheduler.plan()
            seen.append((plan.requests, plan.is_prefill.tolist()))
            scheduler.commit(plan, answer(plan))
        started = next(i for i, (requests, _) in enumerate(seen) if "new" in requests)
        assert [requests for requests, _ in seen[:started]] == [("old",)] * 6  # 22 tokens in chunks of 4
        assert "old" in seen[started][0]

    def test_prompt_logprobs_are_not_repeated(self):
        scheduler = make(pages=12)
        scheduler.add(spec("r", 6, max_tokens=10, prompt_logprobs=True))
        assert scheduler_logprob_starts(scheduler, 2) == [0, -1]
        scheduler._ledger.preempt(scheduler._ledger.requests["r"].row)
        assert scheduler_logprob_starts(scheduler, 2) == [-1, -1]

    def test_admission_stops_above_ninety_percent_of_the_pages(self):
        scheduler = make(pages=11, max_model_len=50)
        scheduler.add(spec("big", 37, max_tokens=9))
        step(scheduler)
        step(scheduler)
        scheduler.add(spec("small", 1, max_tokens=1))
        assert scheduler._ledger.pages.used == 10
        assert step(scheduler).plan.requests == ("big",)


def scheduler_logprob_starts(scheduler, steps):
    """`logprob_start` of the only request in the next steps."""
    starts = []
    for _ in range(steps):
        plan = scheduler.plan()
        starts.append(int(plan.logprob_start[0]))
        scheduler.commit(plan, answer(plan))
    return starts
