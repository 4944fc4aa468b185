"""How a pair's source gets batches back: begun here whatever comes of their tensors, and every block freed once."""

from __future__ import annotations

import asyncio

import pytest

from services.worker import link
from services.worker.core.live import source
from services.worker.core.live.machine import Action, Due, SendHidden
from services.worker.core.live.source_words import BeginBatch, FetchKv, ReceiveHidden
from services.worker.live import links
from shared.errors import DeadlineExceeded, NotFound, Overloaded
from shared.messages.codec import Message
from shared.messages.live import HandOver, Pull, PullKv, Settle
from shared.transport.base import Buffer
from shared.transport.tags import Carries, carried_by
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.ends import Ends, SourceEnd, running_ends
from tests.services.worker.live.members import NUM_LAYERS, expected, request
from tests.wait_until import WAIT_S, eventually

NAMES = "ab"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PULL_WAIT_S", 0.01)
    monkeypatch.setattr(link, "RETRY_S", 0.001)
    monkeypatch.setattr(link, "ASK_TIMEOUT_S", WAIT_S)  # a busy machine answers late, and is asked once
    monkeypatch.setattr(links, "LAST_WORD_S", 0.001)


async def _source(ends: Ends, num_layers: int = 0) -> SourceEnd:
    """Two batches are handed over, and pulled once the target ran so many layers of each."""
    before = ends.before

    async def pulled_then(message: Message) -> None:
        if isinstance(message, Pull):
            await ends.ran(2 * num_layers)
        await before(message)

    ends.before = pulled_then
    source = SourceEnd(ends)
    await ends.load(num_layers)
    await source.begin(*(request(name, 9) for name in NAMES))
    return source


async def _tokens_are_right(ends: Ends, *, without: str = "") -> None:
    await ends.source.idle()
    names = [name for name in NAMES if name not in without]
    assert {n: t for n, t in ends.source.tokens().items() if t} == {n: expected(request(n, 9)) for n in names}


@also_late()
@pytest.mark.parametrize("num_layers", range(NUM_LAYERS))
async def test_pulled_after_any_layer_a_batch_gives_the_tokens_of_one_engine(
    num_layers: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = await _source(ends, num_layers)
        await eventually(lambda: ends.source.finish_reasons().keys() == set(NAMES))
        await eventually(lambda: ends.target.num_used == 0)
        report = await source.part()
        assert report.outcome == "dissolved"
        assert [(b.batch_id, b.target_layers) for b in report.batches] == [
            ("pair-0", num_layers),
            ("pair-1", num_layers),
        ]
        assert [layer for _, layer in ends.source.watched.ran][: NUM_LAYERS - num_layers] == list(
            range(num_layers, NUM_LAYERS)
        )
        await _tokens_are_right(ends)
        assert bool(ends.told(PullKv)) == (num_layers > 0)
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == [], "a batch that fails is computed again"


async def test_with_nothing_to_pull_it_stays_free_and_nothing_is_begun() -> None:
    async with running_ends(batch_tokens=9) as ends:
        source = SourceEnd(ends)
        await source.begin()
        await eventually(lambda: len(ends.told(Pull)) == 3)
        assert len({pull.claim_id for pull in ends.told(Pull)}) == 3
        assert (await source.part()).batches == ()
        assert ends.source.watched.ran == []


async def test_a_pull_whose_answer_is_lost_is_asked_again_and_is_one_claim() -> None:
    async with running_ends(batch_tokens=9) as ends:
        ends.refusals = {Pull: [DeadlineExceeded("no answer in time")]}
        source = await _source(ends, 2)
        await eventually(lambda: ends.target.num_used == 0 and len(ends.told(Pull)) > 2)
        first, again, second = ends.told(Pull)[:3]
        assert first == again != second
        assert [b.batch_id for b in (await source.part()).batches] == ["pair-0", "pair-1"]
        await _tokens_are_right(ends)


@pytest.mark.parametrize("carries", [Carries.PAIR, Carries.PAIR_KV])
async def test_tensors_that_are_lost_are_computed_again_and_the_claim_is_settled(carries: Carries) -> None:
    async with running_ends(batch_tokens=9, tensors_s=3.0) as ends:
        lost: list[int] = []

        def lose(buffer: Buffer, tag: int) -> tuple[Buffer, int]:
            if lost or carried_by(tag) != carries:
                return buffer, tag
            lost.append(tag)
            return buffer, tag ^ 1 << 60

        ends.transports[1].tamper = lose
        source = await _source(ends, 2)
        await eventually(lambda: "pair-claim-0" in [i for m in ends.told(Settle) for i in m.claim_ids])
        await eventually(lambda: ends.target.num_used == 0)
        report = await source.part()
        layers = 0 if carries is Carries.PAIR else 2
        assert [b.target_layers for b in report.batches] == [layers, 2], "hidden states are needed, KV is not"
        await _tokens_are_right(ends)


@pytest.mark.parametrize("kind", [Pull, PullKv, Settle])
async def test_a_target_that_is_lost_at_any_step_leaves_every_request_here(kind: type[Message]) -> None:
    async with running_ends(batch_tokens=9) as ends:

        async def refuse(message: Message) -> None:
            if isinstance(message, kind):
                raise NotFound("no such pair")

        ends.before = refuse
        source = await _source(ends, 2)
        if kind is PullKv:  # others will say so, too
            await eventually(lambda: source.has_landed(FetchKv, "pair-0", result=False))
            await source.end()
        assert (await source.over()).outcome == "failed"
        await _tokens_are_right(ends)


async def test_a_pair_lost_while_hidden_states_are_on_their_way_leaves_the_batch_here() -> None:
    async with running_ends(batch_tokens=9) as ends:
        ends.transports[1].tamper = lambda buffer, tag: (buffer, tag ^ 1 << 60)
        source = await _source(ends, 2)
        await eventually(lambda: source.machine._pulling.name == "RECEIVES")
        source.live.lose("the target is gone")
        assert (await source.over()).reason == "the target is gone"
        await _tokens_are_right(ends)


@pytest.mark.parametrize("when", [Pull, PullKv])
async def test_cancelled_a_batch_leaves_nothing_at_either(when: type[Message]) -> None:
    """Before it is pulled, or while its KV comes."""
    async with running_ends(batch_tokens=9) as ends:

        async def cancel(message: Message) -> None:
            if isinstance(message, when):
                await ends.source.on_engine(lambda loop: loop.scheduler.cancel("a", 1))

        ends.before = cancel
        source = await _source(ends, 2)
        await eventually(lambda: ends.target.num_used == 0)
        report = await source.part()
        assert [b.batch_id for b in report.batches] == ["pair-0", "pair-1"]
        await ends.source.idle()
        assert ends.source.finish_reasons()["a"] == "cancelled"
        assert ends.source.tokens()["b"] == expected(request("b", 9))


@pytest.mark.parametrize("is_lost", [False, True])
async def test_without_room_a_pulled_batch_waits_until_there_is_or_the_pair_is_lost(is_lost: bool) -> None:
    async with running_ends(batch_tokens=9) as ends:
        blocks: list[int] = []

        async def fill(message: Message) -> None:
            if isinstance(message, Pull) and not blocks:
                blocks.extend(await ends.source.on_engine(lambda loop: loop.scheduler.pool.allocate(63)))

        ends.before = fill
        source = await _source(ends, 2)
        await eventually(lambda: source.has_landed(BeginBatch, "pair-0", result=False))
        if is_lost:
            await source.end()
        assert ends.source.watched.ran == []
        await ends.source.on_engine(lambda loop: loop.scheduler.pool.free(blocks))
        if not is_lost:
            await eventually(lambda: source.has_landed(BeginBatch, "pair-0", result=True))
            assert [b.target_layers for b in (await source.part()).batches] == [2, 2]
        await _tokens_are_right(ends)


async def test_room_that_comes_without_a_step_is_seen() -> None:
    async with running_ends(batch_tokens=9) as ends:
        blocks = await ends.source.on_engine(lambda loop: loop.scheduler.pool.allocate(63))
        source = await _source(ends)
        await source.has_handed_over()
        await eventually(lambda: sum(isinstance(event, Due) for _, event in list(source.machine.log)) > 2)
        assert ends.told(Pull) == []
        # As when requests leave with their KV.
        await ends.source.on_engine(lambda loop: loop.scheduler.pool.free(blocks))
        await eventually(lambda: ends.told(Pull))
        await source.part()
        await _tokens_are_right(ends)


async def test_what_never_went_there_is_begun_here_first_come_first_served() -> None:
    async with running_ends(batch_tokens=9) as ends:
        ends.refusals = {HandOver: [Overloaded("no room")]}
        source = await _source(ends)
        await eventually(lambda: source.has_landed(BeginBatch, "pair-0", "pair-1", result=True))
        assert len(ends.told(HandOver)) == 1
        report = await source.part()
        assert [(b.batch_id, b.target_layers) for b in report.batches] == [("pair-0", 0), ("pair-1", 0)]
        await _tokens_are_right(ends)


async def test_what_a_pull_takes_is_measured_and_is_the_lead_of_the_next() -> None:
    async with running_ends(batch_tokens=9) as ends:
        second = asyncio.Event()

        async def hold(message: Message) -> None:
            if isinstance(message, Pull) and message.serial:
                await second.wait()

        ends.before = hold
        source = await _source(ends, 2)
        assert source.live.pull_s == source.machine.time.lead_s == 0.0
        await eventually(lambda: len(ends.told(Pull)) == 2)
        assert 0 < source.live.pull_s < WAIT_S
        layer_s = source.machine.batches["pair-1"].layer_s
        assert source.machine.time.lead_s == min(source.live.pull_s, layer_s)
        second.set()
        await source.part()
        await _tokens_are_right(ends)


@pytest.mark.parametrize("kind", [BeginBatch, SendHidden, ReceiveHidden, FetchKv])
async def test_whatever_breaks_in_carrying_an_action_out_no_request_is_lost(kind: type[Action]) -> None:
    async with running_ends(batch_tokens=9) as ends:
        source, breaks = SourceEnd(ends), [True]
        works = source.live.carry_out[kind]

        def once(action: Action) -> object:
            if breaks:
                breaks.clear()
                raise RuntimeError("a bug of ours")
            return works(action)

        source.live.carry_out = {**source.live.carry_out, kind: once}
        ends.before = lambda message: ends.ran(4) if isinstance(message, Pull) else _nothing()
        await ends.load(2)
        await source.begin(*(request(name, 9) for name in NAMES))
        assert (await source.over()).outcome == "failed"
        await _tokens_are_right(ends)


async def _nothing() -> None:
    """At once."""
