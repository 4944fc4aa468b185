"""How a pair's target gives batches back: pulls, KV on request, settlement, and the shares at the dissolution."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable

import pytest

from services.worker.core.live import target
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.host import HOST
from services.worker.live.tensors import Kind
from shared.errors import BadRequest, Conflict, DeadlineExceeded
from shared.messages.generation import StreamPart
from shared.messages.live import PullKv
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.ends import Ends, InsideLayer, running_ends
from tests.services.worker.live.members import NUM_LAYERS, expected, request
from tests.wait_until import WAIT_S, eventually

ROUNDS = 3
SOON_S = 0.2
"""Within it, or never."""


async def _receives(ends: Ends, serial: int, num_tokens: int, *, within_s: float = WAIT_S) -> bool:
    """Whether hidden states of this claim are on the wire."""
    num_bytes = num_tokens * ends.source.loop.engine.hidden_bytes_per_token
    receiving = asyncio.ensure_future(ends.source_tensors.receive(num_bytes, serial, Kind.PULLED_HIDDEN))
    done, _ = await asyncio.wait({receiving}, timeout=within_s)
    receiving.cancel()
    return bool(done)


# --- pulls ---------------------------------------------------------------------------------------


async def test_the_earliest_batch_is_pulled_with_the_layers_that_were_run() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.hand_over("b", request("b", 5), serial=1)
        await ends.load(2)
        await ends.ran(4)
        first, second = await ends.pull(0), await ends.pull(1)
        assert (first.batch_id, first.first_layer, first.layers_ready) == ("a", 2, 2)
        assert (second.batch_id, second.first_layer, second.loaded) == ("b", 2, False)
        await ends.settle(0, 1)


async def test_a_pull_that_is_repeated_gives_the_same_batch_and_sends_it_once() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.hand_over("b", request("b", 5), serial=1)
        await ends.load(2)
        await ends.ran(4)
        answers = [await ends.pull() for _ in range(ROUNDS)]
        assert {(a.batch_id, a.first_layer) for a in answers} == {("a", 2)}
        assert await _receives(ends, 0, 9)
        assert not await _receives(ends, 0, 9, within_s=SOON_S), "once"
        await ends.settle(0)
        assert ends.target.num_used == 2


async def test_a_pull_repeated_after_its_batch_was_settled_takes_no_other() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.hand_over("b", request("b", 5), serial=1)
        await ends.pull()
        await ends.settle(0)
        assert (await ends.pull()).batch_id in ("", "a")
        assert (await ends.pull(1)).batch_id == "b"


async def test_a_pull_waits_for_the_end_of_a_layer() -> None:
    async with running_ends() as ends, InsideLayer(ends.target) as layer:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await layer.until_inside()
        pulling = asyncio.create_task(ends.pull(wait_s=10.0))
        await asyncio.sleep(0.02)
        assert not pulling.done()
        layer.let_go()
        answer = await pulling
        assert (answer.batch_id, answer.first_layer) == ("a", 1), "before the next layer is begun"
        await ends.settle(0)


async def test_a_pull_that_waited_in_vain_claims_nothing_later() -> None:
    async with running_ends() as ends, InsideLayer(ends.target) as layer:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await layer.until_inside()
        assert (await ends.pull(wait_s=0.02)).batch_id == ""
        layer.let_go()
        await ends.ran(2)
        answer = await ends.pull(1)
        assert (answer.batch_id, answer.first_layer) == ("a", 2)


async def test_nothing_to_pull_says_whether_the_pair_may_part() -> None:
    async with running_ends() as ends:
        assert not (await ends.pull()).can_dissolve
        await ends.load(NUM_LAYERS)
        numbers = itertools.count(1)

        async def may_part() -> bool:
            """Once the target has heard that the source knows."""
            answer = await ends.pull(next(numbers))
            assert (answer.batch_id, answer.loaded) == ("", True)
            return answer.can_dissolve

        await eventually(lambda: ends.taken)
        await eventually(may_part)


async def test_a_pull_ends_with_the_pair() -> None:
    async with running_ends() as ends:
        pulling = asyncio.create_task(ends.pull(wait_s=10.0))
        await asyncio.sleep(0.02)
        await ends.pair.fail("the source is lost")
        with pytest.raises(Conflict, match="the source is lost"):
            await pulling


async def test_settling_frees_a_batch_once_and_knows_no_other() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.hand_over("b", request("b", 5), serial=1)
        await ends.pull()
        for _ in range(ROUNDS):
            await ends.settle(0, 7, "nonsense")
            assert ends.target.num_used == 2
        assert ends.requests.unhosted == ["a"]


async def test_without_claims_a_settlement_is_a_sign_of_life() -> None:
    async with running_ends(silence_s=60.0) as ends:
        await ends.hand_over("a", request("a", 9))
        for _ in range(3):
            ends.pair._link._heard_s -= 30.0
            await ends.settle()
        await asyncio.sleep(0.2)  # it is looked at
        assert ends.target.num_used == 3
        assert not ends.pair.ended.is_set()


# --- KV ------------------------------------------------------------------------------------------


def _kv(batch_id: str = "a", first_layer: int = 0, last_layer: int = 2) -> PullKv:
    return PullKv(pair_id="pair", batch_id=batch_id, serial=0, first_layer=first_layer, last_layer=last_layer)


async def _receives_kv(ends: Ends, first_layer: int, num_layers: int, *, within_s: float = WAIT_S) -> bool:
    num_bytes = num_layers * 9 * ends.source.loop.engine.kv_bytes_per_token_layer
    receiving = ends.transports[0].recv(HOST.staging(num_bytes, "into"), ends.source_tensors.kv_tag(0, first_layer))
    done, _ = await asyncio.wait({asyncio.ensure_future(receiving.wait())}, timeout=within_s)
    receiving.abort()
    return bool(done)


async def test_kv_comes_when_it_is_asked_for_and_once() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await ends.ran(2)
        await ends.pull()
        for _ in range(ROUNDS):
            await ends.pair.on_question(_kv(last_layer=1))
        await ends.pair.on_question(_kv(first_layer=1))
        assert await _receives_kv(ends, 0, 1)
        assert await _receives_kv(ends, 1, 1)
        assert not await _receives_kv(ends, 0, 1, within_s=SOON_S)
        await ends.settle(0)


@pytest.mark.parametrize("layers", [(0, 3), (1, 1), (2, 1), (-1, 1)])
async def test_kv_of_layers_that_were_not_run_is_refused(layers: tuple[int, int]) -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await ends.ran(2)
        await ends.pull()
        with pytest.raises(BadRequest, match="that were run"):
            await ends.pair.on_question(_kv("a", *layers))
        await ends.pair.on_question(_kv())
        assert await _receives_kv(ends, 0, 2)


async def test_kv_of_what_the_source_has_not_pulled_or_settled_is_refused() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await ends.ran(2)
        for batch_id in ("a", "b"):
            with pytest.raises(Conflict, match="not the source's to pull"):
                await ends.pair.on_question(_kv(batch_id))
        await ends.pull()
        await ends.settle(0)
        with pytest.raises(Conflict, match="or settled"):
            await ends.pair.on_question(_kv())


# --- the end -------------------------------------------------------------------------------------


async def _four(ends: Ends) -> None:
    for number, name in enumerate("abcd"):
        await ends.hand_over(name, request(name, 9), serial=number)


async def test_shares_are_given_again_as_they_were_and_what_is_kept_is_finished_here() -> None:
    async with running_ends(policy="stop_the_world") as ends, InsideLayer(ends.target) as layer:
        await _four(ends)
        await ends.load(NUM_LAYERS)
        shares = await ends.dissolve()
        assert shares.kept
        assert [g.first_layer for g in shares.given] == [0] * len(shares.given)
        assert sorted([*shares.kept, *(g.batch_id for g in shares.given)]) == list("abcd")
        assert await ends.dissolve(source_busy_s=1000.0, first_serial=7) == shares
        layer.let_go()
        await asyncio.wait_for(ends.pair.ended.wait(), WAIT_S)
        await ends.target.idle()
        assert ends.requests.announced == list(shares.kept)
        assert ends.target.tokens() == {name: expected(request(name, 9)) for name in shares.kept}
        assert ends.requests.unhosted == [g.batch_id for g in shares.given], "no more than these"


@also_late()
async def test_an_instance_that_goes_leaves_the_pair_with_what_it_kept() -> None:
    async with running_ends(policy="stop_the_world") as ends, InsideLayer(ends.target) as layer:
        await _four(ends)
        await ends.load(NUM_LAYERS)
        shares = await ends.dissolve()
        assert shares.kept
        leaving = asyncio.create_task(ends.pair.leave("the model is removed"))
        await asyncio.sleep(0)
        layer.let_go()
        await asyncio.wait_for(leaving, WAIT_S)
        assert ends.pair.machine.num_requests == 0
        await ends.target.idle()  # in steps, as long as the engine runs
        assert ends.target.tokens() == {name: expected(request(name, 9)) for name in shares.kept}


async def test_what_is_kept_is_announced_before_its_first_token_however_late_the_event_loop_hears_of_it() -> None:
    async with running_ends(policy="stop_the_world") as ends:
        await _four(ends)
        await ends.load(NUM_LAYERS)
        act, announce, said = ends.pair.act_on_loop, ends.requests.announce, list[StreamPart]()

        def late() -> None:
            shares = ends.pair.machine.shares
            if shares is None or ends.target.finish_reasons().keys() >= set(shares.kept):
                act()
            else:
                asyncio.get_running_loop().call_later(0.01, late)

        def seen(sequences: Iterable[ActiveSequence]) -> None:
            said.extend(ends.target.outputs)
            announce(sequences)

        ends.pair.act_on_loop, ends.requests.announce = late, seen  # type: ignore[method-assign]
        shares = await ends.dissolve()
        assert ends.requests.announced == list(shares.kept)
        assert said == []
        await eventually(ends.pair.ended.is_set)


async def test_a_source_that_leaves_early_gets_everything_and_what_was_begun_waits_for_its_settlement() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await ends.ran(2)
        await ends.hand_over("b", request("b", 5), serial=1)
        await ends.ran(4)
        shares = await ends.dissolve()
        assert shares.kept == shares.finished == ()
        assert [(g.batch_id, g.first_layer, g.serial) for g in shares.given] == [("a", 2, 100), ("b", 2, 101)]
        assert await _receives(ends, 100, 9)
        assert await _receives(ends, 101, 5)
        assert ends.target.num_used == 5, "its KV may be asked for"
        for _ in range(ROUNDS):
            await ends.settle("end/a")
        assert ends.target.num_used == 2
        await ends.settle("end/b")
        await asyncio.wait_for(ends.pair.ended.wait(), WAIT_S)
        assert ends.requests.unhosted == ["a", "b"]


async def test_a_source_that_is_lost_after_parting_settles_nothing_and_all_is_freed() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await ends.ran(2)
        ends.target_tensors._timeout_s = 0.3
        await ends.dissolve()
        assert ends.target.num_used == 3
        ends.pair._link._silence_s = 0.3
        await asyncio.wait_for(ends.pair.ended.wait(), WAIT_S)
        # Given to the engine's thread by then, which what comes later goes behind.
        await eventually(lambda: ends.target.num_used == 0)


async def test_parting_waits_for_the_end_of_a_layer_and_ends_with_the_pair() -> None:
    async with running_ends() as ends, InsideLayer(ends.target) as layer:
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await layer.until_inside()
        parting = asyncio.create_task(ends.dissolve())
        await asyncio.sleep(0.02)
        assert not parting.done()
        layer.let_go()
        (given,) = (await parting).given
        assert given.batch_id == "a"
        await ends.settle("end/a")


async def test_parting_that_waits_for_a_long_layer_waits_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "KNOWS_S", 0.01)
    async with running_ends() as ends, InsideLayer(ends.target) as layer:
        machine = ends.pair.machine
        await ends.hand_over("a", request("a", 9))
        await ends.load(2)
        await layer.until_inside()
        parting = asyncio.create_task(ends.dissolve())
        await eventually(lambda: machine._parting)
        ((_, _, until_s),) = machine._parting
        await eventually(lambda: machine.now_s >= until_s)
        assert machine.due_s == math.inf, "or the event loop is busy until the layer ends"
        layer.let_go()
        await parting
        await ends.settle("end/a")


async def test_what_was_finished_before_is_named_at_the_end_unless_the_source_has_acknowledged_it() -> None:
    async with running_ends() as ends:
        await ends.load(NUM_LAYERS)
        for serial in range(20):
            await ends.hand_over(f"a{serial}", request(f"a{serial}", 9), serial=serial)
            await eventually(lambda: (f"a{serial}",) in {t.batch_ids for t in ends.taken})  # noqa: B023
            await eventually(lambda: not ends.pair.machine._finished)
        await eventually(lambda: ends.pair.machine.loaded)
        ends.hears_taken = False
        await ends.hand_over("b", request("b", 9), serial=20)
        await eventually(lambda: "b" in ends.target.finish_reasons())
        assert (await ends.dissolve()).finished == ("b",)


async def test_batches_cancelled_after_parting_are_freed_wherever_they_are() -> None:
    async with running_ends(policy="stop_the_world") as ends, InsideLayer(ends.target) as layer:
        await _four(ends)
        await ends.load(NUM_LAYERS)
        shares = await ends.dissolve()
        for name in "abcd":
            ends.pair.cancel(name, 1)
        await asyncio.sleep(0.02)
        layer.let_go()
        await asyncio.wait_for(ends.pair.ended.wait(), WAIT_S)
        await ends.target.idle()
        assert ends.target.tokens() == {}
        assert sorted(ends.requests.unhosted) == sorted(g.batch_id for g in shares.given)


async def test_kept_batches_that_the_engine_cannot_compute_together_are_computed_in_steps() -> None:
    async with running_ends(policy="stop_the_world") as ends, InsideLayer(ends.target) as layer:
        await _four(ends)
        await ends.load(NUM_LAYERS)
        shares = await ends.dissolve()
        await layer.until_inside()
        bad = next(name for name in reversed("abcd") if name in shares.kept)
        ends.target.watched.fails_on = request(bad, 9).prompt[0]
        layer.let_go()
        await asyncio.wait_for(ends.pair.ended.wait(), WAIT_S)
        await ends.target.idle()
        reasons = {name: "error" if name == bad else "length" for name in shares.kept}
        assert ends.target.finish_reasons() == reasons
        for name in shares.kept:
            if name != bad:
                assert ends.target.tokens()[name] == expected(request(name, 9))


async def test_hidden_states_of_a_claim_never_come_when_it_has_none() -> None:
    async with running_ends() as ends:
        await ends.hand_over("a", request("a", 9))
        assert (await ends.pull()).first_layer == 0
        num_bytes = 9 * ends.source.loop.engine.hidden_bytes_per_token
        with pytest.raises((TimeoutError, DeadlineExceeded)):
            await asyncio.wait_for(ends.source_tensors.receive(num_bytes, 0, Kind.PULLED_HIDDEN), 0.1)
