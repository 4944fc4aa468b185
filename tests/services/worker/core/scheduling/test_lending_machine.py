"""Everything that the two members of a pair do with a scheduler, in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from services.worker.core.scheduling.sequence import ActiveSequence
from tests.services.worker.core.scheduling.harness import ERROR, SchedulerMachine, sampled


class Lending(SchedulerMachine):
    """Everything that the two members of a pair do with a scheduler, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: dict[str, ActiveSequence] = {}
        """Out of the queue, and accepted here."""
        self.guests: dict[str, ActiveSequence] = {}
        """Another instance's, with blocks here."""

    @rule(prompt_tokens=st.integers(1, 9), max_tokens=st.integers(1, 6))
    def add(self, prompt_tokens: int, max_tokens: int) -> None:
        self.offer(self.make(prompt_tokens, max_tokens))

    @rule()
    def lend(self) -> None:
        self.scheduler.table.lending = True
        lent = self.scheduler.lend()
        assert [s.id for s in lent] == sorted(s.id for s in lent)
        assert not any(s.finished or s.num_emitted or s.block_table for s in lent)
        self.lent |= {s.request_id: s for s in lent}

    @precondition(lambda self: self.scheduler.table.lending)
    @rule()
    def stop_lending(self) -> None:
        back = [s for s in self.lent.values() if not s.reserved]
        self.scheduler.table.lending = False
        self.scheduler.take_back(reversed(back))
        self.lent = {name: s for name, s in self.lent.items() if s.reserved}

    @precondition(lambda self: any(not s.reserved for s in self.lent.values()))
    @rule(data=st.data())
    def return_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, s in self.lent.items() if not s.reserved)))
        self.scheduler.take_back([self.lent.pop(name)])

    @precondition(lambda self: any(not s.reserved for s in self.lent.values()))
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        names = sorted(n for n, s in self.lent.items() if not s.reserved)
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        self.reserve_all([self.lent[n] for n in chosen])

    @rule(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=3))
    def reserve_guests(self, sizes: list[tuple[int, int]]) -> None:
        guests = [self.make(*size) for size in sizes]
        if self.reserve_all(guests):
            self.guests |= {s.request_id: s for s in guests}

    def reserve_all(self, sequences: list[ActiveSequence]) -> bool:
        used = self.scheduler.pool.num_used
        done = self.scheduler.reservations.reserve(sequences)
        for sequence in sequences:
            assert sequence.reserved == done
            assert len(sequence.block_table) * 2 >= sequence.num_tokens or not done
        assert done or self.scheduler.pool.num_used == used
        return done

    def held(self) -> list[str]:
        return sorted(n for n, s in (self.lent | self.guests).items() if s.reserved)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.held()))
        sequence = (self.lent | self.guests)[name]
        ended = sequence.finished
        output = self.scheduler.reservations.adopt(sequence, sampled(sequence))
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
        self.scheduler.reservations.release([sequence])
        assert sequence.block_table == []

    @precondition(lambda self: any(not s.reserved for s in self.lent.values()))
    @rule(data=st.data())
    def release_to_target(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, s in self.lent.items() if not s.reserved)))
        sequence = self.lent.pop(name)
        if not sequence.finished:
            self.left.add(name)
        self.scheduler.release_to_target([sequence])

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A layer failed: the batch's blocks are given back first."""
        sequence = self.lent.pop(data.draw(st.sampled_from(sorted(self.lent))))
        self.scheduler.reservations.release([sequence])
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
                assert not piece.sequence.reserved
                assert piece.sequence.request_id not in self.lent, "a lent request was admitted"

    @precondition(lambda self: self.flying is not None)
    @rule(fails=st.integers(0, 9))
    def land(self, fails: int) -> None:
        self.complete(fails=fails == 0)

    @invariant()
    def no_block_is_lost_and_no_request_forgotten(self) -> None:
        scheduler = self.scheduler
        lent_here = [s for s in self.lent.values() if not s.finished]
        queued = [*scheduler.table.running, *scheduler.table.waiting]
        tables = {id(s): s.block_table for s in [*queued, *self.lent.values(), *self.guests.values()]}
        scheduler.pool.check([*tables.values(), *scheduler.table.landing])
        assert {s.key for s in [*queued, *lent_here]} == set(scheduler.table.accepted)
        waiting = [s.id for s in scheduler.table.waiting]
        assert waiting == sorted(waiting)
        assert scheduler.table.waiting_tokens == sum(s.num_tokens for s in scheduler.table.waiting)
        assert not any(s.finished for s in queued)
        assert len(scheduler.table.running) + len(self.held()) <= 4
        assert len(scheduler.reservations.for_prefill) == len(self.held())
        scheduler.check()

    @invariant()
    def the_load_is_that_of_all_requests(self) -> None:
        load = self.scheduler.load()
        lent = [s for s in self.lent.values() if not s.finished]
        running, waiting = self.scheduler.table.running, self.scheduler.table.waiting
        left = sum(len(s.tokens) - s.num_computed for s in running if len(s.tokens) - s.num_computed > 1)
        assert load.queued_requests == len(lent) + len(waiting)
        assert load.queued_tokens == sum(s.num_tokens for s in [*lent, *waiting]) + left
        assert load.running_requests == len(running)
        assert load.running_tokens == sum(s.num_computed for s in running)
        assert load.kv_blocks_used == self.scheduler.pool.num_used

    def teardown(self) -> None:
        """The pair ends: whatever happened, every request ends once, with the right tokens."""
        if self.flying is not None:
            self.land(1)
        scheduler = self.scheduler
        scheduler.reservations.release(self.guests.values())
        self.guests.clear()
        for sequence in self.lent.values():
            scheduler.reservations.release([sequence])
        self.stop_lending()
        for _ in range(2000):
            self.record(scheduler.take_ended())
            if not scheduler.has_work:
                break
            self.schedule()
            if self.flying is not None:
                self.land(1)
        self.check_end()


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
