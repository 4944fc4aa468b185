"""A call of the client that is cancelled in the moment in which it is answered."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.nats_link import ending


async def test_a_cancellation_that_comes_with_the_answer_is_not_lost() -> None:
    answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(ending(asyncio.wait_for(answered, 60.0)))
    await asyncio.sleep(0.01)
    answered.set_result(1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_answers_and_errors_are_the_calls() -> None:
    async def call(error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return 1

    assert await ending(call()) == 1
    with pytest.raises(LookupError):
        await ending(call(LookupError()))
