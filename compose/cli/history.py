"""``blitzscale history``: scale operations, the newest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compose.admin import AdminClient
from compose.cli.options import URL_DEFAULT, Json, Url, show
from compose.cli.tables import fitting, shown_time
from shared.messages.operations import ScaleRecord, ScaleRecords

MAX_LISTED = 100
_COLUMNS = ("time", "model", "role", "what", "status", "first byte", "done", "MB", "id", "why")
_SPARED = ("role", "MB", "first byte", "id")
"""Columns that narrow terminals do without, the least important first."""
_WHY_WIDTH = 30
"""Reasons take more lines before another column goes: an id is for `report`."""
_WHAT = {"out": "more", "in": "fewer", "mutate": "roles", "none": "nothing"}
_STYLES = {"done": "green", "running": "cyan", "failed": "red"}


def history(
    model: Annotated[str, typer.Argument(help="Only this model's.", show_default="all models")] = "",
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="Operations to look at.", metavar="N")] = 20,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """List scale operations, newest first, with their times from trigger to first byte and to the end."""

    async def question(client: AdminClient) -> ScaleRecords:
        found = await client.scale_records(limit=limit)
        return ScaleRecords(records=tuple(record for record in found if model in ("", record.model)))

    def table(found: ScaleRecords, console: Console) -> Iterator[Table | Text]:
        if found.records:
            yield operations_table(found.records, console)
            yield Text("one of them as a page: blitzscale report ID|MODEL|latest -o FILE.html", style="dim")
        else:
            yield Text(f"no scale operation{f' of {model!r}' if model else ''} is among the newest {limit}")

    show(url, as_json, question, table)


def operations_table(records: Sequence[ScaleRecord], console: Console, *, brief: bool = False) -> Table:
    """Scale operations. ``brief``: without the reasons where they would take more than a line each."""
    spared = ("why", *_SPARED) if brief else _SPARED
    rows = [_row(record) for record in records]
    wraps = None if brief else {"why": _WHY_WIDTH}
    return fitting(console, "Scale operations", _COLUMNS, rows, spared=spared, wraps=wraps)


def _row(record: ScaleRecord) -> tuple[str | Text, ...]:
    at = shown_time(record.triggered_at_s, "%m-%d %H:%M:%SZ")
    status = Text("advised" if record.advice else record.status, style=_STYLES.get(record.status, ""))
    done_ms = record.trigger_to_serving_ms if record.direction != "in" else record.trigger_to_spare_ms
    num_mb = f"{record.bytes / 1e6:.1f}" if record.bytes else "-"
    times = (_ms(record.trigger_to_first_byte_ms), _ms(done_ms), num_mb)
    return (at, record.model, record.role, _WHAT[record.direction], status, *times, record.plan_id, record.reason)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
