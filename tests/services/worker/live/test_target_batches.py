"""The batches at a pair's target: taken in once, cancelled in any state, and every block freed once."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import BadRequest, Conflict, Overloaded
from shared.messages.live import Taken
from tests.services.worker.live.ends import Ends, InsideLayer, running_ends
from tests.services.worker.live.members import NUM_LAYERS, expected, request
from tests.services.worker.pausing import pause, resume
from tests.wait_until import WAIT_S, eventually

# --- taking in -----------------------------------------------------------------------------------


async def test_a_hand_over_that_is_repeated_takes_its_blocks_once() -> None:
    async with running_ends() as ends:
        message = ends.message_of("a", request("a", 9))
        await asyncio.gather(*(ends.pair.on_hand_over(message) for _ in range(3)))
        assert ends.target.num_used == 3
        assert ends.requests.hosted == ["a"]
        await ends.pair.on_hand_over(message)
        assert ends.target.num_used == 3


async def test_a_batch_that_was_settled_does_not_come_back_by_a_repeat() -> None:
    async with running_ends() as ends:
        message = ends.message_of("a", request("a", 9))
        await ends.pair.on_hand_over(message)
        assert (await ends.pull()).batch_id == "a"
        await ends.settle(0)
        await ends.pair.on_hand_over(message)
        assert ends.target.num_used == 0
        assert (await ends.pull(1)).batch_id == ""


@pytest.mark.parametrize(
    "changes",
    [{"layer_s": 0.0}, {"layer_s": float("inf")}, {"layer_s": float("nan")}, {"serial": -1}, {"requests": ()}],
)
async def test_what_cannot_be_a_batch_is_refused_and_changes_nothing(changes: dict[str, object]) -> None:
    async with running_ends() as ends:
        with pytest.raises(BadRequest):
            await ends.pair.on_hand_over(ends.message_of("a", request("a"), **changes))
        await _nothing_was_taken(ends)


async def test_a_prompt_that_never_fits_is_refused_and_changes_nothing() -> None:
    async with running_ends() as ends:
        with pytest.raises(BadRequest, match="the target takes up to"):
            await ends.pair.on_hand_over(ends.message_of("a", request("a", 64 * 4)))
        await _nothing_was_taken(ends)


async def _nothing_was_taken(ends: Ends) -> None:
    assert ends.target.num_used == 0
    assert ends.requests.hosted == []
    with pytest.raises(Conflict, match="0 batches of 1"):
        await ends.seal(1)


async def test_without_room_nothing_is_taken_and_the_batch_may_come_again() -> None:
    async with running_ends(max_num_sequences=2) as ends:
        await ends.hand_over("a", request("a", 9))
        both = ends.message_of("b", request("b"), request("c"), serial=1)
        used = ends.target.num_used
        with pytest.raises(Overloaded):
            await ends.pair.on_hand_over(both)
        assert ends.target.num_used == used
        assert ends.requests.hosted == ["a"]
        await ends.pull()
        await ends.settle(0)
        await ends.pair.on_hand_over(both)
        assert ends.requests.hosted == ["a", "b", "c"]
        assert (await ends.pull(1)).batch_id == "b"


async def test_a_queue_is_sealed_once_all_that_waited_is_here_and_again() -> None:
    async with running_ends() as ends:
        with pytest.raises(Conflict):
            await ends.seal(1)
        await ends.hand_over("a", request("a"))
        await ends.seal(1)
        await ends.seal(1)


async def test_a_batch_is_not_begun_before_its_hidden_states_are_here() -> None:
    async with running_ends() as ends:
        await ends.pair.on_hand_over(ends.message_of("late", request("late", 5)))
        await ends.hand_over("b", request("b", 9), serial=1)
        await ends.load(1)
        await ends.ran(1)
        assert ends.target.watched.ran == [(9, 0)]
        answer = await ends.pull()
        assert (answer.batch_id, answer.first_layer) == ("late", 0), "the source has what it is made of"


async def test_hidden_states_that_are_lost_are_made_here_once_there_is_an_embedding() -> None:
    async with running_ends(tensors_s=0.1) as ends:
        a = request("a", 5)
        await ends.pair.on_hand_over(ends.message_of("a", a))
        await asyncio.sleep(0.3)
        assert ends.target.watched.ran == []
        await ends.load(NUM_LAYERS)
        await eventually(lambda: "a" in ends.target.finish_reasons())
        assert ends.target.tokens() == {"a": expected(a)}


# --- cancelled -----------------------------------------------------------------------------------


async def test_cancelled_while_it_waits_a_batch_is_free_at_once() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.hand_over("b", request("b", 5), serial=1)
        ends.pair.cancel("a", 1)
        await eventually(lambda: ends.target.num_used == 2 and ends.requests.unhosted)
        assert ends.requests.unhosted == ["a"]
        assert (await ends.pull()).batch_id == "b"


async def test_cancelled_inside_a_layer_a_batch_is_free_at_its_end() -> None:
    async with running_ends() as ends, InsideLayer(ends.target) as layer:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await layer.until_inside()
        ends.pair.cancel("a", 1)
        await asyncio.sleep(0.02)
        assert ends.target.num_used == 3
        layer.let_go()
        await ends.target.idle()
        await eventually(lambda: ends.requests.unhosted)
        assert ends.requests.unhosted == ["a"]
        assert (await ends.pull()).batch_id == ""


async def test_cancelled_while_the_source_has_it_a_batch_is_free_when_it_is_settled() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await ends.ran(2)
        assert (await ends.pull()).first_layer == 2
        ends.pair.cancel("a", 1)
        await ends.target.on_engine(lambda loop: None)
        assert ends.target.num_used == 3, "its KV may be on its way"
        for _ in range(2):
            await ends.settle(0)
        assert ends.target.num_used == 0
        assert ends.requests.unhosted == ["a"]


async def test_once_the_target_finished_its_batch_a_request_is_cancelled_like_any_other() -> None:
    async with running_ends() as ends:
        await asyncio.wrap_future(pause(ends.target.engine, "a"))
        await ends.load(NUM_LAYERS)
        await ends.hand_over("a", request("a", 9, max_tokens=200))
        await eventually(lambda: ends.target.tokens().get("a"))
        ends.pair.cancel("a", 1)
        assert await asyncio.wrap_future(ends.target.engine.cancel("a", 1))
        resume(ends.target.engine)
        await eventually(lambda: ends.target.finish_reasons() == {"a": "cancelled"})
        assert ends.requests.unhosted == [], "its stream is the target's"


async def test_one_cancelled_request_does_not_take_the_others_of_its_batch_along() -> None:
    async with running_ends() as ends:
        a, b = request("a", 9), request("b", 5)
        await ends.hand_over("x", a, b)
        ends.pair.cancel("a", 1)
        await ends.load(NUM_LAYERS)
        await eventually(lambda: "b" in ends.target.finish_reasons())
        assert ends.target.tokens() == {"b": expected(b)}


async def test_a_cancel_of_a_request_that_is_not_here_changes_nothing() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        ends.pair.cancel("a", 2)
        ends.pair.cancel("b", 1)
        await asyncio.sleep(0.02)
        assert (await ends.pull()).batch_id == "a"


# --- finished, and lost --------------------------------------------------------------------------


async def test_what_the_target_finishes_is_its_own_and_the_source_is_told() -> None:
    async with running_ends() as ends:
        a = request("a", 9)
        await ends.load(NUM_LAYERS)
        await ends.hand_over("a", a)
        await eventually(lambda: Taken(pair_id="pair", batch_ids=("a",), loaded=True) in ends.taken)
        assert ends.taken[0] == Taken(pair_id="pair", batch_ids=(), loaded=True), "before it finishes any"
        await eventually(lambda: "a" in ends.target.finish_reasons())
        assert ends.target.tokens() == {"a": expected(a)}
        assert ends.requests.unhosted == []


@pytest.mark.parametrize("state", ["without hidden states", "waiting", "begun", "inside a layer", "claimed"])
async def test_when_the_source_is_lost_what_it_owns_is_freed(state: str) -> None:
    async with running_ends() as ends:
        message = ends.message_of("a", request("a", 9))
        async with InsideLayer(ends.target) as layer:
            if state == "without hidden states":
                await ends.pair.on_hand_over(message)
            else:
                await ends.hand_over("a", request("a", 9))
            if state != "inside a layer":
                layer.let_go()
            if state in ("begun", "inside a layer", "claimed"):
                await ends.load(1)
                await layer.until_inside()
            if state in ("begun", "claimed"):
                await ends.ran(1)
            if state == "claimed":
                assert (await ends.pull()).first_layer == 1
            failing = asyncio.create_task(ends.pair.fail("the source is lost"))
            await asyncio.sleep(0.02)
            layer.let_go()
            await failing
        await ends.target.idle()
        assert ends.pair.ended.is_set()
        assert ends.requests.unhosted == ["a"]
        assert [(e.reason, e.finished) for e in ends.ended] == [("the source is lost", ())]
        for question in (ends.pair.on_hand_over(message), ends.seal(1), ends.pull(), ends.settle(0)):
            with pytest.raises(Conflict, match="has failed here"):
                await question
        await ends.load(NUM_LAYERS)
        assert ends.target.tokens() == {}


async def test_when_the_source_is_lost_what_was_finished_goes_on_here_and_is_named() -> None:
    async with running_ends() as ends:
        a = request("a", 9, max_tokens=150)
        await ends.load(NUM_LAYERS)
        await eventually(lambda: ends.taken)
        ends.hears_taken = False
        await ends.hand_over("a", a)
        await eventually(lambda: ends.target.tokens().get("a"))
        await ends.pair.fail("the source is lost")
        assert [e.finished for e in ends.ended] == [("a",)]
        await eventually(lambda: "a" in ends.target.finish_reasons())
        assert ends.target.tokens() == {"a": expected(a)}


async def test_a_source_that_says_nothing_any_more_is_lost() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        ends.pair._link._silence_s = 0.2
        await eventually(ends.pair.ended.is_set)
        await ends.target.idle()
        assert [e.reason for e in ends.ended] == ["the source was silent for 0.2 s"]


async def test_an_engine_that_fails_ends_the_pair_and_the_source_has_everything() -> None:
    async with running_ends() as ends:
        ends.target.watched.failure = RuntimeError("cuda")
        await ends.hand_over("a", request("a", 9))
        await ends.load(1)
        await eventually(ends.pair.ended.is_set)
        await ends.target.idle()
        assert [(e.reason, e.finished) for e in ends.ended] == [("the target's engine failed: RuntimeError: cuda", ())]


@pytest.mark.parametrize("where", ["machine", "event loop"])
async def test_a_bug_of_ours_ends_the_pair_and_keeps_nothing(where: str) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    async with running_ends() as ends:
        if where == "machine":
            ends.pair.machine.queue.arrived = broken  # type: ignore[method-assign]
        else:
            ends.requests.host = broken  # type: ignore[method-assign]
        await asyncio.wait_for(ends.hand_over("a", request("a", 9)), WAIT_S)
        await eventually(lambda: [e.reason for e in ends.ended] == ["RuntimeError: a bug of ours"])
        await ends.target.idle()
        assert ends.requests.unhosted == ["a"]
