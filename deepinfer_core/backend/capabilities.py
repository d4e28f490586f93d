"""What a backend says it can do, and whether it can be used here."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from deepinfer_core.backend.formats import CacheFormat, Numerics, WeightFormat


class Capabilities(BaseModel, frozen=True, extra="forbid"):
    """Claims of a backend. Every default is the careful answer; every flag that is set is proved by the conformance suite."""

    device_type: str = Field(default="cpu", description="torch device type on which tensors live")
    architectures: tuple[str, ...] = Field(default=(), description="device architectures it runs on, in the vendor's names; empty: any")
    numerics: frozenset[Numerics] = Field(
        default=frozenset({Numerics.RELEASE}), description="arithmetics offered; a config that asks for another is refused"
    )
    weight_formats: frozenset[WeightFormat] = Field(default=frozenset(), description="checkpoint formats that `prepare_*` accepts")
    window_formats: frozenset[CacheFormat] = Field(default=frozenset(), description="storage of sliding-window keys; the first fit is used")
    entry_formats: frozenset[CacheFormat] = Field(default=frozenset(), description="storage of compressed entries")
    index_formats: frozenset[CacheFormat] = Field(default=frozenset(), description="storage of index keys")
    batch_invariant: bool = Field(
        default=False, description="a row's result is bitwise independent of the other rows; False: `batch_invariant: true` is refused"
    )
    deterministic_sampling: bool = Field(
        default=False, description="same seed, same tokens, under any load; False: `deterministic_sampling: true` is refused"
    )
    graph_capture: bool = Field(default=False, description="decode steps can be captured and replayed; False: the runner stays eager")
    async_copy: bool = Field(default=False, description="host and device overlap; False: copies complete before they return")
    collectives: frozenset[str] = Field(default=frozenset(), description="torch.distributed backends usable; empty: single process only")
    expert_parallel: frozenset[Literal["all_to_all", "native"]] = Field(
        default=frozenset(), description="MoE transports; empty: every rank holds all experts"
    )
    max_context: int | None = Field(default=None, description="longest sequence in tokens; None: limited by memory only")
    tested_on: tuple[str, ...] = Field(default=(), description="devices on which the conformance suite has passed, in words")


class Probe(BaseModel, frozen=True, extra="forbid"):
    """Whether a backend can be used on this machine."""

    available: bool
    reasons: tuple[str, ...] = Field(default=(), description="why not, each a sentence that says what to do; empty if available")
    devices: tuple[str, ...] = Field(default=(), description="devices found, in words")
