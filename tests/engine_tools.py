"""What the tests of the whole engine share: prompts, comparable results, scripted drafters, poisoned caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.engine.outputs import RequestOutput, SampleOutput, TokenLogprob

VOCAB, WINDOW, PAGE = 768, 8, 128  # of the checkpoint that ships with the package
EOS = 1


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random ids of ordinary tokens."""
    return np.random.default_rng((seed, length)).integers(3, 700, size=length).tolist()


def engine(**options: Any) -> LLM:
    """An engine on the shipped checkpoint, small and synchronous unless `options` say otherwise."""
    return LLM(**{"max_num_seqs": 4, "max_model_len": 512, "async_scheduling": False, "backend": "cpu_ref", **options})


def greedy(**fields: Any) -> SamplingParams:
    """Parameters of a greedy request that EOS does not end."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields})


def sampled(**fields: Any) -> SamplingParams:
    """Parameters of a seeded, sampled request that EOS does not end."""
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "seed": 7, **fields})


def plain(sample: SampleOutput) -> tuple[Any, ...]:
    """Everything of a sample that no mode of execution may change, bit for bit."""
    return (sample.token_ids, sample.text, logprobs(sample.logprobs), sample.finish_reason, sample.error)


def logprobs(items: Iterable[TokenLogprob] | None) -> list[tuple[Any, ...]] | None:
    """Log-probabilities as comparable data."""
    return None if items is None else [(item.token_id, item.logprob, tuple(item.top.items())) for item in items]


def comparable(output: RequestOutput) -> tuple[Any, ...]:
    """The same for a request."""
    return (output.prompt_token_ids, logprobs(output.prompt_logprobs), [plain(sample) for sample in output.samples])


def run(llm: LLM, prompts: Sequence[Any], params: Any) -> list[tuple[Any, ...]]:
    """Comparable outputs of `prompts`."""
    return [comparable(output) for output in llm.generate(prompts, params, progress=False)]


def tokens(llm: LLM, prompts: Sequence[Any], params: Any) -> list[list[int]]:
    """Output ids of `prompts`."""
    return [output.token_ids for output in llm.generate(prompts, params, progress=False)]


def drain(llm: LLM, limit: int = 10_000) -> dict[str, RequestOutput]:
    """Steps until nothing is unfinished."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not llm.engine.has_unfinished:
            break
        outputs |= {output.request_id: output for output in llm.poll()}
    outputs |= {output.request_id: output for output in llm.poll()}
    assert not llm.engine.has_unfinished, "requests are starved"
    return outputs


class ScriptedDrafter:
    """Replaces the drafter's heads: draft `right` says, for a request id and a position, whether the draft is the known token there.

    known: request id (of sample 0) -> prompt and expected output. A wrong draft is another id. `confidence` gives the confidence head's
    output for (request id, position).
    """

    def __init__(
        self,
        llm: LLM,
        known: Mapping[str, Sequence[int]],
        right: Callable[[str, int], bool],
        confidence: Callable[[str, int], float] = lambda request_id, position: 0.5,
    ) -> None:
        drafter, runner = llm.parts.loaded.drafter, llm.engine.runner
        assert drafter is not None
        self.known, self.right, self.chance = known, right, confidence
        self._requests: list[str] = []
        self._first: list[int] = []  # index of each sequence's first draft
        self._index = 0
        draft, forward = runner._draft, drafter.forward

        def remember(handle: Any, host: Any, batch: Any, sampled: np.ndarray, *rest: Any) -> None:
            self._requests, self._index = [handle.plan.requests[s] for s in sampled], 0
            draft(handle, host, batch, sampled, *rest)

        def watch(inputs: Any, length: int, caches: Any) -> Any:
            self._first = (inputs.position + 2).tolist()
            return forward(inputs, length, caches)

        runner._draft = remember  # type: ignore[method-assign]
        drafter.forward = watch  # type: ignore[method-assign]
        drafter.markov_logits = self._logits  # type: ignore[method-assign]
        drafter.confidence = self._confidence  # type: ignore[method-assign]

    def _logits(self, base: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        logits = torch.full_like(base, -30.0)
        for row, (name, first) in enumerate(zip(self._requests, self._first, strict=True)):
            at, known = first + self._index, self.known.get(name, ())
            token = known[at] if at < len(known) else 5
            logits[row, token if self.right(name, at) else (token + 1) % VOCAB] = 30.0
        self._index += 1
        return logits

    def _confidence(self, hidden: torch.Tensor, previous: torch.Tensor, temperature: float) -> torch.Tensor:
        chances = [self.chance(name, first + self._index) for name, first in zip(self._requests, self._first, strict=True)]
        return torch.tensor(chances, dtype=torch.float32, device=hidden.device)


def poison(llm: LLM, byte: int) -> None:
    """Overwrites every cache byte that no running request and no cached prefix may read: free pages, free slots, rejected positions.

    Needs an idle device (synchronous scheduling). FP8 0x7F and 0xFF are NaN, so is float32 0xFFFFFFFF.
    """
    engine, caches = llm.engine, llm.parts.loaded.caches
    table = engine.scheduler._ledger.table
    running = table.running()
    pages = {page for row in running for page in table.pages(int(row))}
    slots = {int(table.slot[row]) for row in running}
    for page in set(range(len(caches.pages))) - pages - engine.pages._retained:
        caches.pages[page] = byte
    prefix = engine.scheduler._ledger.prefix
    snapshots = set(prefix._snapshots.values()) if prefix is not None else set()
    for slot in set(range(len(caches.slots))) - slots - snapshots:
        caches.slots[slot] = byte
    for row in running:
        _poison_row(llm, int(table.slot[row]), table.pages(int(row)), int(table.computed[row]), byte)


def _poison_row(llm: LLM, slot: int, pages: list[int], computed: int, byte: int) -> None:
    """Positions from `computed` on were never committed: rejected drafts, and what was there before."""
    loaded, caches = llm.parts.loaded, llm.parts.loaded.caches
    for window in (*caches.window, *caches.draft_window):
        _poison_ring(window.data[slot], computed, loaded.geometry.window, byte)
    for ring in caches.compressor.values():
        fill = ring.data.new_full((), float("nan"))
        rows, ratio = ring.data.shape[1], 2
        for at in set(range(rows)) - {p % rows for p in range(max(computed - ratio + 1, 0), computed)}:
            ring.data[slot, at] = fill
    for section in loaded.layout.sections:
        first = computed // (loaded.geometry.page_tokens // section.entries)  # entries of completed groups are below it
        data = caches.pages[:, section.offset : section.offset + section.length]
        for i, page in enumerate(pages):
            begin = min(max(first - i * section.entries, 0), section.entries)
            if section.kind == "main":
                data[page, begin * section.entry_bytes :] = byte
            elif begin == 0:
                data[page] = byte


def _poison_ring(ring: torch.Tensor, computed: int, window: int, byte: int) -> None:
    rows = len(ring)
    visible = {p % rows for p in range(max(computed - window + 1, 0), computed)}
    for at in set(range(rows)) - visible:
        ring[at] = byte
