"""What tests of the decode side look at, and how they stop it at a moment of their choice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from services.worker.device.completion import Completion
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.thread import EngineThread
from services.worker.kv_transfer.reservation import DecodeReservation
from shared.messages.generation import Submit
from shared.transport.base import Buffer
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.lone_worker import LoneWorker
from tests.wait_until import WAIT_S, eventually


def reservations_of(alone: LoneWorker) -> dict[tuple[str, int], DecodeReservation]:
    return alone.worker.service.parts.kv_receiver.reservations


async def used_blocks(alone: LoneWorker) -> int:
    return (await alone.stats()).load.kv_blocks_used


async def decoded(alone: LoneWorker, request: Submit, *, max_tokens: int = 8) -> None:
    """Wait for its end; its tokens follow those that it came with."""
    end = await alone.gateway.end_of(request.request_id, attempt=request.attempt)
    assert end.finish_reason == "length", end
    start = len(request.output_token_ids)
    tokens = alone.gateway.tokens(request.request_id, attempt=request.attempt, start=start)
    assert tokens == expected_tokens(max_tokens, request.prompt_token_ids)[start:]


async def held(alone: LoneWorker) -> threading.Event:
    """The engine's thread does nothing until this is set."""
    inside, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        inside.set()
        assert go.wait(WAIT_S)

    alone.worker.serving.engine.call(hold)
    await eventually(inside.is_set)
    return go


def calls_to(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the engine's thread is given to run from now on, whether or not it has run it."""
    calls: list[object] = []
    real = engine.call

    def call(function: Callable[[EngineLoop], Any], **how: Any) -> Future[Any]:
        future = real(function, **how)
        calls.append(function)
        return future

    monkeypatch.setattr(engine, "call", call)
    return calls


class Gate:
    """Holds the engine's imports until it is opened."""

    def __init__(self, engine: MockEngine, monkeypatch: pytest.MonkeyPatch, *, layer: int = 0) -> None:
        self.inside = threading.Event()
        self._open = threading.Event()
        real = engine.import_kv

        def import_kv(
            tables: Sequence[Sequence[int]],
            lengths: Sequence[int],
            last: int,
            kv: Buffer,
            *,
            first_layer: int = 0,
            first_tokens: Sequence[int] = (),
        ) -> Completion[None]:
            if first_layer == layer:
                self.inside.set()
                assert self._open.wait(WAIT_S)
            return real(tables, lengths, last, kv, first_layer=first_layer, first_tokens=first_tokens)

        monkeypatch.setattr(engine, "import_kv", import_kv)

    def open(self) -> None:
        self._open.set()


def expire(alone: LoneWorker, reservation: DecodeReservation, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[object]:
    """Its lease lapses; the task that drops it."""
    before = asyncio.all_tasks()
    with monkeypatch.context() as patch:
        patch.setattr(reservation.kv[-1], "message", msgspec.structs.replace(reservation.message, lease_s=-1.0))
        alone.worker.service.parts.kv_receiver.expire()
    (task,) = asyncio.all_tasks() - before
    return asyncio.create_task(asyncio.wait({task}))
