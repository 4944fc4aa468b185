"""The queue of a pair: its rules one by one, then all of them under random events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.errors import BadRequest, Conflict
from shared.zigzag.batch import ENDED, TRANSITIONS, BatchEvent, IllegalBatchEvent, Side, State
from shared.zigzag.queue import Claim, Layer, Policy, Queue, Shares, Wait


def queue_of(*batch_ids: str, num_layers: int = 4, policy: Policy = Policy.ZIGZAG) -> Queue:
    queue = Queue(num_layers, policy)
    for batch_id in batch_ids:
        queue.add(batch_id, 1.0)
    return queue


def run_layer(queue: Queue, layers_ready: int | None = None) -> Layer | None:
    """One layer at the target, from begin to end."""
    layer = queue.next_for_target(layers_ready)
    if layer is not None:
        queue.layer_done(layer.batch_id)
    return layer


def claimed(pulled: Claim | Wait | None) -> tuple[str, int]:
    assert isinstance(pulled, Claim), pulled
    return pulled.batch_id, pulled.first_layer


def test_every_state_has_its_moves() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {State.MOVED, State.FINISHED, State.CANCELLED} == ENDED


def test_target_runs_nothing_before_the_first_layer_is_loaded() -> None:
    assert queue_of("a").next_for_target(0) is None


def test_a_newly_loaded_layer_brings_the_target_back_to_earlier_batches() -> None:
    queue = queue_of("a", "b", "c")
    assert run_layer(queue, 1) == Layer("a", 0)
    assert run_layer(queue) == Layer("b", 0)
    assert run_layer(queue, 2) == Layer("a", 1)
    assert run_layer(queue) == Layer("b", 1)
    assert run_layer(queue) == Layer("c", 0)
    assert run_layer(queue) == Layer("c", 1)
    assert run_layer(queue) is None


def test_source_pulls_whole_batches_before_the_first_layer_is_loaded() -> None:
    queue = queue_of("a", "b")
    assert claimed(queue.pull("1")) == ("a", 0)
    assert claimed(queue.pull("2")) == ("b", 0)
    assert queue.pull("3") is None


def test_source_waits_for_the_layers_end_and_never_overtakes() -> None:
    queue = queue_of("a", "b")
    queue.next_for_target(1)
    assert queue.pull("1") == Wait("a", "in_layer")
    queue.layer_done("a")
    assert claimed(queue.pull("1")) == ("a", 1)


def test_a_layer_is_begun_behind_one_that_has_not_ended_but_not_of_a_batch_that_the_source_waits_for() -> None:
    queue = queue_of("a", "b")
    assert [queue.next_for_target(3) for _ in range(2)] == [Layer("a", 0), Layer("a", 1)]
    assert queue.pull("1") == Wait("a", "in_layer")
    assert queue.next_for_target() == Layer("b", 0)
    queue.layer_done("a")
    assert queue.pull("1") == Wait("a", "in_layer")
    assert queue.next_for_target() == Layer("b", 1)
    queue.layer_done("a")
    assert claimed(queue.pull("1")) == ("a", 2)
    assert queue.batch("a").num_begun == 2


def test_what_nobody_waits_for_any_more_is_begun_again() -> None:
    queue = queue_of("a")
    queue.next_for_target(2)
    assert queue.pull("1") == Wait("a", "in_layer")
    assert queue.next_for_target() is None
    queue.layer_done("a")
    assert queue.next_for_target() == Layer("a", 1)


def test_a_gate_is_reached_when_its_layers_have_ended() -> None:
    queue = queue_of("a", "b")
    queue.set_gate("a", 1)
    queue.set_gate("b", 1)
    assert [queue.next_for_target(3) for _ in range(3)] == [Layer("a", 0), Layer("b", 0), None]
    assert queue.pull("1") == Wait("a", "gate")
    queue.layer_done("a")
    assert queue.next_for_target() is None, "b is short of its gate"
    assert claimed(queue.pull("1")) == ("a", 1)
    queue.layer_done("b")
    assert queue.next_for_target() == Layer("b", 1)


def test_a_loaded_target_begins_the_next_batch_behind_the_one_that_it_finishes() -> None:
    for policy in (Policy.ZIGZAG, Policy.OVERLAP):
        queue = queue_of("a", "b", "c", policy=policy)
        begun = [queue.next_for_target(4) for _ in range(5)]
        assert begun == [*[Layer("a", i) for i in range(4)], Layer("b", 0)]
        assert claimed(queue.pull("1")) == ("c", 0)
        assert [queue.layer_done("a") for _ in range(4)] == [False, False, False, True]


def test_best_effort_goes_on_with_what_is_loaded_while_a_layer_of_it_is_run() -> None:
    queue = queue_of("a", "b", num_layers=8, policy=Policy.BEST_EFFORT)
    assert [queue.next_for_target(1) for _ in range(2)] == [Layer("a", 0), None]
    queue.set_layers_ready(4)
    assert queue.next_for_target() == Layer("a", 1)


def test_a_batch_that_is_begun_keeps_a_loaded_queue_from_dissolving() -> None:
    queue = queue_of("a", "b")
    assert [queue.next_for_target(1) for _ in range(2)] == [Layer("a", 0), Layer("b", 0)]
    queue.layer_done("a")
    assert queue.next_for_target(4) == Layer("a", 1)
    assert not queue.can_dissolve, "b is begun, and not in hand"


def test_best_effort_lets_go_of_what_has_half_of_its_layers_begun() -> None:
    queue = queue_of("a", "b", policy=Policy.BEST_EFFORT)
    assert [queue.next_for_target(4) for _ in range(2)] == [Layer("a", 0), Layer("a", 1)]
    assert queue.pull("1") == Wait("a", "in_hand")
    assert queue.next_for_target() == Layer("b", 0)
    assert queue.pull("1") == Wait("a", "in_layer")
    queue.layer_done("a")
    queue.layer_done("a")
    assert claimed(queue.pull("1")) == ("a", 2)


def test_a_cancelled_batch_is_over_when_nothing_of_it_is_run_whatever_was_begun() -> None:
    for ends in (True, False):
        queue = queue_of("a")
        queue.next_for_target(2)
        queue.next_for_target()
        assert queue.cancel("a") is Side.TARGET
        queue.layer_done("a")
        assert queue.batch("a").state is State.STOPPING
        if ends:
            queue.layer_done("a")
        else:
            queue.stopped("a")
        assert queue.batch("a").state is State.CANCELLED
        assert not queue.batches()


def test_a_loaded_target_keeps_the_batch_in_hand_and_finishes_it() -> None:
    queue = queue_of("a", "b", num_layers=2)
    run_layer(queue, 2)
    assert claimed(queue.pull("1")) == ("b", 0)
    queue.next_for_target()
    assert queue.layer_done("a")
    assert queue.batch("a").state is State.FINISHED
    assert queue.batch("a").holder is Side.TARGET


def test_late_and_repeated_reports_of_layers_change_nothing() -> None:
    queue = queue_of("a")
    queue.set_layers_ready(3)
    queue.set_layers_ready(1)
    assert queue.layers_ready == 3
    with pytest.raises(IllegalBatchEvent):
        queue.set_layers_ready(5)


def test_handed_over_batches_come_before_those_behind_the_seal_however_late() -> None:
    queue = Queue(2)
    queue.add("new", 1.0, behind_seal=True)
    queue.add("old-1", 1.0)
    queue.add("old-2", 1.0)
    assert [b.batch_id for b in queue.batches()] == ["old-1", "old-2", "new"]


def test_the_same_batch_twice_is_refused() -> None:
    queue = queue_of("a")
    with pytest.raises(Conflict):
        queue.add("a", 1.0)
    with pytest.raises(BadRequest):
        queue.add("b", 0.0)
    with pytest.raises(BadRequest):
        Queue(0)


def test_repeating_a_claim_id_gives_the_same_claim_even_when_confirmed() -> None:
    queue = queue_of("a", "b")
    claim = queue.pull("1")
    assert queue.pull("1") == claim
    queue.confirm("1")
    queue.confirm("1")
    assert queue.pull("1", "a", 0) == claim
    with pytest.raises(Conflict):
        queue.pull("1", "b")


def test_a_pull_of_another_generation_loses() -> None:
    queue = queue_of("a")
    with pytest.raises(Conflict):
        queue.pull("1", "a", 1)
    assert claimed(queue.pull("1", "a", 0)) == ("a", 0)


def test_a_pull_of_a_batch_that_is_not_the_earliest_loses() -> None:
    with pytest.raises(Conflict):
        queue_of("a", "b").pull("1", "b", 0)


def test_what_was_pulled_is_the_sources_until_it_is_confirmed() -> None:
    queue = queue_of("a", "b")
    run_layer(queue, 1)
    queue.pull("1")
    assert queue.batch("a").holder is Side.SOURCE
    assert [claim.claim_id for claim in queue.open_claims()] == ["1"]
    queue.confirm("1")
    assert queue.open_claims() == ()
    assert claimed(queue.pull("2")) == ("b", 0)
    with pytest.raises(IllegalBatchEvent):
        queue.confirm("never")


def test_a_gate_holds_the_source_back_and_the_target_to_it() -> None:
    queue = queue_of("a", "b")
    queue.set_gate("a", 2)
    queue.set_gate("b", 1)
    assert run_layer(queue, 1) == Layer("a", 0)
    assert queue.pull("1") == Wait("a", "gate")
    assert run_layer(queue) == Layer("b", 0)
    # b has reached its gate; while a is short of its own the target does not go on with b.
    assert run_layer(queue) is None
    assert run_layer(queue, 2) == Layer("a", 1)
    assert claimed(queue.pull("1")) == ("a", 2)


def test_beyond_all_gates_the_target_goes_on() -> None:
    queue = queue_of("a")
    queue.set_gate("a", 1)
    run_layer(queue, 2)
    assert run_layer(queue) == Layer("a", 1)
    assert claimed(queue.pull("1")) == ("a", 2)


def test_a_batch_gated_by_all_layers_is_passed_by() -> None:
    queue = queue_of("a", "b")
    queue.set_gate("a", 4)
    assert claimed(queue.pull("1")) == ("b", 0)


def test_a_batch_gated_by_none_is_left_to_the_source() -> None:
    queue = queue_of("a", "b")
    queue.set_gate("a", 0)
    queue.set_gate("b", 1)
    assert queue.next_for_target(1) == Layer("b", 0)


@pytest.mark.parametrize("which", ["a", None])
def test_a_lapsed_gate_is_as_if_never_set(which: str | None) -> None:
    queue = queue_of("a")
    queue.set_gate("a", 2)
    run_layer(queue, 1)
    queue.lapse(which)
    assert claimed(queue.pull("1")) == ("a", 1)


def test_gates_are_checked() -> None:
    with pytest.raises(BadRequest):
        queue_of("a").set_gate("a", 5)
    with pytest.raises(IllegalBatchEvent):
        queue_of("a", policy=Policy.BEST_EFFORT).set_gate("a", 1)


def test_a_cancel_inside_a_layer_takes_effect_at_its_end() -> None:
    queue = queue_of("a", "b")
    queue.next_for_target(1)
    assert queue.cancel("a") is Side.TARGET
    assert claimed(queue.pull("1")) == ("b", 0)
    assert not queue.layer_done("a")
    assert queue.batch("a").state is State.CANCELLED
    assert queue.batches() == (queue.batch("b"),)


def test_a_cancel_says_who_has_the_batch() -> None:
    queue = queue_of("a", "b", "c")
    queue.pull("1")
    assert queue.cancel("a") is Side.SOURCE
    assert queue.cancel("a") is None
    queue.confirm("1")
    assert queue.batch("a").state is State.CANCELLED
    queue.pull("2")
    queue.confirm("2")
    assert queue.cancel("b") is Side.SOURCE
    assert queue.cancel("c") is Side.TARGET


def test_illegal_moves_raise() -> None:
    queue = queue_of("a")
    with pytest.raises(IllegalBatchEvent):
        queue.layer_done("a")
    with pytest.raises(IllegalBatchEvent):
        queue.cancel("unknown")
    queue.next_for_target(1)
    with pytest.raises(IllegalBatchEvent):
        queue.batch("a").apply(BatchEvent.CLAIM)


def test_dissolving_keeps_begun_batches_and_shares_the_others_in_order() -> None:
    queue = queue_of("a", "b", "c", "d", "e", num_layers=2)
    run_layer(queue, 1)
    queue.set_layers_ready(2)
    shares = queue.dissolve("end", source_busy=0.0)
    # a has one layer left at the target, so the source is free first, then the target, then both in turn.
    assert [claim.batch_id for claim in shares.given] == ["b", "d"]
    assert shares.kept == ("a", "c", "e")
    assert queue.dissolve("end") is shares
    with pytest.raises(Conflict):
        queue.add("f", 1.0)
    assert queue.pull("1") is None
    assert [run_layer(queue) for _ in range(3)] == [Layer("a", 1), Layer("c", 0), Layer("c", 1)]


def test_dissolving_before_all_layers_are_loaded_gives_everything_to_the_source() -> None:
    queue = queue_of("a", "b")
    run_layer(queue, 1)
    shares = queue.dissolve("end")
    assert [(claim.batch_id, claim.first_layer) for claim in shares.given] == [("a", 1), ("b", 0)]
    assert shares.kept == ()


def test_dissolving_waits_until_only_the_batch_in_hand_is_begun() -> None:
    queue = queue_of("a", "b", "c", num_layers=2)
    run_layer(queue, 1)
    run_layer(queue)
    queue.set_layers_ready(2)
    assert not queue.can_dissolve
    queue.pull("1")
    assert not queue.can_dissolve
    queue.confirm("1")
    assert queue.can_dissolve


def test_best_effort_hands_over_for_good_what_it_cannot_continue() -> None:
    queue = queue_of("a", "b", num_layers=4, policy=Policy.BEST_EFFORT)
    assert run_layer(queue, 1) == Layer("a", 0)
    assert queue.pull("1") == Wait("a", "in_hand")
    assert run_layer(queue) == Layer("b", 0)
    assert run_layer(queue, 3) == Layer("b", 1)
    # Half of the layers at most, and never back to a.
    assert run_layer(queue) is None
    assert claimed(queue.pull("1")) == ("a", 1)
    assert claimed(queue.pull("2")) == ("b", 2)


def test_overlap_shares_no_batch() -> None:
    queue = queue_of("a", "b", "c", num_layers=2, policy=Policy.OVERLAP)
    assert claimed(queue.pull("1")) == ("a", 0)
    layer = queue.next_for_target(1)
    assert layer == Layer("b", 0)
    assert claimed(queue.pull("2")) == ("c", 0), "it passes by what is inside a layer"
    queue.add("d", 1.0)
    queue.layer_done("b")
    assert run_layer(queue) is None, "it stays with the batch that it has begun"
    assert claimed(queue.pull("3")) == ("d", 0), "it passes by what waits for a layer to be loaded"
    assert queue.pull("4") is None
    queue.add("e", 1.0)
    assert run_layer(queue, 2) == Layer("b", 1)
    assert queue.batch("b").state is State.FINISHED
    assert run_layer(queue) == Layer("e", 0)


def test_overlap_goes_on_to_the_next_batch_when_its_own_is_cancelled() -> None:
    queue = queue_of("a", "b", num_layers=2, policy=Policy.OVERLAP)
    assert run_layer(queue, 1) == Layer("a", 0)
    queue.cancel("a")
    assert run_layer(queue) == Layer("b", 0)


def test_overlap_keeps_what_the_target_has_begun_and_shares_the_rest() -> None:
    queue = queue_of("a", "b", "c", num_layers=2, policy=Policy.OVERLAP)
    run_layer(queue, 1)
    queue.set_layers_ready(2)
    shares = queue.dissolve("end")
    assert (shares.kept, [c.batch_id for c in shares.given]) == (("a", "c"), ["b"])
    assert [run_layer(queue) for _ in range(3)] == [Layer("a", 1), Layer("c", 0), Layer("c", 1)]


def test_stop_the_world_runs_nothing_until_it_shares() -> None:
    queue = queue_of("a", "b", num_layers=2, policy=Policy.STOP_THE_WORLD)
    assert queue.next_for_target(1) is None
    assert claimed(queue.pull("1")) == ("a", 0)
    queue.set_layers_ready(2)
    assert queue.dissolve("end", source_busy=1.0).kept == ("b",)
    assert queue.next_for_target() == Layer("b", 0)


def test_an_absent_batch_is_not_begun_before_it_has_arrived() -> None:
    queue = Queue(4)
    queue.add("a", 1.0, absent=True)
    queue.add("b", 1.0)
    assert run_layer(queue, 1) == Layer("b", 0)
    assert run_layer(queue) is None
    queue.arrived("a")
    assert run_layer(queue) == Layer("a", 0), "it has its old place"
    assert run_layer(queue, 2) == Layer("a", 1)


def test_the_source_may_have_an_absent_batch_back() -> None:
    queue = Queue(4)
    queue.add("a", 1.0, absent=True)
    queue.add("b", 1.0)
    run_layer(queue, 1)
    assert claimed(queue.pull("1")) == ("a", 0), "the earliest, though the target has begun a later one"
    queue.arrived("a")
    assert run_layer(queue, 2) == Layer("b", 1), "the source is its holder"


@pytest.mark.parametrize("policy", [Policy.ZIGZAG, Policy.BEST_EFFORT, Policy.OVERLAP])
def test_an_absent_batch_does_not_hold_the_target_up(policy: Policy) -> None:
    queue = Queue(2, policy)
    queue.add("a", 1.0, absent=True)
    queue.add("b", 1.0)
    assert run_layer(queue, 2) == Layer("b", 0)


def test_a_gated_batch_that_is_absent_holds_the_target_to_the_gates() -> None:
    queue = Queue(4)
    queue.add("a", 1.0, absent=True)
    queue.add("b", 1.0)
    queue.set_gate("a", 1)
    queue.set_gate("b", 1)
    assert run_layer(queue, 4) == Layer("b", 0)
    # b has reached its gate and a is short of its own: neither side goes on before a is there.
    assert run_layer(queue) is None
    assert queue.pull("1") == Wait("a", "gate")
    queue.arrived("a")
    assert run_layer(queue) == Layer("a", 0)
    assert claimed(queue.pull("1")) == ("a", 1)


def test_an_absent_batch_is_cancelled_at_once() -> None:
    queue = Queue(2)
    queue.add("a", 1.0, absent=True)
    assert queue.cancel("a") is Side.TARGET
    assert queue.batch("a").state is State.CANCELLED
    queue.arrived("a")
    assert run_layer(queue, 2) is None


def test_an_absent_batch_is_shared_like_any_other_and_run_once_it_is_there() -> None:
    queue = Queue(2)
    queue.set_layers_ready(2)
    for batch_id in ("a", "b"):
        queue.add(batch_id, 1.0, absent=True)
    shares = queue.dissolve("end")
    assert (shares.kept, [c.batch_id for c in shares.given]) == (("a",), ["b"])
    assert run_layer(queue) is None
    queue.arrived("a")
    queue.arrived("b")
    assert [run_layer(queue) for _ in range(3)] == [Layer("a", 0), Layer("a", 1), None]


def test_only_a_batch_that_was_added_can_arrive() -> None:
    with pytest.raises(IllegalBatchEvent):
        queue_of("a").arrived("b")
    queue = queue_of("a")
    queue.arrived("a")  # it was never absent
    assert run_layer(queue, 1) == Layer("a", 0)


class RandomPair(RuleBasedStateMachine):
    """Any order of events. Each batch's layers are written down by who ran them."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(3)
        self.target_ran: dict[str, list[int]] = {}
        self.running: list[str] = []
        """Of layers that are begun, in order."""
        self.awaited: set[str] = set()
        self.claims: dict[str, Claim] = {}
        self.confirmed: set[str] = set()
        self.taken_back: set[str] = set()
        self.cancelled: set[str] = set()
        self.given: set[str] = set()
        self.shares: Shares | None = None
        self.absent: set[str] = set()

    @precondition(lambda self: not self.queue.dissolved)
    @rule(behind=st.booleans(), cost=st.integers(1, 3), gate=st.none() | st.integers(0, 3), absent=st.booleans())
    def add(self, behind: bool, cost: int, gate: int | None, absent: bool) -> None:
        batch_id = f"b{len(self.target_ran)}"
        self.queue.add(batch_id, cost, behind_seal=behind, absent=absent)
        self.target_ran[batch_id] = []
        if absent:
            self.absent.add(batch_id)
        if gate is not None:
            self.queue.set_gate(batch_id, gate)

    @precondition(lambda self: self.absent)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """At any time: it may have been pulled, cancelled or given meanwhile."""
        batch_id = data.draw(st.sampled_from(sorted(self.absent)))
        before = self.queue.batch(batch_id).state
        self.queue.arrived(batch_id)
        assert self.queue.batch(batch_id).state is before
        self.absent.remove(batch_id)

    @precondition(lambda self: self.queue.layers_ready < 3)
    @rule()
    def load(self) -> None:
        self.queue.set_layers_ready(self.queue.layers_ready + 1)

    @precondition(lambda self: len(self.running) < 2)
    @rule()
    def begin(self) -> None:
        layer = self.queue.next_for_target()
        if layer is None:
            return
        assert layer.layer == len(self.target_ran[layer.batch_id]) + self.running.count(layer.batch_id)
        assert layer.batch_id not in self.awaited, "the source waits for it"
        gate = self.queue.batch(layer.batch_id).gate
        short = [b for b in self.queue.batches() if b.gate is not None and b.next_layer < b.gate]
        if gate is not None and layer.layer >= gate:
            assert all(b.holder is not Side.TARGET for b in short), "it goes beyond a gate"
        assert layer.layer < self.queue.layers_ready
        assert layer.batch_id not in self.absent, "it has nothing to begin with"
        for other in self.queue.batches():
            if other.batch_id == layer.batch_id:
                break
            startable = other.state in {State.WAITING, State.RUNNING} and other.num_begun < self.queue.layers_ready
            startable = startable and other.batch_id not in self.absent | self.awaited
            assert not startable or other.gate is not None, "a later batch went first"
        self.running.append(layer.batch_id)

    @precondition(lambda self: self.running)
    @rule(stops=st.booleans())
    def end(self, stops: bool) -> None:
        batch_id = self.running[0]
        if stops and self.queue.batch(batch_id).state is State.STOPPING:
            self.queue.stopped(batch_id)
            self.running = [i for i in self.running if i != batch_id]
        else:
            self.running.pop(0)
            self.queue.layer_done(batch_id)
            self.target_ran[batch_id].append(len(self.target_ran[batch_id]))
        if batch_id not in self.running:
            self.awaited.discard(batch_id)

    @precondition(lambda self: not self.queue.dissolved)
    @rule()
    def pull(self) -> None:
        before = [b for b in self.queue.batches() if b.state in {State.WAITING, State.RUNNING}]
        claim_id = f"c{len(self.claims)}"
        pulled = self.queue.pull(claim_id)
        if isinstance(pulled, Wait) and pulled.reason == "in_layer":
            self.awaited.add(pulled.batch_id)
        if not isinstance(pulled, Claim):
            return
        assert self.queue.pull(claim_id) == pulled
        for earlier in before:
            if earlier.batch_id == pulled.batch_id:
                break
            in_hand = self.queue.loaded and earlier.next_layer + earlier.in_layer > 0
            assert in_hand or earlier.gate == 3, "the source overtook"
        self.check_grant(pulled)

    def check_grant(self, claim: Claim) -> None:
        assert claim.batch_id not in self.running
        assert claim.first_layer == len(self.target_ran[claim.batch_id])
        self.claims[claim.claim_id] = claim

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        claim_id = data.draw(st.sampled_from(sorted(self.claims)))
        batch = self.queue.batch(self.claims[claim_id].batch_id)
        was_open = claim_id in {claim.claim_id for claim in self.queue.open_claims()}
        before = batch.state
        self.queue.confirm(claim_id)
        assert batch.state is (State.MOVED if was_open else before)

    @precondition(lambda self: self.target_ran)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.target_ran)))
        self.queue.cancel(batch_id)
        self.cancelled.add(batch_id)

    @rule()
    def lapse(self) -> None:
        self.queue.lapse()

    @precondition(lambda self: not self.queue.dissolved and (not self.running or self.queue.loaded))
    @rule(source_busy=st.integers(0, 9))
    def dissolve(self, source_busy: int) -> None:
        waiting = [b.batch_id for b in self.queue.batches() if b.state in {State.WAITING, State.RUNNING}]
        begun = {b.batch_id for b in self.queue.batches() if b.next_layer or b.in_layer}
        shares = self.queue.dissolve("d", source_busy)
        given = [claim.batch_id for claim in shares.given]
        assert sorted([*shares.kept, *given]) == sorted(waiting), "a batch was lost or doubled"
        assert given == [b for b in waiting if b in given]
        assert list(shares.kept) == [b for b in waiting if b in shares.kept]
        if self.queue.loaded:
            assert not begun & set(given)
        for claim in shares.given:
            self.check_grant(claim)

    @invariant()
    def each_batch_has_one_holder(self) -> None:
        open_claims = [claim.batch_id for claim in self.queue.open_claims()]
        assert len(set(open_claims)) == len(open_claims)
        for batch_id, ran in self.target_ran.items():
            batch = self.queue.batch(batch_id)
            assert ran == list(range(batch.next_layer)), "a layer was skipped or run twice"
            assert batch.absent == (batch_id in self.absent)
            assert not (batch.absent and (ran or batch.in_layer))
            assert (batch.state is State.CLAIMED) == (batch_id in open_claims)
            assert batch.in_layer == (batch_id in self.running)
            assert (batch in self.queue.batches()) == (batch.state not in ENDED)
            if batch.state is State.CANCELLED:
                assert batch_id in self.cancelled
            if batch.state is State.FINISHED:
                assert len(ran) == 3

    def teardown(self) -> None:
        """Whatever happened, everything comes to an end."""
        for batch_id in self.running:
            self.queue.layer_done(batch_id)
        self.queue.set_layers_ready(3)
        for batch_id in self.absent:
            self.queue.arrived(batch_id)
        for claim in [*self.queue.open_claims(), *self.queue.dissolve("d").given]:
            self.queue.confirm(claim.claim_id)
        while (layer := self.queue.next_for_target()) is not None:
            self.queue.layer_done(layer.batch_id)
        for batch_id in self.target_ran:
            assert self.queue.batch(batch_id).state in ENDED


TestRandomPair = RandomPair.TestCase
TestRandomPair.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
