"""Tables that stay readable on narrow terminals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shared.messages.admin import MAX_INSTANCES
from shared.messages.common import Role

_IDS = ("id", "worker", "workers", "host")
"""Columns that are cut where there is no room: an id over three lines can be neither read nor copied."""
_TEXTS = ("name", "model", "path", "waits", "what", "why")
"""Columns that take more lines instead: every character counts. All others are short and keep their width."""
_UNLIMITED = 10_000
_CONTROL = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if code != ord("\t"))


def titled_table(title: str, *columns: str) -> Table:
    """An empty table without lines."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        shrinks = column in _IDS or column in _TEXTS
        table.add_column(column, overflow="fold" if column in _TEXTS else "ellipsis", no_wrap=not shrinks)
    return table


def fitting(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    spared: Sequence[str] = (),
    wraps: Mapping[str, int] | None = None,
) -> Table:
    """A table, without as many of ``spared`` as it takes to fit the console, the first of them first. ``wraps``:
    columns that take more lines before another goes, and the width that is enough for them."""
    enough = [(wraps or {}).get(column, _UNLIMITED) for column in columns]
    measured = [[cell[:width] for cell, width in zip(row, enough, strict=True)] for row in rows] if wraps else rows
    kept = len(spared)
    for num_spared in range(len(spared) + 1):
        if _width(_without(spared[:num_spared], title, columns, measured), console) <= console.width:
            kept = num_spared
            break
    return _without(spared[:kept], title, columns, rows)


def _without(
    spared: Collection[str], title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]
) -> Table:
    kept = [index for index, column in enumerate(columns) if column not in spared]
    table = titled_table(title, *(columns[index] for index in kept))
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _width(table: Table, console: Console) -> int:
    """Columns that it takes without cutting or wrapping anything."""
    return Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum


def visible(text: str) -> str:
    """Without the control characters that do things to a terminal; on it they have no width."""
    return text.translate(_CONTROL)


class Lines:
    """Parts without control characters, and no more lines of them than ``height``; None: all."""

    def __init__(self, parts: Iterable[RenderableType], height: int | None = None) -> None:
        self._parts = Group(*parts)
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._parts, options.update(height=None), pad=False)
        if self._height is not None and len(lines) > self._height:
            kept = max(0, self._height - 1)
            more = f"... and {len(lines) - kept} more lines"[: options.max_width]
            lines = [*lines[:kept], [Segment(more)]]
        for line in lines:
            yield from (Segment(visible(part.text), part.style) for part in line if not part.control)
            yield Segment.line()


def named_texts(rows: Iterable[tuple[str, str]]) -> Padding:
    """Names and texts, a row each; a text takes as many lines as it needs."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True, min_width=9)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return Padding(table, (0, 0, 0, 2))


def shown_limit(max_instances: int) -> str:
    return "-" if max_instances >= MAX_INSTANCES else str(max_instances)


def shown_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def shown_time(at_s: float, form: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    """Unix time in UTC; ``-`` for one that is none."""
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return "-"


def shown_instances(number: int, role: Role) -> str:
    """In words."""
    noun = "instance" if number == 1 else "instances"
    return f"{number} {noun}" if role == "colocated" else f"{number} {role} {noun}"
