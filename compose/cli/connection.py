"""Options and helpers that the commands which talk to a gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
import typer

from compose.admin import AdminClient
from compose.config import DEFAULT_URL, URL_VARIABLE, admin_key

T = TypeVar("T")

Url = Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="The gateway's base URL.", metavar="URL")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
URL_DEFAULT = DEFAULT_URL


def ask(url: str, question: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Run ``question`` with a client of the gateway at ``url``; the key comes from ``BLITZ_ADMIN_KEY``."""

    async def asking() -> T:
        async with AdminClient(url, api_key=admin_key()) as client:
            return await question(client)

    return asyncio.run(asking())


def print_json(found: object) -> None:
    """For programs."""
    typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
