"""Structure-of-arrays state of the requests that own a row: what planning and committing touch in every step.

Rows are stable while a request runs; a batch is an index array of rows. One row costs a few hundred bytes plus its outputs.
"""

from __future__ import annotations

import numpy as np

from deepinfer_core.engine.limits import SchedulerLimits
from deepinfer_core.engine.request import Request

FREE, RUNNING, ENDING = 0, 1, 2  # ENDING: ended or preempted, but an uncommitted plan still refers to the row


class RequestTable:
    """Arrays indexed by row. Attributes are public to the scheduler and its helpers only."""

    def __init__(self, limits: SchedulerLimits) -> None:
        rows = 2 * limits.max_num_seqs  # running or preempted ones, and as many that ended in the last commit
        drafts = limits.num_draft_tokens
        self.limits = limits
        self.requests: list[Request | None] = [None] * rows
        self.names = np.full(rows, "", object)  # request ids
        self._free = list(range(rows - 1, -1, -1))
        self.state = np.zeros(rows, np.int8)
        self.filling = np.zeros(rows, bool)  # known tokens are still to be scheduled (prefill)
        self.length = np.zeros(rows, np.int64)  # L: tokens known to the host
        self.prompt_len = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)  # L at which the request ends
        self.order = np.zeros(rows, np.int64)  # arrival number
        self.admitted = np.zeros(rows, np.int64)  # admission number
        self.computed = np.zeros(rows, np.int64)  # C: positions whose step is committed
        self.scheduled = np.zeros(rows, np.int64)  # next row's position, all drafts in flight taken as accepted
        self.holds = np.zeros(rows, np.int64)  # uncommitted plans that contain the row
        self.sampling = np.zeros(rows, np.int64)  # of these, plans that sample it
        self.last_index = np.zeros(rows, np.int64)  # its sequence index in the latest plan
        self.last_drafts = np.zeros(rows, np.int64)  # drafts that the latest plan verifies
        self.num_drafts = np.zeros(rows, np.int64)  # drafts known to the host
        self.drafts = np.full((rows, drafts), -1, np.int32)
        self.drafting = np.zeros(rows, bool)  # False: the request goes on without drafts
        self.will_draft = np.zeros(rows, bool)  # the latest plan makes new drafts for it
        self.rates = np.full((rows, drafts), np.nan, np.float32)  # survival of the newest drafts: cumulative confidences
        self.previous_rates = np.full((rows, drafts), np.nan, np.float32)  # the same one step earlier
        self.slot = np.zeros(rows, np.int32)
        self.num_pages = np.zeros(rows, np.int64)
        self.registered = np.zeros(rows, np.int64)  # pages known to the prefix index
        self.valid_start = np.zeros(rows, np.int32)
        self.write_start = np.zeros(rows, np.int32)
        self.keep_from = np.zeros(rows, np.int32)
        self.tail = np.full((rows, limits.history + 1), -1, np.int32)  # the last known ids, newest last
        self.block_table = np.zeros((rows, -(-limits.max_positions // limits.page_tokens)), np.int32)
        self._outputs = np.zeros((rows, 64), np.int32)
        self._known: dict[int, np.ndarray] = {}  # row -> prompt and outputs at admission, while it fills

    @property
    def free_rows(self) -> int:
        """Rows that `attach` can hand out."""
        return len(self._free)

    def attach(self, request: Request) -> int:
        """Gives `request` a row that describes it before its first chunk. Pages, slot and start position are the caller's."""
        limits, row = self.limits, self._free.pop()
        self.requests[row] = request
        self.names[row] = request.request_id
        request.row = row
        self.state[row] = RUNNING
        known = np.concatenate([request.prompt, np.asarray(request.outputs, np.int32)]) if request.outputs else request.prompt
        self._known[row] = known
        self._reserve(len(request.outputs))
        self._outputs[row, : len(request.outputs)] = request.outputs
        self.filling[row] = True
        self.length[row] = len(known)
        self.prompt_len[row] = len(request.prompt)
        self.limit[row] = request.limit
        self.order[row] = request.order
        for column in (self.holds, self.sampling, self.last_drafts, self.num_drafts, self.num_pages, self.registered):
            column[row] = 0
        self.drafting[row] = limits.num_draft_tokens > 0
        self.will_draft[row] = False
        self.rates[row] = np.nan
        self.previous_rates[row] = np.nan
        self.block_table[row] = 0
        width = self.tail.shape[1]
        self.tail[row] = -1
        last = known[-width:]
        self.tail[row, width - len(last) :] = last
        self.keep_from[row] = max(len(known) - limits.keep_tokens, 0) if limits.keep_tokens else 0
        return row

    def detach(self, row: int) -> None:
        """Ends the row's use; it may be handed out again at once."""
        request = self.requests[row]
        if request is not None and request.row == row:
            request.row = -1
        self.requests[row] = None
        self._known.pop(row, None)
        self.state[row] = FREE
        self._free.append(row)

    def running(self) -> np.ndarray:
        """Rows of running requests, ascending."""
        return np.flatnonzero(self.state == RUNNING)

    def pages(self, row: int) -> list[int]:
        """Pages of the row, in order."""
        return self.block_table[row, : self.num_pages[row]].tolist()

    def add_pages(self, row: int, pages: list[int]) -> None:
        """Appends pages to the row's block table."""
        count = int(self.num_pages[row])
        self.block_table[row, count : count + len(pages)] = pages
        self.num_pages[row] = count + len(pages)

    def outputs(self, row: int) -> np.ndarray:
        """A copy of the row's output tokens."""
        return self._outputs[row, : self.length[row] - self.prompt_len[row]].copy()

    def known(self, row: int) -> np.ndarray:
        """All tokens that were known at admission. Only while the row fills."""
        return self._known[row]

    def end_filling(self, row: int) -> None:
        """The row's known tokens are all scheduled."""
        self.filling[row] = False
        del self._known[row]

    def tokens(self, row: int, begin: int, end: int) -> np.ndarray:
        """Known ids at positions begin .. end-1; may be a view."""
        request = self.requests[row]
        assert request is not None
        prompt_len = len(request.prompt)
        outputs = self._outputs[row, max(begin - prompt_len, 0) : max(end - prompt_len, 0)]
        return outputs if begin >= prompt_len else np.concatenate([request.prompt[begin:end], outputs])

    def append(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Appends tokens[i, :counts[i]] to the outputs of rows[i]."""
        if not len(rows):
            return
        first = self.length[rows] - self.prompt_len[rows]
        more, width = tokens.shape[1], self.tail.shape[1]
        self._reserve(int(first.max()) + more)
        wide = np.concatenate([self.tail.take(rows, axis=0), tokens], axis=1)
        newest = np.arange(len(rows)) * (width + more) + counts  # flat indices: numpy is slow with one index for each dimension
        self.tail[rows] = wide.ravel().take(newest[:, None] + np.arange(width))
        flat = (rows * self._outputs.shape[1] + first)[:, None] + np.arange(more)
        self._outputs.reshape(-1)[flat] = tokens  # what lies behind the counts is never read
        self.length[rows] += counts

    def truncate(self, row: int, num_outputs: int) -> None:
        """Drops the row's outputs behind the first `num_outputs`. For requests that end: other columns are not adapted."""
        self.length[row] = self.prompt_len[row] + num_outputs

    def _reserve(self, width: int) -> None:
        have = self._outputs.shape[1]
        if width > have:
            wider = np.zeros((len(self._outputs), max(width, 2 * have)), np.int32)  # zeros: pages are touched only where used
            for row in np.flatnonzero(self.state):
                count = max(self.length[row] - self.prompt_len[row], 0)
                wider[row, :count] = self._outputs[row, :count]
            self._outputs = wider
