"""Random driver of the whole engine: whatever arrives, aborts, is preempted, chunked, drafted or cached, each request gets, bit for bit,
the output that it gets alone in a plain synchronous engine."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from engine_tools import VOCAB, ScriptedDrafter, comparable, drain, engine, poison

from deepinfer_core import LLM, RequestOutput, SamplingParams

LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 90, 127, 128, 129, 140)


@pytest.fixture(scope="module")
def alone():
    """Runs one request at a time; with drafts if the draws of a sampled request depend on them."""
    engines = {drafts: engine(max_num_seqs=1, num_draft_tokens=drafts) for drafts in (0, 3)}
    yield engines
    for llm in engines.values():
        llm.close()


def random_params(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": rng.randrange(1 << 30)}
    fields["temperature"] = rng.choice([0.0, 0.0, 0.0, 0.5, 1.0])
    fields["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.2:
        fields["stop"] = [rng.choice("aeiou "), "th"]
    if rng.random() < 0.2:
        fields["stop_token_ids"] = rng.sample(range(VOCAB), 60)
    if rng.random() < 0.15:
        fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
    if rng.random() < 0.2:
        fields |= {"presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.3}
    if rng.random() < 0.15:
        fields["logit_bias"] = {rng.randrange(VOCAB): rng.uniform(-8, 8) for _ in range(3)}
    if rng.random() < 0.15:
        fields["golden_token_ids"] = [rng.randrange(3, 700) for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.2:
        fields["top_logprobs"] = rng.randint(1, 4)
    if rng.random() < 0.15:
        fields["prompt_logprobs"] = True
    if fields["temperature"] and rng.random() < 0.4:
        fields |= {"top_k": rng.randint(1, 20), "top_p": rng.uniform(0.3, 1.0)}
    return SamplingParams(**fields)


class Driver:
    def __init__(self, seed: int, alone: dict[int, LLM]) -> None:
        rng = self.rng = random.Random(seed)
        self.drafts = rng.choice([0, 3, 3])
        chunked = rng.random() < 0.7
        self.options: dict[str, Any] = {
            "max_num_seqs": rng.randint(2, 5),
            "max_model_len": 200,
            "num_draft_tokens": self.drafts,
            "async_scheduling": rng.random() < 0.7,
            "policy": rng.choice(["mixed", "alternate"]),
            "chunked_prefill": chunked,
            "max_num_batched_tokens": rng.randint(20, 60) if chunked else None,
            "num_pages": rng.choice([4, 5, 8, 40]),
            "prefill_attempt_interval": 3,
            "prefill_any_attempt_interval": 5,
            "prefix_caching": rng.random() < 0.5,
            "window_snapshots": rng.choice([0, 1, 3]),
        }
        self.llm = engine(**{key: value for key, value in self.options.items() if value is not None})
        self.alone = alone
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.known: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.outputs: dict[str, RequestOutput] = {}
        self.documents = [[rng.randrange(3, 700) for _ in range(150)] for _ in range(2)]
        if self.drafts:
            ScriptedDrafter(self.llm, self.known, self._right)

    def _right(self, name: str, position: int) -> bool:
        return zlib.crc32(f"{name}:{position}".encode()) % 3 > 0

    def run(self, steps: int) -> None:
        rng = self.rng
        for step in range(steps):
            while rng.random() < 0.35:
                self._add()
            if rng.random() < 0.04 and self.asked:
                name = rng.choice(list(self.asked))
                if self.llm.abort(name):
                    self.aborted.add(name)
            if not self.options["async_scheduling"] and not self.options["window_snapshots"] and step % 3 == 0:
                poison(self.llm, rng.choice([0x7F, 0xFF]))
            self._collect(self.llm.poll())
        self._collect(drain(self.llm).values())
        self.llm.engine.settle()
        assert self.llm.engine.pages.used == 0
        assert set(self.outputs) == set(self.asked)

    def _add(self) -> None:
        rng = self.rng
        shared = rng.choice(self.documents)
        ids = shared[: rng.choice(LENGTHS)] if rng.random() < 0.5 else [rng.randrange(3, 700) for _ in range(rng.choice(LENGTHS))]
        params = random_params(rng)
        name = f"r{len(self.asked)}"
        if self.drafts and params.is_greedy:
            self.known[name] = ids + self.alone[0].generate(ids, params, progress=False)[0].token_ids
        self.asked[name] = (ids, params)
        self.llm.submit(ids, params, name)

    def _collect(self, outputs: Any) -> None:
        for output in outputs:
            assert output.request_id not in self.outputs, "a request ended twice"
            self.outputs[output.request_id] = output

    def check(self) -> int:
        compared = 0
        for name, output in self.outputs.items():
            ids, params = self.asked[name]
            sample = output.samples[0]
            if sample.replayed or (self.drafts and not params.is_greedy):
                continue  # windows that were rebuilt are approximate; draws depend on the drafts: see test_modes
            expected = self.alone[0].generate(ids, params, progress=False)[0]
            label = (name, self.options, params)
            if name in self.aborted and sample.finish_reason == "abort":
                count = len(sample.token_ids)
                assert sample.token_ids == expected.token_ids[:count], label
                assert sample.logprobs == expected.logprobs[:count], label
                continue
            assert comparable(output) == comparable(expected), label
            compared += 1
        return compared


@pytest.mark.parametrize("seed", range(2))
def test_every_request_gets_its_solo_output(seed, alone):
    driver = Driver(seed, alone)
    driver.run(30)
    assert driver.check() > 3
    driver.llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_every_request_gets_its_solo_output_in_long_runs(seed, alone):
    driver = Driver(seed, alone)
    driver.run(300)
    assert driver.check() > 50
    driver.llm.close()
