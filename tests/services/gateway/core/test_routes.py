from __future__ import annotations

from pathlib import Path

from services.gateway.core.routes import RouteView, takes_new
from shared.messages.common import InstanceState, Role
from shared.messages.registry import GoneRoute, ModelRoute, Route, RouteChanges
from tests.processes import INCARNATION
from tests.records import view, worker_record
from tests.services.gateway.checkpoint import model_record

MODEL = model_record(Path("/m"), "m")


def route(name: str, state: InstanceState = "serving", context: int = 100, role: Role = "colocated") -> Route:
    return Route(
        instance_id=name,
        worker_id=f"w-{name}",
        incarnation=INCARNATION,
        state=state,
        role=role,
        max_running_requests=1,
        max_queued_tokens=1,
        context_tokens=context,
    )


def event(sequence: int, *came: Route, gone: tuple[str, ...] = (), removed: tuple[str, ...] = ()) -> RouteChanges:
    return RouteChanges(
        publisher="p",
        sequence=sequence,
        removed_models=removed,
        models=() if removed else (MODEL,),
        gone=tuple(GoneRoute(model="m", instance_id=name) for name in gone),
        routes=tuple(ModelRoute(model="m", route=route) for route in came),
    )


def test_lost_instances_and_removed_models_are_told() -> None:
    routes = RouteView()
    routes.apply_changes(event(1, route("a"), route("b")))
    assert routes.apply_changes(event(2, gone=("a",))).lost_instances == {"a"}
    assert not routes.apply_changes(event(3, route("b", "draining"))).lost_instances
    changes = routes.apply_changes(event(4, removed=("m",)))
    assert (changes.removed, changes.lost_instances) == ({"m"}, {"b"})
    assert "m" not in routes.models


def test_live_instances_are_known_and_their_loss_is_told() -> None:
    routes = RouteView()
    routes.apply_changes(event(1, route("a", "live"), route("b", "loading")))
    assert list(routes.models["m"].routes) == ["a"]
    assert not routes.apply_changes(event(2, route("a", "serving"))).lost_instances
    routes.apply_changes(event(3, route("a", "live")))
    assert routes.apply_changes(event(4, gone=("a",))).lost_instances == {"a"}


def test_a_live_instance_is_in_a_snapshot_too() -> None:
    routes = RouteView()
    workers = (worker_record("w0", MODEL, "live"), worker_record("w1", MODEL, "loading"))
    routes.apply_view(view(*workers, models=(MODEL,)))
    assert [(r.worker_id, r.state) for r in routes.models["m"].routes.values()] == [("w0", "live")]


def test_a_live_instance_promises_no_context() -> None:
    routes = RouteView()
    routes.apply_changes(event(1, route("a", context=50), route("b", "live", context=70)))
    assert routes.models["m"].context_tokens == 50


def test_a_decode_instance_promises_no_context_either() -> None:
    routes = RouteView()
    routes.apply_changes(event(1, route("a", context=50, role="prefill"), route("b", context=70, role="decode")))
    assert routes.models["m"].context_tokens == 50
    routes.apply_changes(event(2, route("a", context=50, role="prefill"), route("b", context=20, role="decode")))
    assert routes.models["m"].context_tokens == 50
    routes.apply_changes(event(3, gone=("a",)))
    assert routes.models["m"].context_tokens == MODEL.spec.max_position


def test_only_serving_instances_that_compute_prompts_take_new_requests() -> None:
    assert takes_new(route("a"))
    assert takes_new(route("a", role="prefill"))
    assert not takes_new(route("a", role="decode"))
    assert not takes_new(route("a", "draining", role="prefill"))


def test_context_is_the_best_instances_within_the_models() -> None:
    routes = RouteView()
    routes.apply_changes(event(1))
    assert routes.models["m"].context_tokens == MODEL.spec.max_position
    routes.apply_changes(event(2, route("a", context=50), route("b", context=70)))
    assert routes.models["m"].context_tokens == 70
    routes.apply_changes(event(3, route("a", context=10**6)))
    assert routes.models["m"].context_tokens == MODEL.spec.max_position


def test_it_is_ready_with_the_first_snapshot_only() -> None:
    routes = RouteView()
    routes.apply_changes(event(1))
    assert not routes.ready
    routes.apply_view(view(models=(MODEL,)))
    assert routes.ready
