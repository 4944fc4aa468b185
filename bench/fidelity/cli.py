"""``blitzscale bench fidelity``: the simulator beside the lab, on the runs of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, show, unfinished, usage, write, writing
from bench.fidelity.comparison import Row, pooled, rows
from bench.fidelity.condensed import Figures, File, read
from bench.fidelity.figures import Compared, beside
from bench.fidelity.groups import Group, groups, labels
from bench.fidelity.simulation import Simulation
from bench.fidelity.tables import pooled_table, rows_table
from bench.replay.options import Outputs, PngFile
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
    png_file: PngFile = None,
) -> None:
    """Each run of an evaluation in the lab, simulated: how far times to the first token, scale-outs and GPU seconds
    are off. Void runs do not count."""
    with usage():
        outputs = Outputs.checked(json_file, png_file, None)
        check_folder(keep)
        simulation = Simulation(chosen_trace(trace, synthetic, seed, duration))
        found = read(runs)
        grouped = groups(found)
        for group in grouped:
            simulation.check(group.plan)
    given = (
        f"--synthetic {synthetic} --duration {duration:g} --seed {seed}" if trace is None else f"--trace {trace.name}"
    )
    asked = f"blitzscale bench fidelity {runs.name} {given}{'' if imposed else ' --no-imposed'}"
    compared: list[tuple[str, list[Row]]] = []
    drawn: list[Compared] = []
    with one_line("fidelity"):
        if keep is not None:
            with writing(keep):
                File(runs=found).write(keep)
        with unfinished():
            for label, group in zip(labels(grouped), grouped, strict=True):
                simulated = simulation.repeated(group.runs) if group.runs else []
                compared.append((f"{label}: {group.counts}", _rows(simulation, group, simulated, imposed=imposed)))
                if group.runs:
                    drawn.append(Compared(group.plan, [run.figures for run in group.runs], simulated))
                say(f"{label}: {group.counts}" + (f" ({group.why})" if group.void else ""))
        rows_of_all = [row for _, of in compared for row in of]
        pool = pooled(rows_of_all)
        show(rows_table(compared), pooled_table(pool))
        goals = [row for row in rows_of_all if row.holds is not None]
        say(f"{sum(bool(row.holds) for row in goals)} of {len(goals)} figures with a goal keep it")
        document = {
            "groups": [_group_json(group) for group in grouped],
            "rows": [_json(row) | {"group": number} for number, (_, of) in enumerate(compared) for row in of],
            "pooled": [asdict(one) | {"share": one.share} for one in pool],
        }
        write(json_file, document | {"machine": machine.describe(), "command": asked})
        if drawn:
            outputs.draw((), beside(drawn))


def _rows(simulation: Simulation, group: Group, simulated: Sequence[Figures], *, imposed: bool) -> list[Row]:
    """None of a group without a run that counts."""
    if not group.runs:
        return []
    return rows(
        group.plan.window.start_s,
        group.plan.system,
        [run.figures for run in group.runs],
        simulated,
        simulation.imposed(group.runs) if imposed else (),
    )


def _group_json(group: Group) -> dict[str, object]:
    void = [{"repetition": run.plan.repetition, "reasons": run.void} for run in group.void]
    return {"plan": group.plan, "runs": len(group.runs), "void": void}


def _json(row: Row) -> dict[str, object]:
    return asdict(row) | {"off": row.off, "imposed_off": row.imposed_off, "holds": row.holds}
