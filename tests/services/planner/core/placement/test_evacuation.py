"""Which instances go of workers that are to be free."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from services.planner.core.placement.evacuation import evacuations
from shared.messages.common import Role
from shared.messages.registry import Floor, ModelRecord, WorkerRecord
from shared.registry_view import RegistryView
from tests.records import model as model_record
from tests.records import worker_record


def view(workers: Iterable[WorkerRecord], model: ModelRecord, *floors: Floor) -> RegistryView:
    return RegistryView({model.name: model}, tuple(workers), {(f.model, f.role): f for f in floors})


def serving(name: str, model: ModelRecord, *, cordoned: bool = False, role: Role = "colocated") -> WorkerRecord:
    record = worker_record(name, model, "serving")
    assert record.instance is not None
    instance = msgspec.structs.replace(record.instance, role=role)
    return msgspec.structs.replace(record, cordoned=cordoned, instance=instance)


def going(
    found: RegistryView, leaving: Iterable[str] = (), at_work: Callable[[str], bool] = lambda _: False
) -> list[str]:
    return [r.worker.worker_id for one in evacuations(found, tuple(leaving), at_work) for r in one.leave]


def test_one_of_several_goes_at_once() -> None:
    model = model_record(min_instances=1)
    workers = [serving("w0", model, cordoned=True), serving("w1", model)]
    (found,) = evacuations(view(workers, model), (), lambda _: True)
    assert ([r.worker.worker_id for r in found.leave], found.stay) == (["w0"], 1)


def test_the_last_one_that_a_minimum_or_a_floor_keeps_waits_for_another() -> None:
    model = model_record(min_instances=1)
    last = serving("w0", model, cordoned=True)
    loading = worker_record("w1", model, "loading")
    assert going(view([last], model)) == []
    assert going(view([last, loading], model)) == []
    assert going(view([last, serving("w1", model)], model)) == ["w0"]
    floor = Floor(model="m", instances=2, left_s=float("inf"))
    assert going(view([last, serving("w1", model)], model, floor)) == []


def test_an_idle_one_that_nothing_keeps_goes_without_another() -> None:
    model = model_record(min_instances=0)
    alone = view([serving("w0", model, cordoned=True)], model)
    assert going(alone) == ["w0"]
    assert going(alone, at_work=lambda _: True) == [], "its requests have nowhere to go"


def test_what_was_told_already_is_not_told_again_and_does_not_stay() -> None:
    model = model_record(min_instances=1)
    first, second, other = (
        serving("w0", model, cordoned=True),
        serving("w1", model, cordoned=True),
        serving("w2", model),
    )
    assert first.instance is not None
    assert other.instance is not None
    assert going(view([first, second, other], model), [first.instance.instance_id]) == ["w1"]
    assert going(view([first, second, other], model), [other.instance.instance_id]) == []


def test_each_role_by_itself_and_prompts_may_go_to_either() -> None:
    model = model_record(min_instances=0)
    prefill = serving("w0", model, cordoned=True, role="prefill")
    decode = serving("w1", model, cordoned=True, role="decode")
    colocated = serving("w2", model)
    assert going(view([prefill, decode, colocated], model), at_work=lambda _: True) == ["w0"]
    both = [prefill, decode, colocated, serving("w3", model, role="decode")]
    assert sorted(going(view(both, model), at_work=lambda _: True)) == ["w0", "w1"]


def test_workers_that_stop_and_instances_that_load_are_left_alone() -> None:
    model = model_record(min_instances=0)
    stops = msgspec.structs.replace(serving("w0", model, cordoned=True), stopping=True)
    loads = msgspec.structs.replace(worker_record("w1", model, "loading"), cordoned=True)
    assert going(view([stops, loads, serving("w2", model)], model)) == []
