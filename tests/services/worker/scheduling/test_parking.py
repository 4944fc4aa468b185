"""The scheduler of a prefill instance: requests that are parked with their first token, to be decoded elsewhere."""

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
from services.worker.scheduling.schedule import SampledToken, ScheduledBatch
from services.worker.scheduling.scheduler import SchedulerConfig
from services.worker.scheduling.sequence import Sequence, sequence_of, submit_of
from shared.errors import Overloaded
from shared.messages.generation import DecodePlace
from tests.services.worker.scheduling.test_lending import ERROR, config, in_batch, names, request, sampled, step

PLACE = DecodePlace(worker_id="w1", instance_id="i1")


def departing(name: str, prompt_tokens: int = 5, max_tokens: int = 4, *, gateway: str = "g") -> Sequence:
    """A request that is to be decoded elsewhere."""
    sequence = request(name, prompt_tokens, max_tokens, gateway=gateway)
    sequence.decode_at = PLACE
    return sequence


def parked(*sequences: Sequence, **changes: int) -> Scheduler:
    """A scheduler that has computed these requests' prompts; who waits for them has been told."""
    scheduler = Scheduler(config(**changes))
    for sequence in sequences:
        scheduler.add(sequence)
    while any(not s.num_emitted for s in sequences):
        step(scheduler)
    scheduler.take_departing()
    scheduler.check()
    return scheduler


def expected(sequence: Sequence, count: int) -> list[int]:
    tokens = list(sequence.prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(sequence.prompt) :]


def test_with_its_first_token_it_is_parked_with_its_seat_and_blocks() -> None:
    scheduler = Scheduler(config(max_num_sequences=1))
    leaves, waits = departing("leaves"), request("waits")
    scheduler.add(leaves)
    scheduler.add(waits)
    (output,) = step(scheduler)
    assert (output.request_id, output.offset, output.finish_reason) == ("leaves", 0, None)
    assert [(s.request_id, token.token_id) for s, token in scheduler.take_departing()] == [("leaves", leaves.output[0])]
    assert scheduler.take_departing() == [], "it is told once"
    assert scheduler.schedule() is None, "it is not decoded, and its seat is taken"
    assert len(leaves.block_table) == 2
    assert scheduler.num_requests == 2
    scheduler.check()


def test_chunks_before_the_last_do_not_park() -> None:
    scheduler = Scheduler(config(prefill_chunk_tokens=2))
    scheduler.add(departing("a", 5))
    for _ in range(2):
        assert step(scheduler) == []
        assert scheduler.take_departing() == []
    step(scheduler)
    assert names(s for s, _ in scheduler.take_departing()) == ["a"]
    assert not scheduler.has_work


def test_what_is_parked_counts_as_running() -> None:
    scheduler = parked(departing("a", 6), departing("b", 7))
    scheduler.add(request("c", 8))
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.running_requests, load.running_tokens) == (1, 8, 2, 13)
    assert load.blocks_used == 4
    step(scheduler)
    load = scheduler.load()
    assert (load.queued_requests, load.running_requests, load.running_tokens) == (0, 3, 21)


@pytest.mark.parametrize("token", ["last", "failed"])
def test_what_ends_with_its_first_token_is_told_and_not_parked(token: str) -> None:
    scheduler = Scheduler(config())
    sequence = departing("a", max_tokens=1 if token == "last" else 4)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    assert batch is not None
    first = Sampled(0, error=ERROR) if token == "failed" else sampled(sequence)
    (output,) = scheduler.complete(batch, [first])
    assert output.finish_reason == ("error" if token == "failed" else "length")
    assert scheduler.take_departing() == [(sequence, first)]
    assert sequence.finished
    assert not sequence.held
    assert scheduler.num_requests == scheduler.pool.num_used == 0
    assert not scheduler.has_work
    scheduler.check()


def test_an_unparked_request_is_decoded_at_its_place_with_the_tokens_of_an_undisturbed_run() -> None:
    before, leaves, after = request("before", max_tokens=9), departing("leaves"), request("after", max_tokens=9)
    scheduler = parked(before, leaves, after)
    assert in_batch(scheduler) == ["before", "after"]
    scheduler.unpark(leaves)
    assert leaves.decode_at is None
    scheduler.unpark(leaves)  # once more changes nothing
    assert in_batch(scheduler) == ["before", "leaves", "after"]
    while scheduler.has_work:
        step(scheduler)
    assert leaves.output == expected(leaves, 4)
    assert scheduler.take_departing() == []
    assert scheduler.pool.num_used == scheduler.num_requests == 0


def test_an_unparked_request_that_is_preempted_does_not_leave_again() -> None:
    first, leaves = request("a", 7, 8), departing("b", 7, 8)
    scheduler = parked(first, leaves, num_blocks=4)
    scheduler.unpark(leaves)
    while leaves.block_table:
        step(scheduler)
    assert not leaves.finished, "it was preempted"
    while scheduler.has_work:
        step(scheduler)
    assert leaves.output == expected(leaves, 8)
    assert scheduler.take_departing() == []


def test_a_prompt_that_is_preempted_half_way_leaves_once_it_is_computed() -> None:
    early, leaves = request("early", 8, 12), departing("leaves", 8, 4)
    scheduler = Scheduler(config(num_blocks=5, max_batch_tokens=3, prefill_chunk_tokens=1))
    scheduler.add(early)
    while not early.num_emitted:
        step(scheduler)
    scheduler.add(leaves)
    preempted: list[str] = []
    told: list[str] = []
    for _ in range(60):
        batch = scheduler.schedule()
        if batch is None:
            break
        preempted += names(batch.preempted)
        scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])
        told += names(s for s, _ in scheduler.take_departing())
        scheduler.check()
    assert preempted == ["leaves"]
    assert told == ["leaves"]
    assert leaves.output == expected(leaves, 1)


def test_a_request_that_was_parted_with_leaves_without_a_word() -> None:
    a = departing("a")
    scheduler = parked(a)
    scheduler.part_with(a)
    assert scheduler.num_requests == scheduler.pool.num_used == scheduler.load().running_requests == 0
    assert scheduler.take_ended() == []
    assert scheduler.cancel("a", 0) is None
    for late in (scheduler.part_with, scheduler.unpark):
        late(a)
        scheduler.check()
    assert not scheduler.has_work
    scheduler.add(request("a"))  # it may come again


@pytest.mark.parametrize("end", ["unpark", "part_with", "release"])
@pytest.mark.parametrize("by", ["cancel", "gateway", "abort"])
def test_a_parked_request_ends_once_and_keeps_its_blocks_until_nobody_reads_them(by: str, end: str) -> None:
    a, other = departing("a", gateway="gone"), departing("other")
    scheduler = parked(a, other)
    if by == "cancel":
        assert scheduler.cancel("a", 0) is a
        assert scheduler.cancel("a", 0) is None
    elif by == "gateway":
        assert scheduler.cancel_gateway(Gone("gone")) == [a]
    else:
        scheduler.abort([a], ERROR)
    assert names_of(scheduler.take_ended()) == ["a"]
    assert a.block_table, "its KV may be on its way out"
    scheduler.check()
    assert scheduler.num_requests == 1
    if end == "release":
        scheduler.release([a])
    else:
        getattr(scheduler, end)(a)
    assert a.block_table == []
    scheduler.check()
    assert scheduler.take_ended() == []
    assert not scheduler.has_work, "the other one stays parked"
    assert scheduler.load().running_requests == 1
    scheduler.release([a])
    scheduler.part_with(other)
    assert scheduler.pool.num_used == 0


def names_of(outputs: Iterable[TokenOutput]) -> list[str]:
    return [o.request_id for o in outputs]


def test_all_parked_requests_end_when_everything_is_aborted() -> None:
    a, b = departing("a"), departing("b")
    scheduler = parked(a, b)
    scheduler.add(request("c"))
    assert names(scheduler.abort_all(ERROR)) == ["a", "b", "c"]
    assert names_of(scheduler.take_ended()) == ["a", "b", "c"]
    assert scheduler.num_requests == 0
    scheduler.release([a, b])
    assert scheduler.pool.num_used == 0
    scheduler.check()


def test_a_step_that_fails_leaves_parked_requests_alone() -> None:
    a = departing("a")
    scheduler = parked(a)
    scheduler.add(request("b"))
    batch = scheduler.schedule()
    assert batch is not None
    assert names_of(scheduler.fail(batch, ERROR)) == ["b"]
    assert scheduler.num_requests == 1
    scheduler.unpark(a)
    assert in_batch(scheduler) == ["a"]


def test_a_cancel_while_the_last_chunk_is_computed_parks_nothing() -> None:
    a = departing("a")
    scheduler = Scheduler(config())
    scheduler.add(a)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.cancel("a", 0)
    assert scheduler.complete(batch, [sampled(a)]) == []
    assert scheduler.take_departing() == []
    assert scheduler.pool.num_used == scheduler.num_requests == 0
    assert not a.held


def test_blocks_of_parked_requests_are_nobodys_to_take() -> None:
    runs, leaves = request("runs", 4, 20), departing("leaves", 11)
    scheduler = parked(runs, leaves, num_blocks=4)  # one and three blocks
    assert scheduler.has_work
    assert scheduler.schedule() is None, "its second block is not free"
    assert leaves.block_table
    assert not scheduler.reserve([request("guest", 1)])
    scheduler.part_with(leaves)
    assert in_batch(scheduler) == ["runs"]


@pytest.mark.parametrize(("computed_here", "work"), [(True, 5), (False, 0)])
def test_a_prefix_that_another_instance_computed_is_not_this_ones_work(computed_here: bool, work: int) -> None:
    guest = request("guest", 5)
    scheduler = Scheduler(config())
    scheduler.reserve([guest])
    scheduler.adopt(guest, sampled(guest), computed_here=computed_here)
    while scheduler.has_work:
        step(scheduler)
    assert guest.output == expected(guest, 4)
    load = scheduler.load()
    assert (load.prefill_tokens_total, load.decode_tokens_total) == (work, 3), "the first token comes of the prompt"


def test_an_adopted_request_that_is_to_be_decoded_elsewhere_is_parked() -> None:
    guest = departing("guest")
    scheduler = Scheduler(config())
    scheduler.reserve([guest])
    output = scheduler.adopt(guest, sampled(guest))
    assert output is not None
    assert names(s for s, _ in scheduler.take_departing()) == ["guest"]
    assert scheduler.schedule() is None
    assert scheduler.num_requests == 1
    scheduler.check()
    scheduler.unpark(guest)
    while scheduler.has_work:
        step(scheduler)
    assert guest.output == expected(guest, 4)
    assert scheduler.pool.num_used == 0


def test_lent_requests_count_as_queued_beside_one_that_ended_while_it_was_parked() -> None:
    a = departing("a")
    scheduler = parked(a)
    scheduler.add(request("lent", 6))
    scheduler.lending = True
    scheduler.lend()
    scheduler.cancel("a", 0)  # not released yet
    load = scheduler.load()
    assert (load.queued_requests, load.queued_tokens) == (1, 6)


def test_a_request_as_another_instance_has_to_know_it() -> None:
    sequence = departing("a")
    parked(sequence)
    message = submit_of(sequence, "i9", "m")
    assert (message.request_id, message.attempt, message.gateway_id) == (*sequence.key, sequence.gateway_id)
    assert (message.instance_id, message.model, message.decode_at) == ("i9", "m", PLACE)
    there = sequence_of(message, (7,), arrived_s=3.0)
    assert (there.prompt, there.output, there.tokens) == (sequence.prompt, sequence.output, sequence.tokens)
    assert (there.params, there.decode_at, there.arrived_s) == (sequence.params, PLACE, 3.0)
    assert there.stop_ids == {7}
    assert there.num_emitted == there.num_computed == 0
    sequence.append(1)
    assert len(message.output_token_ids) == 1, "a message does not change"


class Parking(RuleBasedStateMachine):
    """Ordinary and departing requests, and everything that happens to those, in any order."""

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
        self.leaving: dict[str, Sequence] = {}
        """Parked, and its shipment under way."""
        self.told: set[str] = set()
        """By ``take_departing``."""
        self.parted: set[str] = set()
        self.guests: dict[str, Sequence] = {}
        self.flying: ScheduledBatch | None = None
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, str] = {}

    def record(self, outputs: Iterable[TokenOutput]) -> None:
        for out in outputs:
            name = out.request_id
            assert name not in self.endings, "output after the terminal"
            assert name not in self.parted, "output of a request that is another's"
            assert out.offset == len(self.tokens[name])
            assert name not in self.leaving or not out.token_ids, "a parked request was decoded"
            self.tokens[name] += out.token_ids
            if out.finish_reason is not None:
                self.endings[name] = out.finish_reason

    def make(self, prompt_tokens: int, max_tokens: int, leaves: bool) -> Sequence:
        name = f"r{len(self.all)}"
        sequence = request(name, prompt_tokens, max_tokens, gateway=f"g{len(self.all) % 2}")
        sequence.decode_at = PLACE if leaves else None
        self.all[name], self.tokens[name] = sequence, []
        return sequence

    @rule(prompt_tokens=st.integers(1, 9), max_tokens=st.integers(1, 6), leaves=st.booleans())
    def add(self, prompt_tokens: int, max_tokens: int, leaves: bool) -> None:
        sequence = self.make(prompt_tokens, max_tokens, leaves)
        try:
            self.scheduler.add(sequence)
        except Overloaded:
            return
        self.accepted.add(sequence.request_id)

    @precondition(lambda self: self.flying is None)
    @rule()
    def schedule(self) -> None:
        self.flying = self.scheduler.schedule()
        if self.flying is not None:
            assert not any(p.sequence.held for p in self.flying.slices)

    @precondition(lambda self: self.flying is not None)
    @rule(fails=st.integers(0, 9), tell=st.integers(0, 4))
    def land(self, fails: int, tell: int) -> None:
        batch, self.flying = self.flying, None
        assert batch is not None
        self.record(self.scheduler.take_ended())
        if fails == 0:
            self.record(self.scheduler.fail(batch, ERROR))
        else:
            self.record(self.scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample]))
        if tell:
            self.take_departing()

    @rule()
    def take_departing(self) -> None:
        for sequence, token in self.scheduler.take_departing():
            self.tell(sequence, token)

    def tell(self, sequence: Sequence, token: SampledToken) -> None:
        name = sequence.request_id
        assert name not in self.told, "it leaves once"
        assert sequence.output == [token.token_id]
        self.told.add(name)
        if sequence.held:
            self.leaving[name] = sequence
        else:
            assert sequence.finished

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), how=st.sampled_from(["unpark", "part_with"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        sequence = self.leaving.pop(name)
        ended = sequence.finished
        getattr(self.scheduler, how)(sequence)
        assert not sequence.held
        if how == "part_with" and not ended:
            self.parted.add(name)
        assert (sequence.block_table == []) == (ended or how == "part_with")

    @precondition(lambda self: any(s.finished for s in self.leaving.values()))
    @rule()
    def release(self) -> None:
        ended = {name: s for name, s in self.leaving.items() if s.finished}
        self.scheduler.release(ended.values())
        assert not any(s.block_table for s in ended.values())
        self.leaving = {name: s for name, s in self.leaving.items() if not s.finished}

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.all)))
        known = self.scheduler.cancel(name, 0)
        assert known is None or (name in self.accepted and name not in self.parted)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def cancel_a_parked_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        ended = self.leaving[name].finished
        assert (self.scheduler.cancel(name, 0) is None) == ended

    @rule(gateway=st.sampled_from(["g0", "g1"]), often=st.integers(0, 3))
    def cancel_gateway(self, gateway: str, often: int) -> None:
        if not often:
            self.scheduler.cancel_gateway(Gone(gateway))

    @rule(often=st.integers(0, 9))
    def abort_all(self, often: int) -> None:
        if not often:
            self.scheduler.abort_all(ERROR)
            assert self.scheduler.num_requests == 0

    @rule(prompt_tokens=st.integers(1, 9), max_tokens=st.integers(1, 6), leaves=st.booleans())
    def reserve(self, prompt_tokens: int, max_tokens: int, leaves: bool) -> None:
        guest = self.make(prompt_tokens, max_tokens, leaves)
        if self.scheduler.reserve([guest]):
            self.guests[guest.request_id] = guest

    @precondition(lambda self: self.guests)
    @rule(data=st.data(), comes=st.booleans())
    def guest_ends(self, data: st.DataObject, comes: bool) -> None:
        guest = self.guests.pop(data.draw(st.sampled_from(sorted(self.guests))))
        if not comes:
            self.scheduler.release([guest])
            assert guest.block_table == []
            return
        self.accepted.add(guest.request_id)
        output = self.scheduler.adopt(guest, sampled(guest))
        assert output is not None
        self.record([output])
        self.take_departing()

    @invariant()
    def no_block_is_lost_and_no_seat_is_taken_twice(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        held = [s for s in self.all.values() if s.held]
        assert len(scheduler._running) + len(held) <= 4
        assert not any(s.held for s in scheduler._running)
        flying = [p.sequence for p in self.flying.slices] if self.flying else []
        holders = {id(s): s for s in [*scheduler._running, *held, *flying]}
        scheduler.pool.check(s.block_table for s in holders.values())
        assert all(s.block_table for s in held)
        untold = {s.request_id for s, _ in scheduler._departing}
        assert {s.request_id for s in held} == set(self.leaving) | set(self.guests) | {
            name for name in untold if self.all[name].held
        }

    @invariant()
    def the_load_is_that_of_all_requests(self) -> None:
        scheduler, load = self.scheduler, self.scheduler.load()
        running = [*scheduler._running, *(s for s in self.all.values() if s.held and s.num_emitted)]
        assert load.running_requests == len(running)
        assert load.running_tokens == sum(s.num_computed for s in running)
        assert load.queued_requests == len(scheduler._waiting)
        assert load.blocks_used == scheduler.pool.num_used

    def teardown(self) -> None:
        """Whatever happened, every request ends once, here or elsewhere, with the right tokens."""
        if self.flying is not None:
            self.land(1, 1)
        scheduler = self.scheduler
        scheduler.release(self.guests.values())
        for _ in range(2000):
            self.record(scheduler.take_ended())
            self.take_departing()
            for sequence in self.leaving.values():
                scheduler.unpark(sequence)
            self.leaving.clear()
            if not scheduler.has_work:
                break
            self.schedule()
            if self.flying is not None:
                self.land(1, 1)
        assert not scheduler.has_work
        assert scheduler.pool.num_used == scheduler.num_requests == 0
        assert set(self.endings) | self.parted == self.accepted
        assert not set(self.endings) & self.parted
        for name in self.accepted:
            assert self.tokens[name] == expected(self.all[name], len(self.tokens[name]))
        for name, reason in self.endings.items():
            sequence, got = self.all[name], self.tokens[name]
            assert reason != "length" or len(got) == min(sequence.params.max_tokens, 20 - len(sequence.prompt))


TestParking = Parking.TestCase
TestParking.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
