"""Everything that may happen to requests while up to two batches, and layers of a pair's batches, are in flight."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.schedule import PartialBatch, Sampled, SchedulerConfig
from services.worker.core.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import Overloaded
from shared.messages.generation import StreamPart
from tests.services.worker.core.scheduling.harness import ERROR, PLACE
from tests.services.worker.core.scheduling.pipeline import Pipeline, placed_request, token_at, wanted

PROMPTS, LENGTHS = st.integers(1, 9), st.integers(1, 14)
STOPS = st.sampled_from([(), (), (3,), (1, 4)])
OFTEN_NONE = st.sampled_from([0, 0, 0, 0, 0, 1, 3])


def first_token(sequence: ActiveSequence) -> Sampled:
    """The one behind all that is known."""
    return Sampled(token_at(sequence.request_id, sequence.num_tokens))


class TwoInFlight(RuleBasedStateMachine):
    """A scheduler with little room, what it was given, what it said, and what is in flight."""

    prefix_cache = False

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
                prefix_cache=self.prefix_cache,
            )
        )
        self.pipeline = Pipeline(self.scheduler)
        self.all: dict[str, ActiveSequence] = {}
        self.accepted: set[str] = set()
        self.left: set[str] = set()
        """They are another instance's now."""
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, str] = {}
        self.partial: list[PartialBatch] = []
        self.asked: dict[str, ActiveSequence] = {}
        """Held back: they are to be held once their landing has come."""
        self.leaving: dict[str, ActiveSequence] = {}
        """Held for decode."""
        self.lent: dict[str, ActiveSequence] = {}
        self.guests: dict[str, ActiveSequence] = {}
        """Another instance's, with blocks here."""
        self.incoming: dict[str, ActiveSequence] = {}
        """Adopted, and KV is on its way."""

    def make(self, prompt_tokens: int, max_tokens: int, **changes: object) -> ActiveSequence:
        name = f"r{len(self.all)}"
        gateway = f"g{len(self.all) % 2}"
        sequence = placed_request(name, prompt_tokens, max_tokens, gateway=gateway, **changes)  # type: ignore[arg-type]
        self.all[name], self.tokens[name] = sequence, []
        return sequence

    def record(self, outputs: Iterable[StreamPart | None]) -> None:
        for out in outputs:
            if out is None:
                continue
            name = out.request_id
            assert name not in self.endings, "output after the terminal"
            assert name not in self.left, "output of a request that is another's"
            assert name not in self.leaving or not out.token_ids, "a held request was decoded"
            assert out.offset == len(self.tokens[name])
            self.tokens[name] += out.token_ids
            tokens, reason = wanted(self.all[name], self.scheduler.config.limit_tokens)
            got = self.tokens[name]
            assert got == tokens[: len(got)]
            if out.finish_reason is not None:
                self.endings[name] = out.finish_reason
            by_itself = out.finish_reason in ("stop", "length")
            assert by_itself == (bool(out.token_ids) and got == tokens), "it ends with its last token"
            assert not by_itself or out.finish_reason == reason

    def draw(self, data: st.DataObject, among: Iterable[str]) -> str:
        return data.draw(st.sampled_from(sorted(among)))

    # Requests come, and are computed.

    @rule(
        prompt_tokens=PROMPTS,
        max_tokens=LENGTHS,
        stops=STOPS,
        min_tokens=st.integers(0, 3),
        leaves=OFTEN_NONE,
        alone=OFTEN_NONE,
    )
    def add(
        self, prompt_tokens: int, max_tokens: int, stops: tuple[int, ...], min_tokens: int, leaves: int, alone: int
    ) -> None:
        place = PLACE if leaves else None
        one = self.make(prompt_tokens, max_tokens, stops=stops, min_tokens=min_tokens, decode_at=place, alone=alone)
        try:
            self.scheduler.add(one)
        except Overloaded:
            return
        self.accepted.add(one.request_id)

    @precondition(lambda self: len(self.pipeline.batches) < MAX_IN_FLIGHT)
    @rule(twice=st.booleans())
    def schedule(self, twice: bool) -> None:
        batch = self.pipeline.schedule()
        assert batch is None or not any(p.sequence.request_id in self.lent for p in batch.slices)
        if twice and len(self.pipeline.batches) < MAX_IN_FLIGHT:
            self.schedule(False)

    @precondition(lambda self: self.pipeline.batches)
    @rule()
    def land(self) -> None:
        self.record(self.scheduler.take_ended())
        self.record(self.pipeline.land())

    @rule(steps=st.integers(1, 4))
    def run_ahead(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.pipeline.batches) < MAX_IN_FLIGHT:
                self.schedule(True)
            if self.pipeline.batches:
                self.land()

    @precondition(lambda self: self.pipeline.batches)
    @rule(data=st.data())
    def land_with_a_row_error(self, data: st.DataObject) -> None:
        places = range(len(self.pipeline.batches[0].slices))
        self.record(self.scheduler.take_ended())
        self.record(self.pipeline.land(row_errors={data.draw(st.sampled_from(places)): ERROR}))

    @precondition(lambda self: self.pipeline.batches)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        places = st.sampled_from(range(len(self.pipeline.batches[0].slices)))
        failures = dict.fromkeys(data.draw(st.sets(places, min_size=1)), ERROR)
        self.record(self.scheduler.take_ended())
        self.record(self.pipeline.land(failures))

    # They end from outside.

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self.draw(data, self.all)
        known = self.scheduler.cancel(name, 0)
        if known is None and name in self.guests:
            self.guests[name].finished = True  # as the target does with what it only holds
        assert known is None or name in self.accepted

    @precondition(lambda self: self.pipeline.batches)
    @rule(data=st.data())
    def cancel_one_in_flight(self, data: st.DataObject) -> None:
        name = self.draw(data, (p.sequence.request_id for p in self.pipeline.batches[-1].slices))
        self.scheduler.cancel(name, 0)

    @rule(gateway=st.sampled_from(["g0", "g1"]), often=st.integers(0, 5))
    def cancel_gateway(self, gateway: str, often: int) -> None:
        if not often:
            self.scheduler.cancel_gateway(Gone(gateway, ""))

    @rule(data=st.data(), often=st.integers(0, 9))
    def abort(self, data: st.DataObject, often: int) -> None:
        if not often:
            self.scheduler.abort_all(ERROR)
            assert self.scheduler.num_requests == 0
        elif often < 4 and self.accepted - self.left:
            self.scheduler.abort([self.all[self.draw(data, self.accepted - self.left)]], ERROR)

    # They are decoded elsewhere.

    @precondition(lambda self: self.scheduler.table.running)
    @rule(data=st.data(), goes_on=st.booleans())
    def ask_to_hold(self, data: st.DataObject, goes_on: bool) -> None:
        sequence = self.all[self.draw(data, (s.request_id for s in self.scheduler.table.running))]
        self.asked[sequence.request_id] = sequence
        self.scheduler.table.held_back.add(id(sequence))
        if goes_on and len(self.pipeline.batches) < MAX_IN_FLIGHT:
            self.schedule(False)

    @precondition(lambda self: any(not self.scheduler.table.flies(s) for s in self.asked.values()))
    @rule()
    def hold(self) -> None:
        """Those whose landing has come."""
        table = self.scheduler.table
        for name, sequence in [(n, s) for n, s in self.asked.items() if not table.flies(s)]:
            del self.asked[name]
            decodes = sequence in table.running and sequence.decodes
            assert self.scheduler.reservations.hold_to_move(sequence) == decodes
            table.held_back.discard(id(sequence))
            if decodes:
                self.leaving[name] = sequence

    @precondition(lambda self: self.scheduler.reservations.has_prefilled)
    @rule()
    def take_prefilled(self) -> None:
        for sequence, token in self.scheduler.reservations.take_prefilled():
            assert token.error is not None or sequence.output[-1] == token.token_id
            if sequence.reserved:
                self.leaving[sequence.request_id] = sequence

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), here=st.booleans())
    def leave(self, data: st.DataObject, here: bool) -> None:
        name = self.draw(data, self.leaving)
        sequence = self.leaving.pop(name)
        if here:
            self.scheduler.reservations.decode_here(sequence)
            return
        if not sequence.finished:
            self.left.add(name)
        self.scheduler.reservations.release_to_decoder(sequence)

    # Their layers are computed outside of steps.

    @rule()
    def lend(self) -> None:
        self.scheduler.table.lending = True
        self.lent |= {s.request_id: s for s in self.scheduler.lend()}

    @precondition(lambda self: self.scheduler.table.lending)
    @rule()
    def stop_lending(self) -> None:
        self.scheduler.table.lending = False
        back = [n for n, s in self.lent.items() if not s.reserved]
        self.scheduler.take_back([self.lent.pop(n) for n in reversed(back)])

    @precondition(lambda self: any(not s.reserved for s in self.lent.values()))
    @rule(data=st.data(), to=st.sampled_from(["here", "target", "reserved", "reserved"]))
    def lent_one_goes(self, data: st.DataObject, to: str) -> None:
        name = self.draw(data, [n for n, s in self.lent.items() if not s.reserved])
        sequence = self.lent[name]
        if to == "reserved":
            self.scheduler.reservations.reserve([sequence])
            return
        del self.lent[name]
        if to == "here":
            self.scheduler.take_back([sequence])
            return
        if not sequence.finished:
            self.left.add(name)
        self.scheduler.release_to_target([sequence])

    @rule(prompt_tokens=PROMPTS, max_tokens=LENGTHS, stops=STOPS, leaves=OFTEN_NONE)
    def reserve(self, prompt_tokens: int, max_tokens: int, stops: tuple[int, ...], leaves: int) -> None:
        guest = self.make(prompt_tokens, max_tokens, stops=stops, decode_at=PLACE if leaves else None)
        if self.scheduler.reservations.reserve([guest]):
            self.guests[guest.request_id] = guest

    def reserved(self) -> list[str]:
        return [n for n, s in (self.lent | self.guests).items() if s.reserved]

    def quiet(self) -> list[str]:
        """Of those, by which nothing in flight is touched."""
        return [n for n in self.reserved() if not self.scheduler.table.flies(self.all[n])]

    @precondition(lambda self: self.reserved())
    @rule(data=st.data())
    def fly_partial(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.reserved())), min_size=1, unique=True))
        self.partial.append(self.pipeline.fly_partial(self.all[n] for n in chosen))

    @precondition(lambda self: self.partial)
    @rule()
    def land_partial(self) -> None:
        self.pipeline.land_partial(self.partial.pop(0))

    @precondition(lambda self: self.quiet())
    @rule(data=st.data(), kv_here=st.booleans())
    def adopt(self, data: st.DataObject, kv_here: bool) -> None:
        name = self.draw(data, self.quiet())
        sequence = self.all[name]
        if kv_here:
            self.pipeline.received(sequence, sequence.num_tokens)
        self.lent.pop(name, None)
        self.guests.pop(name, None)
        if not sequence.finished:
            self.accepted.add(name)
        if not kv_here:
            self.incoming[name] = sequence
        self.record(self.scheduler.take_ended())
        self.record([self.scheduler.reservations.adopt(sequence, first_token(sequence), kv_here=kv_here)])

    @precondition(lambda self: self.incoming)
    @rule(data=st.data(), lost=st.booleans())
    def kv_comes_or_not(self, data: st.DataObject, lost: bool) -> None:
        sequence = self.incoming.pop(self.draw(data, self.incoming))
        if lost:
            self.scheduler.reservations.kv_lost([sequence])
            return
        if not sequence.finished:
            # The token that is known already is the next one to compute.
            self.pipeline.received(sequence, sequence.num_computed)
        self.scheduler.reservations.kv_arrived([sequence])

    @precondition(lambda self: self.reserved())
    @rule(data=st.data(), here=st.booleans())
    def release(self, data: st.DataObject, here: bool) -> None:
        """While layers of it are in flight, or not."""
        name = self.draw(data, self.reserved())
        sequence = self.all[name]
        if here:
            if not sequence.finished:
                self.accepted.add(name)
            self.lent.pop(name, None)
            self.guests.pop(name, None)
            self.scheduler.reservations.compute_here([sequence])
        else:
            self.guests.pop(name, None)  # one that is lent still is
            self.scheduler.reservations.release([sequence])
        assert sequence.block_table == []

    # What holds.

    @invariant()
    def blocks_are_their_owners_while_they_are_touched(self) -> None:
        self.scheduler.check()
        self.pipeline.check()

    @invariant()
    def nobody_is_forgotten(self) -> None:
        scheduler, table = self.scheduler, self.scheduler.table
        queued = [*table.running, *table.waiting]
        assert not any(s.finished or s.reserved for s in queued)
        assert len({id(s) for s in queued}) == len(queued)
        assert table.waiting_tokens == sum(len(s.prompt) + len(s.output) for s in table.waiting)
        outside = [*self.lent.values(), *scheduler.reservations.for_decode, *self.incoming.values()]
        assert {s.key for s in [*queued, *outside] if not s.finished} == set(table.accepted)
        held = [s for s in self.all.values() if s.reserved]
        assert len(table.running) + len(held) <= 4

    @invariant()
    def the_load_is_that_of_all_requests(self) -> None:
        load, table = self.scheduler.load(), self.scheduler.table
        assert load.kv_blocks_used == self.scheduler.pool.num_used
        held = self.scheduler.reservations.for_decode
        assert load.running_tokens == sum(s.num_computed for s in [*table.running, *held])

    def teardown(self) -> None:
        """Once everything is back, two batches at a time bring every request to its end."""
        scheduler = self.scheduler
        while self.partial:
            self.land_partial()
        while self.pipeline.batches:
            self.land()
        scheduler.reservations.release(self.guests.values())
        self.guests.clear()
        scheduler.reservations.release(self.lent.values())
        scheduler.reservations.kv_lost(list(self.incoming.values()))
        self.incoming.clear()
        self.stop_lending()
        self.hold()
        for _ in range(2000):
            self.record(scheduler.take_ended())
            self.take_prefilled()
            for sequence in self.leaving.values():
                scheduler.reservations.decode_here(sequence)
            self.leaving.clear()
            if not scheduler.has_work:
                break
            self.schedule(True)
            assert self.pipeline.batches or scheduler.has_work is False or scheduler.reservations.has_prefilled
            if self.pipeline.batches:
                self.land()
            self.blocks_are_their_owners_while_they_are_touched()
        while self.pipeline.batches:
            self.land()
        assert not scheduler.has_work, "somebody starves"
        assert scheduler.pool.num_used == scheduler.num_requests == 0
        assert not scheduler.table.flight
        assert not scheduler.table.torn
        assert set(self.endings) | self.left == self.accepted
        assert not set(self.endings) & self.left


TestTwoInFlight = TwoInFlight.TestCase
TestTwoInFlight.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


REQUESTS = st.lists(st.tuples(PROMPTS, LENGTHS, STOPS, st.integers(0, 3), OFTEN_NONE), max_size=8)


@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, num_blocks=st.integers(8, 30), budget=st.integers(1, 12), lands=st.lists(st.booleans()))
def test_a_scheduler_that_lands_before_it_schedules_says_the_same(
    requests: list[tuple[int, int, tuple[int, ...], int, int]], num_blocks: int, budget: int, lands: list[bool]
) -> None:
    said = []
    for in_flight in (1, MAX_IN_FLIGHT):
        scheduler = Scheduler(
            SchedulerConfig(num_blocks=num_blocks, block_size=2, max_num_sequences=4, max_batch_tokens=budget)
        )
        pipeline, parts, early = Pipeline(scheduler), list[StreamPart](), iter(lands)
        for number, (prompt, most, stops, least, alone) in enumerate(requests):
            scheduler.add(placed_request(f"r{number}", prompt, most, stops=stops, min_tokens=least, alone=alone))
        while scheduler.has_work or pipeline.batches:
            while len(pipeline.batches) < in_flight and pipeline.schedule() is not None and not next(early, False):
                pass
            assert pipeline.batches, "somebody starves"
            parts += pipeline.land()
            scheduler.check()
            pipeline.check()
        assert scheduler.pool.num_used == 0
        said.append(sorted((p.request_id, p.offset, p.token_ids, p.finish_reason) for p in parts))
    assert said[0] == said[1]
