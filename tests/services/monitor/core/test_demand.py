"""From reports to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.core.demand import DemandSettings, ModelDemand, Verdict
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.reported import Reported
from shared.messages.common import InstanceState, Role
from tests.services.monitor.core.reports import queue, report

POLICY = DemandPolicy(
    rate_window_s=1.0, down_window_s=2.0, slack_s=0.5, prefill_tokens_per_s=1000.0, utilisation=1.0, report_ttl_s=1.5
)
MEASURED = DemandPolicy(assumed_tokens_per_s=123.0, utilisation=1.0)


# --- up ------------------------------------------------------------------------------------------------


def test_no_load_needs_nothing() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(), 0.0)
    assert demand.colocated(0.0, 0).desired == 0


def test_arrivals_beyond_one_instances_capacity_need_more() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(2500, inflight=25), 0.5)
    assert demand.colocated(0.5, 1).desired == 3


def test_a_burst_is_drained_within_the_slack() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_load(report(queued_tokens=600, queued_requests=6), 0.1)
    demand.on_queue("g", queue(1500, queued_tokens=900, inflight=6), 0.1)
    verdict = demand.colocated(0.1, 1)
    assert verdict.desired == 3  # 1500 tokens / 0.5 s at 1000 tokens/s
    assert "1500 wait" in verdict.reason


def test_what_a_gateway_holds_when_it_is_first_heard_counts_as_a_burst() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(10_000, queued_tokens=1500), 0.0)
    assert demand.colocated(0.0, 1).desired == 3


def test_a_models_ttft_objective_is_the_slack() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0, queued_tokens=1500), 0.0)
    assert demand.colocated(0.0, 1).desired == 3
    assert demand.colocated(0.0, 1, DemandSettings(slo_ttft_s=0.25)).desired == 6
    assert demand.colocated(0.0, 1, DemandSettings(slo_ttft_s=1.5)).desired == 2
    # As a record may have it that nobody checked.
    assert demand.colocated(0.0, 1, DemandSettings(slo_ttft_s=float("nan"))).desired == 3
    assert demand.colocated(0.0, 1, DemandSettings(slo_ttft_s=5e-324)).desired == 15, "as many as there are prompts"
    assert demand.colocated(0.0, 1, DemandSettings(slo_ttft_s=float("inf"))).desired == 2


def test_one_prompt_asks_for_one_instance_wherever_it_is() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(), 0.0)
    demand.on_queue("g", queue(0), 0.0)
    wanted = []
    for now_s, queued, waiting, running in ((0.1, 1, 0, 0), (0.2, 0, 1, 0), (0.3, 0, 0, 1), (3.0, 0, 0, 1)):
        at_instance = 10_000 if waiting or running else 0
        demand.on_queue(
            "g",
            queue(10_000, 10_000 * queued, requests=queued, arrived_requests=1, inflight=waiting + running),
            now_s,
        )
        demand.on_load(
            report(queued_tokens=at_instance, queued_requests=waiting, running_requests=running), now_s
        )  # of a worker that does not say what it prefills
        wanted.append(demand.colocated(now_s, 1).desired)
    assert wanted == [1, 1, 1, 1]


def test_a_prompt_on_its_way_from_gateway_to_instance_is_no_second_one() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(queued_tokens=10_000, running_requests=1, prefilling_requests=1), 0.0)
    demand.on_queue("g", queue(10_000, 10_000, requests=1, arrived_requests=1), 0.0)
    # Two reports of it, a moment apart.
    assert demand.colocated(0.0, 1).desired == 1
    demand.on_queue("g", queue(10_000, arrived_requests=1, inflight=1), 0.1)
    assert demand.colocated(0.1, 1).desired == 1


def test_kv_use_near_its_upper_bound_needs_more() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(kv_blocks_used=95, running_requests=9), 0.0)
    assert demand.colocated(0.0, 1).desired == 2


@pytest.mark.parametrize("state", ["loading", "live"])
def test_instances_on_their_way_add_no_blocks_to_the_capacity(state: InstanceState) -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report("i0", kv_blocks_used=95, running_requests=9), 0.0)
    demand.on_load(report("i1", state=state, kv_blocks_total=1000), 0.0)
    assert demand.colocated(0.0, 1).desired == 2


def test_more_running_requests_than_decode_within_the_tbt_objective_need_more() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(running_requests=50, decode_base_s=0.01, decode_request_s=0.001), 0.0)
    assert demand.colocated(0.0, 1).needed == 0
    assert demand.colocated(0.0, 1, DemandSettings(slo_tbt_s=0.05)).needed == pytest.approx(50 / 40)
    # Those whose prompts are not computed decode nothing yet.
    demand.on_load(report(running_requests=50, prefilling_requests=20, decode_base_s=0.01, decode_request_s=0.001), 0.1)
    assert demand.colocated(0.1, 1, DemandSettings(slo_tbt_s=0.05)).needed == pytest.approx(30 / 40)
    demand.on_load(report(running_requests=60), 0.2)
    assert demand.colocated(0.2, 1, DemandSettings(slo_tbt_s=0.05)).needed == pytest.approx(60 / 40)


def test_what_waits_at_a_live_instance_counts_as_load() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(1500, inflight=15), 0.1)
    demand.on_load(report("i0", queued_tokens=500, queued_requests=5), 0.1)
    demand.on_load(report("i1", state="live", queued_tokens=1000, queued_requests=10), 0.1)
    assert demand.colocated(0.1, 2).desired == 3


# --- overdue -------------------------------------------------------------------------------------------


def overdue(demand: ModelDemand, waiting: Callable[[float], int], *, serving: int, until_s: float) -> list[Verdict]:
    """Verdicts, ten a second, while ``waiting(now)`` tokens of a burst at 0 are left and nothing else comes."""
    verdicts = []
    for step in range(round(until_s * 10) + 1):
        now_s = step / 10
        for index in range(serving):
            demand.on_load(report(f"i{index}"), now_s)
        demand.on_queue("g", queue(5000, queued_tokens=waiting(now_s)), now_s)
        verdicts.append(demand.colocated(now_s, 10))
    return verdicts


def test_while_prompts_are_overdue_what_was_needed_for_them_is_needed() -> None:
    # Nothing serves yet: ten instances load for longer than the windows are.
    verdicts = overdue(ModelDemand(POLICY), lambda _: 5000, serving=0, until_s=20.0)
    assert {v.needed for v in verdicts} == {10.0}
    assert {v.desired for v in verdicts} == {10}


def test_instances_that_do_not_shrink_what_is_overdue_are_too_few() -> None:
    verdicts = overdue(ModelDemand(POLICY), lambda _: 5000, serving=10, until_s=6.0)
    needed = [v.needed for v in verdicts]
    assert needed == sorted(needed)
    assert needed[0] == needed[15] == 10.0, "only after a second in which it is overdue"
    assert needed[17] == needed[-1] == 11.0, "then one more, which does not serve yet"


def test_instances_that_work_it_off_are_enough() -> None:
    verdicts = overdue(ModelDemand(POLICY), lambda now_s: max(0, 5000 - round(500 * now_s)), serving=10, until_s=15.0)
    assert max(v.needed for v in verdicts) == 10.0
    assert verdicts[70].needed == 10.0
    assert verdicts[96].needed == 2.0, "as many as there are requests"
    assert verdicts[-1].needed == 0.0


def test_what_was_needed_long_before_a_prompt_was_overdue_was_not_needed_for_it() -> None:
    demand = ModelDemand(replace(POLICY, down_window_s=60.0))
    needed = []
    for step in range(1200):
        now_s = step / 10
        burst, one = 5000 if now_s < 1.0 else 0, 100 if now_s % 20.0 > 17.0 else 0
        demand.on_load(report(load_s=1.0, running_requests=50), now_s)
        demand.on_queue("g", queue(5000 + 100 * int((now_s + 3.0) // 20.0), burst + one, inflight=50), now_s)
        verdict = demand.colocated(now_s, 10)
        needed.append(verdict.needed)
    assert max(needed[:10]) == 10.0
    assert max(needed[50:]) <= 2.0
    assert verdict.desired < 5, "one that is late now and then does not keep what a burst needed"


@pytest.mark.parametrize(("every_s", "load_s"), [(5.0, 1.0), (5.0, 3.0), (20.0, 12.0)])
def test_late_prompts_now_and_then_keep_no_peak_and_raise_none(every_s: float, load_s: float) -> None:
    """Each is late for longer than it takes until one more instance is asked for; what is asked for comes at once."""
    demand, observed, most = ModelDemand(replace(POLICY, down_window_s=60.0)), 10, 0
    for step in range(3000):
        now_s = step / 10
        burst, one = 5000 if now_s < 1.0 else 0, 300 if now_s % every_s > every_s - 2.5 else 0
        demand.on_load(report(load_s=load_s, running_requests=3), now_s)
        demand.on_queue("g", queue(5000 + 300 * int((now_s + 2.5) // every_s), burst + one, inflight=3), now_s)
        observed = max(1, demand.colocated(now_s, observed).desired)
        if now_s > 120.0:
            most = max(most, observed)
    assert most <= 3


def test_if_what_is_overdue_grows_although_many_are_kept_more_than_these_are_needed() -> None:
    demand, needed = ModelDemand(replace(POLICY, down_window_s=60.0)), []
    for step in range(150):
        now_s = step / 10
        slow_s = max(0.0, now_s - 10.0)
        for index in range(10):
            demand.on_load(report(f"i{index}", running_requests=1), now_s)
        arrived = 5000 + round(400 * slow_s)
        demand.on_queue("g", queue(arrived, queued_tokens=5000 if now_s < 1 else arrived - 5000, inflight=30), now_s)
        needed.append(demand.colocated(now_s, 10).needed)
    assert max(needed[:100]) == 10.0
    assert max(needed[100:130]) == 11.0, "within three seconds, and not one a second from one on"


# --- down ----------------------------------------------------------------------------------------------


def test_scaling_in_waits_until_a_whole_window_was_quiet() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0, queued_tokens=1500), 0.0)
    assert demand.colocated(0.0, 1).desired == 3
    for step in range(1, 60):
        now_s = step / 10
        demand.on_queue("g", queue(0), now_s)
        desired = demand.colocated(now_s, 3).desired
        assert desired == (3 if now_s <= 2.0 else 0), now_s


def test_a_load_that_just_fits_fewer_instances_keeps_the_headroom() -> None:
    demand = ModelDemand(POLICY)
    for step in range(40):
        now_s = step / 10
        demand.on_queue("g", queue(190 * step, inflight=19), now_s)  # 1900 tokens/s: two instances, hardly
        verdict = demand.colocated(now_s, 3)
    assert verdict.desired == 3


def test_silence_says_nothing_before_the_connection_was_up_for_a_window() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0, queued_tokens=5000), 0.0)
    assert demand.colocated(0.0, 4).desired == 10
    # No reports for long, as in an outage. Then the connection is there again, the others' are not yet.
    for step in range(20):
        now_s = 60.0 + step / 10
        assert demand.colocated(now_s, 4, DemandSettings(connected_since_s=60.0)).desired == 4, now_s
    assert demand.colocated(62.1, 4, DemandSettings(connected_since_s=60.0)).desired == 0


def test_scaling_out_does_not_wait_for_the_connection_to_last() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0, queued_tokens=5000), 60.0)
    assert demand.colocated(60.0, 4, DemandSettings(connected_since_s=60.0)).desired == 10


def test_what_arrived_in_an_outage_did_not_arrive_at_its_end() -> None:
    demand = ModelDemand(DemandPolicy(prefill_tokens_per_s=1000.0, utilisation=1.0))
    for step in range(11):
        demand.on_queue("g", queue(90 * step, inflight=9), step / 10)
    assert demand.colocated(1.0, 1).desired == 1
    # The same 900 tokens/s, unheard for 1.8 s.
    demand.on_queue("g", queue(900 + 1620, inflight=9), 2.8)
    assert demand.colocated(2.8, 1).needed == pytest.approx(0.9)


def test_a_dead_instances_last_report_is_forgotten() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(kv_blocks_used=90, running_requests=5), 0.0)
    assert demand.colocated(0.0, 1).desired == 1
    assert demand.colocated(3.0, 0).desired == 0


# --- speed ---------------------------------------------------------------------------------------------


def test_the_speed_is_what_instances_report() -> None:
    demand = ModelDemand(MEASURED)
    demand.on_load(report(queued_tokens=900, prefill_tokens_total=900, busy_s_total=0.1), 0.0)
    demand.colocated(0.0, 1)
    assert demand.tokens_per_s == 123.0, "an instance that has measured nothing"
    demand.on_load(report("i1", prefill_tokens_per_s=2000.0), 0.1)
    demand.on_load(report("i2", prefill_tokens_per_s=300.0), 0.1)
    demand.colocated(0.1, 3)
    assert demand.tokens_per_s == 2000.0, "one that has hardly begun has seen small steps only"
    demand.colocated(9.0, 3)
    assert demand.tokens_per_s == 2000.0, "remembered when nobody says anything"


def test_a_profile_wins_over_what_instances_report() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report(prefill_tokens_per_s=5.0), 0.0)
    demand.colocated(0.0, 1)
    assert demand.tokens_per_s == 1000.0


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -5.0])
def test_a_speed_that_is_none_is_not_taken(speed: float) -> None:
    demand = ModelDemand(MEASURED)
    demand.on_load(report(prefill_tokens_per_s=speed, decode_base_s=speed, decode_request_s=speed), 0.0)
    demand.colocated(0.0, 1, DemandSettings(slo_tbt_s=0.1))
    assert demand.tokens_per_s == 123.0


@pytest.mark.parametrize("state", ["loading", "live"])
def test_instances_on_their_way_do_not_tell_the_speed(state: InstanceState) -> None:
    demand = ModelDemand(MEASURED)
    demand.on_load(report(state=state, prefill_tokens_per_s=9.0), 0.0)
    demand.colocated(0.0, 1)
    assert demand.tokens_per_s == 123.0


# --- roles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_instances_of_other_roles_have_to_do_does_not_count(role: Role) -> None:
    demand = ModelDemand(MEASURED)
    demand.on_load(report("i0", kv_blocks_used=50, running_requests=9), 0.0)
    before = demand.colocated(0.0, 1)
    demand.on_load(
        report(
            "i1",
            role=role,
            queued_tokens=5000,
            running_requests=9,
            kv_blocks_used=900,
            kv_blocks_total=1000,
            prefill_tokens_per_s=7.0,
        ),
        0.0,
    )
    assert demand.colocated(0.0, 1) == before


def test_prefill_instances_that_serve_take_their_share_of_new_requests() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(3000, queued_tokens=750, inflight=22), 0.5)  # 3000 tokens/s: three instances
    demand.on_load(report("i0"), 0.5)
    assert demand.colocated(0.5, 1).needed == pytest.approx(3.0)
    for name, role, state in (("i1", "prefill", "loading"), ("i2", "decode", "serving")):
        demand.on_load(report(name, role=role, state=state), 0.5)
    assert demand.colocated(0.5, 1).needed == pytest.approx(3.0), "they take no requests"
    demand.on_load(report("i1", role="prefill"), 0.5)
    verdict = demand.colocated(0.5, 1)
    assert verdict.needed == pytest.approx(1.5)
    assert "375 wait" in verdict.reason
    demand.on_load(report("i1", role="prefill", state="draining"), 0.5)
    assert demand.colocated(0.5, 1).needed == pytest.approx(3.0)


def test_a_model_of_prefill_instances_alone_needs_no_colocated_one() -> None:
    demand = ModelDemand(POLICY)
    demand.on_load(report("i1", role="prefill"), 0.0)
    demand.on_queue("g", queue(0), 0.0)
    demand.on_queue("g", queue(5000, queued_tokens=5000), 0.5)
    assert demand.colocated(0.5, 0).desired == 0
    # The prefill instance fell silent: nobody else takes them.
    demand.on_queue("g", queue(5000, queued_tokens=5000), 1.6)
    assert demand.colocated(1.6, 0).desired == 1
    demand.on_queue("g", queue(10_000, queued_tokens=10_000), 1.7)
    assert demand.colocated(1.7, 0).desired == 11


# --- whatever comes ------------------------------------------------------------------------------------

prompts = st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), max_size=20)


def told(what: list[tuple[int, bool]]) -> Verdict:
    """The verdict about prompts that came at once; some of them are at the instance."""
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0), 0.0)
    there, held = [t for t, sent in what if sent], [t for t, sent in what if not sent]
    demand.on_load(report(queued_tokens=sum(there), queued_requests=len(there)), 0.1)
    sums = sum(there) + sum(held)
    demand.on_queue(
        "g", queue(sums, sum(held), requests=len(held), arrived_requests=len(what), inflight=len(there)), 0.1
    )
    return demand.colocated(0.1, 0)


@given(prompts)
def test_never_more_instances_than_requests_and_one_for_any(what: list[tuple[int, bool]]) -> None:
    assert min(1, len(what)) <= told(what).desired <= len(what)


@given(prompts, st.integers(1, 20_000), st.booleans())
def test_one_more_prompt_never_asks_for_less(what: list[tuple[int, bool]], tokens: int, sent: bool) -> None:
    assert told([*what, (tokens, sent)]).needed >= told(what).needed


def test_a_speed_that_nobody_can_have_measured_is_none() -> None:
    demand = ModelDemand(MEASURED)
    demand.on_load(
        report(prefill_tokens_per_s=5e-324, decode_request_s=5e-324, queued_tokens=9, queued_requests=1), 0.0
    )
    demand.on_queue("g", queue(1000, 1000), 0.0)
    assert demand.colocated(5.0, 1).desired <= 11
    assert demand.tokens_per_s == MEASURED.assumed_tokens_per_s


# --- giving back ---------------------------------------------------------------------------------------


def idle_until(demand: ModelDemand, until_s: float, observed: int, *, since_s: float, **objectives: float) -> int:
    """The verdict at the end of a time in which nothing happens."""
    now_s, desired = since_s, observed
    while now_s < until_s:
        now_s += 0.05
        demand.on_queue("g", queue(0), now_s)
        desired = demand.colocated(now_s, observed, DemandSettings(**objectives)).desired
    return desired


@pytest.mark.parametrize(("load_s", "window_s"), [(0.03, 0.5), (0.4, 0.8), (5.0, 10.0), (400.0, 60.0)])
def test_an_idle_instance_is_kept_while_fetching_it_again_would_cost_more(load_s: float, window_s: float) -> None:
    demand = ModelDemand(DemandPolicy(down_window_s=0.0))
    for step in range(50):
        now_s = step / 20
        demand.on_load(report(load_s=load_s, running_requests=1), now_s)
        demand.on_queue("g", queue(100, inflight=1), now_s)
        assert demand.colocated(now_s, 1).desired == 1
    demand.on_load(report(load_s=load_s), 2.5)
    assert idle_until(demand, 2.5 + window_s - 0.1, 1, since_s=2.5) == 1
    assert idle_until(demand, 2.5 + window_s + 0.2, 1, since_s=2.5 + window_s - 0.1) == 0


def test_a_fixed_window_is_what_was_asked_for() -> None:
    demand = ModelDemand(DemandPolicy(down_window_s=3.0))
    demand.on_load(report(load_s=0.03), 0.0)
    assert idle_until(demand, 2.9, 1, since_s=0.0) == 1
    assert idle_until(demand, 3.2, 1, since_s=2.9) == 0


@pytest.mark.parametrize("window_s", [60.0, 300.0])
def test_what_the_last_window_needed_is_kept_however_long_that_is(window_s: float) -> None:
    demand = ModelDemand(replace(POLICY, down_window_s=window_s))
    demand.on_queue("g", queue(0, queued_tokens=1500), 0.0)
    assert demand.colocated(0.0, 1).desired == 3
    now_s, desired = 0.0, 3
    while desired == 3:
        now_s += 0.1
        demand.on_queue("g", queue(0, inflight=1), now_s)
        desired = demand.colocated(now_s, 3).desired
    assert now_s == pytest.approx(window_s, abs=0.2)


def test_who_is_given_back_hears_for_how_long_no_more_was_needed() -> None:
    demand = ModelDemand(DemandPolicy(down_window_s=60.0))
    demand.on_load(report(load_s=0.03), 0.0)
    assert "needed no more" not in demand.colocated(0.0, 1).reason
    assert idle_until(demand, 60.2, 1, since_s=0.0) == 0
    assert demand.colocated(60.3, 1).reason.endswith("no request; the last 60 s needed no more")
    by_rule = ModelDemand(DemandPolicy(down_window_s=0.0))
    by_rule.on_load(report(load_s=4.0), 0.0)
    assert idle_until(by_rule, 8.2, 1, since_s=0.0) == 0
    assert by_rule.colocated(8.3, 1).reason.endswith("; the last 8 s needed no more")


def test_who_is_kept_hears_what_for() -> None:
    demand = ModelDemand(DemandPolicy(down_window_s=60.0))
    demand.on_load(report(load_s=0.03), 0.0)
    demand.on_queue("g", queue(0, queued_tokens=1500), 0.0)
    asked = demand.colocated(0.0, 1)
    assert asked.desired > 1
    assert "kept" not in asked.reason
    demand.on_queue("g", queue(0), 1.0)
    assert idle_until(demand, 30.0, asked.desired, since_s=1.0) == asked.desired
    assert demand.colocated(30.1, asked.desired).reason.endswith("; what the last 60 s needed is kept")


def test_the_last_one_is_said_to_be_kept_by_its_keep_alive() -> None:
    demand = ModelDemand(DemandPolicy(down_window_s=10.0))
    demand.on_load(report(load_s=0.03), 0.0)
    settings = DemandSettings(keep_alive_s=600.0)
    assert demand.colocated(0.0, 1, settings=settings).desired == 1
    for now_s in (10.5, 11.0):
        demand.on_load(report(load_s=0.03), now_s)
        kept = demand.colocated(now_s, 1, settings=settings)
    assert kept.desired == 1
    assert kept.reason.endswith("; the last one has a keep-alive of 600 s")


def test_the_last_instance_stays_for_the_keep_alive_and_the_others_go() -> None:
    demand = ModelDemand(DemandPolicy(down_window_s=0.0))
    demand.on_load(report(load_s=0.03), 0.0)
    assert idle_until(demand, 4.0, 3, since_s=0.0, keep_alive_s=10.0) == 1
    assert idle_until(demand, 9.9, 1, since_s=4.0, keep_alive_s=10.0) == 1
    assert idle_until(demand, 10.3, 1, since_s=9.9, keep_alive_s=10.0) == 0


@pytest.mark.parametrize("known", [True, False], ids=["reported before", "first report"])
def test_a_request_that_came_and_ended_between_two_reports_keeps_the_last_instance(known: bool) -> None:
    demand = ModelDemand(DemandPolicy(down_window_s=0.0))
    now_s = 0.0
    while now_s < 3.0:
        now_s += 0.05
        demand.on_load(report(load_s=0.03), now_s)
        if known:
            demand.on_queue("g", queue(0), now_s)
        assert demand.colocated(now_s, 1, DemandSettings(keep_alive_s=3.2)).desired == 1
    demand.on_queue("g", queue(100), now_s)
    while now_s < 8.0 and demand.colocated(now_s, 1, DemandSettings(keep_alive_s=3.2)).desired:
        now_s += 0.05
        demand.on_queue("g", queue(100), now_s)
    assert now_s == pytest.approx(3.0 + 3.2, abs=0.15)


def test_what_the_load_does_not_need_now_is_idle_though_it_is_kept() -> None:
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(0, queued_tokens=1500), 0.0)
    demand.on_load(report(queued_tokens=1500, queued_requests=15), 0.0)
    assert demand.colocated(0.0, 3).idle == 0
    demand.on_load(report(running_requests=1, kv_blocks_used=1), 0.1)
    demand.on_queue("g", queue(0, inflight=1), 0.1)
    verdict = demand.colocated(0.1, 3)
    assert (verdict.desired, verdict.idle) == (3, 2)
    demand.on_load(report(), 0.2)
    demand.on_queue("g", queue(0), 0.2)
    assert demand.colocated(0.2, 3).idle == 3
    # Silence just after an outage says nothing.
    assert demand.colocated(0.2, 3, DemandSettings(connected_since_s=0.0)).idle == 0


def test_what_is_idle_is_spare_once_the_recent_peak_would_fit_what_remains_with_headroom() -> None:
    demand, arrived = ModelDemand(POLICY), 0
    settings = DemandSettings(connected_since_s=-10.0)

    def at(now_s: float, tokens: int) -> tuple[int, int]:
        nonlocal arrived
        arrived += tokens
        demand.on_queue("g", queue(arrived, inflight=9), now_s)
        demand.on_load(report(running_requests=1, kv_blocks_used=1), now_s)
        verdict = demand.colocated(now_s, 3, settings)
        return verdict.idle, verdict.spare

    at(-0.1, 0)
    found = [at(tick / 10, 80) for tick in range(60)]
    assert found[1:15] == [(2, 0)] * 14, "too little is known"
    assert found[30:] == [(2, 2)] * 30, "0.8 are needed of one"
    assert [at(6.0 + tick / 10, 90) for tick in range(30)][10:] == [(2, 1)] * 20, "0.9 are"
    assert [at(9.0 + tick / 10, 0) for tick in range(40)][-1] == (2, 2)


def test_what_drains_asks_for_no_instance_for_the_requests_that_it_finishes() -> None:
    busy = {"running_requests": 3, "kv_blocks_used": 3, "decode_base_s": 0.01, "decode_request_s": 0.001}
    demand = ModelDemand(POLICY)
    demand.on_queue("g", queue(300, inflight=3), 0.0)
    demand.on_load(report(**busy), 0.0)
    assert demand.colocated(0.0, 1, DemandSettings(slo_tbt_s=0.05)).desired == 1
    demand.on_load(report(state="draining", **busy), 5.0)
    demand.on_queue("g", queue(300, inflight=3), 5.0)
    assert demand.colocated(5.0, 0, DemandSettings(slo_tbt_s=0.05)).desired == 0
    # Another request waits for one.
    demand.on_queue("g", queue(400, queued_tokens=100, inflight=3), 5.1)
    assert demand.colocated(5.1, 0, DemandSettings(slo_tbt_s=0.05)).desired == 1


def test_what_is_cached_of_prompts_needs_nobody_to_compute_it() -> None:
    def needed(cached: int) -> int:
        demand = ModelDemand(MEASURED)
        for now_s in range(20):
            demand.on_load(
                report(
                    prefill_tokens_per_s=1000.0, prefill_tokens_total=500 * now_s, cached_tokens_total=cached * now_s
                ),
                float(now_s),
            )
            demand.on_queue("g", queue(3000 * now_s, inflight=30), float(now_s))
        return demand.colocated(19.0, 1).desired

    assert needed(0) > needed(500) > needed(4500) == 1


def test_counters_that_begin_anew_say_nothing_of_what_is_cached() -> None:
    reported = Reported(DemandPolicy())
    for computed, cached in ((0, 0), (100, 300), (10, 20), (110, 20)):
        reported.on_load(report(prefill_tokens_total=computed, cached_tokens_total=cached), 0.0)
    assert reported.computed_share == pytest.approx(200 / 500)
    reported.on_load(report(prefill_tokens_total=110, cached_tokens_total=10**9), 0.0)
    assert reported.computed_share == 0.05
