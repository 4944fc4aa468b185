"""Reads request traces; the header row tells the format. ``.gz`` files are unpacked on the way.

    normalised   arrival_s,input_tokens,output_tokens[,model]
    Azure        TIMESTAMP,ContextTokens,GeneratedTokens
    BurstGPT     Timestamp[,Session ID][,Elapsed time],Model,Request tokens,Response tokens,Total tokens,Log Type

Published times are rebased to the first row's.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.traces.request import BadTrace, Trace, TraceRequest

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
        if not (text.isascii() and text.isdigit()):
            raise self.bad(column, "expected a number of tokens, at least 0")
        return int(text)

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


def _normalised(row: _Row) -> TraceRequest | None:
    request = TraceRequest(
        arrival_s=row.seconds("arrival_s"),
        input_tokens=row.tokens("input_tokens"),
        output_tokens=row.tokens("output_tokens"),
        model=row.cells.get("model") or None,
    )
    return request if request.input_tokens and request.output_tokens else None


def _azure(row: _Row) -> TraceRequest | None:
    request = TraceRequest(
        arrival_s=row.utc_seconds("TIMESTAMP"),
        input_tokens=row.tokens("ContextTokens"),
        output_tokens=row.tokens("GeneratedTokens"),
    )
    return request if request.input_tokens and request.output_tokens else None


def _burstgpt(row: _Row) -> TraceRequest | None:
    request = TraceRequest(
        arrival_s=row.seconds("Timestamp"),
        input_tokens=row.tokens("Request tokens"),
        output_tokens=row.tokens("Response tokens"),
        model=row.cells["Model"] or None,
    )
    # A failed request is a row without a response.
    return request if request.input_tokens and request.output_tokens else None


@dataclass(frozen=True, slots=True)
class _Format:
    required: tuple[str, ...]
    rebase: bool
    parse: Callable[[_Row], TraceRequest | None]


_FORMATS = (
    _Format(("arrival_s", "input_tokens", "output_tokens"), False, _normalised),
    _Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), True, _azure),
    _Format(("Timestamp", "Model", "Request tokens", "Response tokens"), True, _burstgpt),
)


def _lines(path: Path) -> Iterator[str]:
    """The file's text lines. Raises ``BadTrace`` when it is missing, truncated, or not text."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        opener = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as text:
            yield from text
    except FileNotFoundError:
        raise BadTrace(str(path), "no such file") from None
    except UnicodeDecodeError as error:
        raise BadTrace(str(path), f"not a text file ({error.reason} at byte {error.start})") from error
    except (OSError, EOFError) as error:
        raise BadTrace(str(path), f"cannot be read: {error}") from error


def _format_of(path: Path, header: Sequence[str]) -> _Format:
    for known in _FORMATS:
        if set(known.required) <= set(header):
            return known
    choices = "; ".join(",".join(known.required) for known in _FORMATS)
    raise BadTrace(
        str(path), f"no known trace format has these columns; known: {choices}", line=1, value=",".join(header)
    )


def read_trace(path: Path) -> Trace:
    """The trace in ``path``, in order of arrival.

    Raises ``BadTrace`` naming file, line, column and value: no such file, unknown header, a row
    of another width, a value that is no time or token count, or not one request.
    """
    rows = csv.reader(_lines(path))
    try:
        header = [name.strip() for name in next(rows, [])]
        if not header:
            raise BadTrace(str(path), "empty: expected a header row")
        known = _format_of(path, header)
        requests: list[TraceRequest] = []
        skipped = 0
        for values in rows:
            if not values:
                continue
            if len(values) != len(header):
                raise BadTrace(
                    str(path),
                    f"expected {len(header)} columns, found {len(values)}",
                    line=rows.line_num,
                    value=",".join(values),
                )
            row = _Row(str(path), rows.line_num, dict(zip(header, values, strict=True)))
            request = known.parse(row)
            if request is None:
                skipped += 1
            else:
                requests.append(request)
    except csv.Error as error:
        raise BadTrace(str(path), f"not CSV: {error}", line=rows.line_num) from error
    if not requests:
        raise BadTrace(str(path), f"no requests ({skipped} rows without tokens)")
    requests.sort(key=lambda request: request.arrival_s)
    zero_s = requests[0].arrival_s if known.rebase else 0.0
    rebased = tuple(
        TraceRequest(request.arrival_s - zero_s, request.input_tokens, request.output_tokens, request.model)
        for request in requests
    )
    return Trace(path.name, rebased, skipped)
