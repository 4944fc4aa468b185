"""A row for tests, that never ends."""

from __future__ import annotations

import threading

from bench.gpu.figures import Report


def measure(report: Report) -> None:
    del report
    threading.Event().wait()
