"""Mooncake's published traces: JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

``hash_ids`` name blocks of 512 tokens that prompts share. They are not used: replayed prompts share nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from bench.traces.request import MAX_TOKENS, BadTrace, TraceRequest

_LATEST_MS = 1e15
"""Unix times are possible; an integer may have more digits than a float can hold."""


def read_mooncake(path: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """The rows as they come; some may have no tokens. Raises ``BadTrace``."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise BadTrace(path, f"not JSON ({error}): expected an object", line=number, value=line.strip()) from error
        if not isinstance(row, dict):
            raise BadTrace(path, "expected a JSON object", line=number, value=line.strip())
        yield TraceRequest(
            arrival_s=_milliseconds(path, number, row) / 1000,
            input_tokens=_tokens(path, number, row, "input_length"),
            output_tokens=_tokens(path, number, row, "output_length"),
        )


def _milliseconds(path: str, line: int, row: dict[str, Any]) -> float:
    value = row.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LATEST_MS:
        raise _bad(path, line, row, "timestamp", "expected milliseconds, at least 0")
    return value


def _tokens(path: str, line: int, row: dict[str, Any], column: str) -> int:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise _bad(path, line, row, column, f"expected a number of tokens, from 0 to {MAX_TOKENS:,}")
    return value


def _bad(path: str, line: int, row: dict[str, Any], column: str, problem: str) -> BadTrace:
    value = msgspec.json.encode(row[column]).decode() if column in row else "absent"
    return BadTrace(path, problem, line=line, column=column, value=value)
