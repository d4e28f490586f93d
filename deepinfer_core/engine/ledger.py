"""Who holds what: the queue, the running rows, their pages and slots, and every way in which a request gives them back."""

from __future__ import annotations

from collections import deque

import numpy as np

from deepinfer_core.cache.pages import PagePool, SlotPool
from deepinfer_core.cache.prefix import PrefixIndex
from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.request import Finished, FinishReason, Request, Status
from deepinfer_core.engine.stats import SchedulerStats
from deepinfer_core.engine.table import ENDING, RequestTable


class Ledger:
    """State shared by planning and committing. Every change of ownership is a method of this class.

    When a request ends while an uncommitted plan refers to it, its pages and slot stay taken until that plan is committed. Preemption
    gives them back at once: whoever gets them writes in a later step, and steps run in order.
    """

    def __init__(self, limits: SchedulerLimits, pages: PagePool, slots: SlotPool, identity: bytes = b"") -> None:
        self.limits, self.pages, self.slots = limits, pages, slots
        self.table = RequestTable(limits)
        snapshots = [slots.allocate() for _ in range(limits.window_snapshots)] if limits.prefix_cache else []
        self.prefix = PrefixIndex(pages, limits.page_tokens, identity, snapshots) if limits.prefix_cache else None
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.stop_users = np.zeros(limits.vocab_size, np.int32)  # requests that stop at each id
        self.finished: list[Finished] = []
        self.stats = SchedulerStats(
            verified=np.zeros(limits.num_draft_tokens, np.int64),
            accepted=np.zeros(limits.num_draft_tokens, np.int64),
            usable_pages=pages.usable,
        )
        self._waiting: deque[Request] = deque()  # may hold requests that have ended; `head` drops them
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Requests that own a state slot."""
        return len(self.requests) - self._num_waiting

    def enqueue(self, request: Request) -> None:
        """Adds a new request at the end of the queue."""
        self.requests[request.request_id] = request
        self.stop_users[list(request.spec.stop_ids)] += 1
        self._waiting.append(request)
        self._num_waiting += 1

    def head(self) -> Request | None:
        """The first request of the queue, or None."""
        while self._waiting and self._waiting[0].status is not Status.WAITING:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def admit(self) -> int:
        """Moves the head of the queue to the running requests; returns its row. Pages and slot are the caller's to give."""
        request = self._waiting.popleft()
        self._num_waiting -= 1
        request.status = Status.RUNNING
        row = self.table.attach(request)
        self.table.slot[row] = self.slots.allocate()
        return row

    def end(self, request: Request, reason: FinishReason, detail: str = "") -> None:
        """Ends a request in any state and records it."""
        row, table = request.row, self.table
        if request.status is Status.RUNNING:
            num_outputs = int(table.length[row] - table.prompt_len[row])
            table.state[row] = ENDING
        else:
            num_outputs = len(request.outputs)
            self._num_waiting -= 1
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        self.stop_users[list(request.spec.stop_ids)] -= 1
        self._record(request, reason, num_outputs, detail)
        if row >= 0 and table.holds[row] == 0:
            self.settle(row)

    def refuse(self, request_id: str, reason: FinishReason, detail: str) -> None:
        """Records the end of a request that never entered the queue."""
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self.finished.append(Finished(request_id, reason, 0, detail))

    def preempt(self, row: int) -> None:
        """Takes everything from a running request and puts it back at the head of the queue, its outputs kept."""
        request = self.table.requests[row]
        assert request is not None
        request.preemptions += 1
        self.stats.preemptions += 1
        if not (self.limits.recompute_preempted and request.spec.recomputable):
            self._give_back(row)
            self.end(request, FinishReason.NO_RESOURCE, self._preemption_detail(request))
            return
        request.outputs = self.table.outputs(row).tolist()
        request.status = Status.WAITING
        self.table.state[row] = ENDING
        self._give_back(row)
        self._waiting.appendleft(request)
        self._num_waiting += 1
        if self.table.holds[row] == 0:
            self.settle(row)

    def settle(self, row: int) -> None:
        """No plan refers to an ended or preempted row any more: everything it still has becomes free."""
        self._give_back(row)
        self.table.detach(row)

    def _give_back(self, row: int) -> None:
        table = self.table
        request = table.requests[row]
        assert request is not None
        if table.slot[row]:
            self.slots.release(int(table.slot[row]))
            for i, page in reversed(list(enumerate(table.pages(row)))):
                self.pages.release([page, request.pins[i]] if i in request.pins else [page])
            request.pins = {}
            table.slot[row] = 0
            table.num_pages[row] = 0

    def _record(self, request: Request, reason: FinishReason, num_outputs: int, detail: str) -> None:
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self.finished.append(
            Finished(request.request_id, reason, num_outputs, detail, request.cached_tokens, request.replayed, request.preemptions)
        )

    def _preemption_detail(self, request: Request) -> str:
        return (
            f"request {request.request_id!r}: preempted because all {self.pages.usable} cache pages are in use, and it may not be "
            "recomputed; give the cache more memory or lower scheduler.max_num_seqs"
        )
