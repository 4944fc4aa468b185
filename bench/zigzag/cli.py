"""``blitzscale bench zigzag``: the schedules of live scaling, played back exactly."""

from __future__ import annotations

import random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, write
from bench.zigzag.measure import equal_cases, example, solver_times, unequal_cases

SMALL = 100
TIMED = 200


def command(
    *,
    cases: Annotated[int, typer.Option(min=1, help="Random cases, each with equal and with unequal batches.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the cases.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """ZigZag against best effort, stop the world, the exhaustive optimum and the best split; the ILP's time."""
    rng = random.Random(seed)
    document: dict[str, Any] = {
        "example": example(),
        "equal": equal_cases(rng, cases),
        "unequal": unequal_cases(rng, cases, min(SMALL, cases)),
        **solver_times(rng, min(TIMED, cases)),
        "cases": cases,
        "seed": seed,
    }
    _print(Console(), document)
    write(json_file, document)


def _print(console: Console, document: dict[str, Any]) -> None:
    for policy, completions in document["example"].items():
        console.print(f"{policy.replace('_', ' '):>15}  " + " ".join([f"{c:g}" for c in completions]), highlight=False)
    equal, unequal = document["equal"], document["unequal"]
    console.print(
        f"{document['cases']} cases of equal batches: worse than best effort in {equal['worse_than_best_effort']}, "
        f"mean {equal['of_best_effort_mean']:.2f} of it and {equal['of_stop_the_world_mean']:.2f} of stop the world; "
        f"largest gap to the optimum {equal['gap_to_optimum_max']:g} over {equal['enumerated']} enumerated"
    )
    table = Table("schedule", "against", "worse in", "then by", "at most", "mean ratio", title="unequal batches")
    for schedule in ("free", "assigned"):
        for against, s in unequal[schedule].items():
            if isinstance(s, dict):
                table.add_row(
                    "without gates" if schedule == "free" else "with gates",
                    against.removeprefix("against_").replace("_", " ").replace("free", "without gates"),
                    f"{s['worse_cases']} ({s['worse_share']:.1%})",
                    f"{s['worse_by_mean']:.1%}",
                    f"{s['worse_by_max']:.1%}",
                    f"{s['ratio_mean']:.3f}",
                )
    console.print(table)
    assigned = unequal["assigned"]
    console.print(
        f"gates used in {assigned['used']} cases ({assigned['by_ilp']} by the ILP); predicted times missed: "
        f"{unequal['predictions_missed']}; predicted over played {unequal['predicted_over_played_mean']:.2%} on average"
    )
    console.print(
        f"80 layers, 12 batches: ILP p50 {document['ilp_ms_p50']:.1f} ms, p99 {document['ilp_ms_p99']:.1f} ms (CPU p99 "
        f"{document['ilp_cpu_ms_p99']:.1f} ms); with search and playbacks p50 {document['assign_ms_p50']:.1f} ms, p99 "
        f"{document['assign_ms_p99']:.1f} ms"
    )
