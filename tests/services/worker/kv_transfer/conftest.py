"""A decode worker that serves, and somebody who computes prompts for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.worker.engine.mock.mock_engine import MockEngine
from tests.services.worker.kv_transfer.decode_side import Gate
from tests.services.worker.kv_transfer.fakes import FakePrefill, clean
from tests.services.worker.lone_worker import LoneWorker


@pytest.fixture
async def prefill(alone: LoneWorker) -> AsyncIterator[FakePrefill]:
    """Beside a decode worker that serves. Nothing may be left there."""
    prefill = FakePrefill(alone, await alone.serve())
    yield prefill
    if alone.worker.instance is not None:
        await clean(alone)
    await prefill.close()


@pytest.fixture
def gate(alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch) -> Gate:
    engine = alone.worker.serving.engine.loop.engine
    assert isinstance(engine, MockEngine)
    return Gate(engine, monkeypatch)
