"""Starting UCX in a process of its own: what it prints."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ucx
_START = """
import asyncio
from shared.transport.ucx import UcxTransport
asyncio.run(UcxTransport(name="a").close())
"""


async def start_output(**environment: str) -> str:
    """What a fresh process prints that starts and closes a transport."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", _START],
        env={**mine, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout + done.stderr


async def test_start_prints_nothing() -> None:
    assert await start_output() == ""


async def test_start_respects_the_users_own_memory_type_setting() -> None:
    assert await start_output(UCX_MEMTYPE_CACHE="n") == ""


async def test_start_still_warns_of_a_misspelt_variable() -> None:
    assert "UCX_NO_SUCH_OPTION" in await start_output(UCX_NO_SUCH_OPTION="1")
