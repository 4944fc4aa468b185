"""Routes as numbered changes: whoever follows them knows what the registry holds, whatever is lost on the way."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.gateway.core.routes import RouteView
from services.pool.core.pages import page_of
from services.pool.core.registry import Registry
from shared.messages.common import InstanceState
from shared.messages.registry import GoneRoute, ModelRoute, Route
from shared.messages.registry import RouteChanges as Event
from shared.registry import RegistryView
from tests.processes import INCARNATION
from tests.records import heartbeat, model, view, worker_record

M = model("m")
OTHER_WEIGHTS = structs.replace(M, model_hash="other")


def route(name: str, state: InstanceState = "serving") -> Route:
    return Route(
        instance_id=name,
        worker_id=f"w-{name}",
        incarnation=INCARNATION,
        state=state,
        role="colocated",
        max_running_requests=1,
        max_queued_tokens=1,
        context_tokens=100,
    )


def event(sequence: int, *came: str, gone: tuple[str, ...] = (), publisher: str = "p", **fields: Any) -> Event:
    return Event(
        publisher=publisher,
        sequence=sequence,
        routes=tuple(ModelRoute(model="m", route=route(name)) for name in came),
        gone=tuple(GoneRoute(model="m", instance_id=name) for name in gone),
        **fields,
    )


def at(sequence: int, *workers: str, publisher: str = "p") -> RegistryView:
    records = [worker_record(name, M, "serving") for name in workers]
    return view(*records, models=(M,), publisher=publisher, routes_sequence=sequence)


def test_a_change_touches_what_it_names_and_nothing_else() -> None:
    routes = RouteView()
    routes.apply_view(at(4, "w0", "w1"))
    changes = routes.apply_changes(event(5, "new", gone=("i-w0",)))
    assert (changes.gap, changes.models, changes.lost_instances) == (False, {"m"}, {"i-w0"})
    assert sorted(routes.models["m"].routes) == ["i-w1", "new"]


def test_new_settings_of_a_known_model_count_at_once_and_leave_its_routes_alone() -> None:
    routes = RouteView()
    routes.apply_view(at(4, "w0", "w1"))
    before, changed = routes.models["m"].routes, model("m", min_instances=0, keep_alive_s=60.0)
    changes = routes.apply_changes(event(5, models=(changed,)))
    assert (changes.gap, changes.models, changes.lost_instances) == (False, {"m"}, set())
    assert (routes.models["m"].record, routes.models["m"].routes) == (changed, before)


def test_a_view_of_the_pool_that_led_before_asks_for_another() -> None:
    routes = RouteView()
    routes.apply_view(at(4, "w0", publisher="old"))
    routes.apply_view(at(1, "w0", publisher="new"))
    routes.apply_changes(event(2, gone=("i-w0",), publisher="new"))
    # It had been asked for before, and came late: what it undoes nobody would say again.
    assert routes.apply_view(at(4, "w0", publisher="old")).gap
    assert routes.apply_view(at(2, publisher="new")).gap
    assert not routes.apply_view(at(2, publisher="new")).gap
    assert routes.models["m"].routes == {}


def test_a_gap_another_publisher_and_an_unknown_beginning_ask_for_the_registry() -> None:
    routes = RouteView()
    assert routes.apply_changes(event(1, "a")).gap
    routes.apply_view(at(4))
    assert not routes.apply_changes(event(5, "a")).gap
    assert routes.apply_changes(event(7, "b")).gap
    assert routes.apply_changes(event(8, "c", publisher="next")).gap


def test_what_was_heard_twice_or_late_changes_nothing() -> None:
    routes = RouteView()
    routes.apply_view(at(4))
    routes.apply_changes(event(5, "a"))
    assert not routes.apply_changes(event(5, gone=("a",))).models
    assert not routes.apply_changes(event(3, gone=("a",))).models
    assert list(routes.models["m"].routes) == ["a"]


def test_a_number_that_the_registry_never_gave_out_hides_nothing_after_the_next_view() -> None:
    routes = RouteView()
    routes.apply_view(at(4, "w0"))
    assert routes.apply_changes(event(2**53, "nobody", gone=("i-w0",))).gap
    num_heard = routes.num_heard
    routes.apply_changes(event(5, "late"))
    routes.apply_view(at(5, "w0", "late"), num_heard=num_heard)
    assert sorted(routes.models["m"].routes) == ["i-late", "i-w0"]
    changes = routes.apply_changes(event(6, "new"))
    assert (changes.gap, sorted(routes.models["m"].routes)) == (False, ["i-late", "i-w0", "new"])


def test_what_comes_while_a_view_is_read_stays_also_when_something_was_heard_before() -> None:
    routes = RouteView()
    routes.apply_view(at(4))
    routes.apply_changes(event(5, "a"))
    num_heard = routes.num_heard
    routes.apply_changes(event(6, "b"))
    assert not routes.apply_view(at(5, "w0"), num_heard=num_heard).gap
    assert sorted(routes.models["m"].routes) == ["b", "i-w0"]
    assert not routes.apply_changes(event(7, "c")).gap


def test_a_worker_that_cannot_be_spoken_to_is_no_route() -> None:
    routes = RouteView()
    routes.apply_view(at(4, "w0", "a.b"))
    odd = structs.replace(route("odd"), worker_id="not a name")
    routes.apply_changes(structs.replace(event(5, "new"), routes=(ModelRoute(model="m", route=odd),)))
    assert sorted(routes.models["m"].routes) == ["i-w0"]


def test_a_view_does_not_undo_what_changed_while_it_was_read() -> None:
    routes = RouteView()
    routes.apply_view(at(4))
    routes.apply_changes(event(5, "a"))
    routes.apply_changes(event(6, gone=("i-w0",)))
    changes = routes.apply_view(at(4, "w0"))
    assert list(routes.models["m"].routes) == ["a"]
    assert (changes.gap, "a" in changes.lost_instances) == (False, False)
    assert not routes.apply_changes(event(7, "b")).gap


def test_a_view_of_before_a_gap_leaves_the_gap_to_be_asked_for() -> None:
    routes = RouteView()
    routes.apply_view(at(4))
    assert routes.apply_changes(event(7, "b")).gap
    assert routes.apply_view(at(5)).gap
    assert not routes.apply_view(at(7)).gap


def test_a_removed_model_is_gone_and_its_return_is_another() -> None:
    routes = RouteView()
    routes.apply_view(at(4, "w0"))
    changes = routes.apply_changes(event(5, removed_models=("m",)))
    assert (changes.removed, changes.lost_instances, routes.models) == ({"m"}, {"i-w0"}, {})
    changes = routes.apply_changes(event(6, "a", removed_models=("m",), models=(M,)))
    assert (changes.removed, changes.models) == (set(), {"m"})
    assert list(routes.models["m"].routes) == ["a"]


def test_instances_of_a_models_earlier_weights_are_no_routes_of_it_whatever_was_not_heard() -> None:
    routes = RouteView()
    routes.apply_view(at(4, "w0"))
    changes = routes.apply_changes(event(6, "a", models=(OTHER_WEIGHTS,)))
    assert (changes.gap, changes.models, changes.removed) == (True, {"m"}, set())
    assert (changes.lost_instances, list(routes.models["m"].routes)) == ({"i-w0"}, ["a"])


STATES: tuple[InstanceState, ...] = ("spare", "loading", "live", "serving", "draining")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(0, 3), st.sampled_from(STATES), st.sampled_from(("m", "n"))),
        st.tuples(st.just("die"), st.integers(0, 3)),
        st.tuples(st.just("add"), st.sampled_from(("m", "n"))),
        st.tuples(st.just("remove"), st.sampled_from(("m", "n"))),
        st.tuples(st.just("hear")),
        st.tuples(st.just("lose")),
        st.tuples(st.just("look")),
        st.tuples(st.just("apply")),
    ),
    max_size=80,
)


def registry_view(registry: Registry) -> RegistryView:
    page = page_of(registry, "", "", 0.0)
    assert page is not None
    return view(
        *page.workers,
        models=page.models,
        publisher=page.publisher,
        routes_sequence=page.routes_sequence,
    )


@settings(max_examples=300, deadline=None)
@given(steps=steps)
def test_whoever_hears_of_a_gap_and_looks_again_knows_everything(steps: list[tuple[Any, ...]]) -> None:
    registry, routes = Registry("pool-1"), RouteView()
    on_its_way: RegistryView | None = None
    number, gap = 0, False
    for kind, *rest in [*steps, ("hear",)]:
        match kind:
            case "beat":
                index, state, name = rest
                number += 1
                registry.take(heartbeat(f"w{index}", model(name), state, sequence=number), 0.0, 2.0)
            case "die":
                registry.forget([f"w{rest[0]}"])
            case "add":
                registry.put_model(model(rest[0]))
            case "remove":
                registry.remove_model(rest[0], 0.0)
            case "hear" | "lose":
                for found in registry.routes.take("pool-1")[0]:
                    if kind == "hear":
                        gap |= routes.apply_changes(found).gap
                    else:
                        gap = True  # heard of with the next event, or at the next regular look
            case "look":
                on_its_way = registry_view(registry)
            case "apply":
                if on_its_way is not None:
                    gap = routes.apply_view(on_its_way).gap or gap
    if gap or not routes.ready:
        assert not routes.apply_view(registry_view(registry)).gap
    names = [record.name for record in registry.models.records()]
    known = {n: tuple(sorted(m.routes.values(), key=lambda r: r.instance_id)) for n, m in routes.models.items()}
    assert known == {name: registry.table(name) for name in names}
