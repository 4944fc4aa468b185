"""Gateways are told before and after each step of a request that is computed alone."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engine.base import Activation
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.requests.inbox import Inbox
from tests.services.fake_gateway import PROMPT, expected_tokens
from tests.services.worker.lone_worker import LoneWorker
from tests.wait_until import WAIT_S, eventually


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes to send a word, the engine waits for it."""
    monkeypatch.setattr("services.worker.requests.step_announcer.SAY_S", WAIT_S)


def engine_of(alone: LoneWorker) -> MockEngine:
    engine = alone.worker.serving.engine.loop.engine
    assert isinstance(engine, MockEngine)
    return engine


def story(alone: LoneWorker, request_id: str) -> list[object]:
    """What its gateway was told, in order: True and False for steps that begin and end, else token ids."""
    told: list[object] = []
    for part in alone.gateway.parts.get((request_id, 1), []):
        if part.computing is not None:
            assert not part.token_ids
            told.append(part.computing)
        told += part.token_ids
    return told


async def test_each_step_is_announced_until_it_has_brought_its_tokens(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.submit(instance_id, "other", max_tokens=200)
    await alone.submit(instance_id, "x", alone_tokens=2)
    await alone.gateway.end_of("x")
    await alone.gateway.end_of("other")
    first, second, *rest = expected_tokens(8)
    assert story(alone, "x") == [True, first, False, True, second, False, *rest]
    assert story(alone, "other") == list(expected_tokens(200))


async def test_chunks_of_a_prompt_are_steps_too(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    prompt = tuple(32 + i % 90 for i in range(150))
    await alone.submit(instance_id, "x", prompt=prompt, max_tokens=1, alone_tokens=16)
    await alone.gateway.end_of("x")
    assert story(alone, "x") == [True, False, True, False, True, *expected_tokens(1, prompt)]


async def test_the_word_is_out_before_the_engine_begins(alone: LoneWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    instance_id = await alone.serve()
    engine, known = engine_of(alone), []
    embed = engine.embed

    def watched(batch: ForwardBatch) -> Activation:
        # Read on the engine's thread: what has arrived at the gateway by now.
        known.append(story(alone, "x"))
        return embed(batch)

    monkeypatch.setattr(engine, "embed", watched)
    await alone.submit(instance_id, "x", alone_tokens=2, max_tokens=3)
    await alone.gateway.end_of("x")
    first, second, _ = expected_tokens(3)
    assert known == [[True], [True, first, False, True], [True, first, False, True, second, False]]


async def test_while_the_bus_is_away_it_is_computed_without_an_announcement(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "x", alone_tokens=8)
    alone.worker.bus.go_down()
    alone.resume()
    loop = alone.worker.serving.engine.loop
    await eventually(lambda: loop.num_requests == 0)
    alone.worker.bus.go_up()
    await alone.gateway.end_of("x")
    tokens = [t for part in alone.gateway.parts["x", 1] for t in part.token_ids]
    assert tuple(tokens) == expected_tokens(8)


async def test_a_word_that_cannot_be_sent_holds_the_engine_for_a_moment_only(
    alone: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.requests.step_announcer.SAY_S", 0.05)

    async def never(self: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(Inbox, "flushed", never)
    instance_id = await alone.serve()
    await alone.submit(instance_id, "x", alone_tokens=1)
    await alone.gateway.end_of("x")
    assert [t for t in story(alone, "x") if t not in (True, False)] == list(expected_tokens(8, PROMPT))
