"""Worker services inside the test's event loop: mock engine, memory bus and transport, small memory."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.worker.config import WorkerConfig
from services.worker.engine.mock.settings import MockFaults, MockTiming
from services.worker.instance.instance import Instance
from services.worker.node.facts import Probes, discover
from services.worker.node.nic import Roots
from services.worker.service import WorkerService
from shared.bus.departures import Departure
from shared.subjects import Process
from tests.processes import INCARNATION
from tests.services.tampering import TamperingTransport
from tests.shared.bus.memory import MemoryBroker
from tests.shared.transport.memory import MemoryFabric

MIB = 1 << 20
NO_MACHINE = Path("/nonexistent")
"""Workers under test share a machine, whose NIC is none of theirs: each has one of its own."""
ENGINES: dict[str, object] = {"late": None}
"""How workers' engines are, where nothing else is said: ``tests.services.worker.late_workers`` changes it."""


def worker_config(worker_id: str, **changes: object) -> WorkerConfig:
    """A worker of a host of its own, so that a lost peer is noticed at once."""
    fields: dict[str, object] = {
        "nats_url": "",
        "worker_id": worker_id,
        "host": f"host-of-{worker_id}",
        "device": "cpu",
        "engine": "mock",
        "engines": (),
        "vllm_python": None,
        "vllm_warm": "none",
        "attention": "torch_cpu",
        "num_threads": 1,
        "arena_bytes": 4 * MIB,
        "prefault_bytes": 0,
        "kv_bytes": 4 * MIB,
        "block_size": 16,
        "max_running_requests": 8,
        "max_batch_tokens": 512,
        "prefill_chunk_tokens": 64,
        "slo_tbt_s": 0.1,
        "max_queued_requests": 16,
        "max_queued_tokens": 4096,
        "leaf": "leaf-0",
        "nic": "",
        "nic_gbps": 10.0,
        "scale_up_domain": "",
        "scale_up_gbps": None,
        "host_link_gbps": 80.0,
        "ssd_gbps": None,
        "limit_reads": False,
        "scratch_dir": None,
        "visible_gpu": "",
        "gpu_claims": NO_MACHINE,
        "host_cache_bytes": 0,
        "report_interval_s": 0.05,
        "stall_s": 3.0,
        "clock_skew_s": 1.0,
        "drain_timeout_s": 10.0,
        "profiles": None,
        "mock": MockTiming(),
        "mock_faults": MockFaults(),
        "mock_gpu": "",
        "late": None,
        "health_port": 0,
        "health_host": "127.0.0.1",
        "log_level": "info",
        "die_with_parent": False,
        "ready_fd": 0,
    }
    return WorkerConfig(**(fields | ENGINES | changes))  # type: ignore[arg-type]


class RunningWorker:
    """One worker process, as far as others can tell. ``fatal`` collects why it asked to be restarted."""

    def __init__(
        self, broker: MemoryBroker, fabric: MemoryFabric, config: WorkerConfig, *, incarnation: str = INCARNATION
    ) -> None:
        """``incarnation``: another one for each further start under an id."""
        self.config = config
        self.fatal: list[str] = []
        self.stopping = asyncio.Event()
        self._broker = broker
        self.bus = broker.bus(config.worker_id)
        self.transport = TamperingTransport(fabric.start(name=config.worker_id))
        self._fabric = fabric
        self.metrics = CollectorRegistry()
        self.service = WorkerService(
            self.bus,
            self.transport,
            config,
            fatal=self.fatal.append,
            node=replace(
                discover(config, Probes(roots=Roots(NO_MACHINE, NO_MACHINE))),
                nic=f"{config.host}/nic-of-{config.worker_id}",
            ),
            metrics=self.metrics,
            incarnation=incarnation,
        )
        self.task = asyncio.create_task(self.service.run(self.stopping))

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    @property
    def process(self) -> Process:
        return self.service.info.process

    @property
    def instance(self) -> Instance | None:
        return self.service.parts.slot.current()

    @property
    def serving(self) -> Instance:
        """Its instance, which must be there."""
        assert self.instance is not None
        return self.instance

    async def stop(self) -> None:
        """As SIGTERM does; waits for the end."""
        self.stopping.set()
        await self.task
        await self._close()

    async def kill(self) -> None:
        """As SIGKILL does: no word to anybody but the server's of its connection, no byte more."""
        if self.task.done():
            return
        process = self.process
        self._broker.depart(Departure("worker", process.id, process.incarnation, "Client Closed"))
        self.bus.go_down()
        self._fabric.kill(self.transport.address)
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await self._close()

    async def _close(self) -> None:
        await self.bus.close()
        await self.transport.close()
