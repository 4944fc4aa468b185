"""What the source of a pair decides."""

from __future__ import annotations

import pytest

from services.worker.core.live import source_words as s
from services.worker.core.live.life import PairState
from services.worker.core.live.machine import (
    Abort,
    Action,
    AnswerQuestion,
    Begin,
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
from services.worker.core.live.source import LOOK_S, PULL_WAIT_S, PullTime
from services.worker.core.live.source_words import How
from services.worker.core.scheduling.schedule import Sampled, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.common import Ack
from shared.messages.live import Dissolve, Pull, Pulled, Seal, Settle, SplitBatch, Taken
from tests.services.worker.core.live.pairs import ASKED, NUM_LAYERS, TOKENS, Source, key, of_kind, request, shares, the
from tests.services.worker.live import members


def names(batch_ids: tuple[str, ...]) -> str:
    return "".join(batch_ids).replace("pair-", "")


def taken(*batch_ids: str, loaded: bool = False, question: int = 5) -> s.TargetAsks:
    return s.TargetAsks(question, Taken(pair_id="pair", batch_ids=batch_ids, loaded=loaded))


def not_taken(name: str) -> list[HasLanded]:
    """It was lent, and the target has no capacity for it."""
    return [HasLanded(s.Lend(False), s.Lent((request(name),), 0.5)), HasLanded(ASKED, s.HandOverAnswer(taken=False))]


def restore(actions: list[Action]) -> s.Restore:
    return the(s.Restore, actions)


# --- offered, redirecting -------------------------------------------------------------------------


def test_a_pair_begins_with_an_offer_and_lends_once_it_is_accepted() -> None:
    source = Source()
    assert source.told(Begin()) == [s.AskOffer()]
    assert source.state() is PairState.OFFERED
    assert source.told(HasLanded(s.AskOffer())) == [s.Lend(begins=True)]
    assert source.state() is PairState.REDIRECTING


def test_what_waits_is_handed_over_in_order_at_what_a_layer_of_it_costs() -> None:
    source = Source()
    actions = source.lent(request("a"), request("b"))
    assert of_kind(s.Lending, actions) == [s.Lending(True)]
    asked = the(s.AskHandOver, actions)
    assert (asked.batch.batch_id, asked.serial, asked.behind_seal) == ("pair-0", 0, False)
    assert (asked.batch.keys, asked.batch.layer_s) == ((key("a"),), 0.5 * TOKENS / NUM_LAYERS)
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True))) == [SendHidden("pair-0", 0)]
    asked = the(s.AskHandOver, source.told(HasLanded(SendHidden("pair-0", 0))))
    assert (asked.batch.keys, asked.serial) == ((key("b"),), 1)
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True))) == [SendHidden("pair-1", 1)]
    assert source.told(HasLanded(SendHidden("pair-1", 0))) == [s.AskTarget(Seal(pair_id="pair", count=2))]


def test_what_arrives_behind_the_seal_goes_the_same_way() -> None:
    source = Source()
    source.cooperating("a")
    assert source.told(s.RequestArrived()) == [s.Lend(begins=False)]
    asked = the(s.AskHandOver, source.told(HasLanded(s.Lend(False), s.Lent((request("c"),), 0.5))))
    assert (asked.batch.keys, asked.serial, asked.behind_seal) == ((key("c"),), 1, True)
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden("pair-1", 0)))[1:] == []


def test_what_arrives_while_others_are_handed_over_follows_them() -> None:
    source = Source()
    source.cooperating("a")
    source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("b"),), 0.5)))
    assert source.told(s.RequestArrived()) == []
    actions = source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden("pair-1", 0)))
    assert of_kind(s.Lend, actions) == [s.Lend(begins=False)]


def test_what_arrives_before_the_seal_waits_for_it() -> None:
    source = Source()
    asked = the(s.AskTarget, source.handed_over("a"))
    assert source.told(s.RequestArrived()) == []
    assert of_kind(s.Lend, source.answered(Ack(), asked.message)) == [s.Lend(begins=False)]


def test_an_empty_queue_is_sealed_at_once() -> None:
    assert the(s.AskTarget, Source().lent()) == s.AskTarget(Seal(pair_id="pair", count=0))


def test_a_batch_takes_a_quarter_of_the_slots_at_most() -> None:
    source = Source(chunk_tokens=1000, max_sequences=8)
    source.lent(*map(request, "abcd"))
    assert [batch.keys for batch in source.machine.batches.values()] == [(key("a"), key("b")), (key("c"), key("d"))]


def test_without_a_measurement_batches_cost_by_their_tokens() -> None:
    source = Source()
    source.lent(request("a", 4), request("b", 8), token_s=0.0)
    first, second = source.machine.batches.values()
    assert second.layer_s == 2 * first.layer_s > 0


def test_what_is_refused_waits_before_what_is_behind_it() -> None:
    source = Source()
    source.lent(request("a"), request("b"))
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=False))) == [s.AskTarget(Seal(pair_id="pair", count=0))]
    source.answered(Ack(), Seal(pair_id="pair", count=0))
    asked = the(s.AskHandOver, source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("c"),), 0.5))))
    assert (asked.batch.batch_id, asked.serial) == ("pair-0", 0)
    actions = source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden("pair-0", 0)))
    asked = the(s.AskHandOver, actions)
    assert (asked.batch.batch_id, asked.serial) == ("pair-1", 1)


def test_a_request_counts_as_the_targets_before_it_has_answered() -> None:
    source = Source()
    source.lent(request("a"), request("b"))
    assert source.told(Cancelled((key("a"),))) == [s.TellCancelled((key("a"),))]
    assert source.told(Cancelled((key("b"),))) == [], "it is still here"
    source.told(HasLanded(ASKED, s.HandOverAnswer(taken=False)))
    assert source.told(Cancelled((key("a"),))) == [], "it is here again"


def test_a_batch_may_be_pulled_before_its_hand_over_is_answered() -> None:
    source = Source()
    source.cooperating("a")
    source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("b"),), 0.5)))
    assert the(s.BeginBatch, source.given("pair-1")).batch_id == "pair-1"
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True))) == [SendHidden("pair-1", 1)]
    source.told(HasLanded(s.BeginBatch("pair-1", 0), True))
    assert source.run("pair-1")


def test_a_target_that_refuses_what_it_gave_is_lost() -> None:
    source = Source()
    source.cooperating("a")
    source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("b"),), 0.5)))
    source.given("pair-1")
    assert of_kind(TellEnded, source.told(HasLanded(ASKED, s.HandOverAnswer(taken=False))))
    assert source.state() is PairState.FAILED
    assert "pair-1" in source.machine.failure


def test_nobody_is_asked_to_take_what_has_ended() -> None:
    source = Source()
    source.lent(*map(request, "abc"))
    asked = the(s.AskHandOver, source.told(HasLanded(ASKED, s.HandOverAnswer(taken=False, asked=False))))
    assert (asked.batch.batch_id, asked.serial) == ("pair-1", 0)
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True, ended=(key("b"),)))) == [
        s.TellCancelled((key("b"),)),
        SendHidden("pair-1", 0),
    ]


def test_of_a_cancel_that_the_scheduler_has_not_heard_of_the_target_is_told() -> None:
    source = Source()
    source.lent(*map(request, "ab"))
    source.told(Cancelled((key("b"),)))
    told = []
    for batch_id in ("pair-0", "pair-1"):
        told.append(of_kind(s.TellCancelled, source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)))))
        source.told(HasLanded(SendHidden(batch_id, 0)))
    assert told == [[], [s.TellCancelled((key("b"),))]]


def test_an_instance_that_is_in_another_pair_lends_nothing() -> None:
    source = Source()
    actions = source.told(Begin(), HasLanded(s.AskOffer()), HasLanded(s.Lend(True)))
    assert of_kind(TellEnded, actions) == [TellEnded("its engine is in another pair")]
    assert actions[-2:] == [Detach(), Over()]
    assert not of_kind(s.Lending, actions)
    assert not of_kind(s.Restore, actions)


def test_a_split_is_asked_for_where_it_can_gain_something() -> None:
    def asked(policy: str, *sizes: int, token_s: float = 0.5) -> list[tuple[SplitBatch, ...]]:
        source = Source(policy)  # type: ignore[arg-type]
        actions = source.lent(*(request(str(i), size) for i, size in enumerate(sizes)), token_s=token_s)
        for i in range(len(sizes)):
            actions = source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden(f"pair-{i}", 0)))
        return [a.batches for a in of_kind(s.AskSplit, source.answered(Ack(), the(s.AskTarget, actions).message))]

    assert asked("zigzag", 9) == [], "one batch"
    assert asked("zigzag", 9, 9) == [], "equal ones"
    ((a, b, c),) = asked("zigzag", 9, 9, 12)
    assert (a.batch_id, b.batch_id, c.batch_id) == ("pair-0", "pair-1", "pair-2")
    assert (a.layer_s, c.layer_s) == (0.5 * 9 / NUM_LAYERS, 0.5 * 12 / NUM_LAYERS)
    assert asked("zigzag", 9, 12, token_s=0.0) == [], "nothing was measured"
    assert asked("overlap", 9, 12) == []


def test_the_source_cooperates_once_the_planner_knows_or_could_not_be_told() -> None:
    source = Source()
    source.lent(request("a", 4), request("b", 8))
    for batch_id in ("pair-0", "pair-1"):
        actions = source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden(batch_id, 0)))
    assert of_kind(s.KeepAlive, source.answered(Ack(), the(s.AskTarget, actions).message)) == []
    assert source.told(s.EngineFree()) == [], "not yet"
    assert source.told(HasLanded(s.AskSplit((), 0.0, 0.0))) == [s.KeepAlive(True), s.Look()]
    assert source.state() is PairState.COOPERATING
    assert isinstance(the(s.AskTarget, source.told(s.EngineFree())).message, Pull)


# --- work is got ------------------------------------------------------------------------------


def test_a_free_engine_asks_for_a_batch_once() -> None:
    source = Source()
    source.cooperating("a", "b")
    pull = source.pulls()
    assert (pull.claim_id, pull.serial, pull.wait_s) == ("pair-claim-0", 0, PULL_WAIT_S)
    assert source.told(s.EngineFree()) == []


def test_a_whole_batch_is_begun_at_once_and_its_claim_settled() -> None:
    source = Source()
    source.cooperating("a")
    assert source.given("pair-0") == [s.SettleSoon("pair-claim-0"), s.BeginBatch("pair-0", 0)]
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), True)) == [s.Look()]


def test_a_begun_batch_comes_with_its_hidden_states_and_its_kv_follows() -> None:
    source = Source()
    source.cooperating("a")
    assert source.given("pair-0", 2) == [s.ReceiveHidden("pair-0", 0)]
    assert source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True)) == [s.BeginBatch("pair-0", 2)]
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), True)) == [s.Look(), s.FetchKv("pair-0", 0, 2)]
    assert source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True)) == [s.SettleSoon("pair-claim-0")]


def test_a_batch_whose_hidden_states_are_lost_is_computed_from_the_beginning() -> None:
    source = Source()
    source.cooperating("a")
    source.given("pair-0", 2)
    actions = source.told(HasLanded(s.ReceiveHidden("pair-0", 0), False))
    assert actions == [s.SettleSoon("pair-claim-0"), s.BeginBatch("pair-0", 0)]
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), True)) == [s.Look()]
    assert the(Finish, source.run("pair-0")) == Finish("pair-0", 0, kv_here=True, kv_direct=False)


def test_kv_is_fetched_one_batch_after_the_other() -> None:
    source = Source()
    source.cooperating("a", "b")
    assert the(s.FetchKv, source.begun("pair-0", 1)).batch_id == "pair-0"
    assert of_kind(s.FetchKv, source.begun("pair-1", 1)) == []
    actions = source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))
    assert actions == [s.SettleSoon("pair-claim-0"), s.FetchKv("pair-1", 1, 1)]


def test_kv_that_goes_straight_to_who_decodes_is_not_fetched() -> None:
    source = Source()
    source.cooperating("a")
    source.given("pair-0", 2, kv_direct=True)
    actions = source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True))
    assert actions == [s.SendRest("pair-0", 2), s.BeginBatch("pair-0", 2)], "in this order"
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), True)) == [s.Look()]
    assert the(RunPart, source.told(PartWanted())).kv_leaves
    assert source.told(s.RestOver("pair-0")) == [s.LookAtRest("pair-0")]
    assert source.told(HasLanded(s.LookAtRest("pair-0"), True)) == [s.SettleSoon("pair-claim-0")]


def test_kv_that_is_decoded_here_after_all_is_fetched() -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0", 2, kv_direct=True)
    source.told(s.RestOver("pair-0"))
    assert source.told(HasLanded(s.LookAtRest("pair-0"), False)) == [s.FetchKv("pair-0", 0, 2)]


def test_the_rest_may_be_over_before_the_batch_has_room() -> None:
    source = Source()
    source.cooperating("a")
    source.given("pair-0", 2, kv_direct=True)
    source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True))
    assert source.told(s.RestOver("pair-0")) == []
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), True)) == [s.Look(), s.LookAtRest("pair-0")]


def test_rests_of_batches_that_have_none_are_ignored() -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0", 2)
    assert source.told(s.RestOver("pair-0"), s.RestOver("pair-9"), HasLanded(s.LookAtRest("pair-0"), True)) == []


def test_a_batch_without_room_is_tried_again_when_the_engine_is_free_and_after_a_while() -> None:
    source = Source()
    source.cooperating("a")
    source.given("pair-0")
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), False)) == []
    assert source.machine.due_s == LOOK_S
    assert source.told(Due()) == [], "too early"
    assert source.told(s.EngineFree()) == [s.BeginBatch("pair-0", 0)]
    source.told(HasLanded(s.BeginBatch("pair-0", 0), False))
    source.now_s = source.machine.due_s
    assert source.told(Due()) == [s.BeginBatch("pair-0", 0)]
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), True)) == [s.Look()]
    assert source.machine.has_runs


def test_the_batch_that_probably_comes_says_how_much_room_is_needed() -> None:
    source = Source(chunk_tokens=20)
    assert list(source.machine.expected_lengths) == []
    source.lent(request("a", 9), request("b", 11), request("c", 5))
    assert source.machine.expected_lengths == (9, 11)
    source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden("pair-0", 0)))
    source.told(HasLanded(ASKED, s.HandOverAnswer(taken=False)))
    source.answered(Ack(), Seal(pair_id="pair", count=1))
    source.told(HasLanded(s.AskSplit((), 0.0, 0.0)))
    assert source.machine.expected_lengths == (9, 11)
    source.begun("pair-0")
    assert list(source.machine.expected_lengths) == [5]


def test_while_it_waits_it_looks_at_the_engine_from_time_to_time() -> None:
    source = Source()
    source.cooperating("a")
    assert source.machine.due_s == LOOK_S
    source.now_s = LOOK_S
    assert source.told(Due()) == [s.Look()]
    assert source.machine.due_s == 2 * LOOK_S
    source.pulls()
    assert source.machine.due_s == float("inf"), "it knows"


def test_what_the_engine_said_before_it_had_this_batch_does_not_count() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.given("pair-0")
    assert source.told(s.EngineFree()) == []
    assert source.told(HasLanded(s.BeginBatch("pair-0", 0), True)) == [s.Look()]


@pytest.mark.parametrize(
    ("pulled", "can_dissolve", "gets_prompts", "has_backlog", "then"),
    [
        (True, False, True, True, s.Lend),
        (True, False, False, False, None),
        (False, True, True, True, Dissolve),
        (False, False, False, True, Dissolve),
        (False, False, True, True, s.BeginBatch),
        (False, False, True, False, Pull),
    ],
)
def test_what_comes_after_a_pull(
    pulled: bool, can_dissolve: bool, gets_prompts: bool, has_backlog: bool, then: type | None
) -> None:
    source = Source()
    source.cooperating("a")
    if has_backlog:
        source.told(s.RequestArrived(), *not_taken("b"))
    answer = Pulled(batch_id="pair-0" if pulled else "", can_dissolve=can_dissolve)
    actions = source.answered(answer, source.pulls(), gets_prompts=gets_prompts)
    if pulled:
        actions = source.told(HasLanded(s.BeginBatch("pair-0", 0), True))
    wanted = [type(a.message) if isinstance(a, s.AskTarget) else type(a) for a in actions]
    wanted = [kind for kind in wanted if kind not in {s.Look, s.KeepAlive}]
    assert wanted == ([] if then is None else [then])


def test_a_batch_from_the_backlog_waits_until_nothing_is_on_its_way_to_the_target() -> None:
    source = Source()
    source.cooperating("a")
    source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("b"), request("c")), 0.5)))
    assert source.given() == [], "the first of them is being handed over"
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=False))) == [s.BeginBatch("pair-1", 0)]
    assert source.told(s.RequestArrived()) == [], "nor is anything handed over before that is settled"
    actions = source.told(HasLanded(s.BeginBatch("pair-1", 0), True))
    assert of_kind(s.Lend, actions) == [s.Lend(begins=False)]
    assert of_kind(s.SettleSoon, actions) == [], "nobody claimed it"


def test_what_was_taken_in_the_meantime_is_not_begun_from_the_backlog() -> None:
    source = Source()
    source.cooperating("a")
    source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("b"), request("c")), 0.5)))
    source.given()
    source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden("pair-1", 0)))
    actions = source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden("pair-2", 0)))
    assert of_kind(s.BeginBatch, actions) == []
    assert isinstance(the(s.AskTarget, actions).message, Pull), "its engine is still free"


def test_the_lead_is_what_pulls_take_but_no_more_than_a_layer() -> None:
    time = PullTime()
    time.took(2.0, layer_s=5.0)
    assert (time.pull_s, time.lead_s) == (1.0, 1.0)
    time.took(2.0, layer_s=0.75)
    assert (time.pull_s, time.lead_s) == (1.5, 0.75)


def test_what_a_pull_took_is_measured_until_the_batch_is_begun() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.given("pair-0", 1)
    source.now_s = 3.0
    source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True), HasLanded(s.BeginBatch("pair-0", 0), True))
    assert source.machine.time.pull_s == 1.5
    assert source.machine.time.lead_s == source.machine.batches["pair-1"].layer_s


def test_it_is_idle_when_what_is_left_takes_no_longer_than_a_pull() -> None:
    source = Source(pull_s=100.0)
    layer_s = 0.5 * TOKENS / NUM_LAYERS
    source.cooperating("a", "b", "c")
    assert source.is_idle()
    source.begun("pair-0", 1)
    assert source.machine.time.lead_s == layer_s
    assert source.machine.remaining_s == 3 * layer_s
    assert not source.is_idle()
    source.told(
        PartWanted(),
        HasLanded(RunPart("pair-0", 1, 0, TOKENS), s.Ran.WELL),
        PartWanted(),
        HasLanded(RunPart("pair-0", 2, 0, TOKENS), s.Ran.WELL),
    )
    assert source.machine.remaining_s == layer_s
    assert source.is_idle()
    source.begun("pair-1")
    assert not source.is_idle()
    for batch_id in ("pair-0", "pair-1"):
        source.run(batch_id)
        source.told(HasLanded(Finish(batch_id, 0, True, False), s.Ran.WELL))
    assert source.is_idle()
    assert not source.machine.has_runs


def test_after_so_many_batches_the_pair_parts() -> None:
    source = Source(max_batches=1)
    source.cooperating("a", "b")
    source.begun("pair-0")
    source.run("pair-0")
    source.told(HasLanded(Finish("pair-0", 0, True, False), s.Ran.WELL))
    assert isinstance(the(s.AskTarget, source.told(s.EngineFree())).message, Dissolve)


# --- layers -----------------------------------------------------------------------------------


def test_layers_are_run_in_parts_and_the_first_layer_is_the_first_that_the_target_did_not_run() -> None:
    source = Source(chunk_tokens=4)
    source.lent(request("a", 10))
    actions = source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden("pair-0", 0)))
    source.answered(Ack(), the(s.AskTarget, actions).message)
    source.begun("pair-0", 2)
    parts = []
    for _ in range(6):
        part = the(RunPart, source.told(PartWanted()))
        parts.append((part.layer, part.begin, part.end))
        actions = source.told(HasLanded(part, s.Ran.WELL))
    assert parts == [(layer, *tokens) for layer in (2, 3) for tokens in ((0, 4), (4, 7), (7, 10))]
    assert the(Finish, actions) == Finish("pair-0", 2, kv_here=False, kv_direct=False)


def test_batches_are_run_first_come_first_served() -> None:
    source = Source()
    source.cooperating("a", "b")
    assert source.told(PartWanted()) == []
    source.begun("pair-0")
    source.begun("pair-1")
    source.run("pair-0")
    source.told(HasLanded(Finish("pair-0", 0, True, False), s.Ran.WELL))
    assert the(RunPart, source.told(PartWanted())).batch_id == "pair-1"


def test_kv_leaves_with_its_layer_only_if_that_before_it_is_here() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0", 2)
    part = the(RunPart, source.told(PartWanted()))
    assert not part.kv_leaves
    source.told(HasLanded(part, s.Ran.WELL))
    source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))
    assert the(RunPart, source.told(PartWanted())).kv_leaves


@pytest.mark.parametrize("kv_first", [False, True])
@pytest.mark.parametrize("is_here", [False, True])
def test_requests_decode_once_the_layers_have_run_and_the_kv_is_here(kv_first: bool, is_here: bool) -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0", 2)
    kv_over = HasLanded(s.FetchKv("pair-0", 0, 0), is_here)
    if kv_first:
        source.told(kv_over)
    assert the(Finish, source.run("pair-0")).kv_here == (kv_first and is_here)
    actions = source.told(HasLanded(Finish("pair-0", 0, True, False), s.Ran.WELL))
    if not kv_first:
        assert of_kind(s.Conclude, actions) == []
        actions = source.told(kv_over)
    if kv_first and is_here:
        assert the(s.Conclude, actions).how is How.DECODED
    else:
        assert the(s.Conclude, actions).how is (How.KV_ARRIVED if is_here else How.KV_LOST)


@pytest.mark.parametrize("is_here", [False, True])
def test_kv_that_comes_while_first_tokens_are_sampled_is_not_forgotten(is_here: bool) -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0", 2)
    assert not the(Finish, source.run("pair-0")).kv_here
    assert of_kind(s.Conclude, source.told(HasLanded(s.FetchKv("pair-0", 0, 0), is_here))) == []
    concluded = the(s.Conclude, source.told(HasLanded(Finish("pair-0", 0, True, False), s.Ran.WELL)))
    assert concluded.how is (How.KV_ARRIVED if is_here else How.KV_LOST)


def test_a_batch_that_failed_is_computed_in_steps_once_its_blocks_are_not_written_any_more() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0")
    source.told(PartWanted())
    assert the(s.Conclude, source.told(HasLanded(RunPart("pair-0", 0, 0, 0), s.Ran.FAILED))) == s.Conclude(
        "pair-0", How.COMPUTE_HERE
    )
    source.begun("pair-1", 2)
    source.told(PartWanted())
    actions = source.told(HasLanded(RunPart("pair-1", 0, 0, 0), s.Ran.FAILED))
    assert of_kind(s.Conclude, actions) == []
    assert not the(s.Done, actions).forget
    actions = source.told(HasLanded(s.FetchKv("pair-1", 0, 0), True))
    assert the(s.Conclude, actions) == s.Conclude("pair-1", How.COMPUTE_HERE)


def test_of_a_batch_that_failed_no_kv_leaves() -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0", 2, kv_direct=True)
    source.told(PartWanted())
    assert the(s.Done, source.told(HasLanded(RunPart("pair-0", 0, 0, 0), s.Ran.FAILED))).forget


def test_a_batch_that_nobody_waits_for_is_done() -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0")
    source.told(PartWanted())
    source.now_s = 4.0
    assert source.told(HasLanded(RunPart("pair-0", 0, 0, 0), s.Ran.NOT)) == [
        s.Conclude("pair-0", How.DECODED),
        s.Done("pair-0", 0, 4.0, forget=False),
    ]
    assert not source.machine.has_runs


def test_what_the_engine_says_of_a_batch_that_is_not_in_hand_is_ignored() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0")
    source.begun("pair-1")
    late = [
        HasLanded(RunPart("pair-9", 0, 0, TOKENS), s.Ran.WELL),
        HasLanded(RunPart("pair-9", 0, 0, 0), s.Ran.FAILED),
        HasLanded(Finish("pair-9", 0, True, False), s.Ran.WELL),
        HasLanded(RunPart("pair-9", 0, 0, 0), s.Ran.NOT),
    ]
    assert source.told(*late) == []
    assert source.told(HasLanded(s.ReceiveHidden("pair-9", 0), True), HasLanded(s.BeginBatch("pair-9", 0), True)) == []
    assert source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True), HasLanded(SendHidden("pair-9", 0)))[1:] == []
    assert the(RunPart, source.told(PartWanted())) == RunPart("pair-0", 0, 0, TOKENS, 0, kv_leaves=True)


@pytest.fixture(name="adopted")
def _adopted() -> tuple[Scheduler, ActiveSequence]:
    """A lent request that has its first token without its KV."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=256, block_size=4))
    scheduler.table.lending = True
    scheduler.add(members.request("a", 10))
    (sequence,) = scheduler.lend()
    assert scheduler.reservations.reserve([sequence])
    scheduler.reservations.adopt(sequence, Sampled(5), 0.0, kv_here=False)
    assert not scheduler.table.running
    return scheduler, sequence


@pytest.mark.parametrize("how", [How.KV_ARRIVED, How.KV_LOST])
def test_what_was_held_decodes_or_is_computed_again(how: How, adopted: tuple[Scheduler, ActiveSequence]) -> None:
    scheduler, sequence = adopted
    how.apply(scheduler.reservations, [sequence])
    assert (sequence in scheduler.table.running) == (how is How.KV_ARRIVED)
    assert (sequence in scheduler.table.waiting) == (how is How.KV_LOST)
    scheduler.check()


def test_what_decodes_already_is_left_alone_and_what_has_ended_is_freed() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=256, block_size=4))
    scheduler.table.lending = True
    for name in "abc":
        scheduler.add(members.request(name, 10))
    decoded, ended, failed = scheduler.lend()
    assert scheduler.reservations.reserve([decoded, ended, failed])
    scheduler.reservations.adopt(decoded, Sampled(5), 0.0)
    scheduler.cancel(*ended.key)
    How.DECODED.apply(scheduler.reservations, [decoded, ended])
    assert scheduler.table.running == [decoded]
    assert not ended.block_table
    How.COMPUTE_HERE.apply(scheduler.reservations, [failed])
    assert list(scheduler.table.waiting) == [failed]
    assert not failed.block_table
    scheduler.check()


# --- what the target says ---------------------------------------------------------------------


def test_what_the_target_took_is_its_own() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.now_s = 2.0
    assert source.told(taken("pair-0", "pair-9", "pair-0")) == [
        s.Moved(("pair-0",), 2.0),
        s.ReleaseToTarget(("pair-0",)),
        AnswerQuestion(5, Ack()),
    ]
    assert source.told(taken("pair-0", question=6)) == [AnswerQuestion(6, Ack())], "it knows"
    assert source.told(Cancelled((key("a"),))) == []


def test_what_the_source_pulled_cannot_be_taken() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.given("pair-0", 2)
    assert source.told(taken("pair-0")) == [AnswerQuestion(5, Ack())]
    source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True), HasLanded(s.BeginBatch("pair-0", 0), True))
    assert source.told(taken("pair-0")) == [AnswerQuestion(5, Ack())]
    assert source.run("pair-0")


def test_a_target_that_finished_something_has_capacity_for_what_waits_here() -> None:
    source = Source()
    source.cooperating("a")
    source.told(s.RequestArrived(), *not_taken("b"))
    assert of_kind(s.Lend, source.told(taken("pair-0"))) == [s.Lend(begins=False)]
    assert the(s.AskHandOver, source.told(HasLanded(s.Lend(False), s.Lent((), 0.5)))).batch.batch_id == "pair-1"


@pytest.mark.parametrize("policy", ["best_effort", "overlap", "stop_the_world"])
def test_the_baselines_part_as_soon_as_the_target_is_loaded_busy_or_not(policy: str) -> None:
    source = Source(policy)  # type: ignore[arg-type]
    source.cooperating("a", "b")
    source.begun("pair-0")
    assert isinstance(the(s.AskTarget, source.told(taken(loaded=True))).message, Dissolve)


def test_zigzag_goes_on_once_the_target_is_loaded() -> None:
    source = Source()
    source.cooperating("a", "b")
    assert source.told(taken(loaded=True)) == [AnswerQuestion(5, Ack())]
    assert source.state() is PairState.COOPERATING
    source.given("pair-0", loaded=True)
    source.told(HasLanded(s.BeginBatch("pair-0", 0), True))
    assert source.state() is PairState.LOADED


def test_a_target_that_is_loaded_may_say_so_in_answer_to_a_pull() -> None:
    source = Source("overlap")
    source.cooperating("a", "b")
    actions = source.given(loaded=True)
    assert isinstance(the(s.AskTarget, actions).message, Dissolve), "it still is free"


@pytest.mark.parametrize("first_layer", [-1, NUM_LAYERS, 10**9])
def test_a_target_that_gives_layers_that_there_are_not_is_lost(first_layer: int) -> None:
    source = Source()
    source.cooperating("a")
    actions = source.given("pair-0", first_layer)
    assert the(TellEnded, actions).reason == source.machine.failure
    assert source.state() is PairState.FAILED
    assert names(restore(actions).batch_ids) == "0"


def test_a_target_that_gives_what_it_does_not_have_is_lost() -> None:
    unknown = Source()
    unknown.cooperating("a")
    assert of_kind(TellEnded, unknown.given("pair-9"))
    taken_before = Source()
    taken_before.cooperating("a", "b")
    taken_before.told(taken("pair-0"))
    assert of_kind(TellEnded, taken_before.given("pair-0"))
    twice = Source()
    twice.cooperating("a", "b")
    twice.begun("pair-0")
    assert of_kind(TellEnded, twice.given("pair-0"))
    refused = Source()
    refused.cooperating("a")
    refused.told(s.RequestArrived(), *not_taken("b"))
    assert of_kind(TellEnded, refused.given("pair-1")), "it was never handed over"


# --- parting ------------------------------------------------------------------------------------


def test_the_source_says_what_it_has_to_do_when_it_asks_to_part() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0", 2)
    source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))
    actions = source.given(can_dissolve=True)
    assert of_kind(s.KeepAlive, actions) == [s.KeepAlive(False)]
    asked = the(s.AskTarget, actions).message
    assert isinstance(asked, Dissolve)
    layer_s = source.machine.batches["pair-0"].layer_s
    assert (asked.claim_id, asked.first_serial, asked.source_busy_s) == ("pair-end", 2, 2 * layer_s)


def test_nothing_is_handed_over_or_pulled_once_it_ends() -> None:
    source = Source()
    source.cooperating("a")
    source.parts()
    assert source.told(s.RequestArrived(), s.EngineFree(), Due()) == []


def test_it_does_not_part_before_what_is_on_its_way_has_come() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("c"),), 0.5)))
    source.begun("pair-0", 2)
    assert source.given(can_dissolve=True) == []
    assert source.told(HasLanded(ASKED, s.HandOverAnswer(taken=True))) == [SendHidden("pair-2", 2)]
    assert source.told(HasLanded(SendHidden("pair-2", 0))) == []
    asked = the(s.AskTarget, source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True)))
    assert isinstance(asked.message, Dissolve)


def test_it_does_not_part_while_kv_of_a_batch_is_on_its_way_to_who_decodes() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0", 2, kv_direct=True)
    assert source.given(can_dissolve=True) == []
    assert of_kind(s.AskTarget, source.told(s.RestOver("pair-0"))) == []
    assert isinstance(the(s.AskTarget, source.told(HasLanded(s.LookAtRest("pair-0"), True))).message, Dissolve)


def test_in_the_end_what_the_target_keeps_is_its_own_and_the_rest_waits_here_again() -> None:
    source = Source()
    source.cooperating(*"abcde")
    asked = source.parts()
    answer = shares(kept=["pair-1", "pair-9"], given=[("pair-3", 0)], finished=["pair-0"])
    actions = source.answered(answer, asked)
    assert source.state() is PairState.DISSOLVED
    assert the(s.Moved, actions).batch_ids == ("pair-0", "pair-1")
    assert restore(actions) == s.Restore(("pair-2", "pair-3", "pair-4"), (), (), None)
    assert source.told(HasLanded(s.Restore((), (), (), None))) == [Detach(), s.Lending(False), Over()]


def test_what_was_given_begun_is_fetched_and_settled_before_the_rest_comes_back() -> None:
    source = Source()
    source.cooperating("a", "b", "c")
    asked = source.parts()
    assert source.answered(shares(given=[("pair-0", 2), ("pair-1", 1), ("pair-2", 0)]), asked) == [
        s.ReceiveHidden("pair-0", 7)
    ]
    source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True))
    actions = source.told(HasLanded(s.BeginBatch("pair-0", 0), True))
    assert actions == [s.Look(), s.FetchKv("pair-0", 7, 2), s.ReceiveHidden("pair-1", 8)]
    assert source.told(HasLanded(s.ReceiveHidden("pair-1", 0), False)) == [
        s.SettleSoon("pair-end/pair-1"),
        s.BeginBatch("pair-1", 0),
    ]
    assert source.told(HasLanded(s.BeginBatch("pair-1", 0), True)) == [s.Look()]
    actions = source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))
    assert actions == [s.SettleSoon("pair-end/pair-0"), s.AskTarget(Settle(pair_id="pair", claim_ids=()))]
    actions = source.answered(Ack(), the(s.AskTarget, actions).message)
    assert restore(actions).batch_ids == ("pair-2",)
    assert source.told(HasLanded(s.Restore((), (), (), None))) == [], "it still runs what it was given"
    for batch_id in ("pair-0", "pair-1"):
        source.run(batch_id)
        actions = source.told(HasLanded(Finish(batch_id, 0, True, False), s.Ran.WELL))
    assert actions[-3:] == [Detach(), s.Lending(False), Over()]


def test_requests_in_no_batch_wait_here_again_as_well() -> None:
    source = Source()
    source.cooperating("a")
    source.told(s.RequestArrived())
    source.told(Lost("gone"))
    actions = source.told(HasLanded(s.Lend(False), s.Lent((request("b"),), 0.5)))
    assert restore(actions) == s.Restore(("pair-0",), (key("b"),), (), None)


def test_gifts_that_there_are_not_are_left_out() -> None:
    source = Source()
    source.cooperating("a", "b")
    asked = source.parts()
    answer = shares(kept=["pair-0"], given=[("pair-0", 2), ("pair-7", 1)])
    actions = source.answered(answer, asked)
    assert of_kind(s.ReceiveHidden, actions) == []
    assert the(s.AskTarget, actions).message == Settle(pair_id="pair", claim_ids=())
    assert restore(source.answered(Ack(), the(s.AskTarget, actions).message)).batch_ids == ("pair-1",)


@pytest.mark.parametrize("given", [[("pair-0", -3)], [("pair-0", 99)], [("pair-0", 1), ("pair-0", 1)]])
def test_gifts_that_cannot_be_cost_nothing_but_the_target(given: list[tuple[str, int]]) -> None:
    source = Source()
    source.cooperating("a", "b")
    actions = source.answered(shares(given=given), source.parts())
    if given[0][1] == 1:
        source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True), HasLanded(s.BeginBatch("pair-0", 0), True))
        actions = source.told(HasLanded(s.FetchKv("pair-0", 0, 0), False))
    assert "pair-1" in restore(actions).batch_ids


# --- the end ------------------------------------------------------------------------------------


def test_at_the_end_everything_that_is_not_the_targets_waits_at_its_old_place() -> None:
    source = Source()
    source.cooperating(*"abcd")
    source.told(taken("pair-0", "unknown"))
    source.begun("pair-1")
    source.told(s.RequestArrived(), *not_taken("e"))
    actions = source.told(Lost("gone"))
    assert actions[:3] == [Abort("gone"), TellEnded("gone"), s.KeepAlive(False)]
    assert restore(actions) == s.Restore(("pair-2", "pair-3", "pair-4"), (), (), None)
    assert source.told(Lost("again")) == [], "once"
    assert source.told(HasLanded(s.Restore((), (), (), None))) == []
    source.run("pair-1")
    assert source.told(HasLanded(Finish("pair-1", 0, True, False), s.Ran.WELL))[-1] == Over()


def test_what_the_target_may_own_ends_and_what_it_gave_does_not() -> None:
    source = Source()
    source.cooperating("a", "b", "c")
    source.told(taken(loaded=True))
    source.told(s.RequestArrived(), *not_taken("d"))
    source.given("pair-0")
    actions = source.told(Lost("gone"))
    assert of_kind(s.Restore, actions) == [], "it may get blocks this moment"
    actions = source.told(HasLanded(s.BeginBatch("pair-0", 0), False))
    restored = restore(actions)
    assert (restored.batch_ids, restored.in_doubt) == (("pair-0", "pair-3"), ("pair-1", "pair-2"))
    assert restored.doubt is not None
    assert (restored.doubt.code, "gone" in restored.doubt.message) == ("unavailable", True)


def test_a_target_that_was_not_loaded_owns_nothing() -> None:
    source = Source()
    source.cooperating("a", "b")
    assert restore(source.told(Lost("gone"))) == s.Restore(("pair-0", "pair-1"), (), (), None)


def test_the_last_word_of_the_target_says_what_it_owns() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.told(taken(loaded=True))
    actions = source.told(s.TargetEnded("its engine failed", ("pair-1", "pair-9")))
    assert the(s.Moved, actions).batch_ids == ("pair-1",)
    assert restore(actions) == s.Restore(("pair-0",), (), (), None)
    assert source.machine.failure == "its engine failed"


def test_after_the_end_the_last_word_of_the_target_changes_nothing() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.told(Lost("gone"))
    assert source.told(s.TargetEnded("too late", ("pair-1",))) == []
    assert source.machine.failure == "gone"


def test_a_batch_that_gets_blocks_as_the_pair_ends_is_run() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.given("pair-0", 2)
    source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True), Lost("gone"))
    actions = source.told(HasLanded(s.BeginBatch("pair-0", 0), True))
    assert of_kind(s.FetchKv, actions) == [], "from whom?"
    assert restore(actions).batch_ids == ("pair-1",)
    source.told(HasLanded(s.Restore((), (), (), None)))
    source.run("pair-0")
    actions = source.told(HasLanded(Finish("pair-0", 0, True, False), s.Ran.WELL))
    assert the(s.Conclude, actions).how is How.KV_LOST
    assert actions[-1] == Over()


def test_nothing_comes_back_while_blocks_are_written() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0", 2)
    assert of_kind(s.Restore, source.told(Lost("gone"))) == []
    assert restore(source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))).batch_ids == ("pair-1",)


def test_kv_that_was_not_asked_for_yet_is_lost_with_the_target() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0", 2)
    source.begun("pair-1", 2)
    for batch_id in ("pair-0", "pair-1"):
        source.run(batch_id)
        source.told(HasLanded(Finish(batch_id, 0, True, False), s.Ran.WELL))
    actions = source.told(Lost("gone"))
    assert the(s.Conclude, actions) == s.Conclude("pair-1", How.KV_LOST)
    assert of_kind(s.Restore, actions) == [], "that of the first one is being written"
    actions = source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))
    assert the(s.Conclude, actions) == s.Conclude("pair-0", How.KV_ARRIVED)


def test_a_batch_that_waits_for_hidden_states_comes_back_with_the_others() -> None:
    source = Source()
    source.cooperating("a")
    source.given("pair-0", 2, kv_direct=True)
    assert restore(source.told(Lost("gone"))).batch_ids == ("pair-0",)
    assert source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True)) == []


def test_of_a_batch_that_gets_no_room_any_more_no_kv_leaves() -> None:
    source = Source()
    source.cooperating("a")
    source.given("pair-0", 2, kv_direct=True)
    source.told(HasLanded(s.ReceiveHidden("pair-0", 0), True), HasLanded(s.BeginBatch("pair-0", 0), False))
    assert of_kind(s.WithholdKv, source.told(Lost("gone"))) == [s.WithholdKv("pair-0")]
    busy = Source()
    busy.cooperating("a")
    busy.given("pair-0", 2, kv_direct=True)
    assert of_kind(s.WithholdKv, busy.told(HasLanded(s.ReceiveHidden("pair-0", 0), True), Lost("gone"))) == []
    assert of_kind(s.WithholdKv, busy.told(HasLanded(s.BeginBatch("pair-0", 0), False))) == [s.WithholdKv("pair-0")]


def test_what_was_asked_before_is_not_answered_any_more_once_the_pair_is_lost() -> None:
    source = Source()
    source.cooperating("a", "b")
    pull = source.pulls()
    source.told(s.RequestArrived(), HasLanded(s.Lend(False), s.Lent((request("c"),), 0.5)), Lost("gone"))
    late = [
        HasLanded(s.AskTarget(pull), (Pulled(batch_id="pair-0"), True)),
        HasLanded(s.AskTarget(pull), (shares(kept=["pair-0"]), True)),
        HasLanded(ASKED, s.HandOverAnswer(taken=True)),
        HasLanded(SendHidden("pair-0", 0)),
        HasLanded(ASKED, s.HandOverAnswer(taken=False, asked=False)),
        HasLanded(s.AskSplit((), 0.0, 0.0)),
        s.EngineFree(),
        s.RequestArrived(),
        Due(),
    ]
    assert source.told(*late) == []
    assert source.told(HasLanded(s.Restore((), (), (), None)))[-1] == Over()


def test_once_it_has_failed_the_target_must_finish_nothing() -> None:
    source = Source()
    source.cooperating("a")
    source.told(Lost("gone"))
    (refused,) = source.told(taken("pair-0"))
    assert isinstance(refused, RefuseQuestion)
    assert (refused.question, refused.error.code) == (5, "conflict")
    assert "gone" in refused.error.message


def test_after_parting_the_target_may_still_say_what_it_took() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.answered(shares(kept=["pair-0"]), source.parts())
    source.told(HasLanded(s.Restore((), (), (), None)))
    assert source.told(taken("pair-0", loaded=True)) == [AnswerQuestion(5, Ack())]


def test_a_pair_that_is_lost_before_it_is_accepted_lends_nothing() -> None:
    source = Source()
    source.told(Begin())
    actions = source.told(Lost("nobody there"))
    assert actions[-2:] == [Detach(), Over()]
    assert source.told(HasLanded(s.AskOffer())) == []
    assert source.state() is PairState.FAILED


def test_what_is_lent_as_the_pair_is_lost_comes_back() -> None:
    source = Source()
    source.told(Begin(), HasLanded(s.AskOffer()))
    assert of_kind(Over, source.told(Lost("gone"))) == []
    actions = source.told(HasLanded(s.Lend(False), s.Lent((request("a"),), 0.5)))
    assert of_kind(s.AskHandOver, actions) == []
    assert restore(actions) == s.Restore((), (key("a"),), (), None)


def test_once_everything_is_restored_a_loss_changes_nothing() -> None:
    source = Source()
    source.cooperating("a")
    source.answered(shares(kept=["pair-0"]), source.parts())
    assert source.told(Lost("the target is gone")) == []
    assert source.state() is PairState.DISSOLVED
    assert source.machine.failure == ""


def test_a_target_that_is_lost_before_its_gifts_are_here_keeps_none_of_them() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.answered(shares(given=[("pair-0", 2), ("pair-1", 1)]), source.parts())
    actions = source.told(Lost("gone"))
    assert source.state() is PairState.DISSOLVED
    assert of_kind(TellEnded, actions) == []
    assert restore(actions) == s.Restore(("pair-0", "pair-1"), (), (), None)


@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_that_has_stopped_has_ended_everything(times: int) -> None:
    source = Source()
    source.cooperating("a", "b", "c")
    source.begun("pair-0", 2)
    source.given("pair-1")
    actions = source.told(*[EngineStopped()] * times)
    assert of_kind(s.Restore, actions) == []
    assert actions[-3:] == [Detach(), s.Lending(False), Over()]
    assert of_kind(Over, actions) == [Over()]
    assert (
        source.told(
            PartWanted(),
            HasLanded(RunPart("pair-0", 0, 0, TOKENS), s.Ran.WELL),
            HasLanded(s.BeginBatch("pair-1", 0), True),
        )
        == []
    )


@pytest.mark.parametrize("lends", [False, True])
def test_an_engine_may_stop_before_anything_was_lent(lends: bool) -> None:
    source = Source()
    source.told(Begin())
    if lends:
        source.told(HasLanded(s.AskOffer()))
    actions = source.told(EngineStopped())
    assert actions[-2:] == [Detach(), Over()]


# --- parts behind parts ---------------------------------------------------------------------------


def in_flight(source: Source, count: int) -> list[RunPart]:
    """It is given so many."""
    return [the(RunPart, source.told(PartWanted())) for _ in range(count)]


def test_layers_are_given_behind_those_that_have_not_landed_batch_after_batch() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0")
    source.begun("pair-1", 2)
    parts = in_flight(source, NUM_LAYERS)
    assert [(part.batch_id, part.layer) for part in parts] == [("pair-0", layer) for layer in range(NUM_LAYERS)]
    assert source.told(PartWanted()) == [], "its first tokens come first"
    for part in parts[: NUM_LAYERS - 1]:
        assert source.told(HasLanded(part, s.Ran.WELL)) == []
    assert source.told(PartWanted()) == []
    actions = source.told(HasLanded(parts[NUM_LAYERS - 1], s.Ran.WELL))
    assert of_kind(Finish, actions) == [Finish("pair-0")]
    assert of_kind(s.Done, actions) == []
    parts = in_flight(source, NUM_LAYERS - 2)
    assert [(part.batch_id, part.layer) for part in parts] == [("pair-1", layer) for layer in range(2, NUM_LAYERS)]


def test_the_next_batch_is_given_and_lands_while_first_tokens_of_the_one_before_are_sampled() -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0")
    finish = the(Finish, source.run("pair-0"))
    source.begun("pair-1")
    (part,) = in_flight(source, 1)
    assert part.batch_id == "pair-1"
    assert source.told(HasLanded(part, s.Ran.WELL)) == []
    actions = source.told(HasLanded(finish, s.Ran.WELL))
    assert the(s.Done, actions).batch_id == "pair-0"
    assert source.machine.remaining_s == (NUM_LAYERS - 1) * source.machine.batches["pair-1"].layer_s


@pytest.mark.parametrize("behind", list(s.Ran))
def test_a_landing_behind_a_failed_one_counts_for_nothing(behind: s.Ran) -> None:
    source = Source()
    source.cooperating("a", "b")
    source.begun("pair-0", 2)
    source.begun("pair-1")
    first, second = in_flight(source, 2)
    source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))
    actions = source.told(HasLanded(first, s.Ran.FAILED))
    assert of_kind(s.Conclude, actions) == [s.Conclude("pair-0", How.COMPUTE_HERE)]
    assert the(s.Done, actions).batch_id == "pair-0"
    (beside,) = in_flight(source, 1)
    assert beside.batch_id == "pair-1"
    assert source.told(HasLanded(second, behind)) == [], "it was its last layer"
    source.told(HasLanded(beside, s.Ran.WELL))
    assert the(RunPart, source.told(PartWanted())).layer == 1


@pytest.mark.parametrize("is_here", [True, False])
def test_a_batch_that_failed_with_more_of_it_in_flight_waits_for_its_kv_all_the_same(is_here: bool) -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0", 2)
    first, second = in_flight(source, 2)
    assert of_kind(s.Conclude, source.told(HasLanded(first, s.Ran.FAILED))) == []
    assert source.told(HasLanded(second, s.Ran.FAILED)) == []
    actions = source.told(HasLanded(s.FetchKv("pair-0", 0, 0), is_here))
    assert of_kind(s.Conclude, actions) == [s.Conclude("pair-0", How.COMPUTE_HERE)]


def test_what_is_left_of_a_batch_are_the_layers_that_have_not_landed() -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0")
    layer_s = source.machine.batches["pair-0"].layer_s
    first, second = in_flight(source, 2)
    assert source.machine.remaining_s == NUM_LAYERS * layer_s
    source.told(HasLanded(first, s.Ran.WELL))
    assert source.machine.remaining_s == (NUM_LAYERS - 1) * layer_s
    source.told(HasLanded(second, s.Ran.WELL))
    assert source.machine.remaining_s == (NUM_LAYERS - 2) * layer_s


def test_whether_kv_leaves_with_a_layer_is_said_when_it_is_given() -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0", 2)
    (first,) = in_flight(source, 1)
    source.told(HasLanded(s.FetchKv("pair-0", 0, 0), True))
    (second,) = in_flight(source, 1)
    assert (first.kv_leaves, second.kv_leaves) == (False, True)


def test_an_engine_that_stops_with_parts_in_flight_has_ended_them() -> None:
    source = Source()
    source.cooperating("a")
    source.begun("pair-0")
    first, second = in_flight(source, 2)
    actions = source.told(EngineStopped())
    assert of_kind(Over, actions)
    assert source.told(HasLanded(first, s.Ran.WELL), HasLanded(second, s.Ran.WELL)) == []
    assert source.told(PartWanted()) == []
