from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import httpx
import pytest

from compose.ports import free_port
from tests.compose.fake_gateway import FakeGateway, fake_gateway


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    with fake_gateway() as made:
        monkeypatch.setenv("BLITZ_URL", made.url)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.delenv("BLITZ_ADMIN_KEY", raising=False)
        yield made


@pytest.fixture(scope="session", autouse=True)
def http_client_is_imported() -> None:
    """What asks first imports half of a library, and keeps its event loop meanwhile."""

    async def ask() -> None:
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            with contextlib.suppress(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{free_port()}")

    asyncio.run(ask())
