"""``blitzscale top``: the cluster as it changes, in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from compose.admin import AdminClient, GatewayUnreachable
from compose.cli.feed_tables import parts, summary
from compose.cli.options import URL_DEFAULT, Url
from compose.cli.tables import Lines
from compose.config import admin_key
from compose.feed import ShownState
from compose.feed_reader import FeedReader

T = TypeVar("T")

DRAW_EVERY_S = 0.25
"""However many frames come."""
LEAST_ROWS = 3
"""Of each table, however low the window is; of a higher one, a third of it."""
FIRST_S = 20.0
"""A gateway that has lost its bus answers, and knows nothing."""
RESIZE_S = 1.0
"""How long a window that was made larger or smaller waits for its picture at most."""
SETTLES_S = 0.5
"""A feed that nobody has read begins with the registry; what the planner knows comes some frames later."""


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one state and end; without a terminal this is what happens.")
    ] = False,
    url: Url = URL_DEFAULT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the feed's entities, a JSON document on a line for each change.")
    ] = False,
) -> None:
    """Watch models, instances, workers and scale operations as they change, like the page /ui, until Ctrl-C."""
    console = Console(highlight=False, markup=False)
    if once or not (as_json or (console.is_terminal and sys.stdout.isatty() and not console.is_dumb_terminal)):
        state = asyncio.run(_looking(url, _once))
        if as_json:
            _write(state)
        else:
            console.print(Lines([Text(summary(state), style="bold"), *parts(state, console)]))
        return
    look = _stream if as_json else functools.partial(_watch, console=console)
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(_until_interrupted(_looking(url, look)))


async def _until_interrupted(watching: Coroutine[None, None, None]) -> None:
    """Ctrl-C and SIGTERM are how this is meant to end: the terminal is put back as it was."""
    task = asyncio.create_task(watching)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    await task


async def _looking(url: str, look: Callable[[FeedReader], Coroutine[None, None, T]]) -> T:
    """What ``look`` sees with a reader at work. Raises what the reader ends with."""
    async with AdminClient(url, api_key=admin_key()) as client:
        reader = FeedReader(client)
        reading, looking = asyncio.create_task(reader.keep_reading()), asyncio.create_task(look(reader))
        try:
            await asyncio.wait({reading, looking}, return_when=asyncio.FIRST_COMPLETED)
            if not looking.done():
                reading.result()
            return looking.result()
        finally:
            for task in (reading, looking):
                task.cancel()
            await asyncio.gather(reading, looking, return_exceptions=True)


async def _once(reader: FeedReader) -> ShownState:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_S):
            while reader.feed.is_empty:
                await reader.fresh.wait()
                reader.fresh.clear()
    if reader.feed.is_empty:
        raise GatewayUnreachable(f"the gateway says nothing of the cluster: nothing came within {FIRST_S:g} s")
    await asyncio.sleep(SETTLES_S)
    return reader.feed


async def _stream(reader: FeedReader) -> None:
    written = lost = ""
    while True:
        await reader.fresh.wait()
        reader.fresh.clear()
        if reader.lost != lost:
            lost = reader.lost
            typer.echo(f"disconnected: {lost}" if lost else "connected again", err=True)
        if reader.feed.last_id != written:
            written = reader.feed.last_id
            _write(reader.feed)


def _write(state: ShownState) -> None:
    typer.echo(state.as_json())


async def _watch(reader: FeedReader, *, console: Console) -> None:
    await reader.fresh.wait()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            reader.fresh.clear()
            live.update(_screen(reader, console), refresh=True)
            await asyncio.sleep(DRAW_EVERY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESIZE_S):
                    await reader.fresh.wait()


def _screen(reader: FeedReader, console: Console) -> Lines:
    if reader.lost:
        state = Text(f"disconnected, what you see is the last that was known: {reader.lost}", style="bold red")
    else:
        state = Text("live", style="bold green")
    if reader.feed.is_empty:
        return Lines([state, Text("the gateway says nothing of the cluster yet")], console.height)
    num_rows = max(LEAST_ROWS, console.height // 3)
    return Lines([state, Text(summary(reader.feed)), *parts(reader.feed, console, num_rows)], console.height)
