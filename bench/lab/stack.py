"""A whole BlitzScale in the lab: the control plane in the root namespace, one worker per host.

with Network(4, rate) as network:
    async with LabStack(network, folder, checkpoint, weights_bytes=n) as stack:
        run = await stack.scale(4)
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import TracebackType

from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.plan import DATA_DEVICE, MANAGEMENT_ADDRESS, Host
from compose.admin import AdminClient
from compose.admin_types import Status
from compose.binaries import nats_server
from compose.child import ChildSpec
from compose.children import CONTROL_PLANE, Addresses, redis_spec, service_spec, stop_order, worker_spec
from compose.config import StackConfig, inherited_environment
from compose.errors import StackNotReady
from compose.ports import free_port
from compose.preflight import Findings
from compose.probes import nats_probe, redis_probe, wait_until
from compose.state_dir import StateDir
from compose.supervisor import Supervisor
from services.planner.registry_view import read_registry
from shared.bus.nats import NatsBus
from shared.errors import Unavailable
from shared.messages.registry import HostCopy, WorkerRecord
from shared.messages.scaling import ScaleRecord

READY_S = 90.0
HOLD_S = 600.0
_SERVER_START_S = 20.0
_POLL_S = 0.05
_MIB = 1024 * 1024
_KV_MIB = 64
_HOST_COPIES = 2
"""Room for the copy that the pool places and for one that the host-cache strategy keeps."""
_REGISTRY_S = 5.0
_COPIES_S = 60.0
_QUIET_S = 15.0
_QUIET_SHARE = 0.02
"""Of the nominal rate; below it is noise."""


class LabStack:
    """Starts with ``async with``, which returns once the model serves on one host and all workers are here.

    ``worker_env`` is added to every worker's environment (``UCX_*`` settings to try). ``num_workers``: on the first
    hosts only, all by default. ``copies_on``: hosts whose workers offer memory for copies outside of their arenas,
    all by default.
    Raises ``StackError`` or ``LabFailed``, with everything stopped.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        checkpoint: Path,
        *,
        weights_bytes: int,
        worker_env: Mapping[str, str] | None = None,
        num_workers: int | None = None,
        copies_on: Container[int] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._network = network
        self._hosts = network.hosts[:num_workers]
        self._copies_on = range(len(network.hosts)) if copies_on is None else copies_on
        self._quiet = _QUIET_SHARE * network.rate.gbps
        self._checkpoint = checkpoint
        self._state = StateDir(folder)
        self._mib = -(-weights_bytes // _MIB)
        self._worker_env = dict(worker_env or {})
        self._say = say
        self._supervisor = Supervisor(self._state.logs, say=say)
        self._config = StackConfig(
            models=(checkpoint,), state_dir=folder, workers=len(self._hosts), engine="mock", stop_grace_s=5.0
        )
        self._addresses: Addresses | None = None
        self._admin: AdminClient | None = None
        self._bus: NatsBus | None = None

    @property
    def admin(self) -> AdminClient:
        """Raises ``RuntimeError`` before the stack has started."""
        if self._admin is None:
            raise RuntimeError("the lab's stack has not started")
        return self._admin

    @property
    def model(self) -> str:
        return self._checkpoint.name

    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run."""
        return tuple(c.pid for n, c in self._supervisor.children.items() if n.startswith("worker-") and c.pid)

    def kill(self, worker_id: str) -> None:
        """SIGKILL to a worker's process; it is started again. Raises ``KeyError``."""
        self._supervisor.children[worker_id].signal(signal.SIGKILL)

    def deaths(self) -> dict[str, int]:
        """By worker id, how often its process died so far."""
        return {n: c.num_restarts for n, c in self._supervisor.children.items() if n.startswith("worker-")}

    def host_of(self, worker_id: str) -> int:
        """The index of the host that a worker runs on."""
        return int(worker_id.rpartition("-")[2])

    async def __aenter__(self) -> LabStack:
        try:
            await self._supervisor.unless_given_up(self._start())
        except BaseException:
            # Also when cancelled half way: what has started must not stay.
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop everything in order. Safe to call twice."""
        if self._admin is not None:
            await self._admin.close()
            self._admin = None
        if self._bus is not None:
            await self._bus.close()
            self._bus = None
        await self._supervisor.stop(stop_order(tuple(self._supervisor.children)))
        self._state.release()

    async def use_planner(self, **env: str) -> None:
        """Start the planner again with other settings."""
        await self._supervisor.remove("planner")
        await self._start_service("planner", **env)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """What the pool knows of the workers, in the order of ids."""
        if self._bus is None:
            raise RuntimeError("the lab's stack has not started")
        return (await read_registry(self._bus, timeout_s=_REGISTRY_S)).workers

    async def wait_quiet(self) -> None:
        """Until no worker reports traffic: what just went over a link must not make a planner keep away from it.

        Raises ``LabFailed`` when that does not come about.
        """
        deadline_s = time.monotonic() + _QUIET_S
        while True:
            workers = await self.workers()
            busy = [w.worker.worker_id for w in workers if max(w.nic_egress_gbps, w.nic_ingress_gbps) > self._quiet]
            if not busy:
                return
            if time.monotonic() > deadline_s:
                raise LabFailed(f"{', '.join(busy)} still report traffic after {_QUIET_S:.0f} s without any")
            await asyncio.sleep(_POLL_S)

    async def host_copies(self) -> dict[str, tuple[HostCopy, ...]]:
        """All copies in host memory, by worker id, once one is ready and none loads.

        Raises ``LabFailed`` when that does not come about.
        """
        deadline_s = time.monotonic() + _COPIES_S
        while True:
            held = {worker.worker.worker_id: worker.host_copies for worker in await self.workers()}
            states = [copy.state for copies in held.values() for copy in copies]
            if "ready" in states and "loading" not in states:
                return held
            if time.monotonic() > deadline_s:
                raise LabFailed(f"no complete copy in host memory within {_COPIES_S:.0f} s: {states or 'none at all'}")
            await asyncio.sleep(_POLL_S)

    async def scale(self, instances: int, *, timeout_s: float) -> ScaleRecord:
        """Scale and wait for the end. Raises ``LabFailed`` unless every target serves within ``timeout_s``."""
        return await self._supervisor.unless_given_up(self._scale(instances, time.monotonic() + timeout_s, timeout_s))

    async def _scale(self, instances: int, deadline_s: float, timeout_s: float) -> ScaleRecord:
        while True:
            try:
                record = await self.admin.scale(self.model, instances, hold_s=HOLD_S)
                break
            except Unavailable as error:
                # The planner was just started again.
                if time.monotonic() > deadline_s:
                    raise LabFailed(f"the planner does not answer: {error.message}") from error
                await asyncio.sleep(_POLL_S)
        while record.status == "running" and time.monotonic() < deadline_s:
            record = await self.admin.scale_record(record.plan_id, wait_s=5.0)
        if record.status != "done":
            why = "; ".join(f"{t.worker_id}: {t.failure}" for t in record.targets if t.failure) or record.status
            raise LabFailed(f"scaling to {instances} did not succeed within {timeout_s:.0f} s: {why}")
        await self._until(lambda s: s.serving(self.model) == instances, f"{instances} instances serve", deadline_s)
        return record

    async def _start(self) -> None:
        self._state.acquire()
        socket = self._state.redis_socket
        self._addresses = addresses = Addresses(
            nats_port=free_port(MANAGEMENT_ADDRESS),
            redis_port=0 if socket is not None else free_port(),
            redis_socket=socket,
            gateway_port=free_port(),
        )
        await self._supervisor.start(self._nats_spec(addresses))
        await self._supervisor.start(redis_spec(self._config, self._state, addresses))
        await wait_until(nats_probe(MANAGEMENT_ADDRESS, addresses.nats_port), "nats", timeout_s=_SERVER_START_S)
        await wait_until(redis_probe(addresses.redis_socket, addresses.redis_port), "redis", timeout_s=_SERVER_START_S)
        for name in (*CONTROL_PLANE, "gateway"):
            await self._start_service(name)
        self._bus = await NatsBus.connect(self._nats_url, name="bench-lab")
        keys = self._config.admin_keys
        self._admin = AdminClient(f"http://127.0.0.1:{addresses.gateway_port}", api_key=next(iter(keys), None))
        for host in self._hosts:
            await self._supervisor.start(self._worker_spec(host))
        deadline_s = time.monotonic() + READY_S
        count = len(self._hosts)
        await self._until(lambda s: len(s.workers) == count, f"{count} workers are here", deadline_s)
        await self.admin.add_model(str(self._checkpoint), name=self.model)
        await self._until(lambda s: s.serving(self.model) == 1, "the model serves", deadline_s)

    async def _until(self, condition: Callable[[Status], bool], what: str, deadline_s: float) -> None:
        last = "no answer"
        while True:
            with contextlib.suppress(Unavailable):
                status = await self.admin.status()
                if condition(status):
                    return
                last = f"{len(status.workers)} workers, {status.serving(self.model)} instances serve"
            if time.monotonic() > deadline_s:
                raise StackNotReady(f"waited in vain until {what}: {last}; see {self._state.logs}")
            await asyncio.sleep(_POLL_S)

    async def _start_service(self, name: str, **env: str) -> None:
        spec = service_spec(self._config, self._state, self._require_addresses(), name)
        await self._supervisor.start(replace(spec, env={**spec.env, "BLITZ_NATS_URL": self._nats_url, **env}))

    def _nats_spec(self, addresses: Addresses) -> ChildSpec:
        # Where the namespaces reach it and nobody else does.
        where = ("--addr", MANAGEMENT_ADDRESS, "--port", str(addresses.nats_port))
        config = str(files("compose").joinpath("nats.conf"))
        argv = (str(nats_server()), "--config", config, *where, "--store_dir", str(self._state.nats))
        return ChildSpec("nats", argv, inherited_environment(), self._config.stop_grace_s, self._state.path)

    def _worker_spec(self, host: Host) -> ChildSpec:
        findings = Findings(num_cuda_devices=0, prefault_bytes=self._mib * _MIB)
        spec = worker_spec(self._config, self._state, self._require_addresses(), host.index, findings)
        own = {
            "BLITZ_NATS_URL": self._nats_url,
            "BLITZ_WORKER_HOST": host.namespace,
            "BLITZ_WORKER_NIC": DATA_DEVICE,
            "BLITZ_WORKER_NIC_GBPS": f"{self._network.rate.gbps:g}",
            "BLITZ_WORKER_ARENA_MIB": str(self._mib + 1),
            "BLITZ_WORKER_KV_MIB": str(_KV_MIB),
            "BLITZ_WORKER_HOST_CACHE_MIB": str(_HOST_COPIES * (self._mib + 1) if host.index in self._copies_on else 0),
            # UCX would otherwise find the shared memory of the one machine, or the unrated interface.
            "UCX_TLS": "tcp",
            # To UCX all hosts of the lab are one; between real ones this is what the transport chooses.
            "UCX_RNDV_THRESH": "inf",
            "UCX_NET_DEVICES": DATA_DEVICE,
        }
        return replace(spec, argv=(*host.enter, *spec.argv), env={**spec.env, **own, **self._worker_env})

    @property
    def _nats_url(self) -> str:
        return f"nats://{MANAGEMENT_ADDRESS}:{self._require_addresses().nats_port}"

    def _require_addresses(self) -> Addresses:
        if self._addresses is None:
            raise RuntimeError("the lab's stack has not started")
        return self._addresses
