"""``/admin/why``: what monitor and planner say of a model, together."""

from __future__ import annotations

import pytest

from services.gateway.http import why
from shared import subjects
from shared.messages.decisions import DecisionRecord, Decisions, GetVerdicts, ListDecisions, RoleVerdict, Verdicts
from shared.messages.operations import ListScaleRecords, ScaleRecords, Unplanned
from tests.services.gateway.conftest import Stack

NEED = RoleVerdict(role="colocated", desired=2, needed=5.0, there=2, seen="prefill 5", bound="max_instances is 2")
MADE = DecisionRecord(
    at_s=7.0, model="tiny", role="colocated", asked_by="load", seen="prefill 2", asked=2, there=1, wanted=2,
    outcome="load", chosen="w1 loads", otherwise="more to do",
)  # fmt: skip
LACK = Unplanned(model="tiny", role="colocated", wanted=3, why="no worker is spare", for_s=2.0)


async def services(stack: Stack) -> list[ListDecisions]:
    """A planner and a monitor; what the planner is asked for."""
    bus, asked = stack.broker.bus("others"), list[ListDecisions]()

    async def decided(request: ListDecisions) -> Decisions:
        asked.append(request)
        return Decisions(decisions=(MADE,) if request.model in ("tiny", "gone") else ())

    async def planned(request: ListScaleRecords) -> ScaleRecords:
        assert request.models == ("tiny",)
        return ScaleRecords(records=(), unplanned=(LACK,))

    async def needs(request: GetVerdicts) -> Verdicts:
        return Verdicts(roles=(NEED,) if request.model == "tiny" else ())

    await bus.respond(subjects.planner("decisions"), ListDecisions, decided)
    await bus.respond(subjects.planner("records"), ListScaleRecords, planned)
    await bus.respond(subjects.verdicts(), GetVerdicts, needs)
    return asked


async def test_need_lack_and_decisions_are_one_answer(stack: Stack) -> None:
    asked = await services(stack)
    found = (await stack.http.get("/admin/why/tiny?limit=3")).json()
    assert found["model"] == "tiny"
    assert [(r["needed"], r["bound"]) for r in found["roles"]] == [(5.0, "max_instances is 2")]
    assert [u["why"] for u in found["unplanned"]] == ["no worker is spare"]
    assert [d["chosen"] for d in found["decisions"]] == ["w1 loads"]
    assert (found["queued_requests"], found["silent"]) == (0, [])
    assert asked == [ListDecisions(model="tiny", until_s=None, limit=3)]


async def test_of_a_time_in_the_past_there_are_decisions_only(stack: Stack) -> None:
    asked = await services(stack)
    found = (await stack.http.get("/admin/why/tiny?at=8.5")).json()
    assert (found["roles"], found["unplanned"], len(found["decisions"])) == ([], [], 1)
    assert asked[0].until_s == 8.5


async def test_of_a_removed_model_decisions_are_shown_and_of_an_unknown_one_404(stack: Stack) -> None:
    await services(stack)
    assert len((await stack.http.get("/admin/why/gone")).json()["decisions"]) == 1
    unknown = await stack.http.get("/admin/why/none")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_who_does_not_answer_is_named(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "TIMEOUT_S", 0.1)
    found = await stack.http.get("/admin/why/tiny")
    assert (found.status_code, sorted(found.json()["silent"])) == (200, ["monitor", "planner"])


@pytest.mark.parametrize(
    "query", ["at=soon", "at=-1", "at=nan", "at=1e300", "limit=0", "limit=101", f"limit={'9' * 999}"]
)
async def test_what_is_no_time_or_number_is_refused(stack: Stack, query: str) -> None:
    response = await stack.http.get(f"/admin/why/tiny?{query}")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_request")
