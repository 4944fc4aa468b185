"""A prefill worker that soon gives up, and a decode worker that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.worker.core.kv_admission import room
from services.worker.kv_transfer import decode_client
from tests.services.worker.kv_transfer.fakes import FakeDecode, clean
from tests.services.worker.kv_transfer.sender.steps import SILENCE_S
from tests.services.worker.lone_worker import LoneWorker, lone_worker


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(decode_client, "GONE_S", 0.5)
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", 1.0)


@pytest.fixture
async def alone() -> AsyncIterator[LoneWorker]:
    """The prefill worker. Nothing may be left there."""
    async with lone_worker(stall_s=SILENCE_S) as alone:
        await alone.serve()
        yield alone
        if alone.worker.instance is not None:
            await clean(alone)


@pytest.fixture
async def decode(alone: LoneWorker) -> AsyncIterator[FakeDecode]:
    decode = FakeDecode(alone)
    await decode.start()
    yield decode
    await decode.close()
