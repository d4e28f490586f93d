"""The `engine` level: equalities of whole runs (model notes, runtime section 9, those that concern what exists).

A backend that claims batch invariance must give the same tokens and the same log-probabilities, bit for bit. Without the claim a run
may leave the other one only at a position where the two best tokens lie within `_GAP`, and is not compared after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.registry import Found, Origin, discover
from deepinfer_core.conformance.checks import Check, UnsupportedError, expect
from deepinfer_core.conformance.subject import Subject
from deepinfer_core.engine.llm import LLM
from deepinfer_core.engine.outputs import RequestOutput
from deepinfer_core.sampling import SamplingParams

_GAP = 0.35  # in log-probability: the bound of the model level on what rounding does to a logit
_LENGTHS = (1, 2, 7, 8, 9, 15, 17, 33, 40, 70)  # around the window, the ratio and the top-k of the shipped checkpoint


@contextmanager
def registered(subject: Subject) -> Iterator[str]:
    """Makes the subject selectable by name, also if no entry point names it."""
    backends = discover().backends
    before = backends.get(subject.name)
    backends[subject.name] = Found(type(subject.backend), Origin("conformance", "0", "under test"))
    try:
        yield subject.name
    finally:
        if before is None:
            del backends[subject.name]
        else:
            backends[subject.name] = before


def prompts(count: int = len(_LENGTHS), shared: int = 0) -> list[list[int]]:
    """Token ids of several lengths; the first `shared` ids are common to all."""
    random = torch.Generator().manual_seed(11)
    head = torch.randint(3, 700, (shared,), generator=random).tolist()
    lengths = [_LENGTHS[i % len(_LENGTHS)] for i in range(count)]
    return [head + torch.randint(3, 700, (n,), generator=random).tolist() for n in lengths]


def greedy(tokens: int = 10) -> SamplingParams:
    """Greedy, and the two best tokens of each position."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, top_logprobs=2)


def seeded(count: int, tokens: int = 8) -> list[SamplingParams]:
    """One seeded set of parameters for each prompt."""
    return [SamplingParams(temperature=0.9, top_p=0.95, max_tokens=tokens, ignore_eos=True, seed=100 + i) for i in range(count)]


def generate(subject: Subject, asked: list[list[int]], params: Any, **options: Any) -> list[RequestOutput]:
    """Runs the prompts on the shipped checkpoint. The engine must hold nothing afterwards."""
    numerics = subject.numerics()[0]
    settings = {"max_model_len": 512, "num_pages": 64, "max_num_seqs": 16, "enforce_eager": True, "numerics": str(numerics), **options}
    poison = settings.pop("poison", False)
    with (
        registered(subject) as name,
        LLM(backend=name, device=subject.device, batch_invariant=subject.claims.batch_invariant, **settings) as llm,
    ):
        if poison:
            caches = llm.parts.loaded.caches
            caches.pages.fill_(0xFF)
            caches.slots.fill_(0xFF)
        outputs = llm.generate(asked, params, progress=False)
        for output in outputs:
            expect(not output.samples[0].error, f"request {output.request_id} ended with: {output.samples[0].error}")
        pages, slots = llm.engine.pages, llm.engine.slots
        if options.get("prefix_caching"):  # the prefix index keeps pages and window snapshots
            return outputs
        expect(pages.used == 0, f"{pages.used} pages are in use after every request ended")
        expect(slots.available == slots.total - 1, f"{slots.total - 1 - slots.available} state slots are in use after every request ended")
        return outputs


def same(subject: Subject, got: list[RequestOutput], want: list[RequestOutput], what: str, logprobs: bool = True) -> None:
    """Raises CheckError where two runs differ by more than the subject's claims allow."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        first = next((t for t, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
        if subject.claims.batch_invariant:
            expect(a.token_ids == b.token_ids, f"{what}: prompt {i} leaves the other run at token {first}: {a.token_ids} and {b.token_ids}")
            if logprobs:
                mine, other = ([item.logprob for item in out.logprobs] for out in (a, b))
                expect(mine == other, f"{what}: prompt {i} has the same tokens but other log-probabilities")
            continue
        if first is not None:
            top = sorted(b.logprobs[first].top.values(), reverse=True)
            gap = top[0] - top[1] if len(top) > 1 else 0.0
            expect(gap < _GAP, f"{what}: prompt {i} leaves the other run at token {first}, where the best token leads by {gap:.3g}")


def _async_equals_sync(subject: Subject) -> None:
    """T-4: asynchronous scheduling changes nothing."""
    asked = prompts()
    for options in ({}, {"num_draft_tokens": 3}):
        first, second = (generate(subject, asked, greedy(), async_scheduling=mode, **options) for mode in (True, False))
        same(subject, first, second, f"asynchronous and synchronous scheduling {options or ''}")


def _speculation_changes_nothing(subject: Subject) -> None:
    """T-1: greedy output with drafts equals output without."""
    asked = prompts()
    plain = generate(subject, asked, greedy())
    for drafts in (1, 5):
        got = generate(subject, asked, greedy(), num_draft_tokens=drafts)
        expect(any(out.samples[0].drafts_verified for out in got), "no draft was verified")
        same(subject, got, plain, f"{drafts} draft tokens and none", logprobs=False)
    mixed = [*[greedy()] * (len(asked) - 1), *seeded(1)]  # a sampled request among them: greedy rows go through the op `verify`, too
    got = generate(subject, asked, mixed, num_draft_tokens=3)
    same(subject, got[:-1], plain[:-1], "draft tokens beside a sampled request and none", logprobs=False)


def _chunks_change_nothing(subject: Subject) -> None:
    """T-6: a prompt in chunks gives what a prompt in one piece gives."""
    asked = prompts()
    whole = generate(subject, asked, greedy())
    for budget in (16, 23):
        got = generate(subject, asked, greedy(), chunked_prefill=True, max_num_batched_tokens=budget, max_num_seqs=4)
        same(subject, got, whole, f"chunks of {budget} tokens and one piece")


def _company_changes_nothing(subject: Subject) -> None:
    """T-9: alone, two at a time, all together."""
    asked = prompts()
    together = generate(subject, asked, greedy())
    for most in (1, 2):
        same(subject, generate(subject, asked, greedy(), max_num_seqs=most), together, f"{most} at a time and all together")


def _preemption_changes_nothing(subject: Subject) -> None:
    """T-14: requests that lose their pages and resume give the same tokens."""
    asked = [ids + [5] * 100 for ids in prompts(4)]
    free = generate(subject, asked, greedy(60))
    tight = generate(subject, asked, greedy(60), num_pages=6)
    expect(any(out.samples[0].preemptions for out in tight), "no request was preempted: the check needs fewer pages")
    same(subject, tight, free, "few pages and many")


def _prefix_hits_change_nothing(subject: Subject) -> None:
    """A prompt whose prefix is cached, with its window state, gives what a cold prompt gives."""
    asked = prompts(4, shared=260)
    cold = generate(subject, asked, greedy())
    warm = generate(subject, asked, greedy(), prefix_caching=True, window_snapshots=8, max_num_seqs=1)
    expect(any(out.samples[0].cached_tokens for out in warm), "no prompt hit the prefix cache")
    if not any(out.samples[0].replayed for out in warm):
        same(subject, warm, cold, "prefix hits and cold prompts")


def _poison_changes_nothing(subject: Subject) -> None:
    """T-8: whatever unused cache memory holds."""
    asked = prompts()
    for options in ({}, {"num_draft_tokens": 3}):
        clean = generate(subject, asked, greedy(), max_num_seqs=3, **options)
        same(subject, generate(subject, asked, greedy(), max_num_seqs=3, poison=True, **options), clean, "poisoned and clean caches")


def _limits_hold(subject: Subject) -> None:
    """T-15: exactly max_tokens tokens, one log-probability each, one finish reason."""
    for tokens in (1, 2, 5):
        for output in generate(subject, prompts(4), greedy(tokens), num_draft_tokens=3):
            expect(len(output.token_ids) == tokens, f"max_tokens={tokens} gave {len(output.token_ids)} tokens")
            expect(len(output.logprobs) == tokens, f"{tokens} tokens came with {len(output.logprobs)} log-probabilities")
            expect(output.samples[0].finish_reason is not None, "a request ended without a reason")


def _seeds_decide(subject: Subject) -> None:
    """T-11: a seeded request gives the same tokens in every run of the same shape."""
    asked = prompts(6)
    runs = [generate(subject, asked, seeded(6)) for _ in range(2)]
    expect([o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]], "two equal runs with equal seeds gave different tokens")


def prove_load_independence(subject: Subject) -> None:
    """T-10: with seeds, the same tokens at every load and in every order of arrival."""
    asked, params = prompts(8), seeded(8)
    want = [out.token_ids for out in generate(subject, asked, params)]
    for most in (1, 3):
        got = [out.token_ids for out in generate(subject, asked, params, max_num_seqs=most)]
        expect(got == want, f"seeded requests give other tokens with max_num_seqs={most}")
    got = [out.token_ids for out in generate(subject, asked[::-1], params[::-1], async_scheduling=False)][::-1]
    expect(got == want, "seeded requests give other tokens in another order of arrival")


def prove_graphs(subject: Subject) -> None:
    """T-5: replayed decode steps equal eager ones at every bucket boundary."""
    for count in (1, 2, 3, 4, 5, 8, 9):
        asked = prompts(count)
        options = {"max_num_seqs": 12, "batch_size_interval": 4}
        eager = generate(subject, asked, greedy(4), enforce_eager=True, **options)
        same(subject, generate(subject, asked, greedy(4), enforce_eager=False, **options), eager, f"graphs and eager steps of {count} rows")


def _needs_formats(check: Any) -> Any:
    """The check, for backends that can hold the shipped checkpoint's caches."""

    def run(subject: Subject) -> None:
        wanted = {"window": "fp8", "entry": "fp4", "index": "fp4_index"}
        if subject.numerics()[0] is Numerics.IDEAL:
            wanted = dict.fromkeys(wanted, "f32")
        for kind, fmt in wanted.items():
            if fmt not in getattr(subject.claims, f"{kind}_formats"):
                raise UnsupportedError(f"{kind}_formats does not name {fmt}")
        check(subject)

    return run


_FUNCTIONS = (
    (_limits_hold, False),
    (_async_equals_sync, True),
    (_speculation_changes_nothing, False),
    (_chunks_change_nothing, True),
    (_company_changes_nothing, True),
    (_preemption_changes_nothing, True),
    (_prefix_hits_change_nothing, True),
    (_poison_changes_nothing, True),
    (_seeds_decide, True),
)

CHECKS: list[Check] = [
    Check("engine", function.__name__.lstrip("_"), _needs_formats(function), slow=slow, patience=5.0) for function, slow in _FUNCTIONS
]
