"""Which peers are connected before they are needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from services.worker.weights import peers as peers_module
from services.worker.weights.peers import TENSOR_LANE, WEIGHT_LANE, PeerChannels, likely
from shared.errors import PeerLost, Unavailable
from shared.messages.common import InstanceState, Role
from shared.messages.registry import WorkerRecord
from shared.messages.traffic import PeerTransports
from shared.transport.base import Channel
from tests.records import model, worker, worker_record
from tests.services.fake_pool import FakePool
from tests.shared.bus.memory import MemoryBroker
from tests.shared.transport.memory import MemoryFabric, MemoryTransport
from tests.wait_until import WAIT_S, eventually


class Recording:
    """A transport that remembers whom it connected to and forgot, and can refuse, or let a dial take for ever."""

    def __init__(self, real: MemoryTransport) -> None:
        self.real = real
        self.connects: list[tuple[bytes, bool, int]] = []
        self.forgotten: list[bytes] = []
        self.refuse: set[bytes] = set()
        self.hang: set[bytes] = set()

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0) -> Channel:
        self.connects.append((address, same_host, lane))
        if address in self.refuse:
            raise PeerLost("not now")
        if address in self.hang:
            await asyncio.Event().wait()
        return await self.real.connect(address, same_host=same_host, timeout_s=timeout_s, lane=lane)

    @property
    def peers(self) -> frozenset[bytes]:
        return self.real.peers

    async def peer_transports(self) -> Mapping[bytes, tuple[str, ...]]:
        return await self.real.peer_transports()

    def forget(self, address: bytes) -> None:
        self.forgotten.append(address)
        self.real.forget(address)


class Cluster:
    """Me (``w0``) and peers that are addresses only."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.pool = FakePool(self.broker)
        self.fabric = MemoryFabric()
        self.transports = {f"w{i}": self.fabric.start(name=f"w{i}") for i in range(5)}
        self.recording = Recording(self.transports["w0"])
        self.me = worker("w0", incarnation="w0-1", transport_address=self.transports["w0"].address)
        self.peers = PeerChannels(self.broker.bus("w0"), self.recording, self.me, interval_s=0.02, gone_after_s=0.2)  # type: ignore[arg-type]

    def record(
        self,
        worker_id: str,
        *,
        serving: bool = False,
        state: InstanceState | None = None,
        name: str = "m",
        host: str = "host-a",
        leaf: str = "leaf-0",
        life: int = 1,
        **fields: Any,
    ) -> WorkerRecord:
        state = state or ("serving" if serving else "spare")
        return worker_record(
            worker_id,
            model(name) if state != "spare" else None,
            state,
            transport_address=self.transports[worker_id].address,
            host=host,
            leaf=leaf,
            incarnation=f"{worker_id}-{life}",
            **fields,
        )

    def connected(self, lane: int = WEIGHT_LANE) -> list[str]:
        """Peers in the order of connecting."""
        names = {transport.address: name for name, transport in self.transports.items()}
        return [names[address] for address, _, its_lane in self.recording.connects if its_lane == lane]

    def same_host(self, worker_id: str) -> set[bool]:
        """How its dials were made."""
        return {same for address, same, _ in self.recording.connects if address == self.transports[worker_id].address}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    await made.pool.start()
    running = asyncio.create_task(made.peers.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await asyncio.gather(*(t.close() for t in made.transports.values()))


async def several_looks(cluster: Cluster) -> None:
    known = cluster.pool.num_snapshots
    await eventually(lambda: cluster.pool.num_snapshots >= known + 3)


async def test_it_is_told_how_each_peer_is_reached_that_the_registry_names(cluster: Cluster) -> None:
    assert await cluster.peers.transports() == ()
    cluster.pool.workers = (cluster.record("w0"), cluster.record("w2"), cluster.record("w1"), cluster.record("w3"))
    await eventually(lambda: len(cluster.connected()) == 3)
    cluster.pool.workers = (cluster.record("w0"), cluster.record("w2"), cluster.record("w1"))
    await several_looks(cluster)
    over = ("memory/fabric",)
    assert await cluster.peers.transports() == (
        PeerTransports(worker_id="w1", transports=over),
        PeerTransports(worker_id="w2", transports=over),
    )


async def test_holders_of_copies_on_the_same_leaf_come_first_and_each_once(cluster: Cluster) -> None:
    cluster.pool.workers = (
        cluster.record("w0"),
        cluster.record("w1"),
        cluster.record("w2", leaf="far"),
        cluster.record("w3", serving=True),
        cluster.record("w4", host="host-b"),
    )
    await eventually(lambda: len(cluster.connected()) >= 3)
    await several_looks(cluster)
    assert cluster.connected()[0] == "w3"
    assert sorted(cluster.connected()) == ["w1", "w3", "w4"]
    assert (cluster.same_host("w4"), cluster.same_host("w1")) == ({False}, {True})


async def test_a_peer_that_fails_is_tried_again_and_holds_up_nobody(cluster: Cluster) -> None:
    cluster.recording.refuse = {cluster.transports["w1"].address}
    cluster.pool.workers = (cluster.record("w1"), cluster.record("w2"))
    await eventually(lambda: cluster.connected().count("w1") >= 3)
    assert cluster.connected().count("w2") == 1
    cluster.recording.refuse.clear()
    await several_looks(cluster)
    tried = cluster.connected().count("w1")
    await several_looks(cluster)
    assert cluster.connected().count("w1") == tried


async def test_a_cancellation_that_comes_together_with_a_reason_to_look_ends_it(cluster: Cluster) -> None:
    bus, me = cluster.broker.bus("w0-again"), cluster.me
    looking = [PeerChannels(bus, cluster.recording, me, interval_s=60.0, gone_after_s=60.0) for _ in range(8)]  # type: ignore[arg-type]
    tasks = [asyncio.create_task(peers.run()) for peers in looking]
    await asyncio.sleep(1.0)  # between its third look and its fourth it waits for 0.3 s for a reason to look
    for peers in looking:
        peers.look_soon()
    for task in tasks:
        task.cancel()
        await asyncio.sleep(0)
    done, _ = await asyncio.wait(tasks, timeout=WAIT_S)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(done) == len(tasks)


async def test_a_restarted_peer_is_connected_again(cluster: Cluster) -> None:
    cluster.pool.workers = (cluster.record("w1"),)
    await eventually(lambda: cluster.connected() == ["w1"])
    cluster.pool.workers = (cluster.record("w1", life=2),)
    await eventually(lambda: cluster.connected() == ["w1", "w1"])


async def test_no_more_than_the_limit_are_connected_ahead(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_PRECONNECTED", 2)
    cluster.pool.workers = tuple(cluster.record(f"w{i}") for i in range(1, 5))
    await several_looks(cluster)
    await several_looks(cluster)
    assert len(cluster.connected()) == len(set(cluster.connected())) == 2


async def test_a_registry_that_does_not_answer_is_asked_again(cluster: Cluster) -> None:
    cluster.pool.errors["snapshot"] = [Unavailable("starting")] * 2
    cluster.pool.workers = (cluster.record("w1"),)
    await eventually(lambda: cluster.connected() == ["w1"])


async def test_workers_of_every_page_of_the_registry_are_seen(cluster: Cluster) -> None:
    cluster.pool.page_size = 1
    cluster.pool.workers = tuple(cluster.record(f"w{i}") for i in range(5))
    await eventually(lambda: sorted(cluster.connected()) == ["w1", "w2", "w3", "w4"])


async def test_a_dial_without_an_answer_holds_up_nobody(cluster: Cluster) -> None:
    cluster.recording.hang = {cluster.transports["w1"].address}
    cluster.pool.workers = tuple(cluster.record(f"w{i}") for i in range(5))
    await eventually(lambda: {"w2", "w3", "w4"} <= set(cluster.connected()))


async def test_a_connection_that_was_lost_is_made_again(cluster: Cluster) -> None:
    cluster.pool.workers = (cluster.record("w1"),)
    await eventually(lambda: cluster.connected() == ["w1"])
    cluster.transports["w1"].forget(cluster.transports["w0"].address)
    cluster.recording.real.forget(cluster.transports["w1"].address)
    await eventually(lambda: cluster.connected() == ["w1", "w1"])


async def test_lanes_for_tensors_are_connected_ahead(cluster: Cluster) -> None:
    cluster.pool.workers = (
        cluster.record("w0", serving=True),
        cluster.record("w1"),
        cluster.record("w2", serving=True),
        cluster.record("w3", state="loading", leaf="far"),
    )
    await eventually(lambda: cluster.connected(TENSOR_LANE) == ["w3", "w1"])
    await several_looks(cluster)
    assert cluster.connected(TENSOR_LANE) == ["w3", "w1"]


async def test_a_worker_whose_part_changes_looks_again_soon(cluster: Cluster) -> None:
    lazy = PeerChannels(cluster.broker.bus("w0"), cluster.recording, cluster.me, interval_s=3600.0)  # type: ignore[arg-type]
    running = asyncio.create_task(lazy.run())
    await asyncio.sleep(0)
    for _ in range(2):
        known = cluster.pool.num_snapshots
        lazy.look_soon()
        await eventually(lambda known=known: cluster.pool.num_snapshots > known)
    running.cancel()


async def test_a_peer_that_left_the_registry_is_forgotten(cluster: Cluster) -> None:
    cluster.pool.workers = (cluster.record("w0"), cluster.record("w1"), cluster.record("w2"))
    await eventually(lambda: len(cluster.recording.peers) == 2)
    cluster.pool.workers = (cluster.record("w0"), cluster.record("w2"))
    await eventually(lambda: cluster.recording.forgotten)
    assert set(cluster.recording.forgotten) == {cluster.transports["w1"].address}
    await eventually(lambda: cluster.recording.peers == {cluster.transports["w2"].address})


async def test_nobody_is_forgotten_while_the_registry_comes_back(cluster: Cluster) -> None:
    everybody = (cluster.record("w0"), cluster.record("w1"))
    cluster.pool.workers = everybody
    await eventually(lambda: cluster.recording.peers)
    cluster.pool.workers = ()  # the registry lost everything, this worker included
    await asyncio.sleep(0.3)
    await several_looks(cluster)
    cluster.pool.workers = everybody
    await several_looks(cluster)
    assert not cluster.recording.forgotten


def part(worker_id: str, role: Role = "colocated", name: str = "m", **fields: Any) -> WorkerRecord:
    """An instance that serves."""
    return worker_record(worker_id, model(name), fields.pop("state", "serving"), role=role, **fields)


def tensor_peers(me: WorkerRecord, *others: WorkerRecord) -> set[str]:
    return {w.worker_id for w, lane in likely((me, *others), me.worker) if lane == TENSOR_LANE}


def test_prompts_and_decodes_of_one_model_are_likely_wherever_they_are() -> None:
    prefill, decode, other = part("w0", "prefill"), part("w1", "decode", leaf="far"), part("w2", "decode", "n")
    alike = part("w3", "prefill")
    assert tensor_peers(prefill, decode, other, alike) == {"w1"}
    assert tensor_peers(decode, prefill, other, alike) == {"w0", "w3"}


def test_an_instance_and_who_loads_or_is_leased_for_its_model_are_likely() -> None:
    serving = part("w0")
    loading, live = part("w1", state="loading", leaf="far"), part("w2", state="live", leaf="far")
    leased = worker_record("w3", lease_plan_id="p", lease_model="m", leaf="far")
    elsewhere = worker_record("w4", lease_plan_id="p", lease_model="n")
    assert tensor_peers(serving, loading, live, leased, elsewhere) == {"w1", "w2", "w3"}
    assert tensor_peers(leased, serving, loading, elsewhere) == {"w0"}


def test_a_spare_and_an_instance_of_its_leaf_are_likely() -> None:
    spare, near, far, idle = worker_record("w0"), part("w1"), part("w2", leaf="far"), worker_record("w3")
    assert tensor_peers(spare, near, far, idle) == {"w1"}
    assert tensor_peers(near, spare, far) == {"w0"}


def test_the_likeliest_come_first_and_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_PRECONNECTED", 3)
    spares = [worker_record(f"w{i}") for i in range(5, 9)]
    decode, loading = part("w2", "decode"), part("w1", "prefill", state="loading")
    found = likely((part("w0", "prefill"), loading, decode, *spares), part("w0").worker)
    tensors = [w.worker_id for w, lane in found if lane == TENSOR_LANE]
    assert tensors[:2] == ["w2", "w1"]
    assert len(tensors) == 3
    assert len([w for w, lane in found if lane == WEIGHT_LANE]) == 3


def test_many_workers_do_not_all_choose_the_same_peers() -> None:
    everybody = tuple(worker_record(f"w{i:03}") for i in range(100))
    chosen = Counter(w.worker_id for record in everybody for w, _ in likely(everybody, record.worker))
    assert len(chosen) == 100
    assert max(chosen.values()) < 3 * peers_module.MAX_PRECONNECTED


async def test_in_a_large_cluster_only_a_change_of_its_own_makes_a_worker_look_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if there were many thousands.
    monkeypatch.setattr(peers_module, "LOOKS_PER_S", 0.001)
    cluster.pool.workers = (cluster.record("w0"), cluster.record("w1"))
    await eventually(lambda: cluster.connected() == ["w1"])
    cluster.pool.workers += (cluster.record("w2"),)
    looks = cluster.pool.num_snapshots
    await asyncio.sleep(0.1)
    assert cluster.pool.num_snapshots == looks
    cluster.peers.look_soon()
    await eventually(lambda: cluster.connected() == ["w1", "w2"])
