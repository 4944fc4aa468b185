"""Which peers are connected before they are needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from services.worker import peers as peers_module
from services.worker.peers import Peers
from shared.bus.memory import MemoryBroker
from shared.errors import PeerLost, Unavailable
from shared.messages.registry import WorkerRecord
from shared.transport.base import Channel
from shared.transport.memory import MemoryFabric
from shared.transport.memory_transport import MemoryTransport
from tests.records import model, worker, worker_record
from tests.services.fake_pool import FakePool
from tests.services.waiting import eventually


class Recording:
    """A transport that remembers whom it connected to, and can refuse."""

    def __init__(self, real: MemoryTransport) -> None:
        self.real = real
        self.connects: list[tuple[bytes, bool]] = []
        self.refuse: set[bytes] = set()

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0) -> Channel:
        self.connects.append((address, same_host))
        if address in self.refuse:
            raise PeerLost("not now")
        return await self.real.connect(address, same_host=same_host, timeout_s=timeout_s, lane=lane)


class Cluster:
    """Me (``w0``) and peers that are addresses only."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.pool = FakePool(self.broker)
        self.fabric = MemoryFabric()
        self.transports = {f"w{i}": self.fabric.start(name=f"w{i}") for i in range(5)}
        self.recording = Recording(self.transports["w0"])
        me = worker("w0", transport_address=self.transports["w0"].address)
        self.peers = Peers(self.broker.bus("w0"), self.recording, me, interval_s=0.02)  # type: ignore[arg-type]

    def record(
        self, worker_id: str, *, serving: bool = False, host: str = "host-a", leaf: str = "leaf-0", life: int = 1
    ) -> WorkerRecord:
        return worker_record(
            worker_id,
            model() if serving else None,
            "serving" if serving else "spare",
            transport_address=self.transports[worker_id].address,
            host=host,
            leaf=leaf,
            incarnation=f"{worker_id}-{life}",
        )

    def connected(self) -> list[str]:
        """Peers in the order of connecting."""
        names = {transport.address: name for name, transport in self.transports.items()}
        return [names[address] for address, _ in self.recording.connects]


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
    assert cluster.connected() == ["w3", "w1", "w4"]
    assert dict(cluster.recording.connects)[cluster.transports["w4"].address] is False
    assert dict(cluster.recording.connects)[cluster.transports["w1"].address] is True


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
    assert cluster.connected() == ["w1", "w2"]


async def test_a_registry_that_does_not_answer_is_asked_again(cluster: Cluster) -> None:
    cluster.pool.errors["snapshot"] = [Unavailable("starting")] * 2
    cluster.pool.workers = (cluster.record("w1"),)
    await eventually(lambda: cluster.connected() == ["w1"])
