"""What the command line shows is there in 80 columns, which is what there is without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from bench.sim.frontier import needed
from bench.sim.tables import needed_table, points_table, table_of_systems
from bench.systems import SYSTEMS
from tests.bench.sim.test_frontier import point

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


def test_settings_and_what_equally_good_ones_cost_fit_as_well() -> None:
    most = {"num_gpus": 1024, "nic_gbps": 6.25, "keep_copies": "never", "give_back_s": 127.516, "ttft_mean_s": 12.3456}
    points = [
        point(1234567.0, 0.999, 123.4, system=name, **most, frontier=True, frontier_ttft=True) for name in SYSTEMS
    ]
    for table in (points_table(points), needed_table(needed(points, 0.9999, 1.0))):
        console = Console(width=80, file=io.StringIO(), record=True)
        console.print(table)
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= 80
        assert "\u2026" not in "".join(lines)
        assert sum("1234567" in line for line in lines) == len(SYSTEMS)


def test_the_columns_are_explained() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(points_table([point(1.0, 0.9, 1.0)]))
    _, legend = console.export_text().split("NIC: ")
    for column in ("keep:", "back:", "TTFT:", "SLO:", "lost:"):
        assert column in legend
