"""Members of a pair whose engine computes later than it is called: two parts in flight, and what waits for a landing.

Streams run by the test's hand, so that each operation is looked at before and after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.worker.core.live import source_words as s
from services.worker.core.live import target_words as t
from services.worker.core.live.machine import AnswerQuestion, HasLanded, RefuseQuestion, SendHidden, TellEnded
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion, Landed, Pending
from services.worker.device.host import HOST
from services.worker.engine import loop as engine_loop
from services.worker.engine.base import Activation
from services.worker.kv_transfer.connector import KvConnector
from services.worker.live.batches import PromptBatch
from services.worker.live.kv_fetch import KvFetch
from services.worker.live.links import LinkToTarget
from services.worker.live.tensors import PairTensors
from shared.messages.generation import DecodePlace, StreamPart
from shared.messages.live import Dissolve, Dissolved, Pull, Pulled, Seal
from shared.transport.base import Buffer
from shared.zigzag.batch import State
from tests.processes import INCARNATION
from tests.services.worker.device.by_hand import HandStreams
from tests.services.worker.live import alone
from tests.services.worker.live.alone import ONE_EACH, Alone, LateEngine, Source, Target
from tests.services.worker.live.members import NUM_LAYERS, expected, request, run_all, tokens_of
from tests.shared.transport.memory import MemoryFabric
from tests.wait_until import WAIT_S, eventually

ELSEWHERE = DecodePlace(worker_id="w9", incarnation=INCARNATION, instance_id="i9")
LONG_S = 1e6
PULL = Pull(pair_id="pair", claim_id="claim", serial=0, wait_s=LONG_S)
PART = Dissolve(pair_id="pair", claim_id="end", first_serial=3, source_busy_s=0.0)


@pytest.fixture(autouse=True)
def _nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loop itself waits for is computed then."""
    made: list[HandStreams] = []

    def make() -> HandStreams:
        made.append(HandStreams())
        return made[-1]

    def waited(completion: Completion[Any]) -> Any:
        for streams in made:
            streams.run_to(completion)
        return completion.result()

    monkeypatch.setattr(alone, "HandStreams", make)
    monkeypatch.setattr(engine_loop, "waited", waited)


def layers(num_tokens: int, *which: int) -> list[str]:
    """Calls for whole layers."""
    return [f"tokens 0..{num_tokens} of layer {layer}" for layer in which]


def until_given(member: Alone, what: str, limit: int = 50) -> None:
    """One call after the other is computed, until this one is made. Nothing comes of those before."""
    outputs = member.step()
    for _ in range(limit):
        assert outputs == []
        if what in member.late.given:
            return
        outputs = member.runs()
    raise AssertionError(f"{what} was not asked for: {member.late.given}")


def begun(here: Source, first_layer: int, *, there: Target | None = None, with_kv: bool = False) -> PromptBatch:
    """A batch is pulled and resumed from what the target ran of it; nothing more is computed."""
    batch = here.start(first_layer, there=there, with_kv=False)
    here.runs()
    if with_kv:
        here.kv_over(batch)
    return batch


class Told:
    """Of layers of requests that are decoded elsewhere: it copies what it is told of, at once."""

    def __init__(self, member: Alone) -> None:
        self.layers: list[int] = []
        self.copies: list[Completion[Buffer]] = []
        self._engine = member.late
        self._next = 0
        member.loop.prefill_listener = self

    def ran_layers(self, sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
        self.layers.append(num_layers)
        if num_layers > self._next:
            kv = [sequence.block_table], [end], num_layers
            self.copies.append(self._engine.export_kv(*kv, first_layer=self._next))
            self._next = num_layers

    def computed(self, sequence: ActiveSequence, token: Sampled) -> None:
        pass


def leaves(sequence: ActiveSequence) -> ActiveSequence:
    """It is decoded elsewhere."""
    sequence.decode_at = ELSEWHERE
    return sequence


def is_wrong(engine: LateEngine, layer: int) -> None:
    """The next part of this layer is computed, and said to have failed all the same: those behind it do not fail."""
    run_part = engine.run_part

    def run(activation: Activation, at: int, *tokens: int) -> Completion[None]:
        ran = run_part(activation, at, *tokens)
        if at != layer:
            return ran
        engine.run_part = run_part  # type: ignore[method-assign]
        wrong = RuntimeError(f"layer {layer} is wrong")
        return engine.streams.compute.later(Pending[None](), lambda: Landed(error=wrong))

    engine.run_part = run  # type: ignore[assignment,method-assign]


def refuses(engine: LateEngine, method: str = "run_part") -> None:
    """The next call of it raises."""
    called = getattr(engine, method)

    def refuse(*_: Any, **__: Any) -> Any:
        setattr(engine, method, called)
        raise RuntimeError("cannot begin this")

    setattr(engine, method, refuse)


# --- two are in flight, and count when they have landed ---------------------------------------------


async def test_two_layers_of_a_batch_are_in_flight_at_the_target_and_none_is_told_before_it_has_landed() -> None:
    here = Target(late=True)
    here.take("x", leaves(request("a", 9)))
    told = Told(here)
    here.load(NUM_LAYERS)
    here.step()
    for _ in range(2):
        assert here.late.given[1:] == ["resume", *layers(9, 0, 1)]
        assert here.loop.num_in_flight == 2
        assert (told.layers, here.work.layers.total) == ([0], 0), "that it is begun"
        here.step()
    here.runs()
    assert here.late.given[2:] == layers(9, 0, 1), "it has been resumed, and no layer has landed"
    for layer in range(NUM_LAYERS - 1):
        here.late.streams.run(here.late.streams.compute)
        assert (told.layers, here.work.layers.total) == ([*range(layer + 1)], layer), "the loop has not looked"
        here.step()
        assert (told.layers, here.work.layers.total) == ([*range(layer + 2)], layer + 1)
        assert [what for what in here.late.given if what != "export"][2:] == layers(9, *range(NUM_LAYERS)[: layer + 3])
        assert here.machine.queue.batch("x").next_layer == layer + 1
        here.late.streams.run(here.late.streams.out)
    assert [copy.error for copy in told.copies] == [None] * (NUM_LAYERS - 1)
    assert here.late.faults == []


async def test_two_layers_of_a_batch_are_in_flight_at_the_source_and_none_is_told_before_it_has_landed() -> None:
    here = Source(leaves(request("a", 9)), late=True)
    told = Told(here)
    here.start()
    for _ in range(2):
        here.step()
        assert here.late.given == ["embed", *layers(9, 0, 1)]
        assert here.loop.num_in_flight == 2
        assert (told.layers, here.work.layers.total) == ([], 0)
    here.runs()
    assert here.late.given[1:] == layers(9, 0, 1), "it is embedded, and no layer has landed"
    for layer in range(NUM_LAYERS - 1):
        here.late.streams.run(here.late.streams.compute)
        assert (told.layers, here.work.layers.total) == ([*range(1, layer + 1)], layer), "the loop has not looked"
        here.step()
        assert (told.layers, here.work.layers.total) == ([*range(1, layer + 2)], layer + 1)
        assert [what for what in here.late.given if what != "export"][1:] == layers(9, *range(NUM_LAYERS)[: layer + 3])
        here.late.streams.run(here.late.streams.out)
    assert [copy.error for copy in told.copies] == [None] * (NUM_LAYERS - 1)
    assert here.late.faults == []


async def test_kv_of_a_batch_whose_first_layers_come_is_told_by_the_next_layer_that_is_begun_and_lands() -> None:
    a = leaves(request("a", 9))
    here = Source(a, late=True)
    told = Told(here)
    batch = begun(here, 1)
    here.kv_over(batch)
    here.runs()
    assert here.late.given[-1] == layers(9, 3)[0]
    assert told.layers == []
    here.runs()
    assert told.layers == [], "these two were given before"
    here.runs_all()
    assert [copy.error for copy in told.copies] == [None]
    assert told.layers == [NUM_LAYERS]


async def test_first_tokens_count_at_the_target_when_they_have_landed() -> None:
    here = Target(late=True)
    a, b = request("a", 5), request("b", 9)
    here.take("x", a)
    here.take("y", b)
    here.load(NUM_LAYERS)
    until_given(here, "sample")
    assert here.loop.num_in_flight == 2
    assert here.late.given[-3:] == ["sample", "resume", *layers(9, 0)], "the next batch is begun behind that"
    assert (a.output, here.finished, here.machine.failure) == ([], [], "")
    assert here.machine.queue.batch("x").state is State.RUNNING
    assert here.machine.holds("x")
    assert here.loop.scheduler.num_requests == 0
    outputs = here.runs()
    assert [part.token_ids for part in outputs] == [expected(a)[:1]]
    assert here.finished == ["x"]
    assert not here.machine.holds("x")
    outputs += here.runs_all()
    assert tokens_of(outputs) == {"a": expected(a), "b": expected(b)}
    assert here.finished == ["x", "y"]
    assert here.is_empty


@pytest.mark.parametrize("kv_here", [True, False])
async def test_first_tokens_count_at_the_source_when_they_have_landed(kv_here: bool) -> None:
    a, b = request("a", 9), request("b", 5)
    here = Source(a, b, late=True, max_num_sequences=ONE_EACH)
    batch = begun(here, 2, with_kv=kv_here)
    behind = here.start()
    until_given(here, "sample")
    assert here.loop.num_in_flight == 2
    assert here.late.given[-3:] == ["sample", "embed", *layers(5, 0)], "the next batch is begun behind that"
    assert (a.output, here.done) == ([], [])
    assert here.machine.has_runs
    outputs = here.runs()
    assert [part.token_ids for part in outputs] == [expected(a)[:1]]
    assert here.done == [batch.batch_id]
    if not kv_here:
        here.kv_over(batch)
    outputs += here.runs_all()
    assert tokens_of(outputs) == {"a": expected(a), "b": expected(b)}
    assert here.done == [batch.batch_id, behind.batch_id]
    assert here.is_empty


@pytest.mark.parametrize("is_here", [True, False])
async def test_a_batch_that_is_resumed_is_begun_at_the_source_when_that_has_landed(is_here: bool) -> None:
    a = request("a", 9)
    here = Source(a, late=True)
    batch = here.start(2, with_kv=False)
    for _ in range(2):
        assert here.late.given == ["resume"]
        assert not here.machine.has_runs
        assert here.all_said(s.FetchKv) == [], "its KV comes behind it"
        assert not here.loop.is_free(a)
        here.step()
    here.runs()
    assert here.machine.has_runs
    assert len(here.all_said(s.FetchKv)) == 1
    assert here.late.given == ["resume", *layers(9, 2, 3)]
    here.kv_over(batch, is_here=is_here)
    assert tokens_of(here.runs_all()) == {"a": expected(a)}
    assert here.is_empty


# --- blocks ---------------------------------------------------------------------------------------


async def test_blocks_of_a_batch_that_nobody_waits_for_are_free_at_the_target_when_its_last_part_has_landed() -> None:
    here = Target(late=True)
    a, b = request("a", 9), request("b", 5)
    here.take("x", a)
    here.load(NUM_LAYERS)
    here.step()
    used = here.num_used
    here.work.cancel(*a.key)
    here.take("y", b)
    for _ in range(2):  # it is resumed, and its first layer
        here.runs()
        assert here.num_used == used + 2, "blocks of both"
        assert not here.loop.is_free(a)
    here.late.streams.run(here.late.streams.compute)
    assert here.num_used == used + 2, "the loop has not looked"
    here.step()
    assert here.loop.is_free(a)
    assert here.num_used == 2
    assert layers(9, 2)[0] not in here.late.given
    assert tokens_of(here.runs_all()) == {"b": expected(b)}
    assert here.is_empty


async def test_blocks_of_a_batch_that_nobody_waits_for_are_free_at_the_source_when_its_last_part_has_landed() -> None:
    a, b = request("a", 9), request("b", 5)
    here = Source(a, b, late=True, max_num_sequences=ONE_EACH)
    batch = here.start()
    here.step()
    used = here.num_used
    here.loop.scheduler.cancel(*a.key)
    behind = here.start()
    for _ in range(2):  # it is embedded, and its first layer
        here.runs()
        assert (here.num_used, here.done) == (used + 2, []), "blocks of both"
        assert not here.loop.is_free(a)
    here.runs()
    assert here.done == [batch.batch_id]
    assert here.num_used == 2
    assert layers(9, 2)[0] not in here.late.given
    assert tokens_of(one for one in here.runs_all() if one.request_id == "b") == {"b": expected(b)}
    assert here.done == [batch.batch_id, behind.batch_id]
    assert here.is_empty


async def test_a_batch_cancelled_while_it_is_resumed_keeps_its_blocks_until_its_kv_is_over() -> None:
    a = request("a", 9)
    here = Source(a, late=True)
    batch = here.start(2, with_kv=False)
    here.loop.scheduler.cancel(*a.key)
    here.step()
    used = here.num_used
    assert here.late.given == ["resume"]
    here.runs()
    assert here.done == [batch.batch_id]
    written = here.import_kv(batch)
    assert here.runs_all() == []
    assert written.error is None
    assert used == here.num_used > 0
    here.work.handle(HasLanded(s.FetchKv(batch.batch_id, 0, 0), True))
    assert here.is_empty


@pytest.mark.parametrize("member", [Source, Target])
async def test_a_request_is_not_free_while_a_part_of_its_batch_is_in_flight(member: type[Source | Target]) -> None:
    a = request("a", 9)
    here = Source(a, late=True) if member is Source else Target(late=True)
    if isinstance(here, Source):
        here.start()
    else:
        here.take("x", a)
        here.load(NUM_LAYERS - 1)
    here.step()
    flew = []
    while here.loop.num_in_flight:
        flew.append(not here.loop.is_free(a))
        here.runs()
    assert len(flew) >= NUM_LAYERS
    assert all(flew)


async def test_blocks_of_a_batch_that_failed_are_free_at_the_source_when_the_part_behind_has_landed() -> None:
    """Its requests wait to be computed in steps, and take others meanwhile."""
    a, b = request("a", 9), request("b", 9)
    here = Source(a, b, late=True, max_num_sequences=ONE_EACH)
    is_wrong(here.late, 0)
    batch = here.start()
    here.step()
    table = list(a.block_table)
    pool = here.loop.scheduler.pool
    here.runs(3)  # it is embedded, computed, and wrong
    assert here.done == [batch.batch_id]
    assert here.loop.scheduler.table.landing_blocks == len(table)
    assert pool.num_used >= len(table)
    assert not set(table) & set(a.block_table)
    assert not here.loop.is_free(a)
    here.start()  # takes blocks at once
    here.step()
    assert not set(table) & set(b.block_table)
    here.runs()
    assert here.loop.scheduler.table.landing_blocks == 0
    assert tokens_of(here.runs_all()) == {one.request_id: expected(one) for one in (a, b)}
    assert here.is_empty


# --- the source pulls and parts -------------------------------------------------------------------


def _answers(here: Target) -> list[Any]:
    return [
        action.message for action in here.all_said(AnswerQuestion) if isinstance(action.message, Pulled | Dissolved)
    ]


def _seal(here: Target, count: int) -> None:
    here.asks(Seal(pair_id="pair", count=count), 1)


async def test_a_pull_is_answered_when_both_layers_have_landed_with_what_both_made() -> None:
    here, there = Target(late=True), Source(request("a", 9))
    a, b = request("a", 9), request("b", 5)
    here.take("pair-0", a)
    here.take("pair-1", b)
    here.load(NUM_LAYERS - 1)
    here.step()
    here.asks(PULL)
    here.runs(2)  # it is resumed, and its first layer
    assert _answers(here) == here.all_said(SendHidden) == []
    assert layers(9, 2)[0] not in here.late.given, "the source waits for it"
    assert layers(5, 0)[0] in here.late.given, "another goes on"
    here.runs()
    (answer,) = _answers(here)
    assert (answer.batch_id, answer.first_layer) == ("pair-0", 2)
    assert [action.batch_id for action in here.all_said(SendHidden)] == ["pair-0"]
    # Copied while the other batch is computed.
    batch = here.work.held["pair-0"]
    assert batch.activation is not None
    hidden = here.late.hidden_states(batch.activation)
    kv = here.late.export_kv(batch.kv(0, 2).tables, batch.lengths, 2)
    here.load(NUM_LAYERS)
    outputs = here.runs_all()
    assert hidden.error is kv.error is None
    assert tokens_of(outputs) == {"b": expected(b)}
    assert layers(9, 2)[0] not in here.late.given
    there.start(2, there=here)
    assert tokens_of(run_all(there.loop)) == {"a": expected(a)}


async def test_a_pull_of_a_batch_of_which_nothing_is_in_flight_waits_for_nothing() -> None:
    here = Target(late=True)
    here.take("x", request("a", 9))
    here.load(1)
    here.step()
    here.runs(2)
    here.asks(PULL)
    assert _answers(here)[0].first_layer == 1
    assert here.loop.num_in_flight == 0


async def test_a_wish_to_part_waits_for_both_layers_and_nothing_more_is_begun() -> None:
    here = Target(late=True)
    here.take("x", request("a", 9))
    here.take("y", request("b", 5))
    _seal(here, 2)
    here.load(NUM_LAYERS - 1)
    here.step()
    here.asks(PART)
    given = list(here.late.given)
    for _ in range(2):  # it is resumed, and its first layer
        here.runs()
        assert here.late.given == given, "neither of this batch nor of another"
        assert _answers(here) == []
    here.runs()
    (shares,) = _answers(here)
    assert [(g.batch_id, g.first_layer) for g in shares.given] == [("x", 2), ("y", 0)]
    assert [action.batch_id for action in here.all_said(SendHidden)] == ["x"]
    assert here.late.given == given
    assert not here.loop.has_work
    hidden, kv = here.state_of("x", 2)
    plain = Target()
    plain.take("x", request("a", 9))
    plain.load(2)
    run_all(plain.loop)
    assert [bytes(part) for part in plain.state_of("x", 2)] == [bytes(hidden), bytes(kv)]
    assert here.late.faults == []


# --- KV between the two ---------------------------------------------------------------------------


async def test_kv_is_sent_when_it_was_copied_and_is_here_when_it_was_written() -> None:
    fabric = MemoryFabric()
    transports = [fabric.start(name=name) for name in ("target", "source")]
    to = await transports[0].connect(transports[1].address, same_host=False)
    back = await transports[1].connect(transports[0].address, same_host=False)
    at_target = PairTensors(KvConnector(transports[0], HOST), to, 1, timeout_s=WAIT_S)
    at_source = PairTensors(KvConnector(transports[1], HOST), back, 1, timeout_s=WAIT_S)

    async def acknowledged(*_: Any) -> None:
        pass

    async def until(task: Coroutine[Any, Any, None]) -> None:
        await task

    there, a = Target(late=True), request("a", 9)
    there.take("pair-0", request("a", 9))
    there.load(2)
    there.runs_all()
    here = Source(a, late=True)
    batch = begun(here, 2, there=there)
    link = cast(LinkToTarget, SimpleNamespace(ask_pair=acknowledged, until=until))
    fetching = asyncio.create_task(KvFetch("pair", here.late, link, at_source).fetch(batch, 0, 2))
    kv = there.work.held["pair-0"].kv(0, 2)
    there.late.given.clear()
    outflow = at_target.kv_outflow(there.late)
    sending = asyncio.create_task(outflow.send(kv, [at_target.kv_tag(0, 0)], lies_there=lambda: True))
    await eventually(lambda: there.late.given == ["export"])
    await asyncio.sleep(0.01)
    assert not sending.done()
    assert "import" not in here.late.given
    there.late.streams.run(there.late.streams.out)
    await at_target.sent(*await sending)
    await eventually(lambda: "import" in here.late.given)
    await asyncio.sleep(0.01)
    assert not fetching.done()
    here.runs(3)  # layers 2 and 3, and the first token
    assert a.output == [*expected(a)[:1]]
    assert here.done == [batch.batch_id]
    assert not here.loop.has_work
    assert not fetching.done()
    here.late.streams.run(here.late.streams.into)
    assert await fetching
    here.work.handle(HasLanded(s.FetchKv(batch.batch_id, 0, 0), True))
    here.runs_all()
    assert a.output == [*expected(a)]
    assert here.is_empty
    assert there.late.faults == []
    for transport in transports:
        await transport.close()


# --- what fails -----------------------------------------------------------------------------------


def _failures(here: Target) -> list[str]:
    return [ended.reason for ended in here.all_said(TellEnded)]


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("behind_fails", [True, False])
async def test_a_layer_that_fails_at_the_source_leaves_nothing_of_the_one_behind_it(
    layer: int, behind_fails: bool
) -> None:
    a, b = leaves(request("a", 9)), request("b", 5)
    here = Source(a, b, late=True, prefill_chunk_tokens=14)
    told = Told(here)
    batch = here.start()
    if behind_fails:
        here.watched.failure, here.watched.fails_at = RuntimeError("cuda"), layer
    else:
        is_wrong(here.late, layer)
    outputs: list[StreamPart] = []
    here.step()
    while not here.done:
        outputs += here.runs()
    here.watched.failure = None
    assert told.layers == list(range(1, layer + 1))
    assert outputs == []
    assert here.loop.num_in_flight
    here.runs()
    assert told.layers == list(range(1, layer + 1)), "nor by the one behind"
    here.loop.prefill_listener = None
    assert tokens_of(here.runs_all()) == {"a": expected(a), "b": expected(b)}
    assert here.done == [batch.batch_id]
    assert here.work.layers.total == layer + NUM_LAYERS, "and those of the steps"
    assert here.is_empty


@pytest.mark.parametrize("layer", range(NUM_LAYERS - 1))
@pytest.mark.parametrize("behind_fails", [True, False])
async def test_a_layer_that_fails_at_the_target_is_told_once_and_all_is_free_when_the_one_behind_it_has_landed(
    layer: int, behind_fails: bool
) -> None:
    here = Target(late=True)
    here.take("x", leaves(request("a", 9)))
    here.take("y", request("b", 5))
    told = Told(here)
    here.load(NUM_LAYERS)
    if behind_fails:
        here.watched.failure, here.watched.fails_at = RuntimeError("cuda"), layer
    else:
        is_wrong(here.late, layer)
    here.step()
    used = here.num_used
    while not here.machine.failure:
        here.runs()
    assert told.layers == list(range(layer + 1))
    assert here.loop.num_in_flight == 1
    given = list(here.late.given)
    assert (here.num_used, _failures(here)) == (used, []), "the one behind it writes"
    while here.loop.num_in_flight:
        assert here.num_used == used
        here.runs()
    assert here.is_empty
    reason = "cuda" if behind_fails else f"layer {layer} is wrong"
    assert _failures(here) == [f"the target's engine failed: RuntimeError: {reason}"]
    assert told.layers == list(range(layer + 1))
    assert [batch_id for action in here.all_said(t.Forget) for batch_id in action.batch_ids] == ["x", "y"]
    assert here.runs_all() == []
    assert here.late.given == given
    assert here.all_said(RefuseQuestion) == []


@pytest.mark.parametrize("layer", range(NUM_LAYERS - 1))
async def test_a_layer_that_fails_of_what_the_target_kept_has_it_computed_in_steps(layer: int) -> None:
    here = Target(late=True)
    a = request("a", 9)
    here.take("x", a)
    _seal(here, 1)
    here.load(NUM_LAYERS)
    is_wrong(here.late, layer)
    here.step()
    here.asks(PART)
    (shares,) = _answers(here)
    assert shares.kept == ("x",)
    assert tokens_of(here.runs_all()) == {"a": expected(a)}
    assert here.work.layers.total == layer
    assert here.is_empty


async def test_a_part_that_cannot_be_asked_for_at_the_source_waits_for_the_embedding() -> None:
    a = request("a", 9)
    here = Source(a, late=True)
    refuses(here.late)
    batch = here.start()
    here.step()
    used, table = here.num_used, list(a.block_table)
    assert here.done == []
    assert a.block_table
    here.step()
    assert (here.done, here.num_used, a.block_table) == ([], used, table), "the embedding is in flight"
    here.runs()
    assert here.done == [batch.batch_id]
    assert tokens_of(here.runs_all()) == {"a": expected(a)}
    assert here.is_empty


async def test_a_part_that_cannot_be_asked_for_at_the_target_waits_for_what_it_goes_on_from() -> None:
    here = Target(late=True)
    here.take("x", request("a", 9))
    here.load(NUM_LAYERS)
    refuses(here.late)
    here.step()
    used = here.num_used
    for _ in range(2):
        assert used == here.num_used > 0
        assert _failures(here) == []
        assert here.loop.num_in_flight
        here.step()
    here.runs()
    assert here.runs_all() == []
    assert _failures(here) == ["the target's engine failed: RuntimeError: cannot begin this"]
    assert here.is_empty


@pytest.mark.parametrize("method", ["embed", "sample"])
async def test_what_else_cannot_be_asked_for_at_the_source_is_computed_in_steps(method: str) -> None:
    a, b = request("a", 9), request("b", 5)
    here = Source(a, b, late=True, max_num_sequences=ONE_EACH)
    refuses(here.late, method)
    first, second = here.start(), here.start()
    assert tokens_of(here.runs_all()) == {"a": expected(a), "b": expected(b)}
    assert here.done == [first.batch_id, second.batch_id]
    assert here.is_empty


@pytest.mark.parametrize("method", ["resume", "sample"])
async def test_what_else_cannot_be_asked_for_at_the_target_ends_the_pair(method: str) -> None:
    here = Target(late=True)
    here.take("x", request("a", 9))
    here.take("y", request("b", 5))
    here.load(NUM_LAYERS)
    refuses(here.late, method)
    assert here.runs_all() == []
    assert _failures(here) == ["the target's engine failed: RuntimeError: cannot begin this"]
    assert here.is_empty


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("late", [True, False])
async def test_a_batch_that_cannot_be_resumed_is_computed_in_steps_when_its_kv_is_not_written_any_more(
    late: bool, is_here: bool
) -> None:
    a, there = request("a", 9), Target()
    here = Source(a, late=True)
    there.take("pair-0", request("z" if late else "a", 9))
    there.load(2)
    run_all(there.loop)
    if not late:
        refuses(here.late, "resume")
    batch = here.start(2, there=there, with_kv=False)
    table = list(a.block_table)
    if late:
        assert not here.machine.has_runs
        here.runs()  # it fails: those are another batch's
    assert len(here.all_said(s.FetchKv)) == 1
    written = here.import_kv(batch) if not late else None
    here.step()
    assert here.done == [batch.batch_id]
    assert here.loop.num_in_flight == 0
    assert (a.block_table, here.loop.scheduler.num_requests) == (table, 1)
    assert not here.loop.has_work, "its KV may be written"
    if written is not None:
        here.late.streams.wait(written)
    here.work.handle(HasLanded(s.FetchKv(batch.batch_id, 0, 0), is_here))
    assert tokens_of(here.runs_all()) == {"a": expected(a)}
    assert here.is_empty


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("layer", [2, 3])
async def test_a_layer_that_fails_while_kv_is_written_has_it_computed_in_steps_when_that_is_over(
    layer: int, is_here: bool
) -> None:
    a = request("a", 9)
    here = Source(a, late=True)
    is_wrong(here.late, layer)
    batch = begun(here, 2)
    written = here.import_kv(batch)
    here.step()
    table = list(a.block_table)
    while not here.done or here.loop.num_in_flight:
        here.runs()
    assert not written.done
    assert (a.block_table, here.num_used, here.done) == (table, len(table), [batch.batch_id])
    assert not here.loop.has_work
    here.late.streams.wait(written)
    assert a.block_table == table, "the source has not heard of it"
    here.work.handle(HasLanded(s.FetchKv(batch.batch_id, 0, 0), is_here))
    assert tokens_of(here.runs_all()) == {"a": expected(a)}
    assert here.is_empty
