"""What fails, fails alone; a device that fails ends the engine once, and nothing that was finished is lost."""

from __future__ import annotations

import pytest
import torch
from engine_tools import comparable, drain, engine, greedy, prompt, run, sampled

from deepinfer_core import SamplingParams
from deepinfer_core.errors import EngineError, RequestError

IDS = prompt(20, seed=2)
OTHERS = [prompt(n, seed=3) for n in (5, 9, 30)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("asynchronous", "drafts"), [(False, 0), (True, 3)])
def test_logits_that_are_not_finite_fail_that_request_alone(value, asynchronous, drafts):
    """The embedding of one token is broken; only the request with that token in its prompt has broken logits."""
    params = greedy(max_tokens=6)
    with engine(num_draft_tokens=drafts) as llm:
        expected = run(llm, OTHERS, params)
    with engine(num_draft_tokens=drafts, async_scheduling=asynchronous) as llm:
        bad = next(token for token in range(3, 700) if all(token not in ids for ids in [*OTHERS, *(out[2][0][0] for out in expected)]))
        embed = llm.parts.loaded.model.weights.embed
        embed[bad] = value
        outputs = llm.generate([OTHERS[0], [4, bad, 6], *OTHERS[1:]], params, progress=False)
        assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
        for word in ("'1'", "NaN or infinity"):
            assert word in outputs[1].error
        assert [comparable(output) for output in [outputs[0], *outputs[2:]]] == expected
        assert run(llm, OTHERS, params) == expected  # its slot and pages are used again
        llm.engine.settle()
        assert llm.engine.pages.used == 0


def test_a_request_for_which_every_token_is_forbidden_fails_alone():
    with engine(token_blacklist="2..767") as llm:
        params = [SamplingParams(temperature=0, min_tokens=2, max_tokens=4, stop_token_ids=[0]), greedy(max_tokens=3)]
        outputs = llm.generate([IDS, IDS], params, progress=False)
    assert outputs[0].finish_reason == "error"
    assert "every token is forbidden" in outputs[0].error
    assert outputs[1].finish_reason == "length"
    assert set(outputs[1].token_ids) <= {0, 1}


class Broken(RuntimeError):
    pass


def break_after(llm, calls):
    """The model's forward raises in its `calls`-th call."""
    model = llm.parts.loaded.model
    forward, count = model.forward, [0]

    def failing(*arguments):
        count[0] += 1
        if count[0] > calls:
            raise Broken("the memory of the device is gone")
        return forward(*arguments)

    model.forward = failing


@pytest.mark.parametrize(("asynchronous", "drafts"), [(False, 0), (True, 0), (True, 3)])
@pytest.mark.parametrize("calls", [0, 1, 3, 6])
def test_a_failing_device_reports_every_unfinished_request_and_loses_no_result(asynchronous, drafts, calls):
    with engine(num_draft_tokens=drafts, async_scheduling=asynchronous) as llm:
        break_after(llm, calls)
        params = [greedy(max_tokens=3), greedy(max_tokens=30), greedy(max_tokens=30)]
        outputs = llm.generate(OTHERS, params, progress=False)
        assert [output.request_id for output in outputs] == ["0", "1", "2"]
        if calls == 6:
            assert outputs[0].finish_reason == "length"
        for output in outputs[1:]:
            assert output.finish_reason == "error"
            for word in ("device failed", "Broken", "memory of the device is gone"):
                assert word in output.error
        assert len(outputs[1].token_ids) >= calls - 2
        for call in (lambda: llm.generate(IDS, progress=False), llm.poll, lambda: llm.compute_logits([IDS]), lambda: next(llm.stream(IDS))):
            with pytest.raises(EngineError, match="memory of the device is gone"):
                call()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_results_of_the_step_before_the_failing_one_are_delivered(asynchronous):
    """The first request ends in the very step that is committed when the device fails."""
    with engine(async_scheduling=asynchronous, max_num_seqs=2) as llm:
        break_after(llm, 2)
        llm.submit(OTHERS[0], greedy(max_tokens=2), "ends")
        llm.submit(OTHERS[1], greedy(max_tokens=20), "lost")
        outputs = [output for _ in range(4 if asynchronous else 3) for output in llm.poll()]
        assert {output.request_id: str(output.finish_reason) for output in outputs} == {"ends": "length", "lost": "error"}
        with pytest.raises(EngineError):
            llm.poll()


def test_a_failure_in_a_stream_is_an_engine_error():
    with engine(async_scheduling=True) as llm:
        break_after(llm, 3)
        with pytest.raises(EngineError, match="memory of the device is gone"):
            list(llm.stream(IDS, greedy(max_tokens=20)))


def test_an_interrupted_step_ends_the_engine_with_an_explanation():
    with engine(async_scheduling=True) as llm:
        llm.submit(IDS, greedy(max_tokens=20))
        llm.poll()
        wait = llm.engine._in_flight.wait

        def interrupted():
            wait()
            raise KeyboardInterrupt

        llm.engine._in_flight.wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.poll()
        with pytest.raises(EngineError, match=r"interrupted.*build a new one"):
            llm.generate(IDS)


def test_a_closed_engine_says_so_and_closing_twice_is_fine():
    llm = engine()
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed; build a new one"):
        llm.generate(IDS)


def test_an_engine_closed_with_work_in_flight_ends_cleanly():
    with engine(async_scheduling=True, num_draft_tokens=3) as llm:
        llm.submit(IDS, greedy(max_tokens=50))
        for _ in range(3):
            llm.poll()


def test_an_unfinished_id_cannot_be_used_again_and_a_finished_one_can():
    with engine(async_scheduling=True) as llm:
        llm.submit(IDS, sampled(n=2, max_tokens=5), "mine")
        for name in ("mine", "mine[1]"):
            with pytest.raises(RequestError, match="choose another"):
                llm.engine.add_request(name, IDS, greedy())
        with pytest.raises(RequestError, match="choose another"):
            llm.submit(IDS, greedy(), "mine")
        assert set(drain(llm)) == {"mine"}
        llm.submit(IDS, greedy(max_tokens=1), "mine")
        assert set(drain(llm)) == {"mine"}


def test_a_name_that_looks_like_a_counter_does_not_collide_with_unnamed_requests():
    with engine() as llm:
        llm.submit(IDS, greedy(max_tokens=3), "0")
        names = [llm.submit(IDS, greedy(max_tokens=2)) for _ in range(2)]
        outputs = drain(llm)
    assert sorted(outputs) == ["0", "1", "2"]
    assert names == ["1", "2"]


def test_ten_thousand_ids_leave_nothing_behind():
    """Book-keeping of requests that ended is gone, whatever their end."""
    with engine(max_num_seqs=8) as llm:
        for round_ in range(4):
            names = [llm.submit([5] if i % 3 else [], greedy(max_tokens=1 + i % 2)) for i in range(30)]
            llm.abort(names[5])
            assert len(drain(llm)) == 30, round_
        held = llm.engine
        assert not held._samples
        assert not held._requests
        assert not held.scheduler._ledger.requests
        assert not any(row is not None for row in held.scheduler._ledger.table.requests)
        assert held.scheduler._ledger.stop_users.sum() == 0
        assert torch.is_tensor(llm.parts.loaded.caches.pages)
