"""``blitzscale cost``: what each model's GPUs cost, and what idle ones do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from compose.admin import AdminClient
from compose.cli.options import URL_DEFAULT, Json, Url, show
from compose.cli.tables import fitting
from shared.messages.registry import GpuTimeReport, GpuUse

_COLUMNS = ("model", "GPU hours", "share", "cost", "by state")
_SPARED = ("by state", "share")


def cost(
    model: Annotated[str, typer.Argument(help="Only this one's.", show_default="all models")] = "",
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Show how long GPUs were each model's, in which state, and what that cost, since the pool leads."""

    async def question(client: AdminClient) -> GpuTimeReport:
        return await client.gpu_time(model)

    show(url, as_json, question, _shown)


def _shown(found: GpuTimeReport, console: Console) -> Iterator[RenderableType]:
    rows = []
    uses = sorted(found.uses, key=lambda use: (use.model, -use.seconds))
    by_model = [(name, list(of)) for name, of in groupby(uses, lambda use: use.model)]
    for name, of in sorted(by_model, key=lambda pair: -_total_s(pair[1])):
        total_s = _total_s(of)
        states = ", ".join(f"{use.state} {_share(use.seconds, total_s)}" for use in of if use.seconds)
        share, price = _share(total_s, found.total_s), _cost(total_s, found.hour_cost)
        rows.append((name or "(no model)", f"{total_s / 3600:.4f}", share, price, states))
    yield fitting(console, "GPU time", _COLUMNS, rows, spared=_SPARED, wraps={"by state": 30})
    all_workers = f"all workers: {found.total_s / 3600:.4f} GPU hours, {_cost(found.total_s, found.hour_cost)}"
    yield f"{all_workers}; counted for {found.counted_s / 3600:.4f} h, since this pool leads"
    if not found.hour_cost:
        yield "no cost without a price: blitzscale up --gpu-hour-cost, or BLITZ_POOL_GPU_HOUR_COST of the pool"


def _total_s(of: list[GpuUse]) -> float:
    return sum(use.seconds for use in of)


def _share(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.0f} %" if whole_s else "-"


def _cost(seconds: float, hour_cost: float) -> str:
    return f"{seconds / 3600 * hour_cost:.2f}" if hour_cost else "-"
