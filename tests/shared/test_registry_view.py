from __future__ import annotations

import msgspec
import pytest

from shared.messages.common import InstanceState, Role
from shared.messages.registry import Floor
from shared.registry_view import bounded, counted_as, route_of
from tests.records import model, worker_record

M = model("m", max_instances=4)


def test_the_number_is_kept_within_the_models_limits_and_above_the_floor() -> None:
    assert bounded(9, M, None) == 4
    assert bounded(0, M, None) == 1
    assert bounded(1, M, Floor(model="m", instances=3, left_s=1.0)) == 3
    assert bounded(1, M, Floor(model="m", instances=9, left_s=1.0)) == 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_least_number_is_of_each_role_that_the_model_is_served_by(role: Role) -> None:
    disaggregated = msgspec.structs.replace(M, serving="disaggregated")
    assert (bounded(0, disaggregated, None, role), bounded(0, disaggregated, None)) == (1, 0)
    assert bounded(0, M, None) == 1
    assert bounded(0, M, None, role) == 0
    assert bounded(9, M, None, role) == 4
    assert bounded(0, M, Floor(model="m", instances=2, left_s=1.0, role=role), role) == 2


@pytest.mark.parametrize("state", ["loading", "live", "serving"])
def test_an_instance_that_serves_or_is_on_its_way_counts_for_its_model_and_role(state: InstanceState) -> None:
    assert counted_as(worker_record("w0", M, state, role="decode"), {"m": M}) == ("m", "decode")


@pytest.mark.parametrize("state", ["draining", "failed"])
def test_an_instance_that_goes_counts_nowhere(state: InstanceState) -> None:
    assert counted_as(worker_record("w0", M, state), {"m": M}) is None


def test_a_leased_worker_counts_until_it_reports_its_instance() -> None:
    leased = worker_record("w0", lease_plan_id="p", lease_model="m", lease_role="prefill")
    assert counted_as(leased, {"m": M}) == ("m", "prefill")
    assert counted_as(worker_record("w0"), {"m": M}) is None


def test_a_worker_that_is_about_to_end_and_other_weights_of_the_name_count_nowhere() -> None:
    stopping = msgspec.structs.replace(worker_record("w0", M, "serving"), stopping=True)
    assert counted_as(stopping, {"m": M}) is None
    assert counted_as(worker_record("w0", model("m", model_hash="old"), "serving"), {"m": M}) is None


@pytest.mark.parametrize("state", ["live", "serving", "draining"])
def test_an_instance_that_may_hold_requests_has_a_route(state: InstanceState) -> None:
    route = route_of(worker_record("w0", M, state, epoch=7), M)
    assert route is not None
    assert (route.instance_id, route.worker_id, route.state, route.epoch) == ("i-w0", "w0", state, 7)


def test_there_is_no_route_to_what_loads_and_to_other_weights_than_the_registered_ones() -> None:
    assert route_of(worker_record("w0", M, "loading"), M) is None
    assert route_of(worker_record("w0"), M) is None
    assert route_of(worker_record("w0", M, "serving"), model("m", model_hash="new")) is None
    assert route_of(worker_record("w0", M, "serving"), None) is None
