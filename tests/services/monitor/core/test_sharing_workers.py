"""Models that share the workers: who gives an instance back, for whom, and when."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from services.monitor.core.watch import Wish
from shared.messages.common import InstanceState
from shared.messages.load import ModelQueue, QueueReport
from shared.messages.registry import ModelRecord, WorkerRecord
from tests.records import model, worker_record
from tests.services.monitor.core.reports import report
from tests.services.monitor.core.watch_rig import POLICY, TICK_S, Rig

KEEPS = dataclasses.replace(POLICY, down_window_s=60.0, assumed_load_s=1.0)
WORTH_S = 2.0
"""For which an instance is kept where another model has none and no worker is spare."""


def sharing(*numbers: int) -> tuple[list[ModelRecord], tuple[WorkerRecord, ...]]:
    """Models m0, m1, ..., and workers with so many instances of each that serve."""
    models = [model(f"m{n}", min_instances=0) for n in range(len(numbers))]
    each = zip(models, numbers, strict=True)
    return models, tuple(worker_record(f"{m.name}-{i}", m, "serving") for m, number in each for i in range(number))


def gone(said: list[Wish]) -> set[tuple[str, int]]:
    """Of which fewer are wanted, and how many."""
    return {(wish.model, wish.desired) for wish in said if wish.desired < wish.observed}


def ask(rig: Rig, name: str) -> None:
    """A request of a model comes, and goes."""
    queue = ModelQueue(
        model=name,
        queued_requests=0,
        queued_tokens=0,
        arrived_requests_total=1,
        arrived_prompt_tokens_total=100,
        inflight_requests=0,
    )
    rig.watch.on_queue(QueueReport(gateway_id="gw", models=(queue,)), rig.now_s)


def test_where_a_model_has_no_instance_and_no_worker_is_spare_another_gives_one_back() -> None:
    models, workers = sharing(3, 1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(*models)
    ask(rig, "m2")
    assert gone(rig.run(WORTH_S - TICK_S)) == set()
    (wish,) = [wish for wish in rig.run(0.3) if wish.desired < wish.observed]
    assert (wish.model, wish.desired) == ("m0", 2)
    assert wish.reason.endswith("; the last 2 s needed no more")
    assert gone(rig.run(5.0)) == {("m0", 2)}


def test_for_a_model_that_nobody_asks_for_nobody_does() -> None:
    models, workers = sharing(3, 1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(*models)
    assert gone(rig.run(50.0)) == set()


@pytest.mark.parametrize("changes", [{"max_instances": 0}, {"weights_bytes": 1 << 60}])
def test_nor_for_one_that_no_worker_can_hold(changes: dict[str, int]) -> None:
    (first, second), workers = sharing(1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(first, msgspec.structs.replace(second, **changes))
    ask(rig, "m1")
    assert gone(rig.run(5.0)) == set()


def test_who_cannot_give_one_yet_does_not_keep_the_others_from_it() -> None:
    """Its only idle instance still loads."""
    (first, *others), workers = sharing(1, 1, 0)
    rig = Rig(KEEPS, (*workers, worker_record("m0-1", first, "loading", epoch=2)))
    rig.show(first, *others)
    ask(rig, "m2")
    said = []
    for _ in range(50):
        rig.watch.on_load(report("m0-0", model="m0", running_requests=1, decode_request_s=0.001), rig.now_s)
        said += rig.run(TICK_S)
    assert ("m1", 0) in gone(said)


def test_where_every_model_has_one_nobody_does() -> None:
    models, workers = sharing(3, 1)
    rig = Rig(KEEPS, workers)
    rig.show(*models)
    assert gone(rig.run(50.0)) == set()


@pytest.mark.parametrize("state", ["spare", "draining"])
def test_where_a_worker_is_spare_or_about_to_be_nobody_does(state: InstanceState) -> None:
    models, workers = sharing(1, 0)
    rig = Rig(KEEPS, (*workers, worker_record("w", models[0] if state == "draining" else None, state)))
    rig.show(*models)
    ask(rig, "m1")
    assert gone(rig.run(5.0)) == set()


def test_a_worker_that_is_to_be_free_is_not_spare() -> None:
    models, workers = sharing(1, 0)
    rig = Rig(KEEPS, (*workers, msgspec.structs.replace(worker_record("w", None, "spare"), cordoned=True)))
    rig.show(*models)
    ask(rig, "m1")
    assert gone(rig.run(5.0)) == {("m0", 0)}


def test_a_model_that_load_does_not_scale_needs_no_worker() -> None:
    (first, second), workers = sharing(1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(first, msgspec.structs.replace(second, advise=True))
    ask(rig, "m1")
    assert gone(rig.run(5.0)) == set()


def test_of_equals_who_has_been_idle_for_longest_gives_back() -> None:
    models, workers = sharing(1, 1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(*models)
    ask(rig, "m2")
    busy = report("m0-0", model="m0", running_requests=1, decode_request_s=0.001)
    for _ in range(15):
        rig.watch.on_load(busy, rig.now_s)
        rig.run(TICK_S)
    assert gone(rig.run(5.0)) == {("m1", 0)}


def test_who_has_more_to_spare_gives_back_before_who_has_been_idle_for_longer() -> None:
    models, workers = sharing(3, 1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(*models)
    ask(rig, "m2")
    said = []
    for _ in range(60):
        # A request now and then: its idle instances are two, three, two.
        busy = int(rig.now_s % 1.0 < 0.5)
        rig.watch.on_load(report("m0-0", model="m0", running_requests=busy, decode_request_s=0.001), rig.now_s)
        said += rig.run(TICK_S)
    assert gone(said) == {("m0", 2)}


def test_a_model_that_only_gets_advice_does_not_keep_the_others_from_it() -> None:
    (first, second, third), workers = sharing(1, 1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(msgspec.structs.replace(first, advise=True), second, third)
    ask(rig, "m2")
    assert gone(rig.run(5.0)) == {("m0", 0), ("m1", 0)}


def test_nor_does_one_with_a_keep_alive() -> None:
    (first, *others), workers = sharing(1, 1, 0)
    rig = Rig(KEEPS, workers)
    rig.show(msgspec.structs.replace(first, keep_alive_s=300.0), *others)
    ask(rig, "m2")
    assert gone(rig.run(5.0)) == {("m1", 0)}


def test_a_shorter_window_than_what_keeping_is_worth_stays() -> None:
    models, workers = sharing(1, 1, 0)
    rig = Rig(dataclasses.replace(KEEPS, down_window_s=1.0), workers)
    rig.show(*models)
    ask(rig, "m2")
    assert gone(rig.run(1.5)) == {("m0", 0), ("m1", 0)}


@pytest.mark.parametrize("offer", [False, True])
def test_for_a_model_with_another_engine_only_where_a_worker_has_it(offer: bool) -> None:
    (first, second), workers = sharing(3, 0)
    theirs = msgspec.structs.replace(second, engine="vllm")
    if offer:
        info = msgspec.structs.replace(workers[0].worker, engines=("vllm",))
        workers = (msgspec.structs.replace(workers[0], worker=info), *workers[1:])
    # A spare worker without the engine is of no use to it.
    rig = Rig(KEEPS, (*workers, worker_record("free")))
    rig.show(first, theirs)
    ask(rig, "m1")
    assert gone(rig.run(WORTH_S + 1.0)) == ({("m0", 2)} if offer else set())
