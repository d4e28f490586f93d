"""The engine loop: requests in, deltas and finished outputs out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_core.cache.pages import PagePool, SlotPool
from deepinfer_core.engine.drafting import DraftStatistics
from deepinfer_core.engine.outputs import Delta, RequestOutput, SampleOutput, Timing, TokenLogprob
from deepinfer_core.engine.plan import RequestUpdate, StepResult
from deepinfer_core.engine.request import Finished, FinishReason, RequestSpec
from deepinfer_core.engine.results import StepPayload, TokenScores
from deepinfer_core.engine.runner import Runner, RunnerOptions, StepHandle
from deepinfer_core.engine.scheduler import Scheduler
from deepinfer_core.engine.startup import EngineParts
from deepinfer_core.engine.text import OutputText
from deepinfer_core.engine.times import StepTimes, statistics
from deepinfer_core.engine.warmup import warm_up
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.sampling import Sampler, SamplerOptions, SamplingParams, SamplingState, parse_blacklist, request_seed

log = logging.getLogger("deepinfer")


@dataclass
class _Sample:
    """One sample of a request while it runs; what the runner and the loop know of it."""

    parent: _Request
    output: SampleOutput
    prompt: np.ndarray  # int32
    sampling: SamplingState
    stop_ids: tuple[int, ...]
    text: OutputText
    stopped: bool = False  # a stop string appeared


@dataclass
class _Request:
    output: RequestOutput
    params: SamplingParams
    arrival: float
    first_token: float | None = None
    running: int = 0  # samples that have not finished


@dataclass
class StepOutputs:
    """What one call of `Engine.step` brought."""

    deltas: list[Delta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


class Engine:
    """One engine on one device. Not thread safe.

    A request that fails ends alone, with its reason. A device that fails ends the engine: `step` raises EngineError, then and ever after;
    `drain` returns what the failed step had completed, and every unfinished request with reason `error`.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        config, limits = parts.config, parts.limits
        self.pages, self.slots = PagePool(parts.sizes.pages), SlotPool(parts.sizes.state_slots)
        options = SamplerOptions(
            blacklist=parse_blacklist(config.sampling.token_blacklist, limits.vocab_size), logprobs_mode=config.sampling.logprobs_mode
        )
        sampler = Sampler(parts.kernels, limits.vocab_size, options)
        compact = config.scheduler.prefill_truncation_mode == "compact"
        runner_options = RunnerOptions(limits.num_draft_tokens, config.speculative.confidence_temperatures, compact)
        self.runner = Runner(parts.loaded, sampler, parts.runtime, runner_options)
        self.times = StepTimes()
        self.drafting = DraftStatistics(2 * limits.max_num_seqs, limits.num_draft_tokens)
        self.costs = warm_up(self.runner, parts)
        self.scheduler = Scheduler(limits, self.pages, self.slots, parts.identity, self.costs)
        self._requests: dict[str, _Request] = {}
        self._samples: dict[str, _Sample] = {}
        self._in_flight: StepHandle | None = None
        self._failure: EngineError | None = None
        self._undelivered = StepOutputs()  # of a step that failed half-way

    # ------------------------------------------------------------------ requests

    def add_request(self, request_id: str, prompt: str | Sequence[int] | np.ndarray, params: SamplingParams) -> None:
        """Queues a request. Its end, and that of a request that can never run, is reported by `step`.

        Raises RequestError if the prompt is neither text nor token ids, a parameter does not fit this engine, or an unfinished request
        has the same id.
        """
        if self._failure is not None:
            raise self._failure
        keys = sample_keys(request_id, params.n)
        if request_id in self._requests or any(key in self._samples for key in keys):
            raise RequestError(
                f"request_id {request_id!r}: an unfinished request has the same id; choose another",
                parameter="request_id",
                value=request_id,
            )
        text, ids = self._encoded(prompt)
        params.check_vocabulary(self.parts.limits.vocab_size)
        if params.so_args is not None:
            raise RequestError(
                "so_args: structured output needs a grammar plugin, and none is installed; leave it out", parameter="so_args", value="…"
            )
        request = _Request(RequestOutput(request_id, text, [int(i) for i in ids], []), params, time.monotonic(), running=params.n)
        eos = self.parts.model_config.eos_token_id
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else (eos,)))
        self._requests[request_id] = request
        if params.prompt_logprobs:
            request.output.prompt_logprobs = []
        for index, key in enumerate(keys):
            seed = request_seed(self.parts.config.model.seed, request_id, index, params.seq_seed)
            state = SamplingState(params, seed, ids, (eos,), self.parts.config.sampling.greedy_compat)
            output = SampleOutput(index)
            request.output.samples.append(output)
            self._samples[key] = _Sample(request, output, ids, state, stops, OutputText(self.parts.tokenizer, params.stop))
            self.scheduler.add(
                RequestSpec(
                    request_id=key,
                    prompt=ids,
                    max_tokens=params.max_tokens,
                    stop_ids=frozenset(stops),
                    min_tokens=params.min_tokens,
                    prompt_logprobs=params.prompt_logprobs and index == 0,
                )
            )

    def abort(self, request_id: str) -> bool:
        """Ends a request with reason `abort`; False if it has ended already. The end is reported by the next `step`."""
        count = len(self._requests[request_id].output.samples) if request_id in self._requests else 0
        return sum([self.scheduler.abort(key) for key in sample_keys(request_id, count)]) > 0

    def is_unfinished(self, request_id: str) -> bool:
        """True while a sample of the request has not ended."""
        return request_id in self._requests

    @property
    def has_unfinished(self) -> bool:
        """True while a request has not ended."""
        return bool(self._samples)

    # ------------------------------------------------------------------ steps

    def step(self) -> StepOutputs:
        """Plans and launches one step, and commits the step that is due: this one, or with asynchronous scheduling the one before."""
        if self._failure is not None:
            raise self._failure
        outputs = StepOutputs()
        with self.guarded(outputs):
            self._advance(outputs)
        return outputs

    def settle(self) -> StepOutputs:
        """Commits the step in flight, if any, without launching another. Fails as `step` does."""
        outputs = StepOutputs()
        if self._in_flight is not None:
            handle, self._in_flight = self._in_flight, None
            with self.guarded(outputs):
                self._commit(handle, outputs)
                self._report(self.scheduler.drain(), outputs)
        return outputs

    def drain(self) -> list[RequestOutput]:
        """After a failure: results that the failed step had completed, and unfinished requests, each with reason `error`."""
        outputs, self._undelivered = self._undelivered, StepOutputs()
        for key in list(self._samples):
            self._finish(key, FinishReason.ERROR, str(self._failure or "the engine was closed"), outputs)
        return outputs.finished

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and mean milliseconds of the newest steps."""
        figures = statistics(self.scheduler.stats(), self.times, self.parts.limits)
        return figures | {"avg_confidence_error": round(self.drafting.mean_error, 4)}

    def record_timeline(self) -> None:
        """Starts a timeline of host and device work. Waits for the device once."""
        event = self.parts.runtime.record()
        event.wait()
        self.times.record_timeline(event)

    def close(self) -> None:
        """Frees the device; nothing can be run afterwards. Idempotent."""
        self._failure = self._failure or EngineError("the engine was closed; build a new one")
        self.parts.runtime.close()

    @property
    def failure(self) -> EngineError | None:
        """Why nothing can be run any more; None while all is well."""
        return self._failure

    @contextmanager
    def guarded(self, outputs: StepOutputs) -> Iterator[None]:
        """Whatever is raised inside ends the engine; `outputs` are kept for `drain`."""
        try:
            yield
        except EngineError as error:
            self._fail(error, outputs)
            raise
        except Exception as error:
            failure = EngineError(f"the device failed in a step: {type(error).__name__}: {error}; every unfinished request ended")
            self._fail(failure, outputs)
            raise failure from error
        except BaseException:
            self._fail(EngineError("a step was interrupted, so the engine's state is unknown; build a new one"), outputs)
            raise

    def _advance(self, outputs: StepOutputs) -> None:
        previous, self._in_flight = self._in_flight, None
        with self.times.span("plan"):
            plan = self.scheduler.plan()
        handle = None
        if plan is not None:
            with self.times.span("launch_forward"), self.parts.runtime.forbid_sync():
                handle = self.runner.forward(plan)
        involved = {key: self._samples[key] for key in plan.requests} if plan is not None else {}  # the commit below may end some
        accepted = None
        if previous is not None:
            accepted = self._commit(previous, outputs)
        if handle is not None:
            self.runner.await_rows(handle)
            with self.times.span("launch_sample"), self.parts.runtime.forbid_sync():
                self.runner.sample(handle, involved, accepted)
            if self.parts.limits.asynchronous:
                self._in_flight = handle
            else:
                self._commit(handle, outputs)
        self._report(self.scheduler.drain(), outputs)
        interval = self.parts.config.observability.logging_interval_step
        if plan is not None and interval > 0 and plan.step % interval == 0 and not self.parts.config.observability.disable_log_stats:
            log.info("event=stats step=%d %s", plan.step, " ".join(f"{name}={value}" for name, value in self.stats().items()))

    def _commit(self, handle: StepHandle, outputs: StepOutputs) -> np.ndarray:
        """Takes a step's results. Returns the drafts accepted, by sequence of its plan."""
        with self.times.span("wait"):
            result = handle.wait()
        with self.times.span("commit"):
            return self._commit_result(handle, result, outputs)

    def _commit_result(self, handle: StepHandle, result: StepResult, outputs: StepOutputs) -> np.ndarray:
        cost = self.times.finish(handle, self.scheduler.stats().output_tokens)
        if self.costs is not None and cost.decodes:
            self.costs.observe(cost.rows, cost.sequences, cost.forward, cost.sample, bool(handle.plan.draft.any()))
        updates = self.scheduler.commit(handle.plan, result)
        self.drafting.take(handle.plan, result, updates)
        for warning in updates.warnings:
            log.warning("event=draft_warning step=%d message=%s", handle.plan.step, warning)
        payload: StepPayload = result.payload
        for update in updates:
            self._take(update, payload, outputs)
        self._report(updates.finished, outputs)
        return np.asarray(result.counts) - 1

    def _take(self, update: RequestUpdate, payload: StepPayload, outputs: StepOutputs) -> None:
        """Hands one step's tokens to a sample."""
        sample = self._samples.get(update.request_id)
        if sample is None:
            return
        if (scores := payload.prompt_scores.get(update.sequence)) is not None:
            self._take_prompt_scores(sample, scores)
        if not len(update.tokens):
            return
        if sample.parent.first_token is None:
            sample.parent.first_token = time.monotonic()
            self.times.first_tokens.append(sample.parent.first_token - sample.parent.arrival)
        tokens = update.tokens.tolist()
        sample.sampling.append(tokens)
        kept, text, stopped = sample.text.feed(tokens)
        out = sample.output
        out.token_ids += tokens[:kept]
        out.text += text
        out.logprobs += _logprobs(tokens[:kept], payload.scores_of(update.sequence), sample.parent.params.top_logprobs)
        out.drafts_verified += update.verified
        out.drafts_accepted += update.accepted
        if stopped:
            sample.stopped = True
            self.scheduler.finish(update.request_id, FinishReason.STOP, keep_outputs=len(out.token_ids))
        outputs.deltas.append(Delta(sample.parent.output.request_id, out.index, text, tuple(tokens[:kept]), None))

    def _take_prompt_scores(self, sample: _Sample, scores: TokenScores) -> None:
        output = sample.parent.output
        output.prompt_logprobs = output.prompt_logprobs or []
        first = 1 + len(output.prompt_logprobs)
        ids = output.prompt_token_ids[first : first + len(scores.tokens)]
        output.prompt_logprobs += _logprobs(ids, scores, sample.parent.params.top_logprobs)

    def _report(self, finished: Sequence[Finished], outputs: StepOutputs) -> None:
        for end in finished:
            sample = self._samples.get(end.request_id)
            if sample is None:
                continue
            out = sample.output
            out.cached_tokens, out.replayed, out.preemptions = end.cached_tokens, end.replayed, end.preemptions
            # A stop string wins over an end that the scheduler found in tokens behind it, or in the one that completed it.
            reason, detail = (FinishReason.STOP, "") if sample.stopped else (end.reason, end.detail)
            self._finish(end.request_id, reason, detail, outputs)

    def _finish(self, key: str, reason: FinishReason, detail: str, outputs: StepOutputs) -> None:
        sample = self._samples.pop(key)
        out, request = sample.output, sample.parent
        rest = sample.text.flush()
        out.text += rest
        out.finish_reason, out.error = reason, detail
        outputs.deltas.append(Delta(request.output.request_id, out.index, rest, (), reason, detail))
        request.running -= 1
        if not request.running:
            del self._requests[request.output.request_id]
            first = None if request.first_token is None else request.first_token - request.arrival
            request.output.timing = Timing(first, time.monotonic() - request.arrival)
            outputs.finished.append(request.output)

    def _fail(self, failure: EngineError, outputs: StepOutputs) -> None:
        self._failure, self._in_flight, self._undelivered = failure, None, outputs
        log.error("event=engine_failed reason=%s unfinished=%d", failure, len(self._samples))

    def _encoded(self, prompt: str | Sequence[int] | np.ndarray) -> tuple[str | None, np.ndarray]:
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"prompt: character {error.start} is {prompt[error.start]!r}, half of a surrogate pair; expected text that UTF-8 can "
                    "encode; read the prompt with the encoding it was written in",
                    parameter="prompt",
                    value=prompt,
                ) from None
            return prompt, np.asarray(self.parts.tokenizer.encode(prompt) if prompt else [], dtype=np.int32)
        ids = token_ids(prompt)
        if ids is None:
            raise RequestError(
                f"prompt is {_kind(prompt)}; expected text or a flat list of token ids",
                parameter="prompt",
                value=prompt,
            )
        outside = ids[(ids < 0) | (ids >= self.parts.limits.vocab_size)]
        if outside.size:
            expected = f"token ids of this model lie in [0, {self.parts.limits.vocab_size})"
            raise RequestError(f"prompt: token id {int(outside[0])} is unknown; {expected}", parameter="prompt", value=int(outside[0]))
        return None, ids.astype(np.int32)


def sample_keys(request_id: str, count: int) -> list[str]:
    """What the samples of a request are called in the scheduler and in messages."""
    return [request_id if index == 0 else f"{request_id}[{index}]" for index in range(count)]


def token_ids(value: object) -> np.ndarray | None:
    """`value` as an array of whole numbers [n], or None if it is anything but a flat sequence of them."""
    if isinstance(value, list | tuple) and not all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in value):
        return None
    ids = np.asarray(value) if isinstance(value, list | tuple | range | np.ndarray) else np.asarray(None)
    return ids if ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iuO") else None


def _kind(value: object) -> str:
    """The type of a prompt that is none, and that of the entry which spoils it."""
    entries = value if isinstance(value, list | tuple) else ()
    bad = next((i for i, entry in enumerate(entries) if isinstance(entry, bool) or not isinstance(entry, int | np.integer)), None)
    where = "" if bad is None else f" whose entry {bad} is {type(entries[bad]).__name__}"
    return f"{type(value).__name__}{where}"


def _logprobs(tokens: Sequence[int], scores: TokenScores, top: int) -> list[TokenLogprob]:
    values = [float(value) for value in scores.tokens[: len(tokens)]]
    if not top or scores.top_ids is None or scores.top is None:
        return [TokenLogprob(int(token), value) for token, value in zip(tokens, values, strict=True)]
    best = zip(scores.top_ids[: len(tokens), :top].tolist(), scores.top[: len(tokens), :top].tolist(), strict=True)
    tops = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in best]
    return [TokenLogprob(int(token), value, chosen) for token, value, chosen in zip(tokens, values, tops, strict=True)]
