"""Ordinary requests and those that another instance is to decode, and everything that happens to them, in any order."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.generation import StreamPart
from tests.services.worker.core.scheduling.harness import ERROR, PLACE, SchedulerMachine, expected, sampled


class HoldForDecode(SchedulerMachine):
    """Ordinary and departing requests, and everything that happens to those, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving: dict[str, ActiveSequence] = {}
        """Held, and its KV on its way."""
        self.told: set[str] = set()
        """By ``take_prefilled``."""
        self.guests: dict[str, ActiveSequence] = {}

    def record(self, outputs: Iterable[StreamPart | None]) -> None:
        outputs = list(outputs)
        for out in outputs:
            assert out is None or out.request_id not in self.leaving or not out.token_ids, "a held request was decoded"
        super().record(outputs)

    def make_one(self, prompt_tokens: int, max_tokens: int, leaves: bool) -> ActiveSequence:
        sequence = self.make(prompt_tokens, max_tokens, gateway=f"g{len(self.all) % 2}")
        sequence.decode_at = PLACE if leaves else None
        return sequence

    @rule(prompt_tokens=st.integers(1, 9), max_tokens=st.integers(1, 6), leaves=st.booleans())
    def add(self, prompt_tokens: int, max_tokens: int, leaves: bool) -> None:
        self.offer(self.make_one(prompt_tokens, max_tokens, leaves))

    @precondition(lambda self: self.flying is None)
    @rule()
    def schedule(self) -> None:
        self.flying = self.scheduler.schedule()
        if self.flying is not None:
            assert not any(p.sequence.reserved for p in self.flying.slices)

    @precondition(lambda self: self.flying is not None)
    @rule(fails=st.integers(0, 9), tell=st.integers(0, 4))
    def land(self, fails: int, tell: int) -> None:
        self.complete(fails=fails == 0)
        if tell:
            self.take_prefilled()

    @rule()
    def take_prefilled(self) -> None:
        for sequence, token in self.scheduler.reservations.take_prefilled():
            self.tell(sequence, token)
        assert {n for n, s in self.all.items() if s.reserved} == set(self.leaving) | set(self.guests)

    def tell(self, sequence: ActiveSequence, token: Sampled) -> None:
        name = sequence.request_id
        assert name not in self.told, "it leaves once"
        assert sequence.output == [token.token_id]
        self.told.add(name)
        if sequence.reserved:
            self.leaving[name] = sequence
        else:
            assert sequence.finished

    @precondition(lambda self: self.flying is None and self.accepted)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.accepted)))
        sequence = self.all[name]
        decoded = not (sequence.finished or sequence.reserved) and sequence in self.scheduler.table.running
        decoded = decoded and sequence.num_emitted > 0 and len(sequence.tokens) - sequence.num_computed == 1
        assert self.scheduler.reservations.hold_to_move(sequence) == decoded
        if decoded:
            self.leaving[name] = sequence

    @precondition(lambda self: any(s.decode_at is None for s in self.guests.values()))
    @rule(data=st.data(), count=st.integers(0, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, s in self.guests.items() if s.decode_at is None)))
        sequence = self.guests[name]
        count = min(count, sequence.params.max_tokens - len(sequence.output) - 1, 20 - sequence.num_tokens - 1)
        before = list(sequence.block_table), list(sequence.tokens)
        more = expected(sequence, len(sequence.output) + count)[len(sequence.output) :]
        if self.scheduler.reservations.extend(sequence, more):
            assert sequence.tokens == [*before[1], *more]
            self.tokens[name] += more
            assert len(sequence.block_table) == max(len(before[0]), -(-len(sequence.tokens) // 2))
        else:
            assert (sequence.block_table, sequence.tokens) == before

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), how=st.sampled_from(["decode_here", "release_to_decoder"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        sequence = self.leaving.pop(name)
        ended = sequence.finished
        getattr(self.scheduler.reservations, how)(sequence)
        assert not sequence.reserved
        if how == "release_to_decoder" and not ended:
            self.left.add(name)
        assert (sequence.block_table == []) == (ended or how == "release_to_decoder")

    @precondition(lambda self: any(s.finished for s in self.leaving.values()))
    @rule()
    def release(self) -> None:
        ended = {name: s for name, s in self.leaving.items() if s.finished}
        self.scheduler.reservations.release(ended.values())
        assert not any(s.block_table for s in ended.values())
        self.leaving = {name: s for name, s in self.leaving.items() if not s.finished}

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.all)))
        known = self.scheduler.cancel(name, 0)
        assert known is None or (name in self.accepted and name not in self.left)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def cancel_a_held_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        ended = self.leaving[name].finished
        assert (self.scheduler.cancel(name, 0) is None) == ended

    @rule(gateway=st.sampled_from(["g0", "g1"]), often=st.integers(0, 3))
    def cancel_gateway(self, gateway: str, often: int) -> None:
        if not often:
            self.scheduler.cancel_gateway(Gone(gateway, ""))

    @rule(often=st.integers(0, 9))
    def abort_all(self, often: int) -> None:
        if not often:
            self.scheduler.abort_all(ERROR)
            assert self.scheduler.num_requests == 0

    @rule(prompt_tokens=st.integers(1, 9), max_tokens=st.integers(1, 6), leaves=st.booleans())
    def reserve(self, prompt_tokens: int, max_tokens: int, leaves: bool) -> None:
        guest = self.make_one(prompt_tokens, max_tokens, leaves)
        if self.scheduler.reservations.reserve([guest]):
            self.guests[guest.request_id] = guest

    @precondition(lambda self: self.guests)
    @rule(data=st.data(), comes=st.booleans())
    def guest_ends(self, data: st.DataObject, comes: bool) -> None:
        guest = self.guests.pop(data.draw(st.sampled_from(sorted(self.guests))))
        if not comes:
            self.scheduler.reservations.release([guest])
            assert guest.block_table == []
            return
        self.accepted.add(guest.request_id)
        output = self.scheduler.reservations.adopt(guest, sampled(guest))
        assert output is not None
        self.record([output])
        self.take_prefilled()

    @invariant()
    def no_block_is_lost_and_no_seat_is_taken_twice(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        held = [s for s in self.all.values() if s.reserved]
        assert len(scheduler.table.running) + len(held) <= 4
        assert not any(s.reserved for s in scheduler.table.running)
        holders = {id(s): s for s in [*scheduler.table.running, *held]}
        scheduler.pool.check([*(s.block_table for s in holders.values()), *scheduler.table.landing])
        assert all(s.block_table for s in held)
        known = set(self.leaving) | set(self.guests)
        untold = {s.request_id for s in held} - known
        assert known <= {s.request_id for s in held}
        assert not untold & self.told
        assert scheduler.reservations.has_prefilled or not untold

    @invariant()
    def the_load_is_that_of_all_requests(self) -> None:
        scheduler, load = self.scheduler, self.scheduler.load()
        running = [*scheduler.table.running, *(s for s in self.all.values() if s.reserved and s.num_emitted)]
        assert load.running_requests == len(running)
        assert load.running_tokens == sum(s.num_computed for s in running)
        assert load.queued_requests == len(scheduler.table.waiting)
        assert load.kv_blocks_used == scheduler.pool.num_used

    def teardown(self) -> None:
        """Whatever happened, every request ends once, here or elsewhere, with the right tokens."""
        if self.flying is not None:
            self.land(1, 1)
        scheduler = self.scheduler
        scheduler.reservations.release(self.guests.values())
        self.guests.clear()
        for _ in range(2000):
            self.record(scheduler.take_ended())
            self.take_prefilled()
            for sequence in self.leaving.values():
                scheduler.reservations.decode_here(sequence)
            self.leaving.clear()
            if not scheduler.has_work:
                break
            self.schedule()
            if self.flying is not None:
                self.land(1, 1)
        self.check_end()


TestHoldForDecode = HoldForDecode.TestCase
TestHoldForDecode.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
