"""Reports of a run: a table for the terminal, and files in JSON, HTML and Markdown."""

from __future__ import annotations

import html
import json
from pathlib import Path

from deepinfer_core.conformance.results import CaseResult, Report, worst_ratio
from deepinfer_core.errors import ConfigError

SUFFIXES = (".json", ".html", ".md")
HEADERS = ("level", "op or check", "origin", "passed", "failed", "unsupported", "skipped", "worst error/bound", "seconds")


def check_report_path(path: Path) -> None:
    """Raises ConfigError now if a report could not be written to `path` later."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"report {str(path)!r}: unknown kind {path.suffix!r}; end the name with one of {', '.join(SUFFIXES)}")
    try:
        existed = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"report {str(path)!r} cannot be written: {error.strerror}; give a path in a folder that can be written"
        ) from error


def write_report(report: Report, path: Path) -> None:
    """Writes the report in the form its suffix names."""
    text = {".json": _json, ".html": _html, ".md": _markdown}[path.suffix](report)
    path.write_text(text, encoding="utf-8")


def rows(report: Report) -> list[tuple[str, ...]]:
    """One row for each op or check, in the columns of HEADERS."""
    table = []
    for (level, name), results in report.by_name().items():
        ratio = worst_ratio(r for r in results if r.status in ("passed", "failed"))
        counts = [sum(r.status in status for r in results) for status in (("passed",), ("failed",), ("unsupported",))]
        skipped = sum(r.status in ("skipped", "known-failure") for r in results)
        origin = report.origins.get(name, "") if level == "ops" else ""
        shown = (level, name, origin, *map(str, counts), str(skipped), f"{ratio:.3g}", f"{sum(r.seconds for r in results):.2f}")
        table.append(shown)
    return table


def summary(report: Report) -> str:
    """One sentence."""
    parts = [f"{report.count('passed')} passed", f"{report.count('failed')} failed", f"{report.count('unsupported')} unsupported"]
    parts.append(f"{report.count('skipped')} skipped")
    if known := report.count("known-failure"):
        parts.append(f"{known} known failures")
    verdict = "conforms" if report.passed else "does not conform"
    return f"{report.backend} {verdict}: {', '.join(parts)}"


def reasons(report: Report) -> list[str]:
    """Distinct reasons of what was not run, with the number of cases."""
    found: dict[tuple[str, str], int] = {}
    for result in report.results:
        if result.status in ("unsupported", "skipped", "known-failure"):
            found[result.status, result.message] = found.get((result.status, result.message), 0) + 1
    return [f"{status} ({count}): {message}" for (status, message), count in found.items()]


def failure_text(result: CaseResult) -> str:
    """A failure as it is printed: id, what is wrong, how to run it alone."""
    return f"{result.level}: {result.id}\n  {result.message}\n  reproduce: {result.reproduce}"


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=1)


def _markdown(report: Report) -> str:
    lines = [f"# Conformance of `{report.backend}`", "", summary(report) + ".", ""]
    lines += [f"* {key}: {value}" for key, value in {"device": report.device, **report.about}.items()]
    lines += ["", "| " + " | ".join(HEADERS) + " |", "|" + "---|" * len(HEADERS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(report)]
    for title, items in _sections(report):
        lines += ["", f"## {title}", ""] + [f"* {item}".replace("\n", "\n  ") for item in items]
    return "\n".join(lines) + "\n"


def _sections(report: Report) -> list[tuple[str, list[str]]]:
    parts = [
        ("Failures", [failure_text(result) for result in report.failures]),
        ("Not run", reasons(report)),
        ("Hints", report.hints),
        ("Notes", report.notes),
    ]
    return [(title, items) for title, items in parts if items]


_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}table{border-collapse:collapse}
th,td{padding:.2em .7em;border-bottom:1px solid #8884;text-align:left}td:nth-child(n+4){text-align:right}
.bad{color:#c22}.good{color:#282}pre{white-space:pre-wrap;background:#8881;padding:.6em}:root{color-scheme:light dark}"""


def _html(report: Report) -> str:
    def escape(text: str) -> str:
        return html.escape(text)

    head = "".join(f"<th>{escape(name)}</th>" for name in HEADERS)
    body = ""
    for row in rows(report):
        state = "bad" if row[4] != "0" else "good"
        body += f'<tr class="{state}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n"
    about = "".join(f"<li>{escape(k)}: {escape(v)}</li>" for k, v in {"device": report.device, **report.about}.items())
    more = ""
    for title, items in _sections(report):
        more += f"<h2>{escape(title)}</h2>" + "".join(f"<pre>{escape(item)}</pre>" for item in items)
    title = f"Conformance of {escape(report.backend)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>{escape(summary(report))}.</p><ul>{about}</ul>"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>{more}</body></html>\n"
    )
