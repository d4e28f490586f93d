"""Results of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "unsupported", "skipped", "known-failure"]

LEVELS = ("contract", "ops", "model", "engine", "claims")
"""The levels in the order in which they run."""


@dataclass(frozen=True)
class CaseResult:
    """Outcome of one case."""

    level: str
    name: str  # op, or subject of the check
    case: str  # the rest of the id: geometry, arithmetic, seed
    status: Status
    message: str = ""  # why it failed, is unsupported or was skipped
    ratio: float = 0.0  # worst error divided by its bound
    seconds: float = 0.0
    reproduce: str = ""  # command that runs this case alone; set on failures

    @property
    def id(self) -> str:
        """Unique in a run; `--ops` accepts it."""
        return f"{self.name}({self.case})" if self.case else self.name


@dataclass
class Report:
    """Everything a run found out about one backend."""

    backend: str
    device: str
    about: dict[str, str] = field(default_factory=dict)  # versions, seed, devices, command
    results: list[CaseResult] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)  # op -> native, inherited or missing
    hints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, status: Status) -> int:
        """How many cases ended so."""
        return sum(result.status == status for result in self.results)

    @property
    def failures(self) -> list[CaseResult]:
        return [result for result in self.results if result.status == "failed"]

    @property
    def passed(self) -> bool:
        """True if nothing failed and something passed."""
        return not self.failures and self.count("passed") > 0

    def by_name(self) -> dict[tuple[str, str], list[CaseResult]]:
        """Results grouped by (level, name), in order of appearance."""
        groups: dict[tuple[str, str], list[CaseResult]] = {}
        for result in self.results:
            groups.setdefault((result.level, result.name), []).append(result)
        return groups

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinite ratios become the string "inf"."""
        results = [{**asdict(r), "id": r.id, "ratio": r.ratio if r.ratio != float("inf") else "inf"} for r in self.results]
        return {**asdict(self), "results": results, "passed": self.passed}


def worst_ratio(results: Iterable[CaseResult]) -> float:
    """The largest error-to-bound ratio."""
    return max((result.ratio for result in results), default=0.0)
