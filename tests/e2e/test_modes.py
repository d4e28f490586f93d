"""Asynchronous or not, chunked or not, alone or among others, preempted or not: the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

import random
import zlib

import pytest
from engine_tools import PAGE, WINDOW, ScriptedDrafter, comparable, drain, engine, greedy, prompt, run, sampled, tokens

LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 31, 64, PAGE - 1, PAGE, PAGE + 1)
PROMPTS = [prompt(n, seed=5) for n in LENGTHS]
PENALISED = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {7: 3.0, 12: -5.0}}

FEATURES = {
    "plain": [greedy(max_tokens=5 + i) for i in range(len(PROMPTS))],
    "sampled": [sampled(max_tokens=3 + i, seed=i, top_k=50, top_p=0.95, top_logprobs=2) for i in range(len(PROMPTS))],
    "penalties": [sampled(max_tokens=10, seed=i, temperature=0.7 * (i % 2), **PENALISED) for i in range(len(PROMPTS))],
    "prompt logprobs": [greedy(max_tokens=4, prompt_logprobs=True, top_logprobs=i % 3) for i in range(len(PROMPTS))],
    "stops": [sampled(max_tokens=30, seed=i, stop_token_ids=list(range(0, 768, 9)), stop=["e", "iz"]) for i in range(len(PROMPTS))],
    "limits": [
        sampled(max_tokens=14, seed=i, min_tokens=i, ignore_eos=False, stop_token_ids=[*range(3, 400)]) for i in range(len(PROMPTS))
    ],
}


FEATURES["mixture"] = [FEATURES[name][i] for i, name in enumerate([*FEATURES, *FEATURES][: len(PROMPTS)])]
FEATURE = pytest.mark.parametrize(
    "feature", ["mixture", *(pytest.param(name, marks=pytest.mark.slow) for name in FEATURES if name != "mixture")]
)


def crc(name: str, position: int) -> int:
    return zlib.crc32(f"{name}:{position}".encode())


@pytest.fixture(scope="module")
def synchronous():
    """Outputs of a plain synchronous engine, by (feature, drafts)."""
    found = {}

    def get(feature: str, drafts: int):
        if (feature, drafts) not in found:
            with engine(num_draft_tokens=drafts) as llm:
                found[feature, drafts] = run(llm, PROMPTS, FEATURES[feature])
        return found[feature, drafts]

    return get


@FEATURE
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("policy", ["alternate", "mixed"])
def test_asynchronous_equals_synchronous(synchronous, drafts, policy, feature):
    with engine(num_draft_tokens=drafts, async_scheduling=True, policy=policy, prefill_attempt_interval=2) as llm:
        assert run(llm, PROMPTS, FEATURES[feature]) == synchronous(feature, drafts)


@FEATURE
@pytest.mark.parametrize(
    ("drafts", "budget"), [pytest.param(0, 4, marks=pytest.mark.slow), (0, 19), (4, 20), pytest.param(4, 37, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_chunked_prefill_changes_nothing(synchronous, drafts, budget, asynchronous, feature):
    options = {"chunked_prefill": True, "max_num_batched_tokens": budget, "policy": "mixed"}
    with engine(num_draft_tokens=drafts, async_scheduling=asynchronous, **options) as llm:
        assert run(llm, PROMPTS, FEATURES[feature]) == synchronous(feature, drafts)


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 8, 9, 18])
def test_every_chunk_size_gives_the_same(budget):
    prompts, params = [prompt(2 * WINDOW + 3, seed=1), prompt(WINDOW, seed=2)], greedy(max_tokens=3, prompt_logprobs=True)
    with (
        engine(max_num_seqs=1, max_model_len=64) as whole,
        engine(max_num_seqs=1, max_model_len=64, chunked_prefill=True, max_num_batched_tokens=budget) as chunked,
    ):
        assert run(chunked, prompts, params) == run(whole, prompts, params)


@FEATURE
@pytest.mark.parametrize(("drafts", "sequences"), [(0, 1), (0, 7), (4, 2), (4, 7)])
def test_neither_neighbours_nor_order_change_a_request(synchronous, drafts, sequences, feature):
    order = list(range(len(PROMPTS)))
    random.Random(sequences).shuffle(order)
    with engine(num_draft_tokens=drafts, max_num_seqs=sequences, async_scheduling=sequences == 7) as llm:
        shuffled = run(llm, [PROMPTS[i] for i in order], [FEATURES[feature][i] for i in order])
    assert shuffled == [synchronous(feature, drafts)[i] for i in order]


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_seed_fixes_the_output_of_repeated_and_staggered_runs(synchronous, drafts):
    with engine(num_draft_tokens=drafts, async_scheduling=True, max_num_seqs=3) as llm:
        for arrivals in (0, 2):
            names, outputs = [], {}
            for ids, params in zip(PROMPTS, FEATURES["sampled"], strict=True):
                names.append(llm.submit(ids, params))
                for _ in range(arrivals):
                    outputs |= {output.request_id: output for output in llm.poll()}
            outputs |= drain(llm)
            assert [comparable(outputs[name]) for name in names] == synchronous("sampled", drafts)


def test_unseeded_requests_draw_different_numbers_and_a_new_engine_draws_the_same():
    params = sampled(seed=None, max_tokens=8, temperature=3.0)
    runs = []
    for _ in range(2):
        with engine(max_num_seqs=2) as llm:
            runs.append(tokens(llm, [PROMPTS[3]] * 3, params))
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 3


@pytest.mark.parametrize("policy", ["alternate", "mixed"])
@pytest.mark.parametrize(("asynchronous", "drafts"), [(False, 0), (True, 0), (True, 4), pytest.param(False, 4, marks=pytest.mark.slow)])
def test_preempted_requests_resume_as_if_nothing_had_happened(policy, asynchronous, drafts):
    prompts = [prompt(n, seed=8) for n in (118, 121, 126, 110)]
    cases = [greedy(max_tokens=22, top_logprobs=1, prompt_logprobs=True)] * 4
    if not drafts:
        cases = [cases[0], *(sampled(max_tokens=22, seed=i, **(PENALISED if i == 2 else {})) for i in range(3))]
    with engine() as llm:
        expected = run(llm, prompts, cases)
        known = {str(i): ids + out[2][0][0] for i, (ids, out) in enumerate(zip(prompts, expected, strict=True))}
    options = {"chunked_prefill": True, "max_num_batched_tokens": 64, "policy": policy, "max_model_len": 256, "prefill_attempt_interval": 4}
    with engine(num_draft_tokens=drafts, async_scheduling=asynchronous, num_pages=5, **options) as llm:
        if drafts:
            ScriptedDrafter(llm, known, lambda name, at: crc(name, at) % 3 > 0)
        outputs = llm.generate(prompts, cases, progress=False)
        assert [comparable(output) for output in outputs] == expected
        assert sum(output.samples[0].preemptions for output in outputs) > 0
        llm.engine.settle()
        assert llm.engine.pages.used == 0


def test_first_token_rule_is_not_applied_again_at_resume():
    with engine() as llm:
        ids = prompt(118, seed=8)
        plain = greedy(max_tokens=22, first_n_token_no_eos=1, min_tokens=1, logit_bias={1: 9.0})
        others = [prompt(n, seed=9) for n in (121, 126)]
        expected = run(llm, [ids, *others], plain)
    with engine(num_pages=4, chunked_prefill=True, max_num_batched_tokens=64, max_model_len=256) as llm:
        outputs = llm.generate([ids, *others], plain, progress=False)
        assert [comparable(output) for output in outputs] == expected
        assert sum(output.samples[0].preemptions for output in outputs) > 0


def test_a_preempted_request_that_may_not_be_recomputed_ends_and_says_why():
    with engine(num_pages=4, max_model_len=256, stop_preempted_request=True) as llm:
        outputs = llm.generate([prompt(n, seed=8) for n in (118, 121, 126)], greedy(max_tokens=22), progress=False)
    lost = [output for output in outputs if output.finish_reason == "insufficient_system_resource"]
    assert lost
    assert all("preempted" in output.error and "more memory" in output.error for output in lost)
    assert all(output.finish_reason == "length" for output in outputs if output not in lost)


@pytest.mark.parametrize(("asynchronous", "drafts"), [(False, 0), (True, 0), (True, 4)])
def test_aborts_at_any_step_leave_the_others_alone(synchronous, asynchronous, drafts):
    rng = random.Random(drafts)
    expected = synchronous("sampled", drafts)
    for _ in range(2):
        with engine(num_draft_tokens=drafts, async_scheduling=asynchronous) as llm:
            names = [llm.submit(ids, params) for ids, params in zip(PROMPTS, FEATURES["sampled"], strict=True)]
            doomed = {name: rng.randrange(1, 12) for name in rng.sample(names, 5)}
            outputs = {}
            for step in range(200):
                for name, at in doomed.items():
                    if at == step:
                        llm.abort(name)
                outputs |= {output.request_id: output for output in llm.poll()}
            assert sorted(outputs, key=int) == names
            for name, output in outputs.items():
                wanted, got = expected[int(name)], comparable(output)
                if got[2][0][3] == "abort":
                    count = len(output.token_ids)
                    assert (output.token_ids, got[2][0][2]) == (wanted[2][0][0][:count], wanted[2][0][2][:count])
                else:
                    assert got == wanted
            llm.engine.settle()
            assert llm.engine.pages.used == 0
