"""``blitzscale why``: what a model needs, what was decided on it, and why."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from compose.admin import AdminClient
from compose.cli.options import URL_DEFAULT, Json, Url, show
from compose.cli.tables import named_texts, shown_instances, shown_time
from shared.messages.admin import WhyStatus
from shared.messages.decisions import MAX_DECISIONS, DecisionRecord, RoleVerdict

_AGO = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhd])")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_ASKED_BY = {"load": "the load", "hand": "by hand", "room": "for another model", "drain": "its worker is drained"}
_OUTCOMES = {
    "load": "loads",
    "revive": "revives",
    "mutate": "changes roles",
    "drain": "gives back",
    "keep": "keeps",
    "refuse": "cannot",
}
_STYLES = {"load": "green", "revive": "green", "mutate": "cyan", "drain": "yellow", "refuse": "red"}


def why(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    at: Annotated[
        str,
        typer.Option(
            help="Decisions up to then: a time of today (14:05, this machine's), one with its date (2026-01-31T14:05, "
            "UTC with a Z), or ago (90s, 15m, 2h). Times are shown in UTC.",
            metavar="TIME",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=MAX_DECISIONS, help="Decisions to show.", metavar="N")] = 5,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Say why a model has as many instances as it has: its load, what was decided, at what cost, and what else would
    have been."""
    until_s = moment(at, time.time()) if at else None

    async def question(client: AdminClient) -> WhyStatus:
        return await client.why(model, until_s=until_s, limit=limit)

    show(url, as_json, question, lambda found, console: _shown(found, console, of_now=until_s is None))


def moment(text: str, now_s: float) -> float:
    """Unix seconds. Raises ``typer.BadParameter``."""
    if ago := _AGO.fullmatch(text):
        return now_s - float(ago["number"]) * _UNITS_S[ago["unit"]]
    # Of a whole minute or second, what happened in it counts.
    whole_s = 1.0 if re.search(r":\d{2}:\d{2}", text) else 60.0
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            time_of_day = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M").time()
            # With the offset that was in force then, not with today's.
            found = datetime.combine(datetime.fromtimestamp(now_s).date(), time_of_day).astimezone()
        else:
            found = datetime.fromisoformat(text)
            found = found if found.tzinfo else found.astimezone()
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no time: such as 14:05, 2026-01-31T14:05 or 15m", param_hint="--at"
        ) from None
    return found.timestamp() + whole_s


def _shown(found: WhyStatus, console: Console, *, of_now: bool) -> Iterator[Text | Padding]:
    del console
    if of_now:
        for verdict in found.roles:
            yield Text(f"{found.model}: {_of_role(verdict)}", style="bold")
            yield named_texts([("load", verdict.seen), *([("bound", verdict.bound)] if verdict.bound else [])])
        waiting = [("waiting", f"{found.queued_requests} requests in gateways")] if found.queued_requests else []
        waiting += [("not now", f"{shown_instances(u.wanted, u.role)} wanted: {u.why}") for u in found.unplanned]
        if waiting:
            yield named_texts(waiting)
    for service in found.silent:
        yield Text(f"no {service} answers: its part is missing", style="red")
    for decision in found.decisions:
        yield headline(decision)
        yield named_texts(particulars(decision))
    if not found.decisions and "planner" not in found.silent:
        yield Text("nothing was decided" if of_now else "nothing was decided by then, as far as is remembered")


def _of_role(verdict: RoleVerdict) -> str:
    wanted = shown_instances(verdict.desired, verdict.role)
    return f"{wanted} wanted, {verdict.there} there; the load fills {verdict.needed:.2f}"


def headline(decision: DecisionRecord) -> Text:
    """When it was, what came of it, and who asked."""
    line = Text(f"{shown_time(decision.at_s)}  ")
    line.append(_OUTCOMES.get(decision.outcome, decision.outcome), style=_STYLES.get(decision.outcome, "bold"))
    asked = f", {decision.asked} asked for" if decision.asked != decision.wanted else ""
    wanted = shown_instances(decision.wanted, decision.role)
    # Where a limit or a floor made the number, the load did not.
    asked_by = decision.bound if decision.asked_by == "load" and decision.bound else _ASKED_BY[decision.asked_by]
    line.append(f": {decision.there} to {wanted}{asked}, {asked_by}")
    return line


def particulars(decision: DecisionRecord) -> list[tuple[str, str]]:
    """The rest of it, by name; what is empty is left out."""
    rows = [("seen", decision.seen), ("bound", decision.bound), ("chosen", decision.chosen)]
    rows += [("cost", decision.cost), ("otherwise", decision.otherwise), ("operation", decision.plan_id)]
    return [(name, value) for name, value in rows if value]
