"""The scheduler of a member of a pair: requests that are lent, reserved, adopted and disowned."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.engine.base import Sampled
from services.worker.engine.mock.engine import next_token
from services.worker.scheduling.gateways import Gone
from services.worker.scheduling.lending import LendingScheduler as Scheduler
from services.worker.scheduling.output import TokenOutput
from services.worker.scheduling.schedule import ScheduledBatch
from services.worker.scheduling.scheduler import SchedulerConfig
from services.worker.scheduling.sequence import Sequence
from shared.errors import Conflict, Internal, Overloaded
from shared.messages.common import ErrorInfo
from shared.messages.generation import SamplingParams

ERROR = ErrorInfo.of(Internal("boom"))


def config(**changes: int) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 64, "block_size": 4, **changes})


def request(
    name: str,
    prompt_tokens: int = 5,
    max_tokens: int = 4,
    *,
    gateway: str = "g",
    output: tuple[int, ...] = (),
) -> Sequence:
    prompt = [(sum(map(ord, name)) * 7 + i) % 90 for i in range(prompt_tokens)]
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return Sequence(request_id=name, attempt=0, gateway_id=gateway, prompt=prompt, params=params, output=output)


def lending(*sequences: Sequence, **changes: int) -> Scheduler:
    """A scheduler that has these requests, and lends."""
    scheduler = Scheduler(config(**changes))
    for number, sequence in enumerate(sequences):
        scheduler.add(sequence, float(number))
    scheduler.lending = True
    return scheduler


def sampled(sequence: Sequence) -> Sampled:
    return Sampled(next_token(sequence.tokens))


def step(scheduler: Scheduler) -> list[TokenOutput]:
    """One step; ``schedule`` must have something."""
    batch = scheduler.schedule()
    assert batch is not None
    return scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])


def names(sequences: Iterable[Sequence]) -> list[str]:
    return [s.request_id for s in sequences]


def in_batch(scheduler: Scheduler) -> list[str]:
    """Whose tokens the next step computes."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])
    return [p.sequence.request_id for p in batch.slices]


def test_what_has_not_begun_is_lent_in_order_and_nothing_of_it_is_admitted() -> None:
    scheduler = lending(*(request(name) for name in "abc"))
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    lent = scheduler.lend()
    assert names(lent) == ["a", "b", "c"]
    assert scheduler.lend() == []
    assert scheduler.num_requests == 3
    assert scheduler.schedule() is None


def test_what_runs_goes_on_while_the_queue_is_lent() -> None:
    scheduler = Scheduler(config(max_num_sequences=1, prefill_chunk_tokens=2))
    scheduler.add(request("runs"))
    step(scheduler)
    scheduler.add(request("waits"))
    scheduler.lending = True
    assert scheduler.has_prefill
    assert not scheduler.has_decodes
    assert names(scheduler.lend()) == ["waits"]
    assert in_batch(scheduler) == ["runs"]
    assert in_batch(scheduler) == ["runs"]
    assert not scheduler.has_prefill
    assert scheduler.has_decodes
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_requests == 1
    assert scheduler.pool.num_used == 0


def test_what_is_added_to_a_lent_queue_waits_for_the_next_lend() -> None:
    scheduler = lending(request("a"))
    scheduler.lend()
    scheduler.add(request("b"))
    assert not scheduler.has_work
    assert names(scheduler.lend()) == ["b"]


def test_an_attempt_that_is_lent_is_here_already() -> None:
    scheduler = lending(request("a"))
    scheduler.lend()
    with pytest.raises(Conflict):
        scheduler.add(request("a"))


def test_what_comes_back_waits_at_its_old_place() -> None:
    scheduler = lending(*(request(name) for name in "abc"))
    a, b, c = scheduler.lend()
    scheduler.add(request("d"))
    scheduler.return_lent([c, a])
    scheduler.return_lent([b])
    scheduler.lending = False
    scheduler.check()
    assert in_batch(scheduler) == ["a", "b", "c", "d"]


def test_what_was_cancelled_does_not_come_back() -> None:
    scheduler = lending(request("a"), request("b"))
    lent = scheduler.lend()
    cancelled = scheduler.cancel("a", 0)
    assert cancelled is lent[0]
    assert [(o.request_id, o.finish_reason) for o in scheduler.take_ended()] == [("a", "cancelled")]
    assert scheduler.cancel("a", 0) is None
    scheduler.return_lent(lent)
    scheduler.lending = False
    scheduler.check()
    assert in_batch(scheduler) == ["b"]


def test_a_gateways_lent_requests_end_with_it() -> None:
    scheduler = lending(request("a", gateway="x"), request("b"), request("c", gateway="x"))
    held, *_ = scheduler.lend()
    scheduler.reserve([held])
    assert sorted(names(scheduler.cancel_gateway(Gone("x")))) == ["a", "c"]
    assert scheduler.num_requests == 1
    scheduler.release([held])
    assert scheduler.pool.num_used == 0


def test_a_preempted_request_is_not_lent_but_goes_on_here() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    early, late = request("a", 7, 8), request("b", 7, 8)
    scheduler.add(early)
    scheduler.add(late)
    while not late.num_emitted or late.block_table:
        step(scheduler)
    assert late.num_emitted, "it was preempted while it decoded"
    scheduler.add(request("c"))
    scheduler.lending = True
    assert names(scheduler.lend()) == ["c"]
    while scheduler.has_work:
        step(scheduler)
    assert late.finished
    assert len(late.output) == 8
    assert scheduler.num_requests == 1


def test_a_preempted_request_at_the_head_does_not_let_lent_ones_in() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    late = request("b", 7, 8)
    for sequence in (request("a", 7, 8), late, request("c")):
        scheduler.add(sequence)
    while not late.num_emitted or late.block_table:
        step(scheduler)
    scheduler.lending = True  # nobody has lent yet: ``c`` waits behind ``b``
    began: set[str] = set()
    while scheduler.has_work:
        began.update(in_batch(scheduler))
    assert began == {"a", "b"}


def test_reserving_is_all_or_nothing() -> None:
    scheduler = lending(request("a", 8), request("b", 8), num_blocks=3)
    lent = scheduler.lend()
    assert not scheduler.reserve(lent), "four blocks of three"
    assert scheduler.pool.num_used == 0
    assert [s.block_table for s in lent] == [[], []]
    assert scheduler.reserve(lent[:1])
    assert len(lent[0].block_table) == 2
    assert not scheduler.reserve(lent[1:])


def test_reserved_requests_have_seats() -> None:
    scheduler = Scheduler(config(max_num_sequences=2))
    scheduler.add(request("runs", max_tokens=9))
    step(scheduler)
    scheduler.lending = True
    for name in "ab":
        scheduler.add(request(name))
    a, b = scheduler.lend()
    assert not scheduler.reserve([a, b])
    assert scheduler.reserve([a])
    scheduler.return_lent([b])
    scheduler.lending = False
    assert in_batch(scheduler) == ["runs"], "both seats are taken"
    scheduler.release([a])
    assert in_batch(scheduler) == ["runs", "b"]


def test_an_adopted_request_decodes_here_and_its_blocks_are_freed_once() -> None:
    scheduler = lending(request("a", max_tokens=3))
    (a,) = scheduler.lend()
    assert scheduler.reserve([a])
    output = scheduler.adopt(a, sampled(a), now_s=7.0)
    assert output is not None
    assert (output.offset, len(output.token_ids), output.queued_s) == (0, 1, 7.0)
    scheduler.release([a])  # it is not held any more: this changes nothing
    assert a.block_table
    outputs = [o for _ in range(2) for o in step(scheduler)]
    assert [(o.offset, o.finish_reason) for o in outputs] == [(1, None), (2, "length")]
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work


def test_a_request_whose_first_token_is_its_last_is_not_left_behind() -> None:
    scheduler = lending(request("a", max_tokens=1))
    (a,) = scheduler.lend()
    scheduler.reserve([a])
    output = scheduler.adopt(a, sampled(a))
    assert output is not None
    assert output.finish_reason == "length"
    assert scheduler.pool.num_used == scheduler.num_requests == 0
    assert not scheduler.has_work


def test_a_first_token_that_could_not_be_sampled_ends_the_request() -> None:
    scheduler = lending(request("a"))
    (a,) = scheduler.lend()
    scheduler.reserve([a])
    output = scheduler.adopt(a, Sampled(0, error=ERROR))
    assert output is not None
    assert (output.finish_reason, output.error) == ("error", ERROR)
    assert scheduler.pool.num_used == scheduler.num_requests == 0


def test_another_instances_request_takes_its_place_in_the_order_of_arrival() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("before"))
    guest = request("guest")
    assert scheduler.reserve([guest])
    assert scheduler.num_requests == 1, "it is the other instance's so far"
    scheduler.add(request("after"))
    step(scheduler)
    scheduler.adopt(guest, sampled(guest))
    assert scheduler.num_requests == 3
    assert in_batch(scheduler) == ["before", "guest", "after"]


def test_a_guest_that_is_here_already_cannot_be_adopted() -> None:
    scheduler = Scheduler(config())
    guest = request("a")
    scheduler.reserve([guest])
    scheduler.add(request("a"))
    with pytest.raises(Conflict):
        scheduler.adopt(guest, sampled(guest))
    scheduler.release([guest])
    scheduler.check()


@pytest.mark.parametrize("when", ["lent", "reserved", "adopted", "in flight"])
def test_a_cancel_at_every_stage_ends_it_once_and_frees_it(when: str) -> None:
    scheduler = lending(request("a"), request("other"))
    lent = a, other = scheduler.lend()
    batch: ScheduledBatch | None = None
    if when != "lent":
        assert scheduler.reserve(lent)
    if when in {"adopted", "in flight"}:
        scheduler.adopt(a, sampled(a))
    if when == "in flight":
        batch = scheduler.schedule()
    assert scheduler.cancel("a", 0) is a
    assert [(o.request_id, o.finish_reason) for o in scheduler.take_ended()] == [("a", "cancelled")]
    if when == "reserved":
        assert a.block_table, "the engine may be writing there"
        assert scheduler.adopt(a, sampled(a)) is None
    if batch is not None:
        assert a.block_table, "the batch in flight writes there"
        assert scheduler.complete(batch, [sampled(a)]) == []
    assert a.block_table == []
    scheduler.release(lent)
    assert scheduler.pool.num_used == 0
    scheduler.return_lent([a, other])
    scheduler.lending = False
    scheduler.check()
    assert scheduler.num_requests == 1
    assert scheduler.take_ended() == []


def test_disowned_requests_leave_without_a_word() -> None:
    scheduler = lending(request("a"), request("b"), request("c"))
    a, b, _ = lent = scheduler.lend()
    scheduler.cancel("b", 0)
    scheduler.take_ended()
    scheduler.disown([a, b])
    assert scheduler.num_requests == 1
    assert scheduler.take_ended() == []
    scheduler.return_lent(lent)
    scheduler.lending = False
    scheduler.check()
    scheduler.add(request("a"))  # it may come again


def test_aborted_requests_end_with_the_error_those_that_had_not_ended() -> None:
    scheduler = lending(request("a"), request("b"))
    _a, _b = lent = scheduler.lend()
    scheduler.cancel("b", 0)
    scheduler.abort(lent, ERROR)
    ended = {o.request_id: (o.finish_reason, o.error) for o in scheduler.take_ended()}
    assert ended == {"a": ("error", ERROR), "b": ("cancelled", None)}
    assert scheduler.num_requests == 0


def test_the_load_counts_what_is_lent_and_held_as_queued() -> None:
    scheduler = lending(request("a", 6), request("b", 7), request("c", 8), max_num_sequences=2)
    before = scheduler.load()
    assert (before.queued_requests, before.queued_tokens, before.oldest_arrived_s) == (3, 21, 0.0)
    a, b, _c = scheduler.lend()
    assert scheduler.load() == before
    scheduler.reserve([b])
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.blocks_used) == (3, 21, 2)
    scheduler.adopt(b, sampled(b))
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.running_requests, load.running_tokens) == (2, 14, 1, 7)
    assert load.prefill_tokens_total == 7
    scheduler.disown([a])
    assert scheduler.load().oldest_arrived_s == 2.0
    scheduler.cancel("c", 0)
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.oldest_arrived_s) == (0, 0, None)


def test_guests_count_as_used_blocks_and_not_as_requests() -> None:
    scheduler = Scheduler(config())
    scheduler.reserve([request("guest", 8)])
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.running_requests, load.blocks_used) == (0, 0, 0, 2)


@pytest.mark.parametrize("what_runs", [False, True])
def test_nothing_is_scheduled_while_what_is_held_leaves_no_room(what_runs: bool) -> None:
    scheduler = Scheduler(config(num_blocks=4))
    if what_runs:
        scheduler.add(request("a", 4, 9))
        step(scheduler)  # its next token needs a second block
    guest = request("guest", 16 - 8 * what_runs)
    assert scheduler.reserve([guest])  # a running request keeps a block to grow into
    if not what_runs:
        scheduler.add(request("a", 4))
    batch = scheduler.schedule()
    assert batch is None or batch.slices


def test_a_request_that_comes_back_runs_before_later_ones_that_were_adopted() -> None:
    scheduler = lending(request("a", 7, 8), request("b", 7, 8), num_blocks=4)
    a, b = scheduler.lend()
    scheduler.reserve([b])
    scheduler.adopt(b, sampled(b))
    scheduler.return_lent([a])
    scheduler.lending = False
    preempted: list[str] = []
    while (batch := scheduler.schedule()) is not None:
        preempted += names(batch.preempted)
        scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])
    assert preempted == ["b"], "the latest arrival yields"


def test_a_preempted_prefill_does_not_hold_up_what_has_begun() -> None:
    scheduler = Scheduler(config(num_blocks=11, max_batch_tokens=12, prefill_chunk_tokens=2))
    first, long, late = request("first", 4, 30), request("long", 30, 2), request("late", 4, 20)
    for sequence in (first, long, late):
        scheduler.add(sequence)
    step(scheduler)
    scheduler.lending = True
    while long.block_table:
        step(scheduler)
    if long.num_emitted or not late.num_emitted or late.block_table:
        pytest.fail("the case is not made: both are to be preempted, the prefill before its first token")
    while scheduler.has_work:
        step(scheduler)
    assert first.finished
    assert late.finished, "its tokens stop for as long as the pair lasts"


class Lending(RuleBasedStateMachine):
    """Everything that the two members of a pair do with a scheduler, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=10,
                block_size=2,
                max_num_sequences=4,
                max_batch_tokens=7,
                prefill_chunk_tokens=3,
                max_queued_requests=5,
            )
        )
        self.all: dict[str, Sequence] = {}
        self.accepted: set[str] = set()
        self.lent: dict[str, Sequence] = {}
        """Out of the queue, and accepted here."""
        self.guests: dict[str, Sequence] = {}
        """Another instance's, with blocks here."""
        self.flying: ScheduledBatch | None = None
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, str] = {}
        self.disowned: set[str] = set()

    def record(self, outputs: Iterable[TokenOutput | None]) -> None:
        for out in outputs:
            if out is None:
                continue
            name = out.request_id
            assert name not in self.endings, "output after the terminal"
            assert name not in self.disowned, "output of a request that is another's"
            assert out.offset == len(self.tokens[name])
            self.tokens[name] += out.token_ids
            if out.finish_reason is not None:
                self.endings[name] = out.finish_reason

    def make(self, prompt_tokens: int, max_tokens: int) -> Sequence:
        name = f"r{len(self.all)}"
        sequence = self.all[name] = request(name, prompt_tokens, max_tokens)
        self.tokens[name] = []
        return sequence

    @rule(prompt_tokens=st.integers(1, 9), max_tokens=st.integers(1, 6))
    def add(self, prompt_tokens: int, max_tokens: int) -> None:
        sequence = self.make(prompt_tokens, max_tokens)
        try:
            self.scheduler.add(sequence)
        except Overloaded:
            return
        self.accepted.add(sequence.request_id)

    @rule()
    def lend(self) -> None:
        self.scheduler.lending = True
        lent = self.scheduler.lend()
        assert [s.id for s in lent] == sorted(s.id for s in lent)
        assert not any(s.finished or s.num_emitted or s.block_table for s in lent)
        self.lent |= {s.request_id: s for s in lent}

    @precondition(lambda self: self.scheduler.lending)
    @rule()
    def stop_lending(self) -> None:
        back = [s for s in self.lent.values() if not s.held]
        self.scheduler.lending = False
        self.scheduler.return_lent(reversed(back))
        self.lent = {name: s for name, s in self.lent.items() if s.held}

    @precondition(lambda self: any(not s.held for s in self.lent.values()))
    @rule(data=st.data())
    def return_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, s in self.lent.items() if not s.held)))
        self.scheduler.return_lent([self.lent.pop(name)])

    @precondition(lambda self: any(not s.held for s in self.lent.values()))
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        names = sorted(n for n, s in self.lent.items() if not s.held)
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        self.reserve_all([self.lent[n] for n in chosen])

    @rule(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=3))
    def reserve_guests(self, sizes: list[tuple[int, int]]) -> None:
        guests = [self.make(*size) for size in sizes]
        if self.reserve_all(guests):
            self.guests |= {s.request_id: s for s in guests}

    def reserve_all(self, sequences: list[Sequence]) -> bool:
        used = self.scheduler.pool.num_used
        done = self.scheduler.reserve(sequences)
        for sequence in sequences:
            assert sequence.held == done
            assert len(sequence.block_table) * 2 >= sequence.num_tokens or not done
        assert done or self.scheduler.pool.num_used == used
        return done

    def held(self) -> list[str]:
        return sorted(n for n, s in (self.lent | self.guests).items() if s.held)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.held()))
        sequence = (self.lent | self.guests)[name]
        ended = sequence.finished
        output = self.scheduler.adopt(sequence, sampled(sequence))
        assert (output is None) == ended
        if self.guests.pop(name, None) is not None and not ended:
            self.accepted.add(name)
        self.lent.pop(name, None)
        self.record([output])

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.held()))
        sequence = self.guests.pop(name, None) or self.lent[name]
        self.scheduler.release([sequence])
        assert sequence.block_table == []

    @precondition(lambda self: any(not s.held for s in self.lent.values()))
    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, s in self.lent.items() if not s.held)))
        sequence = self.lent.pop(name)
        if not sequence.finished:
            self.disowned.add(name)
        self.scheduler.disown([sequence])

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A layer failed: the batch's blocks are given back first."""
        sequence = self.lent.pop(data.draw(st.sampled_from(sorted(self.lent))))
        self.scheduler.release([sequence])
        self.scheduler.abort([sequence], ERROR)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.all)))
        known = self.scheduler.cancel(name, 0)
        if known is None and name in self.guests:
            self.guests[name].finished = True  # as the target does with what it only holds
        assert known is None or name in self.accepted

    @precondition(lambda self: self.flying is None)
    @rule()
    def schedule(self) -> None:
        self.flying = self.scheduler.schedule()
        if self.flying is not None:
            assert sum(p.num_tokens for p in self.flying.slices) <= 7
            for piece in self.flying.slices:
                assert not piece.sequence.held
                assert piece.sequence.request_id not in self.lent, "a lent request was admitted"

    @precondition(lambda self: self.flying is not None)
    @rule(fails=st.integers(0, 9))
    def land(self, fails: int) -> None:
        batch, self.flying = self.flying, None
        assert batch is not None
        self.record(self.scheduler.take_ended())
        if fails == 0:
            self.record(self.scheduler.fail(batch, ERROR))
        else:
            self.record(self.scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample]))

    @invariant()
    def no_block_is_lost_and_no_request_forgotten(self) -> None:
        scheduler = self.scheduler
        flying = [p.sequence for p in self.flying.slices] if self.flying else []
        lent_here = [s for s in self.lent.values() if not s.finished]
        queued = [*scheduler._running, *scheduler._waiting]
        tables = {id(s): s.block_table for s in [*queued, *flying, *self.lent.values(), *self.guests.values()]}
        scheduler.pool.check(tables.values())
        assert {s.key for s in [*queued, *lent_here]} == set(scheduler._by_key)
        waiting = [s.id for s in scheduler._waiting]
        assert waiting == sorted(waiting)
        assert scheduler._waiting_tokens == sum(s.num_tokens for s in scheduler._waiting)
        assert not any(s.finished for s in queued)
        assert len(scheduler._running) + len(self.held()) <= 4
        assert len(scheduler._held) == len(self.held())
        scheduler.check()

    @invariant()
    def the_load_is_that_of_all_requests(self) -> None:
        load = self.scheduler.load()
        lent = [s for s in self.lent.values() if not s.finished]
        running, waiting = self.scheduler._running, self.scheduler._waiting
        left = sum(len(s.tokens) - s.num_computed for s in running if len(s.tokens) - s.num_computed > 1)
        assert load.queued_requests == len(lent) + len(waiting)
        assert load.queued_tokens == sum(s.num_tokens for s in [*lent, *waiting]) + left
        assert load.running_requests == len(running)
        assert load.running_tokens == sum(s.num_computed for s in running)
        assert load.blocks_used == self.scheduler.pool.num_used

    def teardown(self) -> None:
        """The pair ends: whatever happened, every request ends once, with the right tokens."""
        if self.flying is not None:
            self.land(1)
        scheduler = self.scheduler
        scheduler.release(self.guests.values())
        self.guests.clear()
        for sequence in self.lent.values():
            scheduler.release([sequence])
        self.stop_lending()
        for _ in range(2000):
            self.record(scheduler.take_ended())
            if not scheduler.has_work:
                break
            self.schedule()
            if self.flying is not None:
                self.land(1)
        assert not scheduler.has_work
        assert scheduler.pool.num_used == scheduler.num_requests == 0
        assert set(self.endings) == self.accepted - self.disowned
        for name, reason in self.endings.items():
            sequence, got = self.all[name], self.tokens[name]
            tokens = list(sequence.prompt)
            while len(tokens) < len(sequence.prompt) + len(got):
                tokens.append(next_token(tokens))
            assert got == tokens[len(sequence.prompt) :]
            assert reason != "length" or len(got) == min(sequence.params.max_tokens, 20 - len(sequence.prompt))


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
