"""What every trace boils down to: requests with an arrival time and two lengths."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import BadRequest

MAX_TOKENS = 10**12
"""Of a prompt or an answer. More is a mistake, and would be no number any more where it is computed with."""
MAX_SPAN_S = 366 * 86400.0
"""Of a trace. Beyond that, its times are hardly seconds from its beginning."""

_SHOWN = 120
"""Characters of a bad value in a message: a row may be megabytes long."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. ``arrival_s`` counts from the trace's first arrival (or its own zero)."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and what was found in the source besides."""

    name: str
    requests: tuple[TraceRequest, ...]
    skipped_rows: int = 0
    """Failed requests and rows without input or output tokens."""
    unsorted_rows: int = 0
    """Rows that arrived before the row above them; here all are in order."""
    whole_seconds: bool = False
    """Arrivals are known to the second only (``bench.traces.scaling.spread_seconds``)."""

    @property
    def span_s(self) -> float:
        """Seconds from 0 to the last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0


class BadTrace(BadRequest):
    """A trace that cannot be read; the message names file, line, column and value."""

    code = "bad_trace"

    def __init__(
        self, path: str, problem: str, *, line: int | None = None, column: str | None = None, value: str | None = None
    ) -> None:
        where = f"{path}, line {line}" if line is not None else path
        if column is not None:
            where += f", column {column!r}"
        shown = "" if value is None else f", not {value!r}" if len(value) <= _SHOWN else f", not {value[:_SHOWN]!r}..."
        super().__init__(f"{where}: {problem}{shown}", param=column)
        self.path = path
        self.line = line
        self.column = column
        self.value = value
