"""Known failures: a backend's own list of cases that fail, each with a reason.

One line each: a case id or a shell pattern over ids, white space, the reason. `#` begins a comment line. A listed case still runs;
failing it is reported as a known failure, passing it as a note, and a line that matches no case at all as a warning.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer_core.conformance.results import CaseResult
from deepinfer_core.errors import ConfigError, listing


@dataclass
class KnownFailures:
    """The lines of one file, and which of them matched."""

    path: str = ""
    reasons: dict[str, str] = field(default_factory=dict)  # pattern -> reason
    _matched: set[str] = field(default_factory=set)
    _passed: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> KnownFailures:
        """The file at `path`. Raises ConfigError that lists every line without a reason."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"known failures {str(path)!r} cannot be read: {error.strerror}; give the path of a text file") from error
        known, problems = cls(str(path)), []
        for number, line in enumerate(lines, 1):
            pattern, _, reason = line.strip().partition(" ")
            if not pattern or pattern.startswith("#"):
                continue
            if not reason.strip():
                problems.append(f"{path.name}:{number}: {pattern!r} has no reason; write `<case id or pattern> <reason>`")
            known.reasons[pattern] = reason.strip()
        if problems:
            raise ConfigError(listing(f"the file of known failures {path.name!r}", problems))
        return known

    def apply(self, result: CaseResult) -> CaseResult:
        """The result with a listed failure turned into a known one."""
        for pattern, reason in self.reasons.items():
            if result.id != pattern and not fnmatch.fnmatchcase(result.id, pattern):
                continue
            self._matched.add(pattern)
            if result.status == "failed":
                return replace(result, status="known-failure", message=f"{reason} [{result.message}]")
            if result.status == "passed":
                self._passed.append(result.id)
        return result

    def notes(self) -> list[str]:
        """Unexpected passes and lines that match nothing."""
        unused = [pattern for pattern in self.reasons if pattern not in self._matched]
        return [f"known failure passes now: {case}; delete its line" for case in self._passed] + [
            f"warning: {self.path}: {pattern!r} matches no case of this run" for pattern in unused
        ]
