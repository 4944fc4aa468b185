"""What a model needs in each role, by how it is served and within its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.monitor.core.demand import ModelDemand, Verdict
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.roles import There, staying, verdicts, within
from shared.messages.common import Role, Serving
from shared.messages.registry import Floor
from tests.records import model
from tests.services.monitor.core.reports import queue, report

POLICY = DemandPolicy(prefill_tokens_per_s=1000.0, utilisation=1.0, down_window_s=2.0)


def found(
    serving: Serving,
    there: Mapping[Role, There],
    *,
    tokens: int = 0,
    demand: ModelDemand | None = None,
    at_s: float = 0.0,
    **changes: object,
) -> Mapping[Role, Verdict]:
    """With a burst of so many tokens, in prompts of a hundred, at 0 s."""
    demand = demand or ModelDemand(POLICY)
    demand.on_queue("g", queue(tokens, queued_tokens=tokens), 0.0)
    record = model(**{"min_instances": 0, "serving": serving} | changes)
    every: dict[Role, There] = {"colocated": There(), "prefill": There(), "decode": There()}
    verdicts(demand, record, every | there, 0.0)
    return verdicts(demand, record, every | there, at_s)


def numbers(found: Mapping[Role, Verdict]) -> tuple[int, int, int]:
    return found["colocated"].desired, found["prefill"].desired, found["decode"].desired


def test_how_a_model_is_served_says_which_roles_its_load_asks_for() -> None:
    assert numbers(found("", {}, tokens=1500)) == (3, 0, 0)
    assert numbers(found("colocated", {}, tokens=1500)) == (3, 0, 0)
    assert numbers(found("disaggregated", {}, tokens=1500)) == (0, 3, 1)


def test_the_minimum_is_of_each_role_that_it_is_served_by() -> None:
    assert numbers(found("", {}, min_instances=2)) == (2, 0, 0)
    assert numbers(found("disaggregated", {}, min_instances=2)) == (0, 2, 2)


def test_a_number_that_is_not_the_loads_says_whose_it_is() -> None:
    def why(floor: Floor | None = None, **changes: int) -> str:
        found_ = found("", {"colocated": There(0, 0, floor)}, tokens=1500, **changes)
        return found_["colocated"].reason

    assert "min_" not in why()
    assert "hand" not in why()
    assert why(min_instances=4).endswith("; min_instances is 4")
    assert why(Floor(model="m", instances=5, left_s=9.0)).endswith("; 5 asked for by hand")
    assert why(max_instances=2).endswith("; 3 would be needed, and max_instances is 2")


def test_what_nobody_asked_for_goes_where_the_load_decides_and_stays_where_it_does_not() -> None:
    both: dict[Role, There] = {"prefill": There(1, 1), "decode": There(2, 2)}
    assert numbers(found("", both)) == (0, 1, 2)
    assert numbers(found("colocated", both, at_s=2.1)) == (0, 0, 0)
    floor = Floor(model="m", instances=1, left_s=9.0, role="decode")
    assert numbers(found("colocated", both | {"decode": There(2, 2, floor)}, at_s=2.1)) == (0, 0, 1)
    assert numbers(found("", both | {"decode": There(2, 2, floor)})) == (0, 1, 1)


def test_surplus_instances_go_as_others_come_to_take_their_prompts() -> None:
    surplus: dict[Role, There] = {"colocated": There(4, 4)}
    # Three prefill instances and a decode instance are wanted, and there may be no worker but theirs.
    assert numbers(found("disaggregated", surplus, tokens=1500)) == (3, 3, 1)
    coming = surplus | {"prefill": There(3, 1), "decode": There(1, 0)}
    assert numbers(found("disaggregated", coming, tokens=1500)) == (2, 3, 1)
    assert numbers(found("disaggregated", coming | {"prefill": There(3, 3)}, tokens=1500)) == (0, 3, 1)


def test_one_that_takes_prompts_stays_as_long_as_a_last_instance_does() -> None:
    surplus: dict[Role, There] = {"colocated": There(4, 4)}
    assert numbers(found("disaggregated", surplus, at_s=1.9)) == (1, 0, 0), "the window is two seconds"
    assert numbers(found("disaggregated", surplus, at_s=2.1)) == (0, 0, 0)
    assert numbers(found("disaggregated", surplus, at_s=2.1, keep_alive_s=5.0)) == (1, 0, 0)
    others: dict[Role, There] = {"prefill": There(1, 1), "decode": There(1, 1)}
    assert found("disaggregated", surplus | others)["colocated"].desired == 0, "these take what comes"


def test_what_stays_for_what_may_come_is_anybodys_and_takes_nobodys_place() -> None:
    one: dict[Role, There] = {"colocated": There(1, 1)}
    verdict = found("disaggregated", one, at_s=1.9)["colocated"]
    assert (verdict.desired, verdict.idle) == (1, 1)
    assert numbers(found("disaggregated", one, at_s=1.9, max_instances=1)) == (0, 0, 0)


def test_surplus_instances_that_take_prompts_stay_until_it_can_be_known_whether_there_are_any() -> None:
    record, demand = model(serving="disaggregated", min_instances=0), ModelDemand(POLICY)
    there: dict[Role, There] = {"colocated": There(4, 4), "prefill": There(), "decode": There(1, 1)}
    for now_s, stay in ((10.0, 4), (11.9, 4), (12.1, 0)):
        assert verdicts(demand, record, there, now_s, connected_since_s=10.0)["colocated"].desired == stay


@given(*(st.integers(0, 9) for _ in range(5)))
def test_a_model_that_needs_one_is_never_left_without_an_instance_that_takes_prompts(
    surplus: int, wanted: int, serving: int, coming: int, lacking: int
) -> None:
    stays = staying(surplus, wanted=wanted, serving=serving, coming=coming, lacking=lacking)
    assert 0 <= stays <= surplus
    if wanted and surplus:
        assert stays + serving > 0
    if serving >= wanted:
        assert stays == 0
    if lacking and not coming and surplus > 1:
        assert stays < surplus, "its worker may be the only one"


def test_all_roles_share_the_maximum_in_proportion_to_what_they_need() -> None:
    assert within({"prefill": 3, "decode": 2}, {"prefill": 0, "decode": 0}, 9) == {"prefill": 3, "decode": 2}
    assert within({"prefill": 6, "decode": 2}, {"prefill": 1, "decode": 1}, 4) == {"prefill": 3, "decode": 1}
    assert within({"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0}, 1) == {"prefill": 1, "decode": 0}
    # What was asked for by hand, and stays, leaves the rest.
    by_hand: dict[Role, There] = {"decode": There(3, 3)}
    assert numbers(found("", by_hand, tokens=1500, max_instances=4)) == (1, 0, 3)
    assert numbers(found("", {"decode": There(5, 5)}, max_instances=4)) == (0, 0, 4)


def test_what_one_role_only_keeps_takes_no_place_from_what_another_needs() -> None:
    demand, record = ModelDemand(replace(POLICY, down_window_s=60.0)), model(serving="disaggregated", max_instances=8)
    there: dict[Role, There] = {"colocated": There(), "prefill": There(6, 6), "decode": There(2, 2)}
    demand.on_queue("g", queue(3000, queued_tokens=3000), 0.0)
    verdicts(demand, record, there, 0.0)
    for step in range(1, 41):
        # Decode instances need the memory of five.
        for name in ("d0", "d1"):
            demand.on_load(report(name, role="decode", running_requests=5, kv_blocks_used=225), step / 10)
        demand.on_queue("g", queue(3000, inflight=10), step / 10)
        got = verdicts(demand, record, there, step / 10)
    assert numbers(got) == (0, 3, 5)
    assert got["prefill"].reason.endswith("6 would be kept, and max_instances is 8")
    assert numbers(verdicts(demand, msgspec.structs.replace(record, max_instances=20), there, 4.1)) == (0, 6, 5), (
        "kept where there is room"
    )
    assert numbers(verdicts(demand, msgspec.structs.replace(record, max_instances=4), there, 4.2)) == (0, 1, 3), (
        "a share of what is needed"
    )


@given(*(st.integers(0, 50) for _ in range(5)))
def test_no_role_gets_more_than_it_wants_and_all_together_not_more_than_the_most(
    prefill: int, decode: int, more_prefill: int, more_decode: int, most: int
) -> None:
    wanted: dict[Role, int] = {"prefill": prefill + more_prefill, "decode": decode + more_decode}
    least: dict[Role, int] = {"prefill": prefill, "decode": decode}
    got = within(wanted, least, most)
    assert sum(got.values()) == min(most, sum(wanted.values()))
    assert all(0 <= got[role] <= wanted[role] for role in wanted)
    if sum(least.values()) <= most:
        assert all(got[role] >= least[role] for role in wanted)


def test_a_model_that_sleeps_wakes_with_one_of_each() -> None:
    assert numbers(found("disaggregated", {}, tokens=100)) == (0, 1, 1)


def test_an_instance_that_has_another_role_is_not_counted_in_its_former_one() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report("i0", role="decode", running_requests=5, kv_blocks_used=80), 0.0)
    demand.on_load(report("i1", role="decode", running_requests=5, kv_blocks_used=80), 0.0)
    there: dict[Role, There] = {"prefill": There(1, 1), "decode": There(2, 2)}
    before = found("disaggregated", there, demand=demand)["decode"]
    assert before.needed == pytest.approx(160 / 90)
    # The registry says so before the instance does.
    demand.on_role("i1", "prefill")
    there = {"prefill": There(2, 2), "decode": There(1, 1)}
    assert found("disaggregated", there, demand=demand)["decode"].needed == pytest.approx(80 / 90)
    # What it says in its new role counts, whoever hears of it first.
    demand.on_load(report("i1", role="prefill", running_requests=5, kv_blocks_used=80), 0.0)
    demand.on_role("i1", "prefill")
    after = found("disaggregated", there, demand=demand)["decode"]
    assert "10 are" in after.reason, "it decodes them to their end, but as what another one could"


def test_a_request_that_is_handed_on_and_in_two_reports_is_one() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(1000, inflight=10), 0.0)
    demand.on_load(report("i0", role="prefill", running_requests=10, running_tokens=1000), 0.0)
    demand.on_load(report("i1", role="decode", running_requests=6, running_tokens=600), 0.0)
    there: dict[Role, There] = {"prefill": There(1, 1), "decode": There(1, 1)}
    every = {"colocated": There()} | there
    why = verdicts(demand, model(serving="disaggregated"), every, 0.0)["decode"].reason
    assert "10 requests at once: 10 are" in why


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_whatever_is_reported_there_is_a_verdict_within_limits(data: st.DataObject) -> None:
    demand = ModelDemand(POLICY)
    count = st.sampled_from([0, 1, 7, 2**53])
    figure = st.sampled_from([0.0, 5e-324, 1e-6, 1.0, 1e18])
    counts = ("queued_requests", "queued_tokens", "running_requests", "running_tokens", "prefilling_requests")
    blocks = ("kv_blocks_total", "kv_blocks_used", "kv_block_tokens", "ended_requests_total", "ended_tokens_total")
    speeds = ("prefill_tokens_per_s", "decode_base_s", "decode_request_s", "load_s")
    record = model(serving="disaggregated", max_instances=9, slo_tbt_s=data.draw(st.sampled_from([0.0, 0.05, 3600.0])))
    there: dict[Role, There] = {"colocated": There(1, 1), "prefill": There(2, 1), "decode": There(1, 1)}
    for now_s in (0.0, 0.1, 0.2):
        for name, role in (("i0", "prefill"), ("i1", "decode"), ("i2", "colocated")):
            fields = {field: data.draw(count) for field in (*counts, *blocks)}
            fields |= {field: data.draw(figure) for field in speeds}
            demand.on_load(report(name, role=role, **fields), now_s)
        arrived = data.draw(count)
        demand.on_queue("g", queue(arrived, data.draw(count), inflight=data.draw(count)), now_s)
        for verdict in verdicts(demand, record, there, now_s).values():
            assert 0 <= verdict.desired <= 9
            assert verdict.reason


def test_what_drains_asks_for_no_decode_instance_for_the_requests_that_it_finishes() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(300, inflight=3), 0.0)
    demand.on_load(report("i0", role="decode", state="draining", running_requests=3, kv_blocks_used=90), 0.0)
    every: dict[Role, There] = {"colocated": There(), "prefill": There(1, 1), "decode": There()}
    record = model(serving="disaggregated", min_instances=0)
    assert verdicts(demand, record, every, 0.5)["decode"].desired == 0
    demand.on_queue("g", queue(400, queued_tokens=100, inflight=3), 0.6)
    demand.on_load(report("i0", role="decode", state="draining", running_requests=3, kv_blocks_used=90), 0.6)
    assert verdicts(demand, record, every, 0.6)["decode"].desired == 1


def test_only_what_limits_and_floors_leave_is_idle() -> None:
    there: dict[Role, There] = {"prefill": There(3, 3), "decode": There(2, 2)}
    verdict = found("disaggregated", there, min_instances=1)
    assert (verdict["prefill"].idle, verdict["decode"].idle) == (2, 1)
