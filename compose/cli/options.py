"""Options and helpers that several commands share.

A model's objectives are milliseconds on the command line, and seconds everywhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer
from rich.console import Console, RenderableType

from compose.admin import AdminClient
from compose.cli.tables import Lines
from compose.config import DEFAULT_URL, URL_VARIABLE, admin_key, default_state_dir
from shared.messages.admin import MAX_KEEP_ALIVE_S, MAX_NO_ROOM_TIMEOUT_S, MAX_WEIGHT
from shared.messages.common import ReasoningParserName, Serving, ToolParserName

T = TypeVar("T")

Url = Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="The gateway's base URL.", metavar="URL")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
StateDirectory = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="The state directory of `up`; $XDG_STATE_HOME/blitzscale or ~/.local/state/blitzscale.",
        metavar="DIR",
        show_default=False,
    ),
]
EngineName = Literal["torch", "mock"]
"""``services.worker.engine.kinds``, for a parser that wants to see them here."""
URL_DEFAULT = DEFAULT_URL
MIN_SLO_MS = 1.0
MAX_SLO_MS = 3_600_000.0


def state_directory(given: Path | None) -> Path:
    """That of ``--state-dir``."""
    return (given if given is not None else default_state_dir()).expanduser().absolute()


def ask(url: str, question: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Run ``question`` with a client of the gateway at ``url``; the key comes from ``BLITZ_ADMIN_KEY``."""

    async def asking() -> T:
        async with AdminClient(url, api_key=admin_key()) as client:
            return await question(client)

    return asyncio.run(asking())


def show(
    url: str,
    as_json: bool,
    question: Callable[[AdminClient], Awaitable[T]],
    shown: Callable[[T, Console], Iterable[RenderableType]],
) -> None:
    """Print what the gateway answers: as JSON for programs, or as ``shown`` makes it for a console."""
    found = ask(url, question)
    if as_json:
        print_json(found)
        return
    # Names and errors come from others: what looks like markup is none.
    console = Console(highlight=False, markup=False)
    console.print(Lines(shown(found, console)))


def print_json(found: object) -> None:
    """For programs."""
    typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


def _milliseconds(text: str) -> float:
    try:
        value_ms = float(text)
    except ValueError:
        value_ms = 0.0
    # "nan" is a number to float() and in no range.
    if not MIN_SLO_MS <= value_ms <= MAX_SLO_MS:
        raise typer.BadParameter(f"{text!r} is not a number of milliseconds from {MIN_SLO_MS:g} to {MAX_SLO_MS:.0f}")
    return value_ms


def _milliseconds_or_none(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _milliseconds(text)


def _objective(flag: str, time: str) -> Any:
    return typer.Option(
        flag,
        parser=_milliseconds,
        metavar="MS",
        help=f"Objective for the time {time}, in milliseconds.",
        show_default="the services' own",
    )


def _new_objective(flag: str, time: str) -> Any:
    what = f"Objective for the time {time}, in milliseconds; 0: the services' own."
    return typer.Option(flag, parser=_milliseconds_or_none, metavar="MS", help=what, show_default=False)


SloTtft = Annotated[float | None, _objective("--slo-ttft", "to the first token")]
SloTbt = Annotated[float | None, _objective("--slo-tbt", "between two tokens")]
NewSloTtft = Annotated[float | None, _new_objective("--slo-ttft", "to the first token")]
NewSloTbt = Annotated[float | None, _new_objective("--slo-tbt", "between two tokens")]


def _seconds(text: str, most_s: float) -> float:
    try:
        value_s = float(text)
    except ValueError:
        value_s = -1.0
    if not 0 <= value_s <= most_s:
        raise typer.BadParameter(f"{text!r} is not a number of seconds from 0 to {most_s:.0f}")
    return value_s


def _keep_alive(text: str) -> float:
    return _seconds(text, MAX_KEEP_ALIVE_S)


def _no_room_timeout(text: str) -> float:
    return _seconds(text, MAX_NO_ROOM_TIMEOUT_S)


def _new_no_room_timeout(text: str) -> float | Literal["default"]:
    return "default" if text == "default" else _no_room_timeout(text)


KeepAlive = Annotated[
    float | None,
    typer.Option(
        "--keep-alive",
        parser=_keep_alive,
        metavar="SECONDS",
        help="Go to zero instances after this long without a request.",
        show_default="keep an instance",
    ),
]
NewKeepAlive = Annotated[
    float | None,
    typer.Option(
        "--keep-alive",
        parser=_keep_alive,
        metavar="SECONDS",
        help="Go to zero instances after this long without a request; 0 lifts this.",
        show_default=False,
    ),
]
NoRoomTimeout = Annotated[
    float | None,
    typer.Option(
        "--no-room-timeout",
        parser=_no_room_timeout,
        metavar="SECONDS",
        help="Refuse requests after this long without an instance, if none can be started; 0: at once.",
        show_default="the gateway's own",
    ),
]
NewNoRoomTimeout = Annotated[
    Any,  # what the parser gives; typer takes no union
    typer.Option(
        "--no-room-timeout",
        parser=_new_no_room_timeout,
        metavar="SECONDS",
        help="Refuse requests after this long without an instance, if none can be started; 0: at once; default: the "
        "gateway's own.",
        show_default=False,
    ),
]


def _weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_WEIGHT:
        raise typer.BadParameter(f"{text!r} is not a number greater than 0 and at most {MAX_WEIGHT:.0f}")
    return value


Weight = Annotated[
    float | None,
    typer.Option(
        "--weight",
        parser=_weight,
        metavar="NUMBER",
        help="What its missed objectives count for beside those of other models; 1 is usual.",
        show_default=False,
    ),
]
Served = Annotated[
    Serving | None,
    typer.Option(
        "--serving",
        help="Which instances the load decides on: colocated ones, or prefill and decode instances; '': colocated "
        "ones, and those of other roles stay as asked for by hand.",
        show_default=False,
    ),
]
EngineOf = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Engine of others that serves it, on workers that offer it: vllm.",
        show_default="the system's own",
    ),
]
EngineArgsFile = Annotated[
    Path | None,
    typer.Option("--engine-args", help="File with the engine's arguments, a JSON object.", show_default=False),
]
Advise = Annotated[
    bool | None,
    typer.Option("--advise/--no-advise", help="Only say what would be done to its instances.", show_default=False),
]
PrefixCached = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Requests find KV of earlier ones that begin alike. By default they do.",
        show_default=False,
    ),
]
KeptWarm = Annotated[
    bool | None,
    typer.Option(
        "--warm/--no-warm",
        help="Workers without an instance keep its --engine started, so that it waits for nothing but weights.",
        show_default=False,
    ),
]
ToolParsed = Annotated[
    ToolParserName | None,
    typer.Option(
        "--tool-parser",
        help="What reads the calls that it writes. By default (auto) its chat template says so.",
        show_default=False,
    ),
]
ReasoningParsed = Annotated[
    ReasoningParserName | None,
    typer.Option(
        "--reasoning-parser",
        help="What tells its thoughts from its answers. By default (auto) its chat template says so.",
        show_default=False,
    ),
]


def seconds(slo_ms: float | None) -> float | None:
    """An option's value as the services take it; None: no objective was given."""
    return None if slo_ms is None else slo_ms / 1000


def shown_ms(slo_s: float) -> str:
    """An objective in a table; 0 is the services' own."""
    return f"{slo_s * 1000:g}" if slo_s else "-"


def shown_s(keep_alive_s: float) -> str:
    """A keep-alive in a table."""
    return f"{keep_alive_s:g}" if keep_alive_s else "-"


def shown_timeout(no_room_timeout_s: float | None) -> str:
    """In a table; None is the gateway's own, and 0 a time like others."""
    return "-" if no_room_timeout_s is None else f"{no_room_timeout_s:g}"
