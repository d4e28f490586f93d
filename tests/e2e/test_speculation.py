"""Drafting changes nothing but speed: greedy output is that of plain decoding, whatever the drafter does."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from engine_tools import ScriptedDrafter, engine, greedy, poison, prompt, run, sampled, tokens

PROMPTS = [prompt(n, seed=3) for n in (1, 7, 9, 33, 126)]
PARAMS = greedy(max_tokens=14, top_logprobs=2)


@pytest.fixture(scope="module")
def expected():
    """(comparable outputs, output ids) of plain synchronous decoding."""
    with engine() as llm:
        outputs = run(llm, PROMPTS, PARAMS)
    return outputs, [sample[2][0][0] for sample in outputs]


@pytest.fixture
def known(expected):
    return {str(i): ids + out for i, (ids, out) in enumerate(zip(PROMPTS, expected[1], strict=True))}


@pytest.mark.parametrize(("drafts", "asynchronous"), [(1, False), (2, True), (3, True), (4, False), (5, False), (5, True)])
def test_greedy_output_is_that_of_plain_decoding(expected, drafts, asynchronous):
    with engine(num_draft_tokens=drafts, async_scheduling=asynchronous) as llm:
        assert run(llm, PROMPTS, PARAMS) == expected[0]


def crc(name: str, position: int) -> int:
    return zlib.crc32(f"{name}:{position}".encode())


DRAFTERS = {
    "right": lambda name, position: True,
    "wrong": lambda name, position: False,
    "random": lambda name, position: crc(name, position) % 2 == 0,
    "first wrong": lambda name, position: position % 6 != 0,
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("asynchronous", "policy"), [(False, "mixed"), (True, "mixed"), (True, "alternate")])
def test_no_drafter_changes_greedy_output(expected, known, drafter, asynchronous, policy):
    options = {"policy": policy, "chunked_prefill": True, "max_num_batched_tokens": 40}
    with engine(num_draft_tokens=5, async_scheduling=asynchronous, **options) as llm:
        ScriptedDrafter(llm, known, DRAFTERS[drafter])
        assert run(llm, PROMPTS, PARAMS) == expected[0]


def test_right_drafts_are_all_accepted_and_save_steps(expected, known):
    steps = {}
    for drafter in ("right", "wrong"):
        with engine(num_draft_tokens=5) as llm:
            ScriptedDrafter(llm, known, DRAFTERS[drafter])
            out = llm.generate(PROMPTS[:1], PARAMS, progress=False)[0].samples[0]
            stats = llm.engine.scheduler.stats()
            steps[drafter] = stats.steps
        assert out.token_ids == expected[1][0]
        if drafter == "right":  # 14 tokens: one from the prefill, then 6, 6, and the last one with drafts that nobody asked for
            assert steps[drafter] == 4
            assert stats.accepted.tolist()[0] >= 2
            assert out.drafts_accepted >= 10
        else:
            assert steps[drafter] == 14
            assert out.drafts_accepted == 0
            assert stats.accepted.sum() == 0


@pytest.mark.parametrize(("confidence", "asynchronous"), [(0.0, True), (1.0, False), (1e-30, True), ("random", False), ("random", True)])
def test_miscalibrated_confidence_with_varlen_verification_changes_no_greedy_output(expected, known, confidence, asynchronous):
    with engine(num_draft_tokens=5, enable_varlen=True, async_scheduling=asynchronous) as llm:
        chance = (lambda name, at: crc(name, at + 1) % 100 / 100) if confidence == "random" else lambda name, at: confidence
        planner = llm.engine.scheduler._decode
        planner.cost = planner.gauge._cost = JaggedCost()
        ScriptedDrafter(llm, known, DRAFTERS["random"], chance)
        assert run(llm, PROMPTS, PARAMS) == expected[0]


class JaggedCost:
    """Every other budget is expensive, and which ones are changes from step to step."""

    def __init__(self) -> None:
        self.calls = 0

    def step_ms(self, rows: np.ndarray, requests: int) -> np.ndarray:
        self.calls += 1
        return 1.0 + (rows + self.calls) % 3 * 5.0

    def plain_ms(self, requests: int) -> float:
        return 1.0 + self.calls % 4 * 10.0  # at times drafting does not pay


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nan_confidence_ends_drafting_of_that_request_alone_with_one_warning(expected, known, asynchronous, caplog):
    with engine(num_draft_tokens=3, async_scheduling=asynchronous) as llm:
        ScriptedDrafter(llm, known, DRAFTERS["right"], lambda name, at: float("nan") if name == "2" else 0.5)
        assert run(llm, PROMPTS, PARAMS) == expected[0]
    warned = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert all("'2'" in message for message in warned)
    assert len(warned) == 1


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("drafts", [0, 5])
def test_poisoned_rejected_positions_and_free_memory_change_nothing(expected, known, byte, drafts):
    with engine(num_draft_tokens=drafts) as llm:
        if drafts:
            ScriptedDrafter(llm, known, DRAFTERS["random"])
        poison(llm, byte)
        step = llm.engine.step

        def poisoned():
            outputs = step()
            poison(llm, byte)
            return outputs

        llm.engine.step = poisoned
        assert run(llm, PROMPTS, PARAMS) == expected[0]


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_poison_reaches_what_is_read(expected, byte):
    """The check of the check: one byte too many, and the output changes or the request fails."""
    with engine() as llm:
        step = llm.engine.step

        def poisoned():
            outputs = step()
            for ring in llm.parts.loaded.caches.window:
                ring.data[:, :4] = byte
            return outputs

        llm.engine.step = poisoned
        assert run(llm, PROMPTS[3:], PARAMS) != expected[0][3:]


def test_a_poisoned_engine_gives_the_drafts_it_would_give_anyway(known):
    """Drafts of the real drafter depend on its windows: poisoning must not reach those either."""
    drafts = []
    for byte in (None, 0xFF):
        with engine(num_draft_tokens=5) as llm:
            seen = spy_on_drafts(llm)
            step = llm.engine.step

            def poisoned(llm=llm, step=step, byte=byte):
                outputs = step()
                if byte is not None:
                    poison(llm, byte)
                return outputs

            llm.engine.step = poisoned
            tokens(llm, PROMPTS, sampled(max_tokens=10, top_k=3))
        drafts.append(seen)
    assert len(drafts[0]) > 30
    assert drafts[0] == drafts[1]


def spy_on_drafts(llm):
    seen: list[list[int]] = []
    commit = llm.engine.scheduler.commit

    def spying(plan, result):
        if result.drafts is not None:
            seen.extend(result.drafts[plan.sample].tolist())
        return commit(plan, result)

    llm.engine.scheduler.commit = spying
    return seen


def test_a_sampled_request_samples_even_while_greedy_ones_verify_the_first_drafts():
    """It joins in a step in which nobody has kept draft distributions yet."""
    cold, params = prompt(30, seed=9), sampled(max_tokens=1, temperature=5.0)
    with engine(num_draft_tokens=3) as llm:
        expected = [tokens(llm, [cold], params.model_copy(update={"seq_seed": seed}))[0] for seed in range(6)]
    assert len({ids[0] for ids in expected}) > 2
    for seed in range(2):
        with engine(num_draft_tokens=3, policy="mixed", chunked_prefill=True) as llm:
            llm.submit(PROMPTS[1], greedy(max_tokens=7))
            for _ in range(3):
                llm.poll()
            name = llm.submit(cold, params.model_copy(update={"seq_seed": seed}))
            outputs = {output.request_id: output for _ in range(6) for output in llm.poll()}
            assert outputs[name].token_ids == expected[seed]
