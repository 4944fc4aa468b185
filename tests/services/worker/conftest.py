from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.services.worker.lone_worker import LoneWorker, lone_worker


@pytest.fixture
async def alone() -> AsyncIterator[LoneWorker]:
    """A spare worker with a registry double."""
    async with lone_worker() as running:
        yield running
