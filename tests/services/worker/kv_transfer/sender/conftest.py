"""A prefill worker, which gives up late or soon, and a decode worker that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.worker.core.kv_admission import room
from services.worker.core.scheduling.schedule import Sampled
from services.worker.kv_transfer import decode_client
from tests.services.worker.kv_transfer.fakes import FakeDecode, clean
from tests.services.worker.kv_transfer.sender.steps import PATIENT_S, SILENCE_S
from tests.services.worker.lone_worker import LoneWorker, lone_worker


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers late because the machine is busy is asked once, and not given up."""
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", PATIENT_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is given up."""
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(decode_client, "GONE_S", 0.5)
    monkeypatch.setattr(room, "ROOM_PATIENCE_S", 1.0)


@pytest.fixture
def impatient_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``impatient``, and only once all KV is there."""
    begin = decode_client.DecodeClient.begin

    async def begin_soon(client: decode_client.DecodeClient, token: Sampled) -> None:
        monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.2)
        monkeypatch.setattr(decode_client, "GONE_S", 0.5)
        monkeypatch.setattr(client, "_silence_s", SILENCE_S)
        await begin(client, token)

    monkeypatch.setattr(decode_client.DecodeClient, "begin", begin_soon)


@pytest.fixture
async def alone(request: pytest.FixtureRequest) -> AsyncIterator[LoneWorker]:
    """The prefill worker. Nothing may be left there."""
    is_impatient = "impatient" in request.fixturenames
    async with lone_worker(stall_s=SILENCE_S if is_impatient else PATIENT_S) as alone:
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
