"""Requests that waited in vain: each ends once, and few questions are asked for many."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from services.gateway import late_requests
from services.gateway.active_requests import ActiveRequest, ActiveRequests, Sink
from services.gateway.core.capacity import Capacity
from services.gateway.core.routes import RouteView
from services.gateway.core.stream import StreamState
from services.gateway.late_requests import MAX_ASKED, LateRequests
from shared import subjects
from shared.aio import OwnedTasks
from shared.errors import BlitzError
from shared.messages.operations import ListScaleRecords, ScaleRecords
from tests.services.gateway.core.routing import stream
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually


def stream_of(index: int) -> StreamState:
    waiting = stream(f"r{index:03}")
    waiting.model = f"m{index:03}"
    return waiting


async def test_many_models_are_asked_about_in_few_questions_and_who_left_meanwhile_is_not_ended_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_requests, "ASK_TIMEOUT_S", WAIT_S)
    broker, requests, tasks = MemoryBroker(), ActiveRequests(), OwnedTasks()
    failed: list[str] = []
    asked: list[ListScaleRecords] = []
    release = asyncio.Event()

    async def records(message: ListScaleRecords) -> ScaleRecords:
        asked.append(message)
        await release.wait()
        return ScaleRecords(records=())

    def fail(request: ActiveRequest, error: BlitzError) -> None:
        failed.append(request.stream.request_id)
        requests.remove(request.stream.request_id)
        assert request.stream.model in error.message

    await broker.bus("planner").respond(subjects.planner("records"), ListScaleRecords, records)
    late = LateRequests(
        broker.bus("gateway"),
        requests,
        RouteView(),
        Capacity(),
        tasks,
        fail,
        lambda *_: None,
        queue_timeout_s=1.0,
        default_no_room_timeout_s=1.0,
    )
    for index in range(2 * MAX_ASKED + 1):
        request = ActiveRequest(stream_of(index), cast("Sink", None), 0.0)
        requests.add(request)
        late.end(request)
    await eventually(lambda: asked)
    requests.remove("r000")
    release.set()
    await eventually(lambda: not len(requests))
    assert failed == [f"r{index:03}" for index in range(1, 2 * MAX_ASKED + 1)]
    assert [len(message.models) for message in asked] == [MAX_ASKED, MAX_ASKED, 1]
    await tasks.close()
