"""From a step plan to device work and back: completes the plan on the device, runs the graph, samples, drafts.

A step has two halves. `forward` may be enqueued while the previous step is still running: what only the device knows (sampled tokens,
accepted drafts) is taken from that step's device results. `sample` is enqueued after the previous step was committed, because
penalties, limits and random numbers depend on its tokens. The device runs `forward` meanwhile.

Source of the completion rules: asynchronous scheduling of DeepInfer 0.1.0 (model notes, runtime section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.backend.runtime import DeviceRuntime, Event, PendingCopy
from deepinfer_core.engine.draft_graphs import DraftGraphs, Drafts
from deepinfer_core.engine.graphs import DecodeGraphs, GraphOptions
from deepinfer_core.engine.plan import StepPlan, StepResult
from deepinfer_core.engine.results import DeviceOutputs, DeviceStep, host_result
from deepinfer_core.engine.sample_graphs import SampleGraphs
from deepinfer_core.engine.step_inputs import CompletedInputs, StepSize, completed, packed, unpacked
from deepinfer_core.model.batch import SequenceInputs, Truncation
from deepinfer_core.model.drafter import DraftInputs
from deepinfer_core.model.graph import ForwardResult
from deepinfer_core.model.loaded import LoadedModel
from deepinfer_core.sampling import HostBatch, RequestRows, Sampler, SamplingState, host_batch
from deepinfer_core.sampling.batch import SamplingBatch


class SampledRequest(Protocol):
    """What the runner asks of a request that takes part in a step."""

    @property
    def prompt(self) -> np.ndarray: ...

    @property
    def sampling(self) -> SamplingState: ...

    @property
    def stop_ids(self) -> Sequence[int]: ...


@dataclass
class StepHandle:
    """A step on its way."""

    plan: StepPlan
    query_len: PendingCopy | None = None  # rows as the device spread them; None: as planned
    launched: PendingCopy | None = None  # nothing but the success of the first half
    forward: ForwardResult | None = None  # set by device work
    bucket: int | None = None  # size of the decode bucket that ran it, set by device work
    inputs: CompletedInputs | None = None  # set by device work; may be padded behind the plan's sequences and rows
    device: DeviceStep | None = None  # set by device work
    outputs: PendingCopy | None = None
    marks: list[Event] = field(default_factory=list)  # before the forward, after it, before sampling, after drafting
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # rows of each sequence, once known

    def wait(self) -> StepResult:
        """Blocks until the step is done. Raises what its device work raised."""
        assert self.outputs is not None
        assert self.launched is not None
        self.launched.wait()  # if the first half failed, its error is the one to show, not what the second half made of it
        return host_result(self.plan, self.rows, self.outputs.wait())


@dataclass(frozen=True)
class RunnerOptions:
    """Settings of a runner."""

    num_draft_tokens: int = 0
    temperatures: Sequence[float] = (1.0,)  # of the confidence head: one, or one per draft position
    compact: bool = True  # decoder-side replay drops rows; False: it masks them


class Runner:
    """Runs steps on one device, in the order in which they are handed over."""

    def __init__(self, loaded: LoadedModel, sampler: Sampler, runtime: DeviceRuntime, options: RunnerOptions) -> None:
        self.loaded, self.sampler, self.runtime = loaded, sampler, runtime
        self.nextn, self.compact = options.num_draft_tokens, options.compact
        temperatures = options.temperatures
        self.temperatures = list(temperatures) * (self.nextn if len(temperatures) == 1 else 1)
        self._previous: StepHandle | None = None
        self._draft_log_probs: Tensor | None = None  # float32 [state slots, D, V]: only once a sampled request drafts
        self.graphs: DecodeGraphs | None = None
        self.sample_graphs: SampleGraphs | None = None
        self.draft_graphs: DraftGraphs | None = None

    def capture(self, progress: Callable[[int], None] = lambda size: None) -> list[int]:
        """Captures the buckets, and draft passes, or without drafts sampling where steps are plain.

        Returns the sizes that could not be captured.
        """
        assert self.graphs is not None
        failed = self.graphs.capture(progress)
        if self.nextn:
            most = self.graphs.sizes[-1] // (1 + self.nextn)
            sizes = [*(size for size in self.graphs.sizes if size < most), most]
            self.draft_graphs = DraftGraphs(self.runtime, self.sampler, self._drafted, sizes)
            self.draft_graphs.capture()
        else:
            self.sample_graphs = SampleGraphs(self.runtime, self.graphs, self.sampler, self.loaded.model.logits)
            self.sample_graphs.capture()
        return failed

    def use_graphs(self, sizes: list[int], max_positions: int) -> DecodeGraphs:
        """Runs decode steps in buckets of the given sizes from now on. `capture` makes them graphs."""
        loaded = self.loaded
        options = GraphOptions(
            pages=loaded.layout.pages_for(max_positions),
            history=max(loaded.config.engram_max_ngram_size - 1, 0),
            sequences=loaded.geometry.state_slots,
            drafts=self.nextn,
        )
        self.graphs = DecodeGraphs(self.runtime, self._run_model, sizes, options)
        return self.graphs

    # ------------------------------------------------------------------ first half

    def forward(self, plan: StepPlan) -> StepHandle:
        """Enqueues everything up to the hidden states of `plan`."""
        previous = self._previous
        handle = StepHandle(plan, marks=[self.runtime.record()])
        if plan.reallocate_drafts >= 0:
            spread: dict[str, Tensor] = {}
            handle.query_len = self.runtime.submit(lambda: self._spread(plan, previous, spread))
            handle.launched = self.runtime.submit(lambda: self._forward(handle, previous, spread["query_len"]))
        else:
            handle.launched = self.runtime.submit(lambda: self._forward(handle, previous, None))
        handle.marks.append(self.runtime.record())
        self._previous = handle
        return handle

    @torch.inference_mode()
    def _spread(self, plan: StepPlan, previous: StepHandle | None, out: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rows of each sequence when the budget is spread by the newest confidences; the device twin of `allocate_drafts`."""
        assert previous is not None
        assert previous.device is not None
        remap = self._upload(plan.remap)
        survival = previous.device.confidences.nan_to_num(0.0).cumprod(1)[remap.clamp_min(0)]
        survival = survival.masked_fill((remap < 0)[:, None], 0.0)
        survival = survival.masked_fill(self._upload(plan.is_prefill)[:, None], -1.0)
        count, drafts = survival.shape
        chosen = survival.flatten().sort(descending=True, stable=True).indices[: plan.reallocate_drafts]
        wins = torch.zeros(count, dtype=torch.int64, device=survival.device).index_add_(0, chosen // drafts, torch.ones_like(chosen))
        out["query_len"] = torch.where(self._upload(plan.is_prefill), self._upload(plan.query_len.astype(np.int64)), 1 + wins)
        return out

    @torch.inference_mode()
    def _forward(self, handle: StepHandle, previous: StepHandle | None, query_len: Tensor | None) -> dict[str, Tensor]:
        plan, caches = handle.plan, self.loaded.caches
        for source, target in plan.slot_copies:
            caches.slots[target].copy_(caches.slots[source])
        last = None
        if (plan.remap >= 0).any():
            assert previous is not None
            assert previous.device is not None
            last = previous.device
        size = None
        if self.graphs is not None and not plan.has_prefill:
            size = self.graphs.size_for(len(plan.tokens))
        handle.bucket = size
        if size is not None and self.graphs is not None:
            handle.inputs, handle.forward = self.graphs.run(plan, size, query_len)
            return {}
        own = StepSize.of(plan)
        inputs = unpacked(self._upload(packed(plan, own)), own)
        one_row = query_len is None and own.rows == own.sequences and not plan.has_prefill
        handle.inputs = completed(inputs, last, query_len, one_row)
        sequences = handle.inputs.sequences
        truncation = self._truncation(plan, inputs.keep_from, sequences.query_len)
        handle.forward = self._run_model(replace(sequences, truncation=truncation) if truncation else sequences)
        return {}

    def _run_model(self, inputs: SequenceInputs) -> ForwardResult:
        batch = self.loaded.batch(inputs)
        result = self.loaded.model.forward(batch, self.loaded.caches)
        if self.loaded.drafter is not None and result.features is not None:
            self.loaded.drafter.feed(result.features, batch.decoder_rows or batch.rows, self.loaded.caches)
        return result

    def run_padding(self, tokens: np.ndarray, rows: int) -> ForwardResult:
        """Runs padding sequences of `rows` rows each over `tokens` int64 [sequences * rows]: they cost what real ones do, store nothing."""
        count, history = len(tokens) // rows, max(self.loaded.config.engram_max_ngram_size - 1, 0)
        zero = self._upload(np.zeros(count, np.int64))
        return self._run_model(
            SequenceInputs(
                query_len=zero + rows,
                start=zero,
                state_slot=zero,
                block_table=self._upload(np.zeros((count, 1), np.int32)),
                valid_start=zero,
                write_start=zero,
                history=self._upload(np.full((count, history), -1, np.int64)),
                tokens=self._upload(tokens),
                one_row=rows == 1,
            )
        )

    def _truncation(self, plan: StepPlan, keep_from: Tensor, query_len: Tensor) -> Truncation | None:
        if not plan.keep_from.any():
            return None
        if not self.compact:
            return Truncation(keep_from, None)
        dropped = self._dropped(plan)
        return Truncation(keep_from, query_len - self._upload(dropped), len(plan.tokens) - int(dropped.sum()))

    def _dropped(self, plan: StepPlan) -> np.ndarray:
        """Rows of each sequence, counted from its first, that skip the decoder half. A sequence keeps its last row at least."""
        if not self.compact:
            return np.zeros(len(plan.requests), np.int64)
        kept = np.clip(plan.start + plan.query_len - plan.keep_from, 1, plan.query_len)
        return np.where(plan.is_prefill, plan.query_len - kept, 0).astype(np.int64)

    # ------------------------------------------------------------------ second half

    def await_rows(self, handle: StepHandle) -> None:
        """Waits until the rows of each sequence are known: not at all, or until the device has spread them, before its forward."""
        known = handle.plan.query_len.astype(np.int64)
        handle.rows = known if handle.query_len is None else handle.query_len.wait()["query_len"]

    def sample(self, handle: StepHandle, requests: Mapping[str, SampledRequest], accepted: np.ndarray | None) -> None:
        """Enqueues sampling and drafting of a step whose predecessor was committed. `await_rows` comes first.

        `accepted` int [S of the predecessor]: drafts that it accepted; None if there was none.
        """
        plan = handle.plan
        start = plan.start.astype(np.int64)
        if accepted is not None and self.nextn:
            late = plan.remap >= 0
            start = np.where(late, start - (plan.pending_drafts - accepted[plan.remap.clip(0)]), start)
        sampled = plan.sample.nonzero()[0]
        drafts = np.where(plan.is_prefill, 0, handle.rows - 1)[sampled].tolist()
        first = np.where(plan.is_prefill, start + handle.rows, start + 1)[sampled].tolist()
        chosen = [requests[plan.requests[s]] for s in sampled.tolist()]
        rows = [RequestRows(request.sampling, *place) for request, *place in zip(chosen, first, drafts, strict=True)]
        scored = [(s, requests[plan.requests[s]]) for s in (plan.logprob_start >= 0).nonzero()[0].tolist()]
        stops = [request.stop_ids for request in chosen]
        handle.marks.append(self.runtime.record())
        handle.outputs = self.runtime.submit(lambda: self._sample(handle, sampled, rows, stops, scored))
        handle.marks.append(self.runtime.record())

    @torch.inference_mode()
    def _sample(
        self,
        handle: StepHandle,
        sampled: np.ndarray,
        rows: Sequence[RequestRows],
        stops: Sequence[Sequence[int]],
        scored: Sequence[tuple[int, SampledRequest]],
    ) -> dict[str, Tensor]:
        plan, forward = handle.plan, handle.forward
        assert forward is not None
        host = host_batch(rows)
        if self.sample_graphs is not None and handle.bucket is not None and self.sample_graphs.can_run(host, handle.bucket):
            handle.device, results = self.sample_graphs.run(host, handle.bucket)
            return results
        outputs = DeviceOutputs(len(plan.requests), self.nextn, self.loaded.kernels.device)
        ends = np.cumsum(handle.rows - self._dropped(plan))
        if rows:
            drafts = np.array([row.drafts for row in rows], dtype=np.int64)
            if len(rows) == ends[-1]:  # every sequence is sampled at its only row
                hidden = forward.hidden[: len(rows)]
            else:
                picked = np.concatenate([np.arange(ends[s] - 1 - d, ends[s]) for s, d in zip(sampled, drafts, strict=True)])
                hidden = forward.hidden[self._upload(picked)]
            logits = self.loaded.model.logits(hidden)
            batch = self.sampler.prepared(host, self._upload)
            self._choose(handle, logits, batch, sampled, drafts, outputs)
            if plan.draft.any():
                self._draft(handle, host, batch, sampled, stops, outputs)
        for s, request in scored:
            self._score_prompt(handle, s, ends, request, outputs)
        handle.device = outputs.device_step()
        if self.graphs is not None:
            self.graphs.remember(handle.device)
        handle.forward = None
        return outputs.tensors()

    def _choose(
        self, handle: StepHandle, logits: Tensor, batch: SamplingBatch, sampled: np.ndarray, drafts: np.ndarray, outputs: DeviceOutputs
    ) -> None:
        """Samples, or verifies drafts and samples."""
        assert handle.inputs is not None
        if not drafts.any():
            chosen = self.sampler.sample(logits, batch)
            outputs.put_sampled(None if len(sampled) == len(handle.plan.requests) else self._upload(sampled), chosen)
            return
        starts = np.cumsum(handle.rows) - handle.rows
        verify = np.concatenate([np.append(np.arange(starts[s] + 1, starts[s] + 1 + d), -1) for s, d in zip(sampled, drafts, strict=True)])
        index = self._upload(verify)
        ids = torch.where(index >= 0, handle.inputs.tokens[index.clamp_min(0)], -1)
        distributions = None
        if not batch.all_greedy:
            slots = np.repeat(handle.plan.state_slot[sampled], drafts + 1).astype(np.int64)
            column = np.concatenate([np.minimum(np.arange(d + 1), self.nextn - 1) for d in drafts])
            distributions = self._draft_distributions(logits)[self._upload(slots), self._upload(column)]
        verified = self.sampler.verify(logits, batch, ids, distributions)
        outputs.put_verified(self._upload(sampled), self._upload(drafts), ids, verified)

    def _draft(
        self,
        handle: StepHandle,
        host: HostBatch,
        batch: SamplingBatch,
        sampled: np.ndarray,
        stops: Sequence[Sequence[int]],
        outputs: DeviceOutputs,
    ) -> None:
        """Makes drafts after the sampled tokens."""
        plan = handle.plan
        assert handle.inputs is not None
        chosen = self._upload(sampled)
        accepted = outputs.accepted[chosen]
        last = np.where(plan.is_prefill, handle.rows - 1, 0)[sampled]
        position = handle.inputs.sequences.start[chosen] + self._upload(last) + accepted
        slots = self._upload(plan.state_slot[sampled].astype(np.int64))
        floor = self._upload(np.maximum(plan.valid_start, plan.keep_from)[sampled].astype(np.int64))
        inputs = DraftInputs(outputs.tokens[chosen], position, slots, floor)
        drafts = None if self.draft_graphs is None else self.draft_graphs.run(host, inputs, accepted)
        ids, confidences = self._drafted(inputs, batch, accepted) if drafts is None else drafts
        ended = self._ended(outputs.emitted[chosen], stops)
        outputs.put_drafts(chosen, ids, confidences.masked_fill(ended[:, None], 0.0))

    def _drafted(self, inputs: DraftInputs, batch: SamplingBatch, accepted: Tensor) -> Drafts:
        """Drafts after `inputs`. Unless all sequences are greedy, their distributions are kept for verification."""
        drafter = self.loaded.drafter
        assert drafter is not None
        hidden, base = drafter.forward(inputs, self.nextn, self.loaded.caches)
        previous, ids, confidences = inputs.anchor, [], []
        for i in range(self.nextn):
            logits = drafter.markov_logits(base[:, i], previous)
            confidences.append(drafter.confidence(hidden[:, i], previous, self.temperatures[i]))
            previous, log_probs = self.sampler.draft(logits, batch, i + 1, accepted)
            if not batch.all_greedy:
                self._draft_distributions(base)[inputs.state_slot, i] = log_probs
            ids.append(previous)
        return Drafts(torch.stack(ids, 1), torch.stack(confidences, 1))

    def _draft_distributions(self, logits: Tensor) -> Tensor:
        """Where the distributions of drafts are kept from their drawing to their verification; `logits` [..., V] tell the size."""
        if self._draft_log_probs is None:
            shape = (self.loaded.geometry.state_slots, self.nextn, logits.shape[-1])
            self._draft_log_probs = torch.full(shape, -torch.inf, device=logits.device)
        return self._draft_log_probs

    def _ended(self, emitted: Tensor, stops: Sequence[Sequence[int]]) -> Tensor:
        """bool [R]: the sequence emitted one of its stop ids, so that its next rows are wasted."""
        width = max((len(ids) for ids in stops), default=0)
        table = np.full((len(stops), max(width, 1)), -2, dtype=np.int64)
        for row, ids in zip(table, stops, strict=True):
            row[: len(ids)] = ids
        return (emitted[:, :, None] == self._upload(table)[:, None]).any(2).any(1)

    def _score_prompt(self, handle: StepHandle, s: int, ends: np.ndarray, request: SampledRequest, outputs: DeviceOutputs) -> None:
        """Log-probabilities of the prompt tokens that follow this step's rows of sequence s."""
        plan, forward = handle.plan, handle.forward
        assert forward is not None
        first = max(int(plan.start[s]), int(plan.logprob_start[s]))
        last = min(int(plan.start[s] + plan.query_len[s]), len(request.prompt) - 1)  # the last prompt row predicts output
        if last <= first:
            return
        begin = int(ends[s] - plan.query_len[s]) + first - int(plan.start[s])
        logits = self.loaded.model.logits(forward.hidden[begin : begin + last - first])
        targets = self._upload(request.prompt[first + 1 : last + 1].astype(np.int64))
        outputs.put_prompt_scores(s, self.sampler.prompt_scores(logits, targets, request.sampling.params))

    def _upload(self, array: np.ndarray) -> Tensor:
        return self.runtime.to_device(array)
