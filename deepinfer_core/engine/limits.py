"""The scheduler's limits, checked as a whole, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer_core.errors import ConfigError

HISTORY = 3  # ids before a row that Engram looks at: engram_max_ngram_size - 1 of the released model
MAX_PAGE_USAGE = 0.9  # no request is admitted above this share of used pages (DeepInfer 0.1.0), unless none is running


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes and switches of the scheduler. Raises ConfigError listing every contradiction."""

    max_model_len: int  # longest prompt; prompt and output together may reach it plus one
    max_num_batched_tokens: int  # rows of a step
    max_num_seqs: int  # running requests
    vocab_size: int
    num_draft_tokens: int = 0  # nextn: most drafts verified per request and step; 0: no speculation
    page_tokens: int = 128
    window: int = 128  # W, sliding_window: how far bounded replay goes back
    chunked_prefill: bool = True  # False: the token budget never splits a prompt (checkpoints still do)
    policy: Literal["mixed", "alternate"] = "mixed"  # alternate: prefill and decode steps never mix (DeepInfer 0.1.0)
    asynchronous: bool = False  # a plan may be made while one step is uncommitted
    varlen_verification: bool = False  # fewer drafts are verified where confidence is low
    recompute_preempted: bool = True  # False: a preempted request ends
    keep_tokens: int = 0  # decoder-side replay: prompt tokens that go through the decoder half; 0: all (no truncation)
    max_backtracking: int = 0  # B: tokens by which a window can go back; at least num_draft_tokens + 1 is used
    prefix_cache: bool = False
    encoder_replay: bool = True  # False: a prefix hit without a window snapshot is not used (exact mode)
    window_snapshots: int = 0  # state slots that keep windows for exact prefix hits; 0: hits are replayed
    draft_after_prefill: bool = True  # False: the first decode step of a request has no drafts
    max_prefill_seqlen: int = 1 << 30  # sum of sequence lengths in one step's prefill
    chunk_align: int = 1  # prefill chunks fill the budget in multiples of it (2 * context-parallel size)
    prefill_interval: int = 70  # alternate: decode steps between votes of all ranks
    prefill_any_interval: int = 100  # alternate: decode steps between votes of any rank
    history: int = HISTORY

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        for name in ("max_model_len", "max_num_seqs", "vocab_size", "page_tokens", "window", "chunk_align", "prefill_interval"):
            if getattr(self, name) < 1:
                yield f"scheduler.{name} is {getattr(self, name)}; expected at least 1"
        for name in ("num_draft_tokens", "keep_tokens", "max_backtracking", "window_snapshots", "history"):
            if getattr(self, name) < 0:
                yield f"scheduler.{name} is {getattr(self, name)}; expected at least 0"
        decode_rows = self.max_num_seqs * (1 + self.num_draft_tokens)
        if self.max_num_batched_tokens < decode_rows:
            yield (
                f"scheduler.max_num_batched_tokens is {self.max_num_batched_tokens}; expected at least {decode_rows} = max_num_seqs "
                f"{self.max_num_seqs} * (1 + {self.num_draft_tokens} drafts), so that every running request can decode; raise it or lower "
                "max_num_seqs"
            )
        if not self.chunked_prefill and self.largest_chunk < self.max_model_len:
            yield (
                f"scheduler.max_num_batched_tokens is {self.max_num_batched_tokens}; without chunked_prefill expected at least "
                f"max_model_len {self.max_model_len} (rounded up to chunk_align {self.chunk_align}); raise it or switch chunked_prefill on"
            )
        if self.max_num_batched_tokens < self.chunk_align:
            yield f"scheduler.chunk_align is {self.chunk_align}; expected at most max_num_batched_tokens {self.max_num_batched_tokens}"
        if self.max_prefill_seqlen < self.max_model_len + 1:
            yield f"scheduler.max_prefill_seqlen is {self.max_prefill_seqlen}; expected more than max_model_len {self.max_model_len}"
        needed = self.window + self.backtracking
        if 0 < self.keep_tokens < needed:
            yield (
                f"scheduler.prefill_keep_tokens is {self.keep_tokens}; expected at least {needed} = sliding window {self.window} + "
                f"backtracking {self.backtracking}, or 0 to switch decoder-side replay off"
            )

    @property
    def backtracking(self) -> int:
        """B: tokens by which a sequence can go back."""
        return max(self.max_backtracking, self.num_draft_tokens + 1)

    @property
    def largest_chunk(self) -> int:
        """Most prompt tokens of one request in one step."""
        return self.max_num_batched_tokens // max(self.chunk_align, 1) * self.chunk_align

    @property
    def max_positions(self) -> int:
        """Exclusive bound of every position in a plan, drafting included: size rotary tables and block tables with it."""
        in_flight = self.num_draft_tokens + 1 if self.asynchronous else 0
        return self.max_model_len + 1 + 2 * self.num_draft_tokens + in_flight

    def capacity(self, usable_pages: int) -> int:
        """Most tokens of a request that surely fits `usable_pages` pages, whatever is in flight."""
        return usable_pages * self.page_tokens - 2 * self.num_draft_tokens
