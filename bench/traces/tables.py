"""Traces as tables with a header row, which tells the format.

normalised   arrival_s,input_tokens,output_tokens[,model]
Azure        TIMESTAMP,ContextTokens,GeneratedTokens
BurstGPT     Timestamp[,Session ID][,Elapsed time],Model,Request tokens,Response tokens,Total tokens,Log Type
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from bench.traces.request import MAX_TOKENS, BadTrace, TraceRequest

_FRACTION = re.compile(r"^(?P<whole>[^.+Z]+)(?:\.(?P<fraction>\d+))?(?:\+00:00|Z)?$")


@dataclass(frozen=True, slots=True)
class _Row:
    """One data row, with what an error about it needs."""

    path: str
    line: int
    cells: dict[str, str]

    def bad(self, column: str, problem: str) -> BadTrace:
        return BadTrace(self.path, problem, line=self.line, column=column, value=self.cells[column])

    def seconds(self, column: str) -> float:
        try:
            value = float(self.cells[column])
        except ValueError:
            raise self.bad(column, "expected seconds") from None
        if not math.isfinite(value) or value < 0:
            raise self.bad(column, "expected finite seconds, at least 0")
        return value

    def tokens(self, column: str) -> int:
        text = self.cells[column].strip()
        # Python refuses to read numbers of thousands of digits.
        if not (text.isascii() and text.isdigit()) or len(text) > len(str(MAX_TOKENS)) or int(text) > MAX_TOKENS:
            raise self.bad(column, f"expected a number of tokens, from 0 to {MAX_TOKENS:,}")
        return int(text)

    def name(self, column: str) -> str | None:
        # A few names in millions of rows: one string each.
        return sys.intern(self.cells.get(column, "")) or None

    def utc_seconds(self, column: str) -> float:
        # Published times have seven decimals, one more than strptime takes.
        match = _FRACTION.match(self.cells[column].strip())
        try:
            if match is None:
                raise ValueError
            whole = datetime.strptime(match["whole"], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        except ValueError:
            raise self.bad(column, "expected a time like 2023-11-16 18:17:03.9799600") from None
        return whole + (float(f"0.{match['fraction']}") if match["fraction"] else 0.0)


def _normalised(row: _Row) -> TraceRequest:
    return TraceRequest(
        arrival_s=row.seconds("arrival_s"),
        input_tokens=row.tokens("input_tokens"),
        output_tokens=row.tokens("output_tokens"),
        model=row.name("model"),
    )


def _azure(row: _Row) -> TraceRequest:
    return TraceRequest(
        arrival_s=row.utc_seconds("TIMESTAMP"),
        input_tokens=row.tokens("ContextTokens"),
        output_tokens=row.tokens("GeneratedTokens"),
    )


def _burstgpt(row: _Row) -> TraceRequest:
    # A failed request is a row without a response.
    return TraceRequest(
        arrival_s=row.seconds("Timestamp"),
        input_tokens=row.tokens("Request tokens"),
        output_tokens=row.tokens("Response tokens"),
        model=row.name("Model"),
    )


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of table."""

    required: tuple[str, ...]
    rebase: bool
    """Times count from the first row's."""
    times: Literal["exact", "whole seconds", "either"]
    """How they are recorded, if no value says otherwise."""
    parse: Callable[[_Row], TraceRequest]


_FORMATS = (
    Format(("arrival_s", "input_tokens", "output_tokens"), False, "either", _normalised),
    Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), True, "exact", _azure),
    Format(("Timestamp", "Model", "Request tokens", "Response tokens"), True, "whole seconds", _burstgpt),
)


def read_table(path: str, lines: Iterable[str]) -> tuple[Format, Iterator[TraceRequest]]:
    """The format, and the rows as they come; some may have no tokens. Both raise ``BadTrace``."""
    rows = csv.reader(lines)
    try:
        header = [name.strip() for name in next(rows, [])]
    except csv.Error as error:
        raise BadTrace(path, f"not CSV: {error}", line=1) from error
    found = _format_of(path, header)

    def requests() -> Iterator[TraceRequest]:
        try:
            for values in rows:
                if not values:
                    continue
                if len(values) != len(header):
                    problem = f"expected {len(header)} columns, found {len(values)}"
                    raise BadTrace(path, problem, line=rows.line_num, value=",".join(values))
                yield found.parse(_Row(path, rows.line_num, dict(zip(header, values, strict=True))))
        except csv.Error as error:
            raise BadTrace(path, f"not CSV: {error}", line=rows.line_num) from error

    return found, requests()


def _format_of(path: str, header: Sequence[str]) -> Format:
    for known in _FORMATS:
        if set(known.required) <= set(header):
            return known
    choices = "; ".join(",".join(known.required) for known in _FORMATS)
    raise BadTrace(
        path,
        f"no known trace format has these columns; known: {choices}; or JSON lines as Mooncake's",
        line=1,
        value=",".join(header),
    )
