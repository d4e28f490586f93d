"""Which prompt chunks a step computes: partial prompts first, then the queue in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepinfer_core.cache.prefix import NO_HIT, Hit, Reuse, choose_hit
from deepinfer_core.engine.ledger import Ledger
from deepinfer_core.engine.limits import MAX_PAGE_USAGE
from deepinfer_core.engine.plan import SlotCopy
from deepinfer_core.engine.request import Request, RequestSpec
from deepinfer_core.engine.table import RUNNING


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prompt chunk of a step."""

    row: int
    start: int
    count: int
    last: bool  # all known tokens are computed after it: it samples


class Snapshot(NamedTuple):
    """A window snapshot in the making: a state slot is copied, and becomes usable when the step that copies it is committed."""

    key: bytes  # chain hash of the last page before it
    copy: SlotCopy
    exact: bool


class PrefillPlanner:
    """Admits requests and cuts chunks. Mutates the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.limits = ledger, ledger.limits
        limits = self.limits
        self._reuse = Reuse(limits.page_tokens, limits.window, limits.keep_tokens, limits.encoder_replay)
        self._wanted: list[tuple[bytes, int, bool]] = []  # (key, state slot, exact) that the latest planned step leaves at a page boundary
        self._copies: list[SlotCopy] = []  # for the next plan
        self._making: list[Snapshot] = []  # snapshots among them
        self._carried: dict[int, list[Snapshot]] = {}  # step -> snapshots that it copies
        self._admissions = 0

    def start_snapshots(self) -> None:
        """Queues copies of the wanted windows. Runs before a plan hands out any slot: until then their contents stand."""
        prefix = self.ledger.prefix
        for key, slot, exact in self._wanted:
            target = prefix.reserve_snapshot() if prefix is not None and not prefix.has_snapshot(key) else None
            if target is not None:
                self._making.append(Snapshot(key, SlotCopy(slot, target), exact))
                self._copies.append(self._making[-1].copy)
        self._wanted = []

    def carry_copies(self, step: int) -> tuple[SlotCopy, ...]:
        """All queued slot copies, which plan `step` must carry."""
        copies, self._carried[step] = tuple(self._copies), self._making
        self._copies, self._making = [], []
        return copies

    def complete_copies(self, step: int) -> None:
        """Plan `step` is committed: its snapshots can be used."""
        for snapshot in self._carried.pop(step):
            assert self.ledger.prefix is not None
            self.ledger.prefix.add_snapshot(snapshot.key, snapshot.copy.target, snapshot.exact)

    def spoil(self, slot: int) -> None:
        """The contents of `slot` are wrong: no snapshot of it may be used."""
        self._wanted = [item for item in self._wanted if item[1] != slot]
        for snapshots in [self._making, *self._carried.values()]:
            snapshots[:] = [item._replace(key=b"") if item.copy.source == slot else item for item in snapshots]

    def want(self) -> bool:
        """Whether a prefill step could start now, for the vote of policy `alternate`."""
        ledger = self.ledger
        if (ledger.table.filling & (ledger.table.state == RUNNING)).any():
            return True
        head = ledger.head()
        return head is not None and self._may_start(head)

    def select(self, budget: int) -> list[Chunk]:
        """Chunks of at most `budget` rows in total. Admitted requests own all pages of their known tokens and a slot afterwards."""
        chunks: list[Chunk] = []
        table = self.ledger.table
        seqlen = self.limits.max_prefill_seqlen
        filling = ((table.state == RUNNING) & table.filling).nonzero()[0]
        for row in filling[np.argsort(table.admitted[filling])].tolist():
            chunk = self._cut(row, budget, first=not chunks)
            if chunk is None or table.length[row] > seqlen:
                return chunks
            seqlen -= int(table.length[row])
            budget -= self._take(chunk, chunks)
        catching_up = any(self._resumed(row) for row in filling.tolist())
        while (request := self._admissible(catching_up, seqlen)) is not None:
            known = len(request.prompt) + len(request.outputs)
            hit = self._find_hit(request, known)
            if not self._fits(request, known, hit, budget, first=not chunks):
                return chunks
            row = self._admit(request, known, hit)
            chunk = self._cut(row, budget, first=not chunks)
            assert chunk is not None, "`_fits` has checked that the first chunk is not empty"
            seqlen -= known
            budget -= self._take(chunk, chunks)
            catching_up |= self._resumed(row) and not chunk.last
        return chunks

    def _may_start(self, request: Request) -> bool:
        ledger = self.ledger
        if not request.schedulable or request.row >= 0 or ledger.num_running >= self.limits.max_num_seqs:
            return False
        return ledger.num_running == 0 or ledger.pages.used <= MAX_PAGE_USAGE * ledger.pages.usable

    def _admissible(self, catching_up: bool, seqlen: int) -> Request | None:
        """The head of the queue, if it may start. No new request starts while a preempted one is being recomputed: it must not be
        preempted again for the sake of later arrivals."""
        request = self.ledger.head()
        if request is None or not self._may_start(request) or (catching_up and request.preemptions == 0):
            return None
        return request if len(request.prompt) + len(request.outputs) <= seqlen else None

    def _resumed(self, row: int) -> bool:
        request = self.ledger.table.requests[row]
        return request is not None and request.preemptions > 0

    def _find_hit(self, request: Request, known: int) -> tuple[Hit, list[int]]:
        prefix = self.ledger.prefix
        if prefix is None or request.spec.prompt_logprobs:
            return NO_HIT, []
        spec = request.spec
        tokens = _known_tokens(request)
        prefix.extend(request.hashes, tokens, spec.cache_salt, spec.atomic_spans, spec.span_digests)
        pages = prefix.match(request.hashes, tokens)
        positions = prefix.snapshot_positions(request.hashes[: len(pages)])
        hit = choose_hit(len(pages) * self.limits.page_tokens, known, self._reuse, positions, spec.atomic_spans)
        return hit, pages[: hit.length // self.limits.page_tokens]

    def _fits(self, request: Request, known: int, hit: tuple[Hit, list[int]], budget: int, first: bool) -> bool:
        ledger = self.ledger
        count = -(-known // self.limits.page_tokens) - len(hit[1])
        if not ledger.slots.can_allocate() or not ledger.pages.can_allocate(count, sharing=hit[1]):
            return False
        start = hit[0].start
        if not self.limits.chunked_prefill and known - start > budget // self.limits.chunk_align * self.limits.chunk_align:
            return False
        return self._chunk_end(request.spec, start, known, budget, first) > start

    def _admit(self, request: Request, known: int, found: tuple[Hit, list[int]]) -> int:
        ledger, table = self.ledger, self.ledger.table
        hit, shared = found
        row = ledger.admit()
        ledger.pages.share(shared)
        table.add_pages(row, shared)
        table.add_pages(row, ledger.pages.allocate(-(-known // self.limits.page_tokens) - len(shared)))
        table.registered[row] = len(shared)
        table.computed[row] = table.scheduled[row] = hit.start
        table.write_start[row] = hit.length
        table.valid_start[row] = 0 if hit.snapshot else hit.start
        table.admitted[row] = self._admissions
        self._admissions += 1
        if hit.snapshot:
            assert ledger.prefix is not None
            source = ledger.prefix.use_snapshot(request.hashes[len(shared) - 1])
            self._copies.append(SlotCopy(source, int(table.slot[row])))
        request.cached_tokens = hit.length
        request.exact = hit.start == hit.length
        if shared and request.exact:
            assert ledger.prefix is not None
            request.exact = ledger.prefix.is_exact(request.hashes[: len(shared)], hit.snapshot)
        request.replayed |= not request.exact
        ledger.stats.cached_tokens += hit.length
        ledger.stats.replayed_tokens += hit.length - hit.start
        return row

    def _cut(self, row: int, budget: int, first: bool) -> Chunk | None:
        table = self.ledger.table
        request = table.requests[row]
        assert request is not None
        start, known = int(table.scheduled[row]), int(table.length[row])
        end = self._chunk_end(request.spec, start, known, budget, first)
        return Chunk(row, start, end - start, end == known) if end > start else None

    def _take(self, chunk: Chunk, chunks: list[Chunk]) -> int:
        """Schedules `chunk` and returns the rows of the budget it uses."""
        chunks.append(chunk)
        self._want_snapshot(chunk.row, chunk.start + chunk.count)
        align = self.limits.chunk_align
        return -(-chunk.count // align) * align

    def _want_snapshot(self, row: int, position: int) -> None:
        """Asks for a snapshot of the row's windows at `position`, if it is a page boundary and they are complete there."""
        table, page = self.ledger.table, self.limits.page_tokens
        request = table.requests[row]
        assert request is not None
        complete = table.valid_start[row] <= max(position - self.limits.window + 1, 0)  # a replay may have just begun
        if self.limits.window_snapshots and position % page == 0 and position // page <= len(request.hashes) and complete:
            self._wanted.append((request.hashes[position // page - 1], int(table.slot[row]), request.exact))

    def _chunk_end(self, spec: RequestSpec, start: int, known: int, budget: int, first: bool) -> int:
        """Where the next chunk ends; `start` if nothing can be computed."""
        room = budget // self.limits.chunk_align * self.limits.chunk_align
        end = min(known, start + room)
        stops = [*spec.checkpoints, self._snapshot_position(known)]
        end = min((stop for stop in stops if start < stop < end), default=end)
        for begin, after in spec.atomic_spans:
            if begin < end < after:
                grown = min(after, known)
                return begin if begin > start else grown if first and grown - start <= room else start
        return end

    def _snapshot_position(self, known: int) -> int:
        """The last page boundary at which a later request with the same prefix could use a window snapshot; 0: none."""
        if not self.limits.window_snapshots or self.ledger.prefix is None:
            return 0
        return max(min(known - 1, known - self.limits.keep_tokens), 0) // self.limits.page_tokens * self.limits.page_tokens


def _known_tokens(request: Request) -> np.ndarray:
    return np.concatenate([request.prompt, np.asarray(request.outputs, np.int32)]) if request.outputs else request.prompt
