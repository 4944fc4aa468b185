"""What is said to the planner, when: snapshots and reports in, wishes out."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from services.monitor.core.watch import TELL_S, Figures, Watch
from shared.messages.common import Role
from shared.messages.registry import ModelRecord, WorkerInfo
from shared.profile import PrefillPoint, Profile
from tests.records import model, profile, view, worker_record
from tests.services.monitor.core.reports import report
from tests.services.monitor.core.watch_rig import POLICY, TICK_S, Rig

SLEEPING = model(min_instances=0)
PD = model(min_instances=0, serving="disaggregated")


def no_profile(_record: ModelRecord, _engine: str, _device: str) -> Profile | None:
    return None


# --- when ----------------------------------------------------------------------------------------


def test_an_unmet_demand_is_repeated_until_it_is_met() -> None:
    rig = Rig()
    rig.show(model(min_instances=2))
    said = rig.run(2.55)
    assert [(w.model, w.desired, w.observed) for w in said] == [("m", 2, 0)] * 3
    assert set(rig.triggered_s) == {TICK_S}, "a repeat is the same wish"
    rig.show(model(min_instances=2), serving=2)
    assert rig.numbers() == {("colocated", 2, 2)}
    assert rig.run(3.0) == [], "that what is there is what is wanted is said once"
    assert rig.watch.figures["m", "colocated"] == Figures(2, 0.0)


def test_another_number_is_said_at_once_and_is_another_wish() -> None:
    rig = Rig()
    rig.show(model(min_instances=2))
    rig.run(0.3)
    rig.show(model(min_instances=3))
    (wish,) = rig.run(TICK_S)
    assert (wish.desired, wish.triggered_ago_s) == (3, 0.0)
    assert len(rig.run(2.05)) == 2


def test_roles_are_repeated_each_for_itself() -> None:
    rig = Rig(floors={("m", "prefill"): 2})
    rig.show(model(min_instances=1))
    rig.run(0.5)
    rig.floors["m", "decode"] = 3
    rig.show(model(min_instances=1))
    said = rig.run(2.1)
    assert [(w.role, w.desired) for w in said] == [
        ("decode", 3), ("colocated", 1), ("prefill", 2), ("decode", 3), ("colocated", 1), ("prefill", 2), ("decode", 3),
    ]  # fmt: skip
    assert len({(w.role, at_s) for w, at_s in zip(rig.said, rig.triggered_s, strict=True)}) == 3


def test_a_follower_says_nothing_and_is_ready_at_once() -> None:
    rig = Rig(leads=False)
    rig.show(model(min_instances=2))
    assert rig.run(2.0) == []
    assert rig.watch.figures["m", "colocated"].desired == 2
    rig.leads = True
    assert [w.desired for w in rig.run(TICK_S)] == [2]
    rig.leads = False
    rig.run(TICK_S)
    rig.leads = True
    assert [w.desired for w in rig.run(TICK_S)] == [2], "the next term begins with what is wanted"


def test_people_are_told_of_each_number_and_only_of_what_was_published() -> None:
    rig = Rig()
    rig.show(model(min_instances=2))
    rig.now_s = 1.0
    (unpublished,) = rig.watch.evaluate(1.0, connected_since_s=0.0, leads=True)
    assert unpublished.turns
    rig.run(3.5)
    assert [w.turns for w in rig.said] == [True, *[False] * (len(rig.said) - 1)]
    rig.show(model(min_instances=0, max_instances=0), serving=1)
    assert [w.turns for w in rig.run(TICK_S)] == [True], "another direction"


def test_people_are_told_of_further_numbers_a_while_after_the_last_and_at_once_when_it_was_met() -> None:
    rig = Rig()
    for wanted in range(1, 7):
        rig.show(model(min_instances=wanted), serving=1)
        rig.run(0.3)
    rig.run(3 * TELL_S)
    assert [w.desired for w in rig.said if w.turns] == [2, 6], "no line for each step, and the last one is said"
    rig.show(model(min_instances=6), serving=6)
    rig.run(TICK_S)
    rig.show(model(min_instances=6), serving=5)
    assert [(w.desired, w.turns) for w in rig.run(TICK_S)] == [(6, True)]


def test_only_the_first_word_of_a_held_request_is_urgent() -> None:
    rig = Rig()
    rig.show(SLEEPING)
    assert rig.queue(100)
    assert [w.desired for w in rig.evaluate()] == [1]
    for _ in range(3):
        assert not rig.queue(0, "another")
        assert not rig.queue(100)
    assert rig.queue(100, "another")
    # Once nothing is held, the next one is new.
    assert not rig.queue(0)
    assert rig.queue(200)


def test_what_waits_for_a_model_with_instances_is_not_urgent() -> None:
    rig = Rig()
    rig.show(SLEEPING, serving=1)
    assert not rig.queue(100)
    rig.show(SLEEPING, serving=0)
    assert rig.queue(100)


def test_a_request_of_an_unknown_model_is_nobodys() -> None:
    rig = Rig()
    rig.show(model("other", min_instances=0))
    assert not rig.queue(100)
    assert rig.evaluate() == []


def test_a_disaggregated_model_that_sleeps_is_woken_with_one_of_each() -> None:
    rig = Rig()
    rig.show(PD)
    assert rig.queue(100)
    assert {(w.role, w.desired, w.observed) for w in rig.evaluate()} == {("prefill", 1, 0), ("decode", 1, 0)}


# --- what is there -------------------------------------------------------------------------------


def test_a_lost_instance_is_asked_for_again() -> None:
    rig = Rig()
    rig.show(model(min_instances=2), serving=2)
    assert rig.run(3.0) == []
    rig.show(model(min_instances=2), serving=1)
    assert rig.numbers() == {("colocated", 2, 1)}


def test_instances_on_workers_that_are_about_to_end_do_not_count() -> None:
    rig = Rig()
    rig.show(model(min_instances=2), serving=2)
    rig.workers = (msgspec.structs.replace(rig.workers[0], stopping=True), rig.workers[1])
    rig.show(model(min_instances=2))
    assert rig.numbers() == {("colocated", 2, 1)}


def test_workers_leased_for_a_model_count_as_on_their_way() -> None:
    record = model(min_instances=3)
    rig = Rig()
    rig.workers = (
        worker_record("w0", lease_plan_id="p", lease_model="m"),
        worker_record("w1", record, "loading"),
        worker_record("w2", record, "draining"),
        worker_record("w3", record, "live"),
    )
    rig.show(record)
    assert rig.run(3.0) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_instance_of_another_role_is_neither_counted_nor_asked_for(role: Role) -> None:
    rig = Rig()
    rig.workers = (
        worker_record("w0", model(), "serving"),
        worker_record("w1", model(), "serving", role=role),
        worker_record("w2", lease_plan_id="p", lease_model="m", lease_role=role),
    )
    rig.show(model(min_instances=1))
    assert rig.run(3.0) == []
    rig.workers = rig.workers[1:]
    rig.show(model(min_instances=1))
    assert rig.numbers() == {("colocated", 1, 0)}


def test_a_floor_holds_while_there_is_no_load() -> None:
    rig = Rig(floors={("m", "colocated"): 3})
    rig.show(SLEEPING, serving=3)
    assert rig.run(3.0) == []
    rig.floors["m", "colocated"] = 1
    rig.show(SLEEPING)
    assert ("colocated", 1, 3) in rig.numbers()
    rig.floors.clear()
    rig.show(SLEEPING, serving=1)
    assert ("colocated", 0, 1) in rig.numbers()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_floor_of_a_role_is_its_number_while_it_holds(role: Role) -> None:
    record = model(min_instances=0, max_instances=4)
    rig = Rig(floors={("m", role): 2})
    rig.show(record)
    (wish,) = rig.run(TICK_S)
    assert (wish.role, wish.desired, wish.observed, wish.reason) == (role, 2, 0, "asked for by hand")
    # What is on its way counts, and more than was asked for goes.
    rig.workers = (
        worker_record("w0", record, "serving", role=role),
        worker_record("w1", lease_plan_id="p", lease_model="m", lease_role=role),
    )
    rig.show(record)
    assert rig.numbers() == {(role, 2, 2)}
    assert rig.run(3.0) == []
    rig.workers = tuple(worker_record(f"w{i}", record, "serving", role=role) for i in range(3))
    rig.show(record)
    assert rig.numbers() == {(role, 2, 3)}
    rig.floors["m", role] = 9
    rig.show(record)
    assert rig.numbers() == {(role, 4, 3)}
    # Without a floor it stays as it is.
    rig.floors.clear()
    rig.show(record)
    assert rig.numbers() == {(role, 3, 3)}
    assert rig.run(3.0) == []
    assert set(rig.watch.figures) == {("m", "colocated")}, "the load decides on none of these"


def test_roles_that_a_model_is_not_served_by_are_given_back() -> None:
    rig = Rig()
    rig.workers = tuple(worker_record(f"w{i}", PD, "serving") for i in range(2))
    rig.show(PD)
    given_back = next(wish for wish in rig.run(3.0) if wish.role == "colocated")
    assert given_back.desired == 0
    assert "served disaggregated" in given_back.reason
    assert set(rig.watch.figures) == {("m", "colocated"), ("m", "prefill"), ("m", "decode")}
    rig.show(msgspec.structs.replace(PD, serving=""))
    rig.run(TICK_S)
    assert set(rig.watch.figures) == {("m", "colocated")}


def test_an_instance_that_got_another_role_is_not_heard_in_its_former_one() -> None:
    rig = Rig(dataclasses.replace(POLICY, report_ttl_s=600.0))
    rig.workers = (
        worker_record("w0", PD, "serving", role="decode"),
        worker_record("w1", PD, "serving", role="prefill"),
    )
    rig.show(PD)
    said = report("i-w0", role="decode", running_requests=9, kv_blocks_used=270, kv_blocks_total=100)
    rig.watch.on_load(said, rig.now_s)
    rig.evaluate()
    assert rig.watch.figures["m", "decode"].desired == 3
    rig.workers = tuple(worker_record(f"w{i}", PD, "serving", role="prefill") for i in range(2))
    rig.show(PD)
    rig.evaluate()
    assert rig.watch.figures["m", "decode"].desired == 0


def test_a_model_of_another_hash_starts_afresh() -> None:
    rig = Rig()
    rig.show(model(min_instances=0, max_instances=5))
    rig.queue(2000)
    assert max(w.desired for w in rig.run(TICK_S)) >= 2
    rig.show(model(min_instances=0, max_instances=5, model_hash="other"))
    assert rig.run(3.0) == []


def test_a_removed_model_is_forgotten() -> None:
    rig = Rig()
    rig.show(model(min_instances=2))
    (wish,) = rig.run(TICK_S)
    rig.show()
    assert not rig.watch.figures
    assert not rig.watch.knows_models
    rig.watch.published(wish)  # it was on its way
    assert rig.run(3.0) == []


def test_a_profile_counts_while_all_workers_are_of_the_kind_that_it_was_measured_on() -> None:
    point = PrefillPoint(prompt_tokens=100, seconds=0.2, repetitions=1)
    rig = Rig(profiled=profile(model(), prefill=(point,)), waiting=4000)
    rig.show(model(), serving=1)
    assert "computes 500 tokens/s" in rig.run(TICK_S)[0].reason
    odd = worker_record("w9")
    rig.workers = (*rig.workers, msgspec.structs.replace(odd, worker=msgspec.structs.replace(odd.worker, device="odd")))
    rig.show(model())
    assert "computes 1000 tokens/s" in rig.run(1.0)[-1].reason


def test_gpus_of_two_models_are_two_kinds() -> None:
    asked: list[str] = []

    def asks(_: ModelRecord, worker: WorkerInfo) -> None:
        asked.append(worker.gpu_name)

    watch = Watch(POLICY, repeat_s=1.0)

    def look(*gpu_names: str) -> None:
        workers = [worker_record(f"w{i}", device="cuda", gpu_name=name) for i, name in enumerate(gpu_names)]
        watch.on_snapshot(view(*workers, models=(model(),)), asks)

    look("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    assert asked == []
    look("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")
    assert asked == ["NVIDIA H100 80GB HBM3"]


# --- how many ------------------------------------------------------------------------------------


def test_load_is_met_within_the_models_limits() -> None:
    record = model(min_instances=1, max_instances=3)
    rig = Rig(waiting=20_000)
    rig.show(record, serving=1)
    said = rig.run(1.0)
    assert said[-1].desired == 3
    assert "20000 wait" in said[-1].reason
    rig.show(record, serving=3)
    assert rig.numbers() == {("colocated", 3, 3)}
    assert rig.run(3.0) == []
    # The reports age, and the load is forgotten with them; the minimum stays.
    rig.waiting = None
    assert {desired for _, desired, _ in rig.numbers(6.0)} == {3, 1}, "with 3 it says which are idle"


def test_a_changed_ttft_objective_changes_the_verdict() -> None:
    # 3000 tokens at 900 per second: 3.3 instances within the policy's second, 6.7 within half of it.
    rig = Rig(waiting=3000)
    rig.show(SLEEPING, serving=1)
    assert rig.run(0.5)[-1].desired == 4
    rig.show(model(min_instances=0, slo_ttft_s=0.5))
    assert rig.run(TICK_S)[0].desired == 7


def test_the_last_instance_stays_for_the_models_keep_alive_as_the_record_says_now() -> None:
    rig = Rig()
    rig.show(model(min_instances=0, keep_alive_s=3600.0), serving=2)
    assert rig.run(3.0)[-1].desired == 1
    rig.show(model(min_instances=0, keep_alive_s=3600.0), serving=1)
    # Much longer than an idle instance would stay otherwise.
    assert {desired for _, desired, _ in rig.numbers(60.0)} <= {1}
    rig.show(model(min_instances=0, keep_alive_s=0.1), serving=1)
    assert rig.run(3.0)[-1].desired == 0


def test_what_the_load_does_not_need_is_said_and_taken_back() -> None:
    rig = Rig()
    rig.show(model(min_instances=1, max_instances=4), serving=3)
    # Silence says something once the monitor has listened for long enough.
    said = rig.run(2.0)
    assert {w.idle for w in said} == {2}
    idle_for_s = [w.idle_for_s for w in said]
    assert idle_for_s[0] == 0.0
    assert idle_for_s == sorted(idle_for_s), "all of the time"  # type: ignore[type-var]
    rig.waiting = 20_000
    assert rig.run(TICK_S)[0].idle == 0


def test_what_is_lacking_again_is_another_wish() -> None:
    """The same number is wanted all the time, and idle instances are spoken of while it is there."""
    rig = Rig(dataclasses.replace(POLICY, down_window_s=60.0))
    rig.show(model(min_instances=1, max_instances=4), serving=3)
    rig.run(8.0)
    assert (rig.said[-1].desired, rig.said[-1].idle) == (3, 2)
    rig.floors["m", "colocated"] = 3
    rig.show(model(min_instances=1, max_instances=4), serving=2)
    (wish,) = rig.run(TICK_S)
    assert wish.desired == 3
    assert wish.triggered_ago_s == 0.0
    number = len(rig.said) - 1
    again = rig.run(2.5)
    assert {w.desired for w in again} == {3}
    assert len(set(rig.triggered_s[number:])) == 1


def test_another_number_of_idle_instances_is_said_at_once_even_if_no_other_is_wanted() -> None:
    rig = Rig(dataclasses.replace(POLICY, down_window_s=60.0))
    rig.show(model(min_instances=1, max_instances=4), serving=3)
    rig.run(1.5)
    assert (rig.said[-1].desired, rig.said[-1].idle) == (3, 2)
    rig.waiting = 200
    said = rig.run(2 * TICK_S)
    assert [(w.desired, w.idle) for w in said] == [(3, 1)]


def test_a_demand_says_how_much_of_what_is_needed_is_missing() -> None:
    # 4.4 instances within a second, of which three may be.
    rig = Rig(waiting=4000)
    rig.show(model(min_instances=0, max_instances=3), serving=2)
    (wish,) = rig.run(TICK_S)
    assert (wish.desired, wish.deficit) == (3, pytest.approx(0.5))
    rig = Rig()
    rig.show(model(min_instances=3), serving=2)
    (wish,) = rig.run(TICK_S)
    assert (wish.desired, wish.deficit) == (3, 0.0), "a minimum is no load"
