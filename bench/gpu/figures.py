"""What a row reports, and the table of it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

FAILED = "failed"
OFF = "OFF"
"""In the note of a figure that is not what it should be."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit, a text (no value, in ``note``), or what failed (unit ``FAILED``, why in ``note``)."""

    row: str
    name: str
    value: float | None
    unit: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a row is given: where its figures go, and a folder that all rows of a run share."""

    row: str
    send: Callable[[Figure], None]
    folder: Path
    """Compiled kernels and logs. Empty at the run's beginning, so that the first compilation is a cold one."""

    def number(self, name: str, value: float, unit: str, note: str = "") -> None:
        self.send(Figure(self.row, name, value, unit, note))

    def at_most(self, name: str, value: float, unit: str, aim: float, look: str, note: str = "") -> None:
        """A figure that should not be above ``aim``. ``look``: where to look if it is, or is NaN."""
        self._aimed(name, value, unit, f"aim: at most {aim:.3g}", value <= aim, look, note)

    def at_least(self, name: str, value: float, unit: str, aim: float, look: str, note: str = "") -> None:
        """A figure that should not be below ``aim``. ``look``: as ``at_most``."""
        self._aimed(name, value, unit, f"aim: at least {aim:.3g}", value >= aim, look, note)

    def _aimed(self, name: str, value: float, unit: str, aim: str, is_right: bool, look: str, note: str) -> None:
        said = [*([note] if note else []), aim, *([] if is_right else [f"{OFF}: look at {look}"])]
        self.number(name, value, unit, "; ".join(said))

    def text(self, name: str, text: str) -> None:
        self.send(Figure(self.row, name, None, "", text))

    def failed(self, name: str, error: BaseException) -> None:
        """In one line; the traceback goes into the folder."""
        self.send(Figure(self.row, name, None, FAILED, one_line(error)))
        with (self.folder / f"{self.row}.log").open("a", encoding="utf-8") as log:
            log.write(f"== {name}\n{''.join(traceback.format_exception(error))}\n")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part whose failure leaves the row's other parts alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the part's result
            self.failed(name, error)


def one_line(error: BaseException, most: int = 300) -> str:
    """The error's kind, and its text on one line, cut where it goes on for long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}{'…' if len(text) > most else ''}"


def table(figures: Sequence[Figure]) -> str:
    """Columns that line up, a heading per row."""
    width = max((len(one.name) for one in figures), default=0)
    lines: list[str] = []
    last = ""
    for one in figures:
        if one.row != last:
            lines.append(f"[{one.row}]")
            last = one.row
        number = "" if one.value is None else f"{one.value:,.4g}" if abs(one.value) < 1000 else f"{one.value:,.0f}"
        lines.append(f"  {one.name:<{width}}  {number:>9} {one.unit:<10} {one.note}".rstrip())
    return "\n".join(lines)


def document(figures: Sequence[Figure]) -> str:
    """The figures as JSON."""
    return json.dumps({"figures": [asdict(one) for one in figures]}, indent=1, ensure_ascii=False) + "\n"
