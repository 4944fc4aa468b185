"""What the command line shows: each figure beside the lab's, and how far off they are over all windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from bench.fidelity.comparison import FIGURES, Pooled, Row
from bench.sim.tables import in_percent, table_of_systems


def rows_table(compared: Iterable[tuple[str, Sequence[Row]]]) -> Table:
    """Of groups, each with what it is called. ``!``: misses its goal, and lies outside of the lab's own range."""
    table = table_of_systems("Simulator beside lab", ("lab", "range", "simulated", "off", "imposed"))
    for title, rows in compared:
        table.add_row(title)
        for row in rows:
            imposed = row.imposed_off
            table.add_row(
                f" {row.figure}",
                f"{row.lab.median:.4g}",
                f"{row.lab.low:.4g}-{row.lab.high:.4g}",
                f"{row.simulated.median:.4g}",
                f"{row.off:+.1%}{'!' if row.holds is False else ''}",
                "-" if imposed is None else f"{imposed:+.1%}",
            )
        table.add_section()
    return table


_GOALS = [name for name, (_, goal) in FIGURES.items() if goal is not None]
_HEADS = {"ttft_mean_s": "TTFT", "ttft_p99_s": "p99", "gpu_seconds": "GPU s", "scale_out_mean_s": "scale-out"}


def pooled_table(of: Iterable[Pooled]) -> Table:
    """Of systems. In brackets: with the lab's scale events."""
    heads = [_HEADS.get(name, name) for name in _GOALS]
    table = table_of_systems("Over all windows: % within goal, and mean absolute % off (imposed)", ("goal", *heads))
    for one in of:
        table.add_row(one.system, in_percent(one.share), *(_off(one, name) for name in _GOALS))
    return table


def _off(one: Pooled, figure: str) -> str:
    imposed = one.imposed_off.get(figure)
    return in_percent(one.off.get(figure)) + ("" if imposed is None else f" ({in_percent(imposed)})")
