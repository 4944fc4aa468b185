"""What the command line shows is there in 80 columns, which is what there is without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from bench.sim.tables import table_of_systems
from bench.systems import SYSTEMS

COLUMNS = ("TTFT", "p99", "TBT", "p99", "5x", "abs.", "GPU s", "host", "lost", "void")
FIGURES = ("123456", "1234567", "123", "1234", "100.0", "100.0", "123456", "12.5", "1234", "15")


def lines_of(*figures: str) -> list[str]:
    console = Console(width=80, file=io.StringIO(), record=True)
    table = table_of_systems("a title", COLUMNS)
    for name in SYSTEMS:
        table.add_row(name, *figures)
    console.print(table)
    return console.export_text().splitlines()


def test_figures_are_whole_and_no_two_systems_look_the_same() -> None:
    lines = lines_of(*FIGURES)
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in "".join(lines)
    assert sum(line.split()[-len(FIGURES) :] == list(FIGURES) for line in lines) == len(SYSTEMS)
    # Names that go on in the next line are whole when put together.
    rows = [line.split() for line in lines[lines.index(next(one for one in lines if "blitz" in one)) :]]
    names = "".join(row[0] for row in rows if row)
    assert names == "".join(SYSTEMS)


def test_usual_figures_leave_room_for_every_name() -> None:
    lines = lines_of("123", "1234", "12", "123", "98.7", "100.0", "12345", "8.0", "12", "0")
    assert [line.split()[0] for line in lines if line.strip()][-len(SYSTEMS) :] == list(SYSTEMS)
