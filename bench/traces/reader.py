"""Reads request traces: tables, whose header row tells the format (``tables``), and JSON lines (``mooncake``).

``.gz`` files are unpacked on the way. Published times are rebased to the first arrival. A row without input or output
tokens is no request that could be replayed: it is counted, and so is one that is out of order.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.traces.mooncake import read_mooncake
from bench.traces.request import MAX_SPAN_S, BadTrace, Trace, TraceRequest
from bench.traces.tables import read_table


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
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(str(path), f"cannot be read: {error}") from error


def read_trace(path: Path) -> Trace:
    """The trace in ``path``, in order of arrival.

    Raises ``BadTrace`` naming file, line, column and value: no such file, unknown header, a row
    of another width, a value that is no time or token count, more than a year, or not one request.
    """
    lines = _lines(path)
    first = next(lines, "")
    if not first.strip():
        raise BadTrace(str(path), "empty: expected a header row, or a JSON object a line")
    lines = itertools.chain([first], lines)
    table = None
    if first.lstrip().startswith("{"):
        rows = read_mooncake(str(path), lines)
    else:
        table, rows = read_table(str(path), lines)
    requests: list[TraceRequest] = []
    num_rows = unsorted = 0
    latest_s = 0.0
    for row in rows:
        unsorted += bool(num_rows) and row.arrival_s < latest_s
        latest_s = row.arrival_s
        num_rows += 1
        if row.input_tokens and row.output_tokens:
            requests.append(row)
    if not requests:
        raise BadTrace(str(path), f"no requests ({num_rows} rows without tokens)")
    requests.sort(key=lambda request: request.arrival_s)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if max(span_s, 0.0 if table is None or table.rebase else requests[-1].arrival_s) > MAX_SPAN_S:
        raise BadTrace(str(path), f"arrivals up to {requests[-1].arrival_s:g} s: more than a year of them")
    whole_seconds = table is not None and _to_the_second(table.times, requests)
    if table is None or table.rebase:
        zero_s = requests[0].arrival_s
        for index, request in enumerate(requests):  # in place: there may be millions
            requests[index] = replace(request, arrival_s=request.arrival_s - zero_s)
    return Trace(path.name, tuple(requests), num_rows - len(requests), unsorted, whole_seconds)


def _to_the_second(times: str, requests: Sequence[TraceRequest]) -> bool:
    """Whether arrivals are recorded to the second only. If either may be: when there are ties, and none between two."""
    different = {request.arrival_s for request in requests}
    if times == "exact" or not all(at_s.is_integer() for at_s in different):
        return False
    return times == "whole seconds" or len(different) < len(requests)
