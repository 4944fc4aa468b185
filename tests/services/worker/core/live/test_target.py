"""What the target of a pair decides."""

from __future__ import annotations

import pytest

from services.worker.core.live import target_words as t
from services.worker.core.live.batch import Batch
from services.worker.core.live.life import PairState
from services.worker.core.live.machine import (
    Abort,
    Action,
    AnswerQuestion,
    Cancelled,
    Detach,
    Due,
    EngineStopped,
    Finish,
    HasLanded,
    Lost,
    Over,
    PartWanted,
    RefuseQuestion,
    RunPart,
    SendHidden,
    TellEnded,
)
from services.worker.core.live.target import KNOWS_S, WATCH_S
from shared.messages.common import Ack, LivePolicy
from shared.messages.live import Dissolve, Dissolved, Gate, Pulled, PullKv
from tests.services.worker.core.live.pairs import NUM_LAYERS, TOKENS, Target, key, of_kind, request, the

BASELINES = ["best_effort", "overlap", "stop_the_world"]


def gate(batch_id: str, num_layers: int) -> Gate:
    return Gate(batch_id=batch_id, num_layers=num_layers)


def pull_kv(batch_id: str, first_layer: int, last_layer: int) -> PullKv:
    return PullKv(pair_id="pair", batch_id=batch_id, serial=3, first_layer=first_layer, last_layer=last_layer)


def pulled(actions: list[Action]) -> tuple[str, int]:
    """The answer to a pull: batch and first layer."""
    answer = the(AnswerQuestion, actions).message
    assert isinstance(answer, Pulled)
    return answer.batch_id, answer.first_layer


def shares(actions: list[Action]) -> Dissolved:
    answer = the(AnswerQuestion, actions).message
    assert isinstance(answer, Dissolved)
    return answer


def refused(actions: list[Action]) -> str:
    """The code of the only answer."""
    assert not of_kind(AnswerQuestion, actions)
    return the(RefuseQuestion, actions).error.code


def freed(actions: list[Action]) -> list[str]:
    return [batch_id for action in of_kind(t.Free, actions) for batch_id in action.batch_ids]


# --- batches come -------------------------------------------------------------------------------


def test_a_batch_that_is_handed_over_gets_blocks_and_its_hidden_states() -> None:
    target = Target()
    assert target.asked_to_take("a") == [t.Reserve("a")]
    assert not target.machine.holds("a")
    actions = target.told(HasLanded(t.Reserve("a"), True))
    assert actions == [t.HostBatch("a", 0), AnswerQuestion(1, Ack())]
    assert target.machine.holds("a")
    assert target.machine.num_requests == 1
    target.told(t.LayersReady(1))
    assert target.told(PartWanted()) == [], "its hidden states are not here"
    assert t.Wake() in target.told(HasLanded(t.HostBatch("a", 0), True))
    assert target.may_run()
    assert target.part() == RunPart("a", 0, 0, TOKENS)


def test_a_repeated_hand_over_is_answered_with_the_first() -> None:
    target = Target()
    target.asked_to_take("a")
    assert target.asked_to_take("a") == []
    actions = target.told(HasLanded(t.Reserve("a"), True))
    assert [a.question for a in of_kind(AnswerQuestion, actions)] == [1, 2]
    assert len(of_kind(t.HostBatch, actions)) == 1
    assert target.asked_to_take("a") == [AnswerQuestion(3, Ack())], "it is here"


def test_without_capacity_a_batch_is_refused_and_may_come_again() -> None:
    target = Target()
    target.asked_to_take("a")
    target.asked_to_take("a")
    actions = target.told(HasLanded(t.Reserve("a"), False))
    assert [(a.question, a.error.code) for a in of_kind(RefuseQuestion, actions)] == [
        (1, "overloaded"),
        (2, "overloaded"),
    ]
    assert not target.machine.holds("a")
    assert target.asked_to_take("a") == [t.Reserve("a")]


@pytest.mark.parametrize(("num_tokens", "takes"), [(99, True), (100, False), (10**9, False)])
def test_a_request_that_will_never_fit_is_refused(num_tokens: int, takes: bool) -> None:
    target = Target()
    actions = target.asked_to_take("a", num_tokens)
    if takes:
        assert actions == [t.Reserve("a")]
    else:
        assert refused(actions) == "bad_request"
        assert str(num_tokens) in the(RefuseQuestion, actions).error.message


def test_of_a_batch_each_request_has_to_fit() -> None:
    target = Target()
    batch = Batch("a", (request("x", 60), request("y", 60)), 1.0)
    assert target.told(t.HandedOver(1, batch, 0, behind_seal=False)) == [t.Reserve("a")]
    batch = Batch("b", (request("x", 6), request("y", 100)), 1.0)
    assert refused(target.told(t.HandedOver(2, batch, 1, behind_seal=False))) == "bad_request"


def test_handed_over_batches_come_before_those_behind_the_seal() -> None:
    target = Target()
    target.asked_to_take("late", behind_seal=True)
    target.told(HasLanded(t.Reserve("late"), True), HasLanded(t.HostBatch("late", 0), True))
    target.has("early")
    target.told(t.LayersReady(1))
    assert target.part().batch_id == "early"


def test_a_batch_that_comes_as_the_pair_ends_is_freed() -> None:
    target = Target()
    target.asked_to_take("a")
    target.asked_to_part()
    actions = target.told(HasLanded(t.Reserve("a"), True))
    assert freed(actions) == ["a"]
    assert refused(actions) == "conflict"
    assert of_kind(t.HostBatch, actions) == []
    assert refused(target.asked_to_take("b")) == "conflict"


def test_what_has_arrived_of_a_batch_that_is_gone_does_not_matter() -> None:
    target = Target()
    assert (
        target.told(HasLanded(t.HostBatch("a", 0), True), HasLanded(t.HostBatch("a", 0), False), HasLanded(Finish("a")))
        == []
    )


def test_lost_hidden_states_are_made_anew_once_everything_is_loaded() -> None:
    target = Target()
    target.has("a", "b", arrived=False)
    assert target.told(HasLanded(t.HostBatch("a", 0), False)) == []
    target.told(t.LayersReady(NUM_LAYERS - 1))
    assert target.told(PartWanted()) == []
    assert of_kind(t.Embed, target.loaded()) == [t.Embed("a")]
    assert of_kind(t.Embed, target.told(HasLanded(t.HostBatch("b", 0), False))) == [t.Embed("b")]
    target.told(HasLanded(t.HostBatch("a", 0), True))
    assert target.part().batch_id == "a"


def test_the_source_may_have_back_what_never_arrived() -> None:
    target = Target()
    target.has("a", arrived=False)
    target.told(HasLanded(t.HostBatch("a", 0), False))
    assert pulled(target.pulled("1")) == ("a", 0)


# --- the seal -----------------------------------------------------------------------------------


def test_the_seal_counts_what_was_handed_over() -> None:
    target = Target()
    target.has("a")
    assert refused(target.sealed(2)) == "conflict"
    assert target.state() is PairState.REDIRECTING
    target.has("b")
    assert target.sealed(2) == [AnswerQuestion(4, Ack())]
    assert target.state() is PairState.COOPERATING


def test_a_repeated_seal_changes_nothing() -> None:
    target = Target()
    target.sealed(0)
    assert target.sealed(0) == [AnswerQuestion(2, Ack())]
    target.loaded()
    assert target.state() is PairState.LOADED
    assert target.sealed(0) == [AnswerQuestion(3, Ack())]
    assert target.state() is PairState.LOADED


def test_a_target_that_was_loaded_before_the_seal_is_loaded_with_it() -> None:
    target = Target()
    target.loaded()
    assert target.state() is PairState.REDIRECTING
    target.sealed(0)
    assert target.state() is PairState.LOADED


# --- layers -------------------------------------------------------------------------------------


def test_a_layer_is_run_part_by_part_before_another_is_begun() -> None:
    target = Target(part_tokens=4)
    target.has("a", "b")
    assert target.told(PartWanted()) == []
    assert not target.may_run()
    target.told(t.LayersReady(1))
    assert target.may_run()
    parts = []
    for _ in range(3):
        part = target.part()
        parts.append((part.batch_id, part.layer, part.begin, part.end))
        target.told(HasLanded(RunPart("a", 0, 0, part.end)))
    assert parts == [("a", 0, 0, 3), ("a", 0, 3, 6), ("a", 0, 6, 9)]
    assert target.part().batch_id == "b"


def test_first_tokens_of_a_batch_come_before_layers_of_another() -> None:
    target = Target()
    target.has("a", "b")
    target.loaded()
    parts = [target.part() for _ in range(NUM_LAYERS)]
    assert [(part.batch_id, part.layer) for part in parts] == [("a", layer) for layer in range(NUM_LAYERS)]
    assert target.told(PartWanted()) == []
    for part in parts[:-1]:
        target.told(HasLanded(part))
        assert target.told(PartWanted()) == []
    assert of_kind(Finish, target.told(HasLanded(parts[-1]))) == [Finish("a")]
    assert target.may_run()
    assert target.part().batch_id == "b"


def test_the_last_layer_counts_once_the_source_knows() -> None:
    target = Target()
    target.has("a")
    target.told(t.LayersReady(NUM_LAYERS))
    assert target.machine.queue.layers_ready == NUM_LAYERS - 1
    for _ in range(NUM_LAYERS - 1):
        target.ran_layer("a")
    actions = target.told(t.LayersReady(NUM_LAYERS, complete=True))
    assert of_kind(t.TellTaken, actions) == [t.TellTaken((), loaded=True)]
    assert target.told(PartWanted()) == []
    target.told(HasLanded(t.TellTaken((), True), True))
    assert of_kind(Finish, target.ran_layer("a")) == [Finish("a")]
    assert target.machine.queue.batch("a").state == "running", "its requests are not in two places, nor in none"
    actions = target.told(HasLanded(Finish("a")))
    assert of_kind(t.TellTaken, actions) == [t.TellTaken(("a",), loaded=True)]
    assert the(t.Forget, actions) == t.Forget(("a",), theirs=False)
    assert not target.machine.holds("a")


def test_that_it_is_loaded_is_told_once() -> None:
    target = Target()
    target.loaded()
    assert of_kind(t.TellTaken, target.told(t.LayersReady(NUM_LAYERS, complete=True))) == []


def test_a_source_that_does_not_know_keeps_the_last_layer_out() -> None:
    target = Target()
    target.told(t.LayersReady(NUM_LAYERS, complete=True))
    target.told(HasLanded(t.TellTaken((), True), False))
    assert target.machine.queue.layers_ready == NUM_LAYERS - 1


def test_a_target_that_is_loaded_after_the_end_need_not_tell_anybody() -> None:
    target = Target()
    target.has("a")
    target.asked_to_part()
    assert of_kind(t.TellTaken, target.told(t.LayersReady(NUM_LAYERS, complete=True))) == []


def test_what_the_engine_says_of_another_batch_is_ignored() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(1))
    assert target.told(HasLanded(RunPart("a", 0, 0, TOKENS))) == [], "none is begun"
    target.part()
    assert target.told(HasLanded(RunPart("b", 0, 0, TOKENS)), HasLanded(RunPart("c", 0, 0, TOKENS))) == []
    assert target.told(HasLanded(RunPart("a", 0, 0, TOKENS))) == []
    assert target.part().batch_id == "b"


# --- the source pulls ---------------------------------------------------------------------------


def test_a_pull_gets_the_earliest_batch_and_what_was_run_of_it() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(2))
    target.ran_layer("a")
    actions = target.pulled("1")
    assert pulled(actions) == ("a", 1)
    assert of_kind(SendHidden, actions) == [SendHidden("a", 0)]
    assert target.part().batch_id == "b"
    target.told(HasLanded(RunPart("b", 0, 0, TOKENS)))
    actions = target.pulled("2")
    assert pulled(actions) == ("b", 1)


def test_of_an_untouched_batch_the_source_has_everything() -> None:
    target = Target()
    target.has("a")
    actions = target.pulled("1")
    assert pulled(actions) == ("a", 0)
    assert of_kind(SendHidden, actions) == []


def test_a_repeated_pull_gets_the_same_batch_and_nothing_is_sent_twice() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(1))
    target.ran_layer("a")
    assert of_kind(SendHidden, target.pulled("1"))
    actions = target.pulled("1")
    assert pulled(actions) == ("a", 1)
    assert of_kind(SendHidden, actions) == []
    assert pulled(target.pulled("2")) == ("b", 0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_pull_that_waits_is_granted_at_the_end_of_the_layer_and_one_that_gave_up_is_not(waits: bool) -> None:
    target = Target()
    target.has("a")
    target.told(t.LayersReady(2))
    target.part()
    assert target.pulled("1", wait_s=5.0) == []
    assert target.machine.due_s == 5.0
    if not waits:
        target.now_s = 5.0
        actions = target.told(Due())
        assert pulled(actions) == ("", 0)
        assert not the(AnswerQuestion, actions).message.can_dissolve  # type: ignore[attr-defined]
    actions = target.told(HasLanded(RunPart("a", 0, 0, TOKENS)))
    if waits:
        assert pulled(actions) == ("a", 1)
        assert target.told(PartWanted()) == [], "before another layer is begun"
    else:
        assert actions == []
        assert target.part().layer == 1


def test_a_pull_that_waits_is_granted_when_a_batch_comes() -> None:
    target = Target()
    assert target.pulled("1", wait_s=5.0) == []
    target.asked_to_take("a")
    actions = target.told(HasLanded(t.Reserve("a"), True))
    assert [type(a.message) for a in of_kind(AnswerQuestion, actions)] == [Ack, Pulled]


def test_an_answer_says_how_far_the_target_is() -> None:
    target = Target()
    target.told(t.LayersReady(2))
    answer = the(AnswerQuestion, target.pulled("1")).message
    assert answer == Pulled(layers_ready=2)
    target.loaded()
    answer = the(AnswerQuestion, target.pulled("2", wait_s=9.0)).message
    assert answer == Pulled(layers_ready=NUM_LAYERS, loaded=True, can_dissolve=True), "at once"


@pytest.mark.parametrize("policy", BASELINES)
def test_the_baselines_part_as_soon_as_everything_is_loaded(policy: str) -> None:
    target = Target(policy)  # type: ignore[arg-type]
    target.has("a", "b")
    target.told(t.LayersReady(1))
    if policy != "stop_the_world":
        target.ran_layer("a")
    target.loaded()
    answer = the(AnswerQuestion, target.pulled("1", wait_s=9.0)).message
    assert isinstance(answer, Pulled)
    assert (answer.batch_id, answer.can_dissolve) == ("", True)


def test_the_baselines_do_not_part_before() -> None:
    for policy in BASELINES:
        target = Target(policy)  # type: ignore[arg-type]
        target.told(t.LayersReady(1))
        answer = the(AnswerQuestion, target.pulled("1")).message
        assert isinstance(answer, Pulled)
        assert not answer.can_dissolve


def test_zigzag_goes_on_while_begun_batches_wait() -> None:
    target = Target()
    target.has("a", "b", "c")
    target.told(t.LayersReady(1))
    for batch_id in "abc":
        target.ran_layer(batch_id)
    target.loaded()
    assert target.part().batch_id == "a"
    assert pulled(target.pulled("1")) == ("b", 1)
    assert pulled(target.pulled("2")) == ("c", 1)
    assert target.pulled("3", wait_s=1.0) == [], "it has not settled them"
    actions = target.settled("1", "2") + target.told(HasLanded(t.Free(("b", "c"), 0)))
    answers = [a.message for a in of_kind(AnswerQuestion, actions)]
    assert Pulled(layers_ready=NUM_LAYERS, loaded=True, can_dissolve=True) in answers


def test_what_the_source_settles_is_free_once() -> None:
    target = Target()
    target.has("a", "b")
    target.pulled("1")
    actions = target.settled("1", "unknown")
    assert of_kind(t.Free, actions) == [t.Free(("a",), 4)]
    assert of_kind(AnswerQuestion, actions) == [], "not before the blocks are free"
    actions = target.told(HasLanded(t.Free(("a",), 4)))
    assert of_kind(t.Forget, actions) == [t.Forget(("a",), theirs=True)]
    assert of_kind(AnswerQuestion, actions) == [AnswerQuestion(4, Ack())]
    assert target.settled("1") == [AnswerQuestion(5, Ack())]
    assert target.settled() == [AnswerQuestion(6, Ack())], "a sign of life"
    assert target.machine.holds("b")


def test_kv_is_sent_of_layers_that_were_run_once_each() -> None:
    target = Target()
    target.has("a")
    target.told(t.LayersReady(3))
    for _ in range(3):
        target.ran_layer("a")
    target.pulled("1")
    assert target.asked(pull_kv("a", 0, 2)) == [t.SendKv("a", 3, 0, 2), AnswerQuestion(3, Ack())]
    assert target.asked(pull_kv("a", 0, 2)) == [AnswerQuestion(4, Ack())]
    assert target.asked(pull_kv("a", 2, 3)) == [t.SendKv("a", 3, 2, 3), AnswerQuestion(5, Ack())]


@pytest.mark.parametrize(("first", "last"), [(0, 2), (-1, 1), (1, 1), (1, 0), (0, 0), (1, 2), (0, 10**9), (-5, -1)])
def test_kv_of_layers_that_were_not_run_is_refused(first: int, last: int) -> None:
    target = Target()
    target.has("a")
    target.told(t.LayersReady(1))
    target.ran_layer("a")
    target.pulled("1")
    assert refused(target.asked(pull_kv("a", first, last))) == "bad_request"


def test_kv_of_a_batch_that_is_not_the_sources_is_refused() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(1))
    target.ran_layer("a")
    assert refused(target.asked(pull_kv("a", 0, 1))) == "conflict"
    assert refused(target.asked(pull_kv("unknown", 0, 1))) == "conflict"
    target.pulled("1")
    target.settled("1")
    assert refused(target.asked(pull_kv("a", 0, 1))) == "conflict", "it is settled"


# --- gates --------------------------------------------------------------------------------------


def test_both_sides_are_held_to_gates() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(3))
    assert t.Wake() in target.told(t.GatesCame((gate("a", 1), gate("b", 2), gate("late", 3))))
    assert target.pulled("1", wait_s=1.0) == []
    assert pulled(target.ran_layer("a")) == ("a", 1)
    target.ran_layer("b")
    assert target.part() == RunPart("b", 1, 0, TOKENS)
    target.has("late")
    assert target.machine.queue.batch("late").gate == 3


def test_gates_come_too_late_once_everything_is_loaded_or_shared() -> None:
    target = Target()
    target.has("a")
    target.told(t.GatesCame((gate("a", 1),)))
    assert target.machine.queue.batch("a").gate == 1
    target.loaded()
    assert target.told(t.GatesCame((gate("a", 2),))) == []
    assert target.machine.queue.batch("a").gate == 1
    target.asked_to_part()
    assert target.told(t.GatesCame((gate("a", 2),))) == []
    assert target.machine.queue.batch("a").gate is None


@pytest.mark.parametrize("num_layers", [-1, NUM_LAYERS + 1, 10**9])
def test_gates_that_make_no_sense_are_left_out(num_layers: int) -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.GatesCame((gate("a", num_layers), gate("b", 2), gate("nobody", 1))))
    assert [b.gate for b in target.machine.queue.batches()] == [None, 2]


def test_gates_lapse_when_layers_are_late() -> None:
    target = Target(ordered_s=1000.0)
    target.now_s = 1050.0
    target.has("a")
    assert target.machine.due_s == float("inf"), "nothing is to be watched"
    target.told(t.GatesCame((gate("a", 2),)))
    assert target.machine.due_s == WATCH_S
    target.told(Due())
    assert 1050.0 < target.machine.due_s <= 1050.0 + WATCH_S
    target.now_s = 1101.9
    assert target.told(Due()) == []
    assert pulled(target.pulled("1")) == ("", 0)
    target.now_s = 1102.0
    actions = target.told(Due())
    assert the(t.Note, actions).text == "pair pair: layers are late, the split is off"
    assert t.Wake() in actions
    assert pulled(target.pulled("2")) == ("a", 0)
    assert target.machine.due_s == float("inf")


def test_gates_that_lapse_free_a_pull_that_waits() -> None:
    target = Target()
    target.has("a")
    target.told(t.GatesCame((gate("a", 2),)))
    assert target.pulled("1", wait_s=1000.0) == []
    target.now_s = 500.0
    assert pulled(target.told(Due())) == ("a", 0)


# --- requests that nobody wants -------------------------------------------------------------------


def test_a_cancelled_batch_is_freed_unless_the_engine_or_the_source_has_it() -> None:
    target = Target()
    target.has("a", "b", "c")
    target.told(t.LayersReady(1))
    target.pulled("1")
    assert target.part().batch_id == "b"
    assert target.told(Cancelled((key("d"),))) == []
    keys = tuple(map(key, "abc"))
    assert target.told(Cancelled((*keys, key("d")))) == [t.EndRequests(keys)]
    assert freed(target.told(HasLanded(t.EndRequests(keys)))) == ["c"]
    actions = target.told(HasLanded(RunPart("b", 0, 0, TOKENS)))
    assert freed(actions) == ["b"]
    assert of_kind(Finish, actions) == []
    assert freed(target.settled("1")) == ["a"]


def test_a_batch_is_cancelled_with_the_last_of_its_requests() -> None:
    target = Target()
    batch = Batch("ab", (request("a"), request("b")), 1.0)
    target.told(
        t.HandedOver(1, batch, 0, behind_seal=False),
        HasLanded(t.Reserve("ab"), True),
        HasLanded(t.HostBatch("ab", 0), True),
    )
    target.told(t.LayersReady(1))
    assert target.told(Cancelled((key("a"),))) == [t.EndRequests((key("a"),))]
    assert target.told(HasLanded(t.EndRequests((key("a"),)))) == []
    assert target.told(Cancelled((key("a"),))) == [], "once"
    assert freed(target.told(HasLanded(t.EndRequests((key("b"),))))) == ["ab"]


def test_a_layer_of_a_batch_that_nobody_wants_is_given_up_between_two_parts() -> None:
    target = Target(part_tokens=4)
    target.has("a", "b")
    target.told(t.LayersReady(1))
    target.told(HasLanded(RunPart("a", 0, 0, target.part().end)))
    assert freed(target.told(HasLanded(t.EndRequests((key("a"),))))) == []
    actions = target.told(PartWanted())
    assert freed(actions) == ["a"]
    assert the(RunPart, actions) == RunPart("b", 0, 0, 3)


def test_a_batch_may_be_cancelled_while_its_first_tokens_are_sampled() -> None:
    target = Target()
    target.has("a")
    target.loaded()
    while not of_kind(Finish, target.ran_layer("a")):
        pass
    assert freed(target.told(HasLanded(t.EndRequests((key("a"),))))) == []
    actions = target.told(HasLanded(Finish("a")))
    assert of_kind(t.Forget, actions) == [t.Forget(("a",))]
    assert freed(actions) == [], "the engine has"
    assert of_kind(t.TellTaken, actions) == []
    assert target.machine.queue.batch("a").state == "cancelled"


def test_a_pull_passes_by_what_nobody_wants() -> None:
    target = Target()
    target.has("a", "b")
    target.told(HasLanded(t.EndRequests((key("a"),))))
    assert pulled(target.pulled("1")) == ("b", 0)


# --- parting --------------------------------------------------------------------------------------


def test_a_queue_that_is_not_sealed_is_not_shared() -> None:
    target = Target()
    target.has("a")
    asked = Dissolve(pair_id="pair", claim_id="end", first_serial=0, source_busy_s=0.0)
    assert refused(target.asked(asked)) == "conflict"
    assert target.told(HasLanded(t.AwaitStepEnd())) == []
    assert target.sealed(1) == [AnswerQuestion(3, Ack())]
    assert shares(target.asked_to_part()).given[0].batch_id == "a"


def test_sharing_waits_for_a_layer_that_only_the_source_could_go_on_from() -> None:
    target = Target()
    target.has("a", "b", "c")
    target.told(t.LayersReady(1))
    target.part()
    assert target.asked_to_part() == []
    actions = target.told(HasLanded(RunPart("a", 0, 0, TOKENS)))
    assert [(g.batch_id, g.first_layer, g.serial) for g in shares(actions).given] == [
        ("a", 1, 3),
        ("b", 0, 4),
        ("c", 0, 5),
    ]
    assert [c.batch_id for c in target.machine.queue.open_claims()] == ["a"], "the source settles it with its KV"
    assert of_kind(SendHidden, actions) == [SendHidden("a", 3)]
    assert freed(actions) == ["b", "c"]
    assert target.state() is PairState.DISSOLVED


def test_with_all_layers_it_is_shared_inside_of_one() -> None:
    target = Target()
    target.has("a", "b")
    target.loaded()
    target.part()
    actions = target.asked_to_part(source_busy_s=99.0)
    assert shares(actions).kept == ("a", "b")
    assert of_kind(t.Announce, actions) == [t.Announce(("a", "b"))]
    assert target.told(HasLanded(RunPart("a", 0, 0, TOKENS))) == []


def test_a_loaded_target_keeps_what_it_has_begun_and_shares_the_rest() -> None:
    target = Target()
    target.has("a", "b", "c")
    target.loaded()
    target.ran_layer("a")
    actions = target.asked_to_part()
    assert (shares(actions).kept, [g.batch_id for g in shares(actions).given]) == (("a", "c"), ["b"])
    assert of_kind(t.Announce, actions) == [t.Announce(("a", "c"))]
    assert freed(actions) == ["b"]
    assert target.machine.queued == (2, 2 * TOKENS)
    for batch_id in ("a", "c"):
        assert of_kind(t.TellTaken, target.finished(batch_id)) == [], "it was told"
    assert target.told(HasLanded(t.Free(("b",), -1)), HasLanded(t.AwaitStepEnd()))[-2:] == [Detach(), Over()]


def test_before_the_pair_dissolves_all_requests_are_the_sources() -> None:
    target = Target()
    target.has("a")
    target.loaded()
    assert target.machine.queued == (0, 0)
    assert target.machine.num_requests == 1


def test_what_the_source_still_has_to_do_is_counted_when_it_is_shared() -> None:
    shared = []
    for busy_s in (0.0, 99.0):
        target = Target()
        target.has("a", "b")
        target.loaded()
        shared.append(shares(target.asked_to_part(source_busy_s=busy_s)).kept)
    assert shared == [("a",), ("a", "b")]


def test_a_loaded_target_parts_once_the_source_knows_or_after_a_while() -> None:
    target = Target()
    target.told(t.LayersReady(NUM_LAYERS, complete=True))
    assert target.asked_to_part() == []
    assert target.machine.due_s == KNOWS_S
    assert shares(target.told(HasLanded(t.TellTaken((), True), True))).given == ()
    late = Target()
    late.has("a")
    late.told(t.LayersReady(NUM_LAYERS, complete=True))
    late.asked_to_part()
    late.now_s = KNOWS_S
    assert [g.batch_id for g in shares(late.told(Due())).given] == ["a"], "it finishes nothing"


def test_repeating_the_wish_to_part_gives_the_same_shares() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(NUM_LAYERS, complete=True))
    assert target.asked_to_part("end") == target.asked_to_part("end") == []
    actions = target.told(HasLanded(t.TellTaken((), True), True))
    first, again = (a.message for a in of_kind(AnswerQuestion, actions))
    assert first == again
    assert shares(target.asked_to_part("another", source_busy_s=50.0)) == first


def test_what_was_finished_is_said_in_the_end_unless_the_source_knows() -> None:
    target = Target()
    target.has("a", "b")
    target.loaded()
    for batch_id in ("a", "b"):
        target.finished(batch_id)
    target.told(HasLanded(t.TellTaken(("a",), True), True))
    assert shares(target.asked_to_part()).finished == ("b",)


def test_what_the_source_pulled_before_is_settled_with_the_end() -> None:
    target = Target()
    target.has("a", "b")
    target.pulled("1")
    actions = target.asked_to_part()
    assert [g.batch_id for g in shares(actions).given] == ["b"]
    assert freed(actions) == ["a", "b"]


def test_given_batches_stay_until_they_are_settled() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(2))
    target.ran_layer("a")
    target.asked_to_part()
    assert target.told(HasLanded(t.Free(("b",), -1))) == [t.Forget(("b",)), t.Wake()]
    assert of_kind(t.SendKv, target.asked(pull_kv("a", 0, 1)))
    actions = target.settled("end/a")
    assert freed(actions) == ["a"]
    assert of_kind(t.AwaitStepEnd, actions) == [t.AwaitStepEnd()]
    assert target.told(HasLanded(t.AwaitStepEnd())) == [Detach(), Over()]


def test_gifts_of_a_source_that_is_lost_are_freed() -> None:
    target = Target()
    target.has("a")
    target.told(t.LayersReady(2))
    target.ran_layer("a")
    target.asked_to_part()
    actions = target.told(Lost("silent"))
    assert freed(actions) == ["a"]
    assert of_kind(TellEnded, actions) == []
    assert target.state() is PairState.DISSOLVED
    assert target.told(HasLanded(t.AwaitStepEnd())) == [Detach(), Over()]


def test_a_batch_that_nobody_wants_is_not_freed_inside_its_layer_by_the_end_of_the_pair() -> None:
    target = Target(part_tokens=4)
    target.has("a", "b")
    target.loaded()
    target.told(HasLanded(RunPart("a", 0, 0, target.part().end)))
    target.told(HasLanded(t.EndRequests((key("a"),))))
    actions = target.asked_to_part()
    assert shares(actions).kept == ("b",)
    assert freed(actions) == []
    actions = target.told(PartWanted())
    assert freed(actions) == ["a"]
    assert the(RunPart, actions).batch_id == "b"


def test_pulls_that_wait_end_with_the_pair() -> None:
    target = Target()
    target.pulled("1", wait_s=9.0)
    actions = target.asked_to_part()
    assert [type(a.message) for a in of_kind(AnswerQuestion, actions)] == [Dissolved, Pulled]


# --- the end ----------------------------------------------------------------------------------


def test_a_pair_that_fails_leaves_nothing_here() -> None:
    target = Target()
    target.has("a", "b", "c")
    target.loaded()
    target.finished("a")
    actions = target.told(Lost("silent"))
    assert actions == [t.Note("pair pair failed: silent", warns=True), Abort("silent"), t.AwaitStepEnd()]
    actions = target.told(HasLanded(t.AwaitStepEnd()))
    assert actions == [t.Free(("b", "c")), TellEnded("silent", ("a",)), Detach(), Over()]
    assert of_kind(t.Forget, target.told(HasLanded(t.Free(("b", "c"), -1)))) == [t.Forget(("b",)), t.Forget(("c",))]
    assert target.told(PartWanted(), HasLanded(RunPart("b", 0, 0, TOKENS)), Lost("again")) == []


def test_a_source_that_said_it_need_not_be_told() -> None:
    target = Target()
    target.told(Lost("it said so", tell=False))
    assert target.told(HasLanded(t.AwaitStepEnd())) == [Detach(), Over()]


def test_questions_after_a_failure_are_refused() -> None:
    target = Target()
    target.has("a")
    target.pulled("1")
    target.has("b")
    target.pulled("2", wait_s=0.0)
    target.pulled("3", wait_s=9.0)
    target.asked_to_take("c")
    actions = target.told(Lost("silent"))
    assert refused(actions) == "conflict", "of the pull that waits"
    answers = [
        target.asked_to_take("d"),
        target.asked_to_take("a"),
        target.sealed(0),
        target.pulled("1"),
        target.asked(pull_kv("a", 0, 1)),
        target.settled("1"),
        target.asked_to_part(),
    ]
    assert [refused(actions) for actions in answers] == ["conflict"] * 7
    assert "silent" in the(RefuseQuestion, answers[0]).error.message
    actions = target.told(HasLanded(t.Reserve("c"), True))
    assert (refused(actions), freed(actions)) == ("conflict", ["c"])


def test_a_wish_to_part_that_waits_is_refused_when_the_pair_fails() -> None:
    target = Target()
    target.told(t.LayersReady(NUM_LAYERS, complete=True))
    target.asked_to_part()
    assert refused(target.told(Lost("silent"))) == "conflict"
    assert target.machine.due_s == float("inf")


def test_halted_it_runs_nothing() -> None:
    target = Target()
    target.has("a", "b")
    target.told(t.LayersReady(1))
    target.part()
    actions = target.told(HasLanded(RunPart("a", 0, 0, 0), "RuntimeError: out of memory"))
    assert Abort("the target's engine failed: RuntimeError: out of memory") in actions
    assert not target.may_run()
    assert target.told(PartWanted()) == []
    assert freed(target.told(HasLanded(t.AwaitStepEnd()))) == ["a", "b"]
    assert not target.may_run()


@pytest.mark.parametrize("complete", [True, False])
def test_an_engine_that_fails_on_what_was_kept_ends_that_or_computes_it_in_steps(complete: bool) -> None:
    target = Target()
    target.has("a", "b")
    target.loaded()
    if not complete:
        target.machine.loaded = False  # the source shared as if it were
    target.asked_to_part(source_busy_s=99.0)
    target.part()
    assert target.told(HasLanded(RunPart("a", 0, 0, 0), "RuntimeError: out of memory")) == [t.AwaitStepEnd()]
    actions = target.told(HasLanded(t.AwaitStepEnd()))
    abandoned = the(t.Abandon, actions)
    assert abandoned.batch_ids == ("a", "b")
    if complete:
        assert abandoned.error is None
    else:
        assert abandoned.error is not None
        assert abandoned.error.code == "unavailable"
    assert freed(actions) == ["a", "b"]
    assert actions[-2:] == [Detach(), Over()]
    assert of_kind(TellEnded, actions) == []


def test_an_engine_that_has_stopped_has_freed_everything() -> None:
    target = Target()
    target.has("a", "b")
    target.loaded()
    target.finished("a")
    target.asked_to_take("c")
    target.asked_to_take("c")
    actions = target.told(EngineStopped())
    assert [(a.question, a.error.code) for a in of_kind(RefuseQuestion, actions)] == [
        (3, "engine_broken"),
        (4, "engine_broken"),
    ]
    assert of_kind(t.Forget, actions) == [t.Forget(("b",))]
    assert freed(actions) == []
    assert the(TellEnded, actions).finished == ("a",)
    assert actions[-2:] == [Detach(), Over()]
    assert of_kind(TellEnded, target.told(EngineStopped())) == [], "once"


def test_a_question_about_blocks_that_are_not_freed_any_more_is_refused() -> None:
    target = Target()
    target.has("a")
    target.pulled("1")
    assert of_kind(t.Free, target.settled("1"))
    actions = target.told(EngineStopped())
    assert (the(RefuseQuestion, actions).question, refused(actions)) == (3, "engine_broken")
    assert of_kind(RefuseQuestion, target.told(EngineStopped())) == []


@pytest.mark.parametrize("complete", [True, False])
def test_an_engine_that_is_about_to_stop_leaves_nothing_of_what_was_kept(complete: bool) -> None:
    target = Target()
    target.has("a", "b")
    target.loaded()
    target.machine.loaded = complete
    target.asked_to_part(source_busy_s=99.0)
    assert target.told(Lost("the target leaves"), t.EngineStops("the target leaves")) == [t.AwaitStepEnd()]
    assert target.told(t.EngineStops("again"), PartWanted()) == []
    actions = target.told(HasLanded(t.AwaitStepEnd()))
    abandoned = the(t.Abandon, actions)
    assert (abandoned.batch_ids, abandoned.error is None) == (("a", "b"), complete)
    assert freed(actions) == ["a", "b"]
    assert actions[-2:] == [Detach(), Over()]
    assert target.told(t.EngineStops("the target leaves")) == []


def test_that_an_engine_is_about_to_stop_changes_nothing_else() -> None:
    target = Target()
    target.has("a")
    assert target.told(t.EngineStops("the target leaves")) == []


# --- parts behind parts ---------------------------------------------------------------------------


def loaded_with(*batch_ids: str, num_layers: int = NUM_LAYERS - 1, policy: LivePolicy = "zigzag") -> Target:
    """The queue is sealed, and so many layers are there."""
    target = Target(policy)
    target.has(*batch_ids)
    target.sealed(len(batch_ids))
    if num_layers == NUM_LAYERS:
        target.loaded()
    else:
        target.told(t.LayersReady(num_layers))
    return target


def in_flight(target: Target, count: int = 2) -> list[RunPart]:
    """It is given so many."""
    return [target.part() for _ in range(count)]


def test_a_layer_is_given_behind_one_that_has_not_landed_and_they_land_in_order() -> None:
    target = loaded_with("a", num_layers=NUM_LAYERS)
    parts = in_flight(target, NUM_LAYERS)
    assert [(part.batch_id, part.layer) for part in parts] == [("a", layer) for layer in range(NUM_LAYERS)]
    assert target.told(PartWanted()) == []
    for part in parts[:-1]:
        assert target.told(HasLanded(part)) == []
    assert of_kind(Finish, target.told(HasLanded(parts[-1]))) == [Finish("a")]


def test_what_is_in_flight_goes_on_with_the_next_batch_once_a_batch_has_no_layer_left() -> None:
    target = loaded_with("a", "b", num_layers=2)
    parts = in_flight(target, 4)
    assert [(part.batch_id, part.layer) for part in parts] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert target.told(PartWanted()) == []
    target.told(t.LayersReady(3))
    assert target.part() == RunPart("a", 2, 0, TOKENS), "the first come, though nothing of it has landed"


def test_a_batch_whose_part_is_in_flight_is_first_run_to_the_end_of_its_layer() -> None:
    target = Target(part_tokens=TOKENS // 3)
    target.has("a", "b")
    target.told(t.LayersReady(1))
    parts = in_flight(target, 6)
    assert [part.batch_id for part in parts] == ["a"] * 3 + ["b"] * 3
    assert [part.begin for part in parts[:3]] == [0, 3, 6]
    assert target.told(*map(HasLanded, parts[:2])) == []
    assert pulled(target.pulled("0")) == ("", 0), "its last part has not landed"
    target.told(HasLanded(parts[2]))
    assert pulled(target.pulled("1")) == ("a", 1)


def test_a_landing_behind_a_failed_one_counts_for_nothing() -> None:
    target = loaded_with("a", num_layers=NUM_LAYERS)
    parts = in_flight(target, NUM_LAYERS)
    target.told(*map(HasLanded, parts[:-2]))
    actions = target.told(HasLanded(parts[-2], "RuntimeError: cuda"))
    assert of_kind(t.AwaitStepEnd, actions)
    assert freed(actions) == []
    assert target.told(HasLanded(parts[-1])) == [], "nor is it finished"
    actions = target.told(HasLanded(t.AwaitStepEnd()))
    assert freed(actions) == ["a"]
    assert the(TellEnded, actions).reason == "the target's engine failed: RuntimeError: cuda"


def test_two_that_fail_are_one_failure() -> None:
    target = loaded_with("a")
    first, second = in_flight(target)
    target.told(HasLanded(first, "RuntimeError: cuda"))
    assert target.told(HasLanded(second, "RuntimeError: again")) == []
    ended = the(TellEnded, target.told(HasLanded(t.AwaitStepEnd())))
    assert ended.reason == "the target's engine failed: RuntimeError: cuda"


def test_a_batch_that_nobody_waits_for_is_freed_when_the_last_of_it_has_landed() -> None:
    target = loaded_with("a", "b", num_layers=2)
    first, second = in_flight(target)
    target.told(Cancelled((key("a"),)))
    assert freed(target.told(HasLanded(t.EndRequests((key("a"),))))) == []
    assert freed(target.told(HasLanded(first))) == []
    assert target.machine.holds("a")
    assert target.part().batch_id == "b", "nothing more of it is run"
    assert freed(target.told(HasLanded(second))) == ["a"]
    assert not target.machine.holds("a")


def test_a_batch_that_nobody_waits_for_is_freed_at_once_if_all_that_was_given_of_it_has_landed() -> None:
    target = Target(part_tokens=TOKENS // 3)
    target.has("a")
    target.told(t.LayersReady(1))
    target.told(HasLanded(target.part()))
    target.told(Cancelled((key("a"),)))
    assert freed(target.told(HasLanded(t.EndRequests((key("a"),))))) == [], "it is inside a layer"
    assert freed(target.told(PartWanted())) == ["a"]


def test_of_a_batch_that_is_freed_as_its_part_lands_no_other_part_is_given() -> None:
    target = Target(part_tokens=TOKENS // 3)
    target.has("a", "b")
    target.told(t.LayersReady(1))
    part = target.part()
    target.told(Cancelled((key("a"),)))
    target.told(HasLanded(t.EndRequests((key("a"),))))
    assert freed(target.told(HasLanded(part))) == ["a"]
    assert target.part() == RunPart("b", 0, 0, TOKENS // 3)


@pytest.mark.parametrize("kept", [True, False])
def test_of_a_batch_cancelled_while_first_tokens_are_sampled_it_is_known_whose_it_was(kept: bool) -> None:
    target = loaded_with("a", num_layers=NUM_LAYERS)
    parts = in_flight(target, NUM_LAYERS)
    target.told(*map(HasLanded, parts))
    if kept:
        assert shares(target.asked_to_part()).kept == ("a",)
    target.told(Cancelled((key("a"),)))
    assert freed(target.told(HasLanded(t.EndRequests((key("a"),))))) == []
    actions = target.told(HasLanded(Finish("a")))
    assert of_kind(t.Forget, actions) == [t.Forget(("a",), theirs=not kept)]
    assert of_kind(t.TellTaken, actions) == []
    assert not target.machine.holds("a")


def test_a_pull_is_answered_when_all_of_the_batch_has_landed_and_nothing_more_of_it_is_given() -> None:
    target = loaded_with("a", "b")
    first, second = in_flight(target)
    assert target.pulled("0", wait_s=9.0) == []
    beside = target.part()
    assert (beside.batch_id, beside.layer) == ("b", 0)
    assert of_kind(AnswerQuestion, target.told(HasLanded(first))) == []
    assert target.part().batch_id == "b"
    actions = target.told(HasLanded(second))
    assert the(SendHidden, actions).batch_id == "a"
    assert pulled(actions) == ("a", 2)


def test_who_wishes_to_part_waits_for_all_that_is_in_flight_and_nothing_is_given_meanwhile() -> None:
    target = loaded_with("a", "b")
    first, second = in_flight(target)
    assert target.asked_to_part() == []
    assert target.told(PartWanted()) == []
    assert target.told(HasLanded(first)) == []
    assert target.told(PartWanted()) == [], "neither of it nor of another"
    actions = target.told(HasLanded(second))
    assert [(g.batch_id, g.first_layer) for g in shares(actions).given] == [("a", 2), ("b", 0)]
    assert the(SendHidden, actions).batch_id == "a"
    assert freed(actions) == ["b"]


def test_who_wishes_to_part_waits_for_the_other_parts_of_a_layer_that_is_begun() -> None:
    target = Target(part_tokens=TOKENS // 3)
    target.has("a")
    target.sealed(1)
    target.told(t.LayersReady(2))
    first, second = in_flight(target)
    assert target.asked_to_part() == []
    target.told(HasLanded(first), HasLanded(second))
    third = target.part()
    assert (third.layer, third.begin, third.end) == (0, 6, 9)
    assert target.told(PartWanted()) == []
    assert [(g.batch_id, g.first_layer) for g in shares(target.told(HasLanded(third))).given] == [("a", 1)]


def test_who_wishes_to_part_waits_for_what_best_effort_has_let_go_of_and_is_in_flight() -> None:
    target = loaded_with("a", "b", num_layers=2, policy="best_effort")
    first, second = in_flight(target)
    beside = target.part()
    assert beside.batch_id == "b", "half of the layers of the first one are begun"
    target.loaded()
    assert target.asked_to_part() == []
    assert target.told(HasLanded(first)) == []
    answered = shares(target.told(HasLanded(second)))
    assert [(g.batch_id, g.first_layer) for g in answered.given] == [("a", 2)]
    assert answered.kept == ("b",)
    assert target.told(HasLanded(beside)) == []
    assert target.part() == RunPart("b", 1, 0, TOKENS)
