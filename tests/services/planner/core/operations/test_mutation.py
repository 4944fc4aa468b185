"""Which instances get another role, as a pure decision."""

from __future__ import annotations

import itertools

import pytest

from services.planner.core.operations.mutation import (
    KEPT_LOADS,
    KEPT_S,
    RoleSurplus,
    from_surplus,
    kept_s,
    made_up_for,
    surplus_of,
    with_roles,
)
from shared.messages.common import Role
from shared.messages.registry import WorkerRecord
from tests.records import model, view, worker_record

M = model("m")


def records(role: Role, *worker_ids: str) -> tuple[WorkerRecord, ...]:
    return tuple(worker_record(w, M, "serving", role=role, epoch=i + 1) for i, w in enumerate(worker_ids))


def offer(role: Role, *worker_ids: str, surplus: int = 1) -> RoleSurplus:
    return RoleSurplus(role, surplus, "why", records(role, *worker_ids))


def idle(_: str) -> bool:
    return False


def chosen(*offers: RoleSurplus, role: Role = "decode", missing: int = 1, takers: int = 9, **more: object) -> list[str]:
    at_work = more.pop("at_work", idle)
    changes = from_surplus(role, missing, offers, at_work, takers, **more)  # type: ignore[arg-type]
    return [change.record.worker.worker_id for change in changes]


def test_no_more_than_is_missing_and_no_more_than_a_role_has_to_give() -> None:
    for missing, surplus in itertools.product(range(4), range(4)):
        found = chosen(offer("prefill", "w0", "w1", "w2", surplus=surplus), missing=missing)
        assert len(found) == min(missing, surplus)


def test_what_has_nothing_to_do_goes_first_then_the_newest() -> None:
    of_two = offer("prefill", "w0", "w1"), offer("colocated", "w2", "w3", "w4")
    assert chosen(*of_two, missing=2) == ["w4", "w1"]
    assert chosen(*of_two, missing=2, at_work=lambda i: i in {"i-w1", "i-w4"}) == ["w3", "w0"]


@pytest.mark.parametrize("takers", [0, 1, 2, 3])
def test_the_last_that_takes_prompts_goes_on_doing_so(takers: int) -> None:
    many = offer("prefill", "w0", "w1", "w2", surplus=3)
    assert len(chosen(many, missing=3, takers=takers)) == max(0, takers - 1)
    assert len(chosen(many, missing=3, takers=takers, role="colocated")) == 3
    assert len(chosen(offer("decode", "w0"), takers=takers, role="prefill")) == 1


@pytest.mark.parametrize(
    ("there", "least", "needed", "surplus"),
    [(3, 0, [], 0), (3, 0, [1], 2), (3, 2, [1], 1), (3, 0, [2, 1], 2), (1, 2, [0], 0), (0, 0, [0], 0)],
)
def test_a_role_needs_what_is_known_of_it_and_keeps_its_least(
    there: int, least: int, needed: list[int], surplus: int
) -> None:
    assert surplus_of(there, least, needed) == surplus


def test_one_prefill_instance_stays_while_others_load() -> None:
    prefill = records("prefill", "w0", "w1", "w2")

    def taken(missing: int, num_serving: int = 3) -> list[str]:
        return [r.worker.worker_id for r in made_up_for(missing, prefill, idle, num_serving)]

    assert (taken(1), taken(9), taken(0), taken(9, 1)) == (["w2"], ["w2", "w1"], [], [])
    assert taken(9, 4) == ["w2", "w1", "w0"], "another one serves that may not go"


def test_a_role_that_was_given_gives_none_for_a_while() -> None:
    assert kept_s(0.0) == KEPT_S
    assert kept_s(3.0) == 3.0 * KEPT_LOADS


def test_the_registry_is_seen_with_the_roles_that_were_given() -> None:
    seen = view(*records("prefill", "w0", "w1"), models=(M,))
    changed = with_roles(seen, {"i-w1": "decode", "i-gone": "decode"})
    assert [r.instance.role for r in changed.workers if r.instance] == ["prefill", "decode"]
    assert [r.instance.role for r in seen.workers if r.instance] == ["prefill", "prefill"]
    assert with_roles(seen, {}) is seen
