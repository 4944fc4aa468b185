from __future__ import annotations

import asyncio
import contextlib

import pytest

from bench.replay.observer import Observer
from bench.stream_client import Endpoint
from shared.errors import Unauthorized
from shared.messages.admin import InstanceStatus, ModelStatus, Status
from tests.bench.fake_server import fake_server

STATUS = Status(
    models=(ModelStatus(name="fake"),), instances=(InstanceStatus(id="i", model="fake", state="live", workers=("w",)),)
)


async def find(url: str) -> Observer | None:
    return await Observer.find(Endpoint.of(url), "fake", admin_key=None)


async def test_only_a_gateway_of_ours_that_has_the_model_is_observed() -> None:
    async with fake_server() as other, fake_server(admin={"/admin/status": Status()}) as without_model:
        assert await find(other.url) is None
        assert await find(without_model.url) is None
    assert await find("http://127.0.0.1:1") is None


async def test_a_gateway_that_wants_another_key_is_not_taken_for_another_server() -> None:
    async with fake_server(admin={}, admin_status="401 Unauthorized") as server:
        with pytest.raises(Unauthorized, match="BLITZ_ADMIN_KEY"):
            await find(server.url)


async def test_what_does_not_answer_does_not_keep_the_rest_from_being_seen() -> None:
    async with fake_server(admin={"/admin/status": STATUS}) as server:
        observer = await find(server.url)
        assert observer is not None
        running = asyncio.create_task(observer.run(0.0))
        while len(observer.log.looks_s) < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        observer.close()
    assert [point.instances for point in observer.log.instances] == [{"colocated/live": 1}]
    assert not observer.log.carried
