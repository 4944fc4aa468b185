"""Options for a model's objectives: milliseconds on the command line, seconds everywhere else."""

from __future__ import annotations

from typing import Annotated, Any

import typer

MIN_SLO_MS = 1.0
MAX_SLO_MS = 3_600_000.0


def _milliseconds(text: str) -> float:
    try:
        value_ms = float(text)
    except ValueError:
        value_ms = 0.0
    # "nan" is a number to float() and in no range.
    if not MIN_SLO_MS <= value_ms <= MAX_SLO_MS:
        raise typer.BadParameter(f"{text!r} is not a number of milliseconds from {MIN_SLO_MS:g} to {MAX_SLO_MS:.0f}")
    return value_ms


def _objective(flag: str, time: str) -> Any:
    return typer.Option(
        flag,
        parser=_milliseconds,
        metavar="MS",
        help=f"Objective for the time {time}, in milliseconds.",
        show_default="the services' own",
    )


SloTtft = Annotated[float | None, _objective("--slo-ttft", "to the first token")]
SloTbt = Annotated[float | None, _objective("--slo-tbt", "between two tokens")]


def seconds(slo_ms: float | None) -> float | None:
    """An option's value as the services take it; None: no objective was given."""
    return None if slo_ms is None else slo_ms / 1000


def shown_ms(slo_s: float) -> str:
    """An objective in a table; 0 is the services' own."""
    return f"{slo_s * 1000:g}" if slo_s else "-"
