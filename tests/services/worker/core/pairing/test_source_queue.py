"""What a pair's source lent: in batches, in order, and nowhere else at the end."""

from __future__ import annotations

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.source_queue import SourceQueue
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from shared.messages.common import ErrorInfo
from tests.services.worker.live.members import request

NUM_LAYERS = 4


class Source:
    """A scheduler that lends what it was given."""

    def __init__(self, *names: str, **changes: int) -> None:
        settings = {"num_blocks": 64, "block_size": 4, "prefill_chunk_tokens": 9} | changes
        self.scheduler = Scheduler(SchedulerConfig(**settings))
        self.queue = SourceQueue("pair", NUM_LAYERS, self.scheduler.config)
        self.scheduler.table.lending = True
        for name in names:
            self.scheduler.add(request(name, 9))
        self.lend()

    def lend(self) -> None:
        self.queue.lend(self.scheduler)
        self.queue.pack(token_s=0.5)

    def hand(self) -> PromptBatch:
        batch = self.queue.next_to_hand()
        assert batch is not None
        self.queue.took(batch)
        return batch

    def waiting(self) -> str:
        return "".join(s.request_id for s in self.scheduler.table.waiting)


def names(*batches: PromptBatch) -> str:
    return "".join(s.request_id for batch in batches for s in batch.sequences)


def test_what_waits_is_handed_over_in_order_at_what_a_layer_of_it_costs() -> None:
    source = Source("a", "b")
    assert source.waiting() == ""
    batch = source.hand()
    assert (batch.batch_id, batch.serial, batch.layer_s) == ("pair-0", 0, 0.5 * 9 / NUM_LAYERS)
    assert names(source.hand()) == "b"
    assert source.queue.next_to_hand() is None
    source.scheduler.add(request("c", 9))
    source.lend()
    assert names(source.hand()) == "c"
    assert [b.serial for b in source.queue.handed.values()] == [0, 1, 2]


def test_a_batch_takes_a_quarter_of_the_slots_at_most() -> None:
    source = Source("a", "b", "c", "d", prefill_chunk_tokens=1000, max_num_sequences=8)
    assert [names(batch) for batch in source.queue.backlog] == ["ab", "cd"]


def test_what_is_refused_waits_before_what_is_behind_it_and_may_be_pulled_before_the_answer() -> None:
    source = Source("a", "b")
    batch = source.queue.next_to_hand()
    assert batch is not None
    assert source.queue.holds("a", 1)
    source.queue.refused(batch)
    assert not source.queue.holds("a", 1)
    assert names(*source.queue.backlog) == "ab"
    assert names(source.hand(), source.hand()) == "ab"


def test_nobody_is_asked_to_take_what_has_ended() -> None:
    source = Source("a", "b", "c")
    source.scheduler.cancel("a", 1)
    batch = source.queue.next_to_hand()
    assert batch is not None
    assert names(batch) == "b"
    source.scheduler.cancel("b", 1)
    assert [s.request_id for s in source.queue.took(batch)] == ["b"], "the target has to be told"


def test_the_source_has_room_if_the_batch_that_probably_comes_fits() -> None:
    source = Source("a", num_blocks=4)
    assert source.queue.expected is not None
    assert names(source.queue.expected) == "a"
    assert source.queue.has_room(source.scheduler)
    other = request("x", 9)
    assert source.scheduler.reservations.reserve([other])
    assert not source.queue.has_room(source.scheduler)
    batch = source.hand()
    assert not source.queue.begin(batch, source.scheduler)
    assert not batch.begun
    source.scheduler.reservations.release([other])
    assert source.queue.begin(batch, source.scheduler)
    assert batch.begun


def test_at_the_end_everything_that_is_not_the_targets_waits_at_its_old_place() -> None:
    source = Source("a", "b", "c", "d", "e")
    taken, begun = source.hand(), source.hand()
    source.hand()
    assert source.queue.taken_by_target([taken.batch_id, "unknown"]) == [taken]
    assert source.queue.begin(begun, source.scheduler)
    source.scheduler.add(request("f", 9))
    source.queue.lend(source.scheduler)
    source.queue.restore(source.scheduler, *source.queue.close(in_doubt=False), None)
    assert source.waiting() == "cdef"
    assert not source.scheduler.table.lending
    assert source.queue.close(in_doubt=False) == ([], []), "once"


def test_what_the_target_may_own_ends_and_what_it_gave_does_not() -> None:
    source = Source("a", "b", "c")
    given = source.hand()
    source.hand()
    source.queue.pulled.add(given.batch_id)
    back, doubtful = source.queue.close(in_doubt=True)
    assert (names(*back), names(*doubtful)) == ("ac", "b")
    source.queue.restore(source.scheduler, back, doubtful, ErrorInfo(code="unavailable", message="who knows"))
    assert [o.request_id for o in source.scheduler.take_ended()] == ["b"]
    assert source.waiting() == "ac"


def test_a_split_is_asked_for_where_it_can_gain_something() -> None:
    source = Source("a", "b", prefill_chunk_tokens=9)
    source.hand()
    assert source.queue.to_split("zigzag", 0.5) == (), "one batch"
    source.hand()
    assert source.queue.to_split("zigzag", 0.5) == (), "equal ones"
    source.scheduler.add(request("c", 12))
    source.lend()
    source.hand()
    assert [b.batch_id for b in source.queue.to_split("zigzag", 0.5)] == ["pair-0", "pair-1", "pair-2"]
    assert source.queue.to_split("zigzag", 0.0) == (), "nothing was measured"
    assert source.queue.to_split("overlap", 0.5) == ()


def test_of_a_cancel_that_the_scheduler_has_not_heard_of_the_target_is_told() -> None:
    source = Source("a", "b")
    source.queue.unwanted("a", 1)  # inside a step
    told = []
    while (batch := source.queue.next_to_hand()) is not None:
        told.append((names(batch), [s.request_id for s in source.queue.took(batch)]))
    assert told == [("a", ["a"]), ("b", [])]
