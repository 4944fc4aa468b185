"""What plans predict, against what loads then take."""

from __future__ import annotations

import pytest

from services.planner.core.multicast.chains import predicted_s_of
from services.planner.core.multicast.overhead import ASSUMED_START_S, MAX_OVERHEAD_S
from shared.messages.live import ZigzagAssignment
from shared.messages.plans import ScalePlan
from shared.messages.progress import ProgressEvent
from tests.records import model
from tests.services.monitor.core.reports import report
from tests.services.planner.core.driven import Driven
from tests.services.planner.core.multicast.clusters import record

SMALL = model("m", weights_bytes=25_000_000, min_instances=0, slo_ttft_s=0.05)
BYTES_S = 25e6 * 8 / 50e9
"""What its bytes take at the planned rate."""
START_S = 0.03


class Loads:
    """One instance serves; others come and go."""

    def __init__(self, num_spare: int = 1) -> None:
        source = record("w0", "serving", copy_of=SMALL, nic_gbps=50.0)
        self.workers = (source, *(record(f"w{i + 1}", nic_gbps=50.0) for i in range(num_spare)))
        self.made = Driven([SMALL], self.workers)

    def plan(self) -> ScalePlan:
        """To all spare workers, of which nobody has heard yet."""
        self.made.now_s += 10.0
        self.made.workers = self.workers
        self.made.demand("m", len(self.workers), 1)
        self.made.round()
        plan = self.made.plans[-1]
        assert isinstance(plan, ScalePlan)
        return plan

    def load(self, whole_s: float, start_s: float = START_S, hop_s: float = 0.0) -> ScalePlan:
        """They load, the first in the chain within ``whole_s``, each further one ``hop_s`` later."""
        plan = self.plan()
        self.report_loaded(plan, whole_s, start_s, hop_s)
        return plan

    def report_loaded(self, plan: ScalePlan, whole_s: float, start_s: float = START_S, hop_s: float = 0.0) -> None:
        planned_s = self.made.now_s
        for chain in plan.chains:
            for number, hop in enumerate(chain.hops):
                for worker_id in hop.targets:
                    after_s = number * hop_s
                    self.report(plan, worker_id, "accepted", planned_s + 0.01)
                    self.report(plan, worker_id, "first_byte", planned_s + start_s + after_s)
                    self.report(plan, worker_id, "loaded", planned_s + whole_s + after_s)
                    self.report(plan, worker_id, "serving", planned_s + whole_s + after_s)

    def report(self, plan: ScalePlan, worker_id: str, event: ProgressEvent, at_s: float) -> None:
        self.made.now_s = at_s
        instance_id = plan.member(worker_id).instance_id
        self.made.report(plan.plan_id, event, worker_id, instance_id)


def predicted_s(plan: ScalePlan) -> list[float]:
    return list(predicted_s_of(plan.chains).values())


def test_a_small_models_loads_take_what_is_predicted_once_some_were_seen() -> None:
    loads = Loads()
    for _ in range(5):
        loads.load(0.1)
    assert predicted_s(loads.plan()) == pytest.approx([0.1])


def test_before_any_load_a_start_is_assumed() -> None:
    assert predicted_s(Loads().plan()) == pytest.approx([ASSUMED_START_S + BYTES_S])


def test_one_load_that_met_a_stall_says_nothing_not_even_the_first() -> None:
    loads = Loads()
    loads.load(5.0, start_s=4.0)
    assert predicted_s(loads.plan()) == pytest.approx([ASSUMED_START_S + BYTES_S])
    for _ in range(4):
        loads.load(0.1)
    loads.load(5.0, start_s=4.0)
    assert predicted_s(loads.plan()) == pytest.approx([0.1])


@pytest.mark.parametrize("then_s", [0.02, 0.5])
def test_what_has_changed_shows_after_three_loads(then_s: float) -> None:
    loads = Loads()
    for _ in range(20):
        loads.load(0.1)
    for _ in range(3):
        loads.load(then_s, start_s=0.01)
    assert predicted_s(loads.plan()) == pytest.approx([then_s])


def test_each_hop_adds_what_it_added_to_the_loads_before() -> None:
    loads = Loads(num_spare=3)
    for _ in range(5):
        plan = loads.load(0.1, hop_s=0.05)
    assert [len(chain.hops) for chain in plan.chains] == [3]
    assert predicted_s(loads.plan()) == pytest.approx([0.1, 0.15, 0.2])


def test_a_model_that_was_never_loaded_starts_like_the_others_and_then_takes_its_bytes() -> None:
    loads = Loads()
    for _ in range(5):
        loads.load(0.1)
    overheads = loads.made.planner.overheads
    assert overheads.of("hash-of-other", "gpu").after(0) == pytest.approx(START_S)
    assert overheads.of(SMALL.model_hash, "disk").after(0) == pytest.approx(START_S), "nor from there"


def test_links_that_are_faster_than_known_are_no_reason_to_expect_less_than_nothing() -> None:
    loads = Loads()
    for _ in range(5):
        loads.load(0.001, start_s=0.0005)
    assert predicted_s(loads.plan()) == pytest.approx([BYTES_S])


def test_absurd_reports_are_believed_up_to_a_bound() -> None:
    loads = Loads()
    for _ in range(5):
        loads.load(1e6, start_s=1e5)
    plan = loads.plan()
    assert predicted_s(plan) == pytest.approx([MAX_OVERHEAD_S + BYTES_S])


def test_loads_that_failed_or_told_no_first_byte_teach_nothing() -> None:
    loads = Loads()
    for event in ("failed", "loaded"):
        for _ in range(3):
            plan = loads.plan()
            loads.report(plan, "w1", "accepted", loads.made.now_s + 0.5)
            loads.report(plan, "w1", event, loads.made.now_s + 0.5)  # type: ignore[arg-type]
            loads.made.planner.refusals.served("w1", "m")
    assert predicted_s(loads.plan()) == pytest.approx([ASSUMED_START_S + BYTES_S])


def test_loads_under_an_earlier_planner_teach_nothing() -> None:
    loads = Loads()
    for _ in range(5):
        plan = loads.plan()
        operation = loads.made.planner.operations.get(plan.plan_id)
        assert operation is not None
        operation.recalled = True
        loads.report_loaded(plan, 0.1)
    assert predicted_s(loads.plan()) == pytest.approx([ASSUMED_START_S + BYTES_S])


def test_the_record_has_what_was_predicted_beside_what_it_took() -> None:
    loads = Loads()
    for _ in range(5):
        loads.load(0.1)
    plan = loads.load(0.12)
    operation = loads.made.planner.operations.get(plan.plan_id)
    assert operation is not None
    record = operation.record()
    assert (record.predicted_loaded_ms, record.trigger_to_loaded_ms) == pytest.approx((100.0, 120.0))
    assert f"whole in about 0.100 s: {BYTES_S:.3f} s at these rates, and 0.096 s beside them" in " ".join(
        record.explain
    )


def test_a_new_instance_scales_live_where_loading_takes_longer_than_the_slack_and_its_bytes_alone_do_not() -> None:
    loads = Loads()

    def pairs() -> list[ZigzagAssignment]:
        said = report("i-w0", queued_tokens=100, queued_requests=10, prefill_tokens_per_s=1000.0)
        loads.made.planner.pairs.load.on_load(said, loads.made.now_s + 10.0)
        operation = loads.made.planner.operations.get(loads.plan().plan_id)
        assert operation is not None
        return [pair.assignment for pair in operation.pairs.values()]

    assert pairs() == []
    for _ in range(5):
        loads.load(0.1)
    (assignment,) = pairs()
    assert assignment.loaded_s == pytest.approx(0.1)
    first_s, second_s, *_ = assignment.layers_ready_s
    assert first_s == pytest.approx(START_S + (second_s - first_s)), "an even pace from the first byte on"
