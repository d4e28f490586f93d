"""Prints the mutation score."""

from __future__ import annotations


def pytest_terminal_summary(terminalreporter):
    caught = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for key, value in report.user_properties
        if key == "mutant_caught"
    ]
    if caught:
        share = 100 * sum(caught) / len(caught)
        terminalreporter.write_line(f"mutation score: {sum(caught)} of {len(caught)} faulty backends failed the suite ({share:.0f} %)")
