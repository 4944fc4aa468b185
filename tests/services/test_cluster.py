"""Pool, planner, monitor and workers together, in one process: they scale, and they heal."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from services.planner.core.operations import operation
from services.worker.memory.pieces import REFETCH_INDEX
from services.worker.weights import flow_completion
from shared.errors import Conflict, NoCapacity, SentBack
from shared.messages.operations import ScaleRecord
from shared.messages.plans import ScalePlan
from tests.checkpoints import tiny_checkpoint
from tests.services.cluster import LEASE_S, Cluster, running_cluster
from tests.services.fake_gateway import expected_tokens
from tests.services.tampering import corrupt, lose_from
from tests.services.worker.pausing import pause, resume
from tests.services.workers import MIB
from tests.wait_until import eventually


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "MISSING_S", 0.2)


@pytest.fixture
async def cluster(redis_url: str) -> AsyncIterator[Cluster]:
    """Three workers, and a monitor that repairs."""
    async with running_cluster(redis_url) as running:
        yield running


@pytest.fixture
async def unwatched(redis_url: str) -> AsyncIterator[Cluster]:
    """Three workers without a monitor: nothing happens that a test does not ask for."""
    async with running_cluster(redis_url, monitor=False) as running:
        yield running


def sources(plan: ScalePlan) -> list[tuple[str, str]]:
    """(worker id, kind) of where each target's bytes come from."""
    return [(s.source, s.source_kind) for chain in plan.chains for hop in chain.hops for s in hop.stripes]


def check_times(record: ScaleRecord) -> None:
    """The order in which things happen must be the order of their times."""
    assert record.trigger_to_plan_ms is not None
    assert record.trigger_to_first_byte_ms is not None
    assert record.trigger_to_loaded_ms is not None
    assert record.trigger_to_serving_ms is not None
    assert 0 < record.trigger_to_first_byte_ms <= record.trigger_to_loaded_ms <= record.trigger_to_serving_ms
    assert list(record.layer_ready_ms) == sorted(record.layer_ready_ms)
    assert record.layer_ready_ms[-1] <= record.trigger_to_loaded_ms
    for target in record.targets:
        assert target.first_byte_ms is not None
        assert target.loaded_ms is not None
        assert target.serving_ms is not None
        assert target.first_byte_ms <= target.layer_ready_ms[0] <= target.loaded_ms <= target.serving_ms
        assert target.failure == ""


async def test_the_monitor_alone_brings_the_first_instance_up_from_disk(cluster: Cluster) -> None:
    model = await cluster.add_model(min_instances=1)
    (only,) = await cluster.serving(1)
    assert only.instance is not None
    assert only.instance.layers_ready == model.basics.num_layers
    (plan,) = cluster.plans()
    assert sources(plan) == [("", "disk")]
    record = await cluster.record(plan.plan_id)
    assert (record.status, record.direction, record.desired) == ("done", "out", 1)


async def test_a_host_keeps_what_a_load_left_while_it_is_used_and_a_little_longer(redis_url: str) -> None:
    baseline = {"strategy": "host-cache", "copies": "kept", "keep_copies_s": 0.1}
    async with running_cluster(redis_url, 2, monitor=False, host="h", host_cache_bytes=4 * MIB, **baseline) as cluster:
        await cluster.add_model()

        async def held() -> list[tuple[str, bool]]:
            workers = (await cluster.snapshot()).workers
            return [(w.worker.worker_id, c.cached) for w in workers for c in w.host_copies if c.state == "ready"]

        async def holds(*copies: tuple[str, bool]) -> bool:
            return await held() == [*copies]

        await cluster.scale(1)
        await eventually(lambda: holds(("w0", True)))
        await cluster.scale(2)
        assert await held() == [("w0", True)], "the workers of a host share its memory"
        assert (await cluster.scale(0)).status == "done"
        await eventually(holds)
        await cluster.scale(1)
        assert [sources(plan) for plan in cluster.plans()] == [[("", "disk")], [("w0", "host")], [("", "disk")]]


async def test_scaling_out_gives_identical_weights_and_a_consistent_record(unwatched: Cluster) -> None:
    model = await unwatched.add_model()
    await unwatched.scale(1)
    record = await unwatched.scale(3)
    instances = await unwatched.serving(3)
    assert len(unwatched.digests(instances)) == 1
    assert "" not in unwatched.digests(instances)
    contents = [bytes(w.serving.copy.arena.memory(0, model.weights_bytes)) for w in unwatched.workers.values()]
    assert contents[0] == contents[1] == contents[2]
    plan = unwatched.plans()[-1]
    assert [kind for _, kind in sources(plan)] == ["gpu", "gpu"]
    assert (record.status, record.direction, record.desired) == ("done", "out", 3)
    assert {t.worker_id for t in record.targets} == {m.worker_id for m in plan.targets}
    assert record.bytes == 2 * model.weights_bytes
    assert [t.received_bytes for t in record.targets] == [model.weights_bytes] * 2
    assert len(record.layer_ready_ms) == model.basics.num_layers
    assert record.gbps > 0
    check_times(record)


async def test_scaling_in_gives_the_newest_workers_back(cluster: Cluster) -> None:
    await cluster.add_model()
    await cluster.scale(1)
    (oldest,) = await cluster.serving(1)
    await cluster.scale(3)
    record = await cluster.scale(1)
    assert (record.status, record.direction) == ("done", "in")
    assert [w.worker.worker_id for w in await cluster.serving(1)] == [oldest.worker.worker_id]
    await cluster.states(**{w: "spare" for w in cluster.workers if w != oldest.worker.worker_id})


async def test_asking_for_what_is_there_changes_nothing(unwatched: Cluster) -> None:
    await unwatched.add_model()
    await unwatched.scale(1)
    record = await unwatched.start_scale(1)
    assert (record.status, record.direction, record.targets) == ("done", "none", ())
    assert len(unwatched.plans()) == 1


async def test_a_drain_finishes_running_requests_and_refuses_new_ones(unwatched: Cluster) -> None:
    await unwatched.add_model()
    await unwatched.scale(1)
    (record,) = await unwatched.serving(1)
    worker = unwatched.workers[record.worker.worker_id]
    engine, instance_id = worker.serving.engine, worker.serving.instance_id
    await asyncio.wrap_future(pause(engine))
    await unwatched.gateway.submit(worker.worker_id, instance_id, "running")
    drain = await unwatched.start_scale(0)
    await unwatched.states(**{worker.worker_id: "draining"})
    with pytest.raises(SentBack):
        await unwatched.gateway.submit(worker.worker_id, instance_id, "late")
    assert unwatched.gateway.parts == {}
    resume(engine)
    assert (await unwatched.gateway.end_of("running")).finish_reason == "length"
    assert unwatched.gateway.tokens("running") == expected_tokens(8)
    assert (await unwatched.record(drain.plan_id)).status == "done"
    await unwatched.states(**{worker.worker_id: "spare"})


async def test_a_draining_instance_is_revived_with_its_requests(unwatched: Cluster) -> None:
    await unwatched.add_model()
    await unwatched.scale(1)
    (record,) = await unwatched.serving(1)
    worker = unwatched.workers[record.worker.worker_id]
    instance = worker.serving
    await asyncio.wrap_future(pause(instance.engine))
    await unwatched.gateway.submit(worker.worker_id, instance.instance_id, "before")
    drain = await unwatched.start_scale(0)
    await unwatched.states(**{worker.worker_id: "draining"})
    revival = await unwatched.scale(1)
    assert (revival.status, revival.direction) == ("done", "out")
    assert len(unwatched.plans()) == 1, "nothing was loaded"
    await unwatched.gateway.submit(worker.worker_id, instance.instance_id, "after")
    resume(instance.engine)
    for request_id in ("before", "after"):
        await unwatched.gateway.end_of(request_id)
        assert unwatched.gateway.tokens(request_id) == expected_tokens(8)
    assert worker.instance is instance
    cancelled = await unwatched.record(drain.plan_id)
    assert cancelled.status == "failed"
    assert revival.plan_id in cancelled.targets[0].failure
    # It can be drained again.
    assert (await unwatched.scale(0)).status == "done"


async def test_a_target_killed_while_loading_fails_alone_and_is_replaced(redis_url: str) -> None:
    async with running_cluster(redis_url, 4) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        (source,) = await cluster.serving(1)
        targets = sorted(set(cluster.workers) - {source.worker.worker_id})[:2]
        # The first target forwards nothing beyond the second piece to the last one.
        cluster.workers[targets[0]].transport.tamper = lose_from(2)
        plan_id = (await cluster.start_scale(3)).plan_id
        assert [m.worker_id for m in cluster.plans()[-1].targets] == targets
        await cluster.reported(plan_id, "first_byte", targets[1])
        await cluster.workers[targets[1]].kill()
        cluster.workers[targets[0]].transport.tamper = None
        record = await cluster.record(plan_id)
        assert record.status == "failed"
        assert [bool(t.failure) for t in record.targets] == [False, True]
        assert record.targets[0].serving_ms is not None
        instances = await cluster.serving(3)
        assert targets[1] not in {w.worker.worker_id for w in instances}
        assert len(cluster.digests(instances)) == 1


async def test_targets_whose_source_is_killed_keep_what_they_have_and_end_whole(cluster: Cluster) -> None:
    await cluster.add_model()
    await cluster.scale(1)
    (source,) = await cluster.serving(1)
    cluster.workers[source.worker.worker_id].transport.tamper = lose_from(2)
    plan_id = (await cluster.start_scale(3)).plan_id
    targets = [m.worker_id for m in cluster.plans()[-1].targets]
    await cluster.reported(plan_id, "first_byte", targets[0])
    await cluster.workers[source.worker.worker_id].kill()
    # Nobody else holds a copy: the head of the chain goes on from its disk, and the other one with it.
    record = await cluster.record(plan_id)
    assert record.status == "done"
    instances = await cluster.serving(2)
    assert {w.worker.worker_id for w in instances} == set(targets)
    assert len(cluster.digests(instances)) == 1


async def test_targets_behind_a_killed_member_go_on_from_the_one_before_it(redis_url: str) -> None:
    async with running_cluster(redis_url, 5, monitor=False) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        (source,) = await cluster.serving(1)
        targets = sorted(set(cluster.workers) - {source.worker.worker_id})
        # The member to be killed never gets everything, and the one behind it gets even less.
        cluster.workers[targets[0]].transport.tamper = lose_from(8)
        cluster.workers[targets[1]].transport.tamper = lose_from(2)
        plan_id = (await cluster.start_scale(5)).plan_id
        assert [m.worker_id for m in cluster.plans()[-1].targets] == targets, "one chain"
        await cluster.reported(plan_id, "first_byte", targets[2])
        cluster.workers[targets[0]].transport.tamper = None
        await cluster.workers[targets[1]].kill()
        record = await cluster.record(plan_id)
        assert [t.worker_id for t in record.targets if t.failure] == [targets[1]]
        instances = await cluster.serving(4)
        assert len(cluster.digests(instances)) == 1
        assert all(not worker.fatal for worker in cluster.workers.values())


def _boxes_of_two(worker_id: str) -> dict[str, object]:
    """w0 and w1, w2 and w3, ...: two workers of a host, joined by NVLink, each with a NIC of its own."""
    box = int(worker_id[1:]) // 2
    return {"host": f"box-{box}", "scale_up_domain": f"box-{box}/nvlink", "scale_up_gbps": 1600.0}


async def test_groups_receive_stripes_gather_them_and_forward(redis_url: str) -> None:
    async with running_cluster(redis_url, 6, monitor=False, each=_boxes_of_two) as cluster:
        await cluster.add_model()
        await cluster.scale(2)
        record = await cluster.scale(6)
        assert record.status == "done"
        plan = cluster.plans()[-1]
        hops = [hop for chain in plan.chains for hop in chain.hops]
        assert [len(hop.targets) for hop in hops] == [2, 2]
        assert all(len({s.source for s in hop.stripes}) == 2 for hop in hops), "each copy sends its own stripe"
        instances = await cluster.serving(6)
        assert len(cluster.digests(instances)) == 1
        assert [t.received_bytes for t in record.targets] == [plan.model.weights_bytes] * 4


async def test_a_group_that_loses_a_member_gathers_its_stripe_from_the_source(redis_url: str) -> None:
    async with running_cluster(redis_url, 4, monitor=False, each=_boxes_of_two) as cluster:
        await cluster.add_model()
        await cluster.scale(2)
        held = {w.worker.worker_id for w in await cluster.serving(2)}
        lost, kept = sorted(set(cluster.workers) - held)
        cluster.workers[lost].transport.tamper = lose_from(1)  # it gathers and gives nothing
        for worker_id in held:
            cluster.workers[worker_id].transport.tamper = lose_from(9)
        plan_id = (await cluster.start_scale(4)).plan_id
        await cluster.reported(plan_id, "first_byte", kept)
        for worker_id in held:
            cluster.workers[worker_id].transport.tamper = None
        await cluster.workers[lost].kill()
        record = await cluster.record(plan_id)
        assert [t.worker_id for t in record.targets if t.failure] == [lost]
        assert len(cluster.digests(await cluster.serving(3))) == 1


async def test_two_overlapping_plans_for_one_model_both_end(redis_url: str) -> None:
    async with running_cluster(redis_url, 5, monitor=False) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        cluster.fabric.set_rate(2_000_000)
        first = await cluster.start_scale(3)
        second = await cluster.start_scale(5)
        assert first.plan_id != second.plan_id
        cluster.fabric.set_rate(None)
        for record in (await cluster.record(first.plan_id), await cluster.record(second.plan_id)):
            assert record.status == "done"
            assert len(record.targets) == 2
        assert len(cluster.digests(await cluster.serving(5))) == 1


def _one_box(_worker_id: str) -> dict[str, object]:
    return {"host": "box", "scale_up_domain": "box/nvlink", "scale_up_gbps": 1600.0}


async def test_a_plan_that_continues_anothers_chain_outlives_the_one_in_between(redis_url: str) -> None:
    async with running_cluster(redis_url, 4, monitor=False, each=_one_box) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        (source,) = await cluster.serving(1)
        cluster.workers[source.worker.worker_id].transport.tamper = lose_from(8)
        first = (await cluster.start_scale(2)).plan_id
        (between,) = [m.worker_id for m in cluster.plans()[-1].targets]
        await cluster.reported(first, "first_byte", between)
        second = (await cluster.start_scale(3)).plan_id
        ((chain,), (behind,)) = cluster.plans()[-1].chains, [m.worker_id for m in cluster.plans()[-1].targets]
        assert {s.source for hop in chain.hops for s in hop.stripes} == {between}, "where the chain before it ends"
        await cluster.reported(second, "first_byte", behind)
        cluster.workers[source.worker.worker_id].transport.tamper = None
        await cluster.workers[between].kill()
        lost, found = await cluster.record(first), await cluster.record(second)
        assert (lost.status, found.status) == ("failed", "done")
        instances = await cluster.serving(2)
        assert {w.worker.worker_id for w in instances} == {source.worker.worker_id, behind}
        assert len(cluster.digests(instances)) == 1


async def test_a_slow_link_in_the_middle_slows_a_chain_and_breaks_nothing(redis_url: str) -> None:
    async with running_cluster(redis_url, 4, monitor=False) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        (source,) = await cluster.serving(1)
        middle = sorted(set(cluster.workers) - {source.worker.worker_id})[1]
        cluster.workers[middle].transport.delay_s = 0.1
        record = await cluster.scale(4)
        assert record.status == "done"
        assert len(cluster.digests(await cluster.serving(4))) == 1
        assert record.targets[0].loaded_ms is not None
        assert record.targets[-1].loaded_ms is not None
        assert record.targets[0].loaded_ms < record.targets[-1].loaded_ms


@pytest.mark.parametrize("index", [2, 3], ids=["data", "checksums"])
async def test_a_chunk_corrupted_in_flight_is_healed_for_everybody_behind_it(unwatched: Cluster, index: int) -> None:
    await unwatched.add_model()
    await unwatched.scale(1)
    (source,) = await unwatched.serving(1)
    unwatched.workers[source.worker.worker_id].transport.tamper = corrupt(index)
    record = await unwatched.scale(3)
    assert record.status == "done"
    assert len(unwatched.digests(await unwatched.serving(3))) == 1
    for worker in unwatched.workers.values():
        assert all(worker.serving.copy.bad_ranges(unit) == () for unit in range(len(worker.serving.layout.units)))


async def test_a_target_whose_upstream_stalls_goes_on_from_elsewhere(redis_url: str) -> None:
    async with running_cluster(redis_url, 2, monitor=False) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        (source,) = await cluster.serving(1)
        cluster.workers[source.worker.worker_id].transport.tamper = lose_from(2)
        record = await cluster.record((await cluster.start_scale(2)).plan_id)
        assert record.status == "done"
        assert len(cluster.digests(await cluster.serving(2))) == 1


async def test_a_target_without_any_way_left_fails_and_takes_the_next_plan(redis_url: str, tmp_path: Path) -> None:
    async with running_cluster(redis_url, 2, monitor=False) as cluster:
        path = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m")
        await cluster.add_model(path=path)
        await cluster.scale(1)
        (source,) = await cluster.serving(1)
        (target,) = set(cluster.workers) - {source.worker.worker_id}
        cluster.workers[source.worker.worker_id].transport.tamper = lose_from(2)
        path.rename(tmp_path / "gone")
        record = await cluster.record((await cluster.start_scale(2)).plan_id)
        assert record.status == "failed"
        assert "no upstream is left" in record.targets[0].failure
        await cluster.states(**{target: "spare"})
        assert cluster.workers[target].fatal == []
        cluster.workers[source.worker.worker_id].transport.tamper = None
        assert (await cluster.scale(2)).status == "done"
        assert len(cluster.digests(await cluster.serving(2))) == 1


@pytest.mark.parametrize("index", [2, REFETCH_INDEX])
async def test_a_buffer_that_is_never_given_back_asks_for_a_restart(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    monkeypatch.setattr(flow_completion, "SETTLE_S", 0.2)
    async with running_cluster(redis_url, 2, monitor=False) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        (source,) = await cluster.serving(1)
        (target,) = set(cluster.workers) - {source.worker.worker_id}
        cluster.workers[source.worker.worker_id].transport.tamper = corrupt(2)
        cluster.workers[target].transport.stuck_from = index
        record = await cluster.record((await cluster.start_scale(2)).plan_id)
        assert record.status == "failed"
        assert "still posted" in cluster.workers[target].fatal[0]
        # A late write could still come: this memory takes no other model.
        await cluster.states(**{target: "failed"})


async def test_a_removed_models_instances_drain_and_do_not_bring_it_back(cluster: Cluster) -> None:
    await cluster.add_model(min_instances=1)
    await cluster.scale(2)
    await cluster.remove_model()
    await cluster.states(w0="spare", w1="spare", w2="spare")
    assert (await cluster.snapshot()).models == ()
    num_plans = len(cluster.plans())
    # Several heartbeats and monitor rounds later it is still gone.
    await asyncio.sleep(LEASE_S)
    assert (await cluster.snapshot()).models == ()
    assert len(cluster.plans()) == num_plans
    # It may be registered again on purpose.
    await cluster.add_model(min_instances=1)
    await cluster.serving(1)


async def test_an_emptied_registry_heals_without_touching_an_instance(cluster: Cluster) -> None:
    model = await cluster.add_model(min_instances=2)
    await cluster.serving(2)
    before = [w.instance for w in cluster.workers.values()]
    await cluster.redis.flushdb()

    async def healed() -> bool:
        snapshot = await cluster.snapshot()
        known = await cast(Any, cluster.redis.hkeys("blitz:models"))
        return len(snapshot.workers) == 3 and snapshot.models == (model,) and known == [b"m"]

    await eventually(healed)
    await cluster.serving(2)
    assert [w.instance for w in cluster.workers.values()] == before
    record = await cluster.scale(3)
    assert record.status == "done"
    assert len(cluster.digests(await cluster.serving(3))) == 1


async def test_two_models_that_want_the_same_workers_never_share_one(redis_url: str) -> None:
    async with running_cluster(redis_url, 4) as cluster:
        await cluster.add_model("a", kind="llama")
        await cluster.add_model("b", kind="qwen2")
        await cluster.scale(1, "a")
        await cluster.scale(1, "b")
        answers = await asyncio.gather(cluster.start_scale(3, "a"), cluster.start_scale(3, "b"), return_exceptions=True)
        winners = [name for name, a in zip("ab", answers, strict=True) if isinstance(a, ScaleRecord)]
        refusals = [a for a in answers if isinstance(a, BaseException)]
        assert len(winners) == 1
        assert len(refusals) == 1
        assert isinstance(refusals[0], Conflict | NoCapacity)
        (loser,) = {"a", "b"} - set(winners)
        await cluster.serving(3, winners[0])
        await cluster.serving(1, loser)
        used = [(m.worker_id, m.epoch) for plan in cluster.plans() for m in plan.targets]
        assert len({worker_id for worker_id, _ in used}) == len(used), "a worker was given away twice"
        # A refused wish changed nothing; once workers are free it can be asked for again.
        await cluster.scale(1, winners[0])

        async def two_are_spare() -> bool:
            return [w.state for w in (await cluster.snapshot()).workers].count("spare") == 2

        await eventually(two_are_spare)
        await cluster.scale(3, loser)
        instances = await cluster.serving(3, loser)
        assert len(cluster.digests(instances)) == 1


async def test_a_bus_outage_kills_nobody_and_streams_go_on(unwatched: Cluster) -> None:
    await unwatched.add_model()
    await unwatched.scale(2)
    before = [w.instance for w in unwatched.workers.values()]
    (first, _) = await unwatched.serving(2)
    worker = unwatched.workers[first.worker.worker_id]
    await asyncio.wrap_future(pause(worker.serving.engine))
    await unwatched.gateway.submit(worker.worker_id, worker.serving.instance_id, "r", max_tokens=20)
    unwatched.broker.disconnect()
    resume(worker.serving.engine)
    await asyncio.sleep(1.5 * LEASE_S)
    assert unwatched.gateway.parts == {}
    unwatched.broker.reconnect()
    await unwatched.gateway.end_of("r")
    assert unwatched.gateway.tokens("r") == expected_tokens(20)
    await asyncio.sleep(1.5 * LEASE_S)
    assert len((await unwatched.snapshot()).workers) == 3
    await unwatched.serving(2)
    assert [w.instance for w in unwatched.workers.values()] == before
    assert (await unwatched.scale(3)).status == "done"


async def test_the_last_instance_goes_once_a_host_copy_is_there_and_the_next_one_comes_from_it(redis_url: str) -> None:
    async with running_cluster(redis_url, 2, monitor=False, host_cache_bytes=4 * MIB) as cluster:
        await cluster.add_model()
        await cluster.scale(1)
        assert (await cluster.scale(0)).status == "done"
        held = [copy for w in (await cluster.snapshot()).workers for copy in w.host_copies]
        assert [(copy.model, copy.state) for copy in held] == [("m", "ready")]
        assert (await cluster.scale(2)).status == "done"
        assert sources(cluster.plans()[-1])[0][1] == "host"
        assert len(cluster.digests(await cluster.serving(2))) == 1


async def test_a_model_survives_the_loss_of_the_host_that_holds_its_copy(redis_url: str) -> None:
    async with running_cluster(redis_url, 3, monitor=False, host_cache_bytes=4 * MIB) as cluster:
        await cluster.add_model()
        await cluster.scale(1)

        async def holders() -> list[str]:
            workers = (await cluster.snapshot()).workers
            return [w.worker.worker_id for w in workers if any(c.state == "ready" for c in w.host_copies)]

        await eventually(holders)
        (holder,) = await holders()
        await cluster.workers[holder].kill()

        async def replaced() -> bool:
            return len(now := await holders()) == 1 and now != [holder]

        await eventually(replaced)


async def test_a_worker_that_leaves_takes_no_part_any_more(cluster: Cluster) -> None:
    await cluster.add_model()
    await cluster.scale(2)
    leaver = (await cluster.serving(2))[0].worker.worker_id
    await cluster.workers[leaver].stop()
    assert leaver not in {w.worker.worker_id for w in (await cluster.snapshot()).workers}, "it said goodbye"
    assert leaver not in {w.worker.worker_id for w in await cluster.serving(2)}
