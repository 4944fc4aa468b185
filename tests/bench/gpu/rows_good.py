"""A row for tests."""

from __future__ import annotations

from bench.gpu.figures import Report


def measure(report: Report) -> None:
    report.number("rate", 2.5, "GB/s", "a note")
