"""How a pair's source gets batches back: begun here whatever comes of their tensors, and every block freed once."""

from __future__ import annotations

import asyncio

import pytest

from services.worker import link
from services.worker.link import LinkLost
from services.worker.live import links
from shared.errors import DeadlineExceeded, NotFound, Overloaded
from shared.messages.codec import Message
from shared.messages.live import HandOver, Pull, PullKv, Settle
from shared.transport.base import Buffer
from shared.transport.tags import Carries, tag_of
from tests.services.worker.live.ends import Ends, SourceEnd, running_ends
from tests.services.worker.live.members import NUM_LAYERS, expected, request
from tests.wait_until import WAIT_S, eventually

NAMES = "ab"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RETRY_S", 0.001)
    monkeypatch.setattr(link, "ASK_TIMEOUT_S", WAIT_S)  # a busy machine answers late, and is asked once
    monkeypatch.setattr(links, "LAST_WORD_S", 0.001)


async def _handed_over(ends: Ends, num_layers: int = 0) -> SourceEnd:
    """Two batches are at the target, which ran so many layers of each."""
    await ends.answer()
    source = SourceEnd(ends)
    await source.begin(*(request(name, 9) for name in NAMES))
    await source.hand_over()
    if num_layers:
        await ends.load(num_layers)
        await ends.ran(2 * num_layers)
    return source


def _asked(ends: Ends, kind: type[Message]) -> int:
    return sum(isinstance(m, kind) for m in ends.asked)


async def _settled(source: SourceEnd) -> None:
    """The target hears of what is settled."""
    await source.puller.until_kv_is_over()
    await source.link.settle_now()


async def _tokens_are_right(ends: Ends, *, without: str = "") -> None:
    await ends.source.idle()
    names = [name for name in NAMES if name not in without]
    assert {n: t for n, t in ends.source.tokens().items() if t} == {n: expected(request(n, 9)) for n in names}


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS))
async def test_pulled_after_any_layer_a_batch_gives_the_tokens_of_one_engine(num_layers: int) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, num_layers)
        for name, left in (("a", 1), ("b", 0)):
            answer = await source.puller.pull()
            assert (answer.batch_id, answer.first_layer) == (f"pair-{NAMES.index(name)}", num_layers)
            assert len(source.handed.queue.handed) == left
        await _settled(source)
        await eventually(lambda: ends.target.num_used == 0)
        await eventually(lambda: source.done == ["pair-0", "pair-1"])
        assert [layer for _, layer in ends.source.watched.ran][: NUM_LAYERS - num_layers] == list(
            range(num_layers, NUM_LAYERS)
        )
        await source.end()
        await _tokens_are_right(ends)
        assert (_asked(ends, PullKv) > 0) == (num_layers > 0)


async def test_with_nothing_to_pull_it_stays_free_and_nothing_is_begun() -> None:
    async with running_ends(batch_tokens=9) as ends:
        await ends.answer()
        source = SourceEnd(ends)
        await source.begin()
        answer = await source.puller.pull()
        assert answer.batch_id == ""
        await asyncio.wait_for(source.puller.until_free(), WAIT_S)
        assert source.puller.num_claims == 1
        await source.end()


async def test_a_pull_whose_answer_is_lost_is_asked_again_and_is_one_claim() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, 2)
        ends.refusals = [DeadlineExceeded("no answer in time")]
        assert (await source.puller.pull()).batch_id == "pair-0"
        pulls = [m for m in ends.asked if isinstance(m, Pull)]
        assert pulls == pulls[:1] * 2
        await _settled(source)
        await eventually(lambda: ends.target.num_used == 3)
        await source.end()
        await _tokens_are_right(ends)


@pytest.mark.parametrize("carries", [Carries.PAIR, Carries.PAIR_KV])
async def test_tensors_that_are_lost_are_computed_again_and_the_claim_is_settled(carries: Carries) -> None:
    async with running_ends(batch_tokens=9, tensors_s=3.0) as ends:
        source = await _handed_over(ends, 2)

        def lose(buffer: Buffer, tag: int) -> tuple[Buffer, int]:
            return buffer, tag ^ 1 << 60 if tag // tag_of(0, 0, Carries.KV_TO_DECODE) == carries else tag

        ends.transports[1].tamper = lose
        alive = asyncio.create_task(source.link.keep_alive())
        assert (await source.puller.pull()).first_layer == 2
        await source.puller.until_kv_is_over()
        await eventually(lambda: any(m.claim_ids for m in ends.asked if isinstance(m, Settle)))
        alive.cancel()
        await asyncio.wait({alive})
        await eventually(lambda: ends.target.num_used == 3)
        await source.end()
        await _tokens_are_right(ends)


@pytest.mark.parametrize("kind", [Pull, PullKv, Settle])
async def test_a_target_that_is_lost_at_any_step_leaves_every_request_here(kind: type[Message]) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, 2)

        async def refuse(message: Message) -> None:
            if isinstance(message, kind):
                raise NotFound("no such pair")

        ends.before = refuse
        if kind is Pull:
            with pytest.raises(LinkLost):
                await source.puller.pull()
        else:
            await source.puller.pull()
            await source.puller.until_kv_is_over()
        if kind is Settle:
            with pytest.raises(LinkLost):
                await source.link.settle_now()
        await source.end()
        await _tokens_are_right(ends)


async def test_a_pair_lost_while_hidden_states_are_on_their_way_leaves_the_batch_here() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, 2)
        ends.transports[1].tamper = lambda buffer, tag: (buffer, tag ^ 1 << 60)
        pulling = asyncio.create_task(source.puller.pull())
        await eventually(lambda: source.handed.queue.pulled)
        source.link.lose("the target is gone")
        with pytest.raises(LinkLost, match="the target is gone"):
            await pulling
        await source.end()
        await _tokens_are_right(ends)


@pytest.mark.parametrize("when", ["before the pull", "while its KV comes"])
async def test_cancelled_a_batch_leaves_nothing_at_either(when: str) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, 2)

        async def cancel(message: Message | None = None) -> None:
            if message is None or isinstance(message, PullKv):
                await ends.source.on_engine(lambda loop: loop.scheduler.cancel("a", 1))

        if when == "before the pull":
            await cancel()
        else:
            ends.before = cancel
        assert (await source.puller.pull()).batch_id == "pair-0"
        await _settled(source)
        await eventually(lambda: ends.target.num_used == 3)
        await eventually(lambda: source.done == ["pair-0"])
        await source.end()
        assert ends.source.finish_reasons()["a"] == "cancelled"
        await ends.source.idle()
        assert ends.source.tokens()["b"] == expected(request("b", 9))


async def test_without_room_a_pulled_batch_waits_until_there_is() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, 2)
        blocks = await ends.source.on_engine(lambda loop: loop.scheduler.pool.allocate(63))
        assert not await ends.source.on_engine(lambda _: source.handed.has_room())
        pulling = asyncio.create_task(source.puller.pull())
        await asyncio.sleep(0.05)
        assert not pulling.done()
        assert list(source.handed.queue.handed) == ["pair-0", "pair-1"], "still lent: the pair may be lost meanwhile"
        await ends.source.on_engine(lambda loop: loop.scheduler.pool.free(blocks))
        assert await ends.source.on_engine(lambda _: source.handed.has_room())
        source.puller.free.set()
        assert (await asyncio.wait_for(pulling, WAIT_S)).batch_id == "pair-0"
        await source.end()
        await _tokens_are_right(ends)


async def test_room_that_comes_without_a_step_is_seen() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, 2)
        blocks = await ends.source.on_engine(lambda loop: loop.scheduler.pool.allocate(63))
        source.puller.free.clear()
        waiting = asyncio.create_task(source.puller.until_free())
        await asyncio.sleep(0)
        # As when requests leave with their KV.
        await ends.source.on_engine(lambda loop: loop.scheduler.pool.free(blocks))
        await asyncio.wait_for(waiting, WAIT_S)
        await source.end()
        await _tokens_are_right(ends)


async def test_what_never_went_there_is_begun_here_first_come_first_served() -> None:
    async with running_ends(batch_tokens=9) as ends:
        ends.refusals = [Overloaded("no room")]
        source = await _handed_over(ends)
        assert [b.batch_id for b in source.handed.queue.backlog] == ["pair-0", "pair-1"]
        assert _asked(ends, HandOver) == 1
        await source.puller.run_from_backlog()
        await eventually(lambda: source.done == ["pair-0"])
        await source.puller.run_from_backlog()
        await source.puller.run_from_backlog()  # there is no third
        await eventually(lambda: source.done == ["pair-0", "pair-1"])
        await source.end()
        await _tokens_are_right(ends)


async def test_what_a_pull_takes_is_measured_and_is_the_lead_of_the_next() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _handed_over(ends, 2)
        assert source.puller.time.pull_s == source.work.lead_s == 0.0
        await source.puller.pull()
        assert 0 < source.puller.time.pull_s < WAIT_S
        layer_s = next(iter(source.handed.queue.handed.values())).layer_s
        assert source.work.lead_s == min(source.puller.time.pull_s, layer_s)
        await source.end()
