"""``blitzscale bench fidelity``: the simulator beside the lab, on the runs of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, show, usage, write, writing
from bench.fidelity.comparison import Row, rows
from bench.fidelity.condensed import File, groups, read
from bench.fidelity.simulation import Simulation
from bench.sim.choices import chosen_trace


def command(
    *,
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="The directory of an evaluation, or a file that --keep has written.")
    ],
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="The trace that was replayed.")] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help="The look-alike that was replayed, by --seed and --duration.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the look-alike.")] = 0,
    duration: Annotated[float, typer.Option(metavar="S", help="Of the look-alike.")] = 300.0,
    imposed: Annotated[bool, typer.Option(help="Simulate once more with the scale events of the lab.")] = True,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there what this needs of the runs, without the trace.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Each run of an evaluation in the lab, simulated: how far times to the first token, scale-outs and GPU seconds
    are off."""
    with usage():
        check_folder(json_file)
        check_folder(keep)
        simulation = Simulation(chosen_trace(trace, synthetic, seed, duration))
        found = read(runs)
        for run in found:
            simulation.check(run.plan)
    if keep is not None:
        with one_line("fidelity"), writing(keep):
            File(runs=found).write(keep)
    compared: list[Row] = []
    for (window_s, system), repetitions in groups(found).items():
        compared += rows(
            window_s,
            system,
            [run.figures for run in repetitions],
            simulation.repeated(repetitions),
            simulation.imposed(repetitions) if imposed else (),
        )
        say(f"{system}, window at {window_s:g} s: {len(repetitions)} runs")
    show(_table(compared))
    goals = [row for row in compared if row.holds is not None]
    say(f"{sum(bool(row.holds) for row in goals)} of {len(goals)} figures with a goal keep it")
    with one_line("fidelity"):
        write(json_file, {"rows": [_json(row) for row in compared], "machine": machine.describe()})


def _json(row: Row) -> dict[str, object]:
    own = {"off": row.off, "imposed_off": row.imposed_off, "holds": row.holds}
    return msgspec.structs.asdict(row) | own


def _table(compared: Sequence[Row]) -> Table:
    title = Text("Simulator beside lab", style="table.title")
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for head in ("lab", "range", "simulated", "off", "imposed"):
        table.add_column(head, justify="right", no_wrap=True)
    before = None
    for row in compared:
        if (row.window_s, row.system) != before:
            before = row.window_s, row.system
            table.add_section()
            table.add_row(f"{row.system}, {row.window_s:g} s")
        imposed = row.imposed_off
        table.add_row(
            f"  {row.figure}",
            f"{row.lab.median:.4g}",
            f"{row.lab.low:.4g}-{row.lab.high:.4g}",
            f"{row.simulated.median:.4g}",
            f"{row.off:+.1%}{'' if row.holds in (None, True) else ' !'}",
            "-" if imposed is None else f"{imposed:+.1%}",
        )
    return table
