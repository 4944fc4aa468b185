"""A row for tests, that fails after its first figure."""

from __future__ import annotations

from bench.gpu.figures import Report


def measure(report: Report) -> None:
    report.number("before", 1.0, "ms")
    raise ValueError("two\nlines")
