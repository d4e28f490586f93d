"""What must hold while the engine drafts: n-grams, confidences that are no numbers, forbidden waits, memory."""

from __future__ import annotations

import gc
import resource

import numpy as np
import pytest
import torch
from decoding_tools import VOCAB, Curve, ToyModel, engine, table, varlen_engine

from deepinfer_core import SamplingParams
from deepinfer_core.errors import ConfigError, EngineError

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


# ---------------------------------------------------------------------------------------------- T-27: n-grams


@pytest.mark.parametrize(("asynchronous", "varlen"), [(False, False), (True, False), (True, True)])
def test_ngrams_across_accepted_and_refused_drafts_are_those_of_the_final_tokens(monkeypatch, asynchronous, varlen):
    options = {"num_draft_tokens": 3, "async_scheduling": asynchronous, "max_model_len": 80, "policy": "mixed"}
    llm = varlen_engine(monkeypatch, Curve(9, 2, 5), **options) if varlen else engine(**options)
    loaded, target = llm.parts.loaded, table(40, seed=3)
    draft = target + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
    model = ToyModel(llm, target, draft)
    seen: dict[tuple[int, int], tuple[int, list[int]]] = {}  # (state slot, position) -> (token, n-gram), newest

    def watch(inputs):
        batch = loaded.batch(inputs)
        slots = inputs.state_slot[batch.rows.sequence.long()].tolist()
        for slot, position, token, ngram in zip(
            slots, batch.rows.positions.tolist(), batch.tokens.tolist(), batch.ngrams.tolist(), strict=True
        ):
            seen[slot, position] = (token, ngram)
        return model._forward(inputs)

    llm.engine.runner._run_model = watch
    prompts = [[3 + i, 7, 9 + i][: 1 + i] for i in range(3)] + [list(range(3, 40))]
    slots = {}
    for prompt in prompts:
        llm.submit(prompt, GREEDY)
    outputs = []
    while llm.engine.has_unfinished:
        outputs += llm.poll()
        requests = llm.engine.scheduler._ledger.table
        slots |= {requests.names[row]: int(requests.slot[row]) for row in requests.running()}
    assert len(outputs) == 4
    for output in outputs:
        ids = output.prompt_token_ids + output.token_ids
        compressed = loaded.token_map[torch.tensor(ids)].tolist()
        for position in range(len(ids) - 1):
            token, ngram = seen[slots[output.request_id], position]
            assert token == ids[position]
            assert ngram == [compressed[position - i] if position >= i else loaded.pad_id for i in range(loaded.geometry.ngram)]
    assert 0.05 < llm.stats()["avg_nextn_accept_rate"] < 0.95
    llm.close()


# ---------------------------------------------------------------------------------------------- bad confidences, bad limits


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_with_nan_confidences_goes_on_without_drafts_after_one_warning(monkeypatch, caplog, varlen, asynchronous):
    target = table(40, seed=3)
    options = {"num_draft_tokens": 3, "async_scheduling": asynchronous, "max_model_len": 80}
    llm = varlen_engine(monkeypatch, Curve(9, 2, 5), **options) if varlen else engine(**options)
    confidence = torch.full((VOCAB,), 0.5)
    token = 5
    for _ in range(6):
        token = int(target[token].argmax())
    confidence[token] = torch.nan  # met after some steps by the first request, perhaps never by the other
    ToyModel(llm, target, target, confidence)
    outputs = llm.generate([[5], [6]], GREEDY, progress=False)
    for first, output in zip((5, 6), outputs, strict=True):
        chain = [first]
        for _ in range(20):
            chain.append(int(target[chain[-1]].argmax()))
        assert output.token_ids == chain[1:]
    warned = [record.message for record in caplog.records if "request '0'" in record.message]
    assert len(warned) == 1
    assert "a draft confidence is NaN; it goes on without drafting" in warned[0]
    llm.close()


def test_more_drafts_than_the_block_holds_are_refused():
    with pytest.raises(ConfigError, match=r"num_draft_tokens = 6: the drafter's block holds 5; lower it to that"):
        engine(num_draft_tokens=6)


# ---------------------------------------------------------------------------------------------- T-30: nothing waits while launching


@pytest.mark.parametrize("half", ["forward", "sample"])
def test_a_wait_that_slips_into_launch_code_ends_the_engine_with_its_reason(half):
    llm = engine(async_scheduling=True)
    runner, runtime = llm.engine.runner, llm.parts.runtime
    launch = getattr(runner, half)

    def careless(*args):
        result = launch(*args)
        runtime.synchronize()
        return result

    setattr(runner, half, careless)
    with pytest.raises(EngineError, match="inside forbid_sync"):
        llm.engine.add_request("a", [3], GREEDY) or [llm.engine.step() for _ in range(2)]
    runtime.synchronize()  # the guard is gone
    (output,) = llm.engine.drain()
    assert "forbid_sync" in output.error
    llm.close()


@pytest.mark.parametrize("varlen", [False, True])
def test_launching_never_waits(monkeypatch, varlen):
    """The guard raises on any wait in launch code, whether or not it would block."""
    options = {"num_draft_tokens": 3, "async_scheduling": True, "max_model_len": 80}
    llm = varlen_engine(monkeypatch, Curve(9, 2, 5), **options) if varlen else engine(**options)
    target = table(40, seed=3)
    ToyModel(llm, target, target)
    outputs = llm.generate([[3], [4], [5]], GREEDY, progress=False)
    assert [len(output.token_ids) for output in outputs] == [20] * 3
    llm.close()


# ---------------------------------------------------------------------------------------------- T-29: memory


def drive(llm, count: int, rng: np.random.Generator) -> list[int]:
    """Runs `count` requests of random lengths; returns how many had ended after each tenth of the polls that brought results."""
    ended, progress = 0, []
    for _ in range(count):
        prompt = rng.integers(3, 40, size=rng.integers(1, 60)).tolist()
        llm.submit(prompt, SamplingParams(temperature=int(rng.integers(2)), max_tokens=int(rng.integers(1, 12)), ignore_eos=True))
    while llm.engine.has_unfinished:
        ended += len(llm.poll())
        progress.append(ended)
    assert ended + len(llm.poll()) == count
    return progress


def tensor_count() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.slow
def test_ten_thousand_requests_do_not_grow_memory():
    """Over 5 s: 10,000 requests through the whole engine. Pages and slots are all free after it, the process is as large as before."""
    llm = engine(num_draft_tokens=2, async_scheduling=True, max_num_seqs=64, max_model_len=128, prefix_caching=True, num_pages=80)
    target = table(40, seed=3)
    ToyModel(llm, target, table(40, seed=4))
    rng = np.random.default_rng(0)
    drive(llm, 2000, rng)
    before, tensors = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, tensor_count()
    progress = drive(llm, 8000, rng)
    assert progress[len(progress) // 2] > 2000, "results must come as requests end, not at the end"
    llm.engine.settle()
    assert llm.engine.pages.used == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB; 8,000 waiting requests are in it
    assert abs(tensor_count() - tensors) < 200
    llm.close()
