from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.observations import ClusterLog
from shared.messages.admin import InstanceStatus, ModelStatus, PoolStatus, PoolTotals, Status, TrafficStatus
from shared.messages.operations import ScaleRecord
from shared.messages.traffic import CarriedBytes, Way, WorkerTraffic


def status(*instances: tuple[str, str], model: str = "m") -> Status:
    return Status(
        models=(ModelStatus(name="m", weights_bytes=9),),
        instances=tuple(
            InstanceStatus(id=f"i{n}", model=model, role=role, state=state, workers=(f"w{n}",))
            for n, (role, state) in enumerate(instances)
        ),
    )


def traffic(worker: str, incarnation: str, num_bytes: int, way: Way = "network") -> TrafficStatus:
    carried = tuple(
        CarriedBytes(direction=direction, purpose="kv", way=way, num_bytes=num_bytes)
        for direction in ("sent", "received")
    )
    return TrafficStatus(workers=(WorkerTraffic(worker_id=worker, incarnation=incarnation, carried=carried),))


SERVING, LOADING, DECODE = ("prefill", "serving"), ("prefill", "loading"), ("decode", "serving")


def test_gpu_seconds_are_counted_from_the_first_arrival_to_a_fixed_end_by_role() -> None:
    log = ClusterLog("m")
    for at_s, seen in (
        (0.0, [SERVING]),
        (2.0, [SERVING, LOADING]),
        (3.0, [SERVING, LOADING]),
        (5.0, [SERVING, DECODE]),
    ):
        log.saw_status(at_s, status(*seen))
    log.saw_status(20.0, status(SERVING))
    found = log.sum_up(1.0, 10.0, started_at_s=0.0)
    assert found is not None
    assert found.gpu_seconds_by_role == {"decode": 5.0, "prefill": 1.0 + 3 * 2 + 5.0}
    assert found.gpu_seconds == 17.0
    assert (found.peak_gpus, found.weights_bytes, found.not_observed_s) == (2, 9, 15.0)
    assert [point.at_s for point in found.instances] == [0.0, 2.0, 5.0, 20.0]
    assert found.instances[1].instances == {"prefill/loading": 1, "prefill/serving": 1}


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 4)), min_size=1), st.floats(0, 10), st.floats(0, 30))
def test_gpu_seconds_of_two_spans_add_up(looks: list[tuple[float, int]], begin_s: float, split_s: float) -> None:
    log, at_s = ClusterLog("m"), 0.0
    for gap_s, count in looks:
        log.saw_status(at_s, status(*[SERVING] * count))
        at_s += gap_s
    log.saw_status(100.0, status())

    def gpu_seconds(from_s: float, to_s: float) -> float:
        found = log.sum_up(from_s, to_s, started_at_s=0.0)
        assert found is not None
        return found.gpu_seconds

    middle_s = begin_s + split_s
    assert gpu_seconds(begin_s, middle_s) + gpu_seconds(middle_s, 100.0) == pytest.approx(gpu_seconds(begin_s, 100.0))


def test_an_interrupted_run_counts_up_to_the_last_look() -> None:
    log = ClusterLog("m")
    log.saw_status(0.0, status(SERVING))
    log.saw_status(3.0, status(SERVING))
    found = log.sum_up(1.0, 60.0, started_at_s=0.0)
    assert found is not None
    assert (found.gpu_seconds, found.end_s, found.not_observed_s) == (2.0, 3.0, 60.0)


def test_other_models_do_not_count_and_nothing_seen_is_nothing() -> None:
    log = ClusterLog("m")
    assert log.sum_up(0, 1, started_at_s=0.0) is None
    log.saw_status(0.0, status(SERVING, model="other"))
    log.saw_status(1.0, status(SERVING, model="other"))
    found = log.sum_up(0, 1, started_at_s=0.0)
    assert found is not None
    assert (found.gpu_seconds, found.nic_bytes, found.host_cache_max_bytes) == (0.0, None, None)


def test_bytes_are_those_sent_since_the_first_look_by_all_processes_that_came() -> None:
    log = ClusterLog("m")
    log.saw_status(0.0, status())
    log.saw_traffic(0.0, traffic("w0", "a", 100))
    log.saw_traffic(1.0, traffic("w0", "a", 150))
    log.saw_traffic(2.0, traffic("w0", "b", 7))
    log.saw_traffic(3.0, traffic("w1", "c", 1_000, way="host"))
    found = log.sum_up(0, 1, started_at_s=0.0)
    assert found is not None
    assert found.nic_bytes == {"weights": 0, "kv": 57, "activations": 0}
    assert [(point.network["kv"], point.host["kv"]) for point in found.carried] == [
        (0, 0),
        (50, 0),
        (57, 0),
        (57, 1000),
    ]


def test_workers_that_do_not_count_leave_no_bytes() -> None:
    log = ClusterLog("m")
    log.saw_status(0.0, status())
    log.saw_traffic(0.0, TrafficStatus(silent=("w0",)))
    found = log.sum_up(0, 1, started_at_s=0.0)
    assert found is not None
    assert found.nic_bytes is None


def test_host_memory_is_kept_at_its_changes() -> None:
    log = ClusterLog("m")
    log.saw_status(0.0, status())
    for at_s, num_bytes in ((0.0, 5), (1.0, 5), (2.0, 9), (3.0, 2)):
        log.saw_pool(at_s, PoolStatus(models=(), totals=PoolTotals(host_bytes=num_bytes)))
    found = log.sum_up(0, 1, started_at_s=0.0)
    assert found is not None
    assert [(point.at_s, point.num_bytes) for point in found.host_cache] == [(0.0, 5), (2.0, 9), (3.0, 2)]
    assert found.host_cache_max_bytes == 9


def test_operations_are_those_of_the_model_that_began_in_the_run_as_last_told() -> None:
    def operation(plan_id: str, at_s: float, **fields: object) -> ScaleRecord:
        whole = {"model": "m", "status": "running", "direction": "out", "desired": 2, "reason": "load"}
        return ScaleRecord(plan_id=plan_id, triggered_at_s=at_s, **(whole | fields))  # type: ignore[arg-type]

    log = ClusterLog("m")
    log.saw_status(0.0, status())
    log.saw_operations([operation("early", 99.0), operation("b", 103.0), operation("x", 103.0, model="other")])
    log.saw_operations(
        [operation("b", 103.0, status="done"), operation("a", 101.0), operation("c", 104.0, advice=True)]
    )
    found = log.sum_up(0, 1, started_at_s=100.0)
    assert found is not None
    assert [(o.plan_id, o.at_s, o.status) for o in found.operations] == [("a", 1.0, "running"), ("b", 3.0, "done")]
