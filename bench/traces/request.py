"""What every trace boils down to: requests with an arrival time and two lengths."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import BadRequest


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. ``arrival_s`` counts from the trace's first arrival (or its own zero)."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and how many rows of the source were not requests that can be replayed."""

    name: str
    requests: tuple[TraceRequest, ...]
    skipped_rows: int = 0
    """Failed requests and rows without input or output tokens."""

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
        super().__init__(f"{where}: {problem}" + (f", not {value!r}" if value is not None else ""), param=column)
        self.path = path
        self.line = line
        self.column = column
        self.value = value
