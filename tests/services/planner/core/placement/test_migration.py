"""Where the requests of instances that go may continue."""

from __future__ import annotations

from services.planner.core.placement.migration import MAX_DESTINATIONS, DestinationPicker, Goes, Stays
from shared.messages.common import Role
from tests.processes import process


def stays(name: str, free: int = 1000, role: Role = "colocated", *, slots: int = 8, context: int = 4096) -> Stays:
    return Stays(process(f"w-{name}"), name, role, free, slots, context)


def goes(name: str = "goes", role: Role = "colocated", *, kv: int = 500, context: int = 4096) -> Goes:
    return Goes(name, role, kv, context)


def named(destinations: DestinationPicker, going: Goes) -> list[str]:
    return [destination.instance_id for destination in destinations.of(going)]


def test_those_with_the_most_free_kv_come_first_and_keep_some() -> None:
    found = DestinationPicker([stays("a", 100), stays("b", 1000), stays("c", 500)]).of(goes())
    assert [(d.worker_id, d.instance_id, d.kv_tokens) for d in found] == [
        ("w-b", "b", 900),
        ("w-c", "c", 450),
        ("w-a", "a", 90),
    ]


def test_what_one_is_promised_others_do_not_count_on() -> None:
    destinations = DestinationPicker([stays("a", 1000), stays("b", 1000)])
    assert [d.kv_tokens for d in destinations.of(goes("x", kv=900))] == [900, 900]
    assert [d.kv_tokens for d in destinations.of(goes("y", kv=900))] == [450, 450]
    assert destinations.of(goes("z")) == ()


def test_only_some_are_named() -> None:
    assert len(DestinationPicker([stays(str(i)) for i in range(9)]).of(goes())) == MAX_DESTINATIONS


def test_those_without_a_slot_without_kv_or_with_less_context_are_not_named() -> None:
    unfit = [stays("slots", slots=0), stays("full", 0), stays("short", context=4095)]
    assert named(DestinationPicker([*unfit, stays("fits")]), goes()) == ["fits"]
    assert named(DestinationPicker(unfit), goes()) == []


def test_each_role_goes_where_it_is_decoded() -> None:
    every = [stays("c"), stays("d", role="decode"), stays("p", role="prefill")]
    assert named(DestinationPicker(every), goes(role="colocated")) == ["c"]
    assert named(DestinationPicker(every), goes(role="prefill")) == ["d"]
    assert named(DestinationPicker(every), goes(role="decode")) == ["d"]
    assert named(DestinationPicker(every[1:]), goes(role="colocated")) == ["d"]
    assert named(DestinationPicker(every[:1]), goes(role="decode")) == ["c"]
    assert named(DestinationPicker(every[2:]), goes(role="decode")) == []


def test_what_has_not_begun_goes_back_only_if_somebody_else_takes_it() -> None:
    assert DestinationPicker([stays("full", 0)]).send_back(goes(), at_once=False) == "waiting"
    assert DestinationPicker([stays("d", role="decode")]).send_back(goes(), at_once=False) == "none"
    assert DestinationPicker([]).send_back(goes(), at_once=False) == "none"


def test_all_goes_back_only_for_another_model_and_if_nobody_is_left() -> None:
    assert DestinationPicker([]).send_back(goes(), at_once=True) == "all"
    assert DestinationPicker([stays("a")]).send_back(goes(), at_once=True) == "waiting"
    assert DestinationPicker([stays("d", role="decode")]).send_back(goes(role="prefill"), at_once=True) == "none"


def test_where_kv_stays_all_goes_back_unless_nobody_else_takes_it() -> None:
    assert DestinationPicker([stays("full", 0)]).send_all_back(goes(), at_once=False) == "all"
    for others in ([], [stays("goes")], [stays("d", role="decode")]):
        assert DestinationPicker(others).send_all_back(goes(), at_once=False) == "none"
        assert DestinationPicker(others).send_all_back(goes(), at_once=True) == "all"
