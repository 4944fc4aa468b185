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
from pathlib import Path
from typing import Any, Literal

from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.plan import MANAGEMENT_ADDRESS
from bench.lab.processes import nats_spec, nats_url, worker_spec
from bench.recording.child import recorded
from bench.replay.objectives import Slo
from compose.child import ChildSpec
from compose.children import (
    CONTROL_PLANE,
    Addresses,
    nats_access,
    redis_spec,
    service_forks,
    service_spec,
    worker_forks,
)
from compose.config import StackConfig
from compose.errors import StackNotReady
from compose.ports import free_port
from compose.state_dir import StateDir
from compose.supervisor import RunningStack, Supervisor
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.errors import Unavailable
from shared.messages.admin import Status
from shared.messages.common import SERVED_BY, LiveChoice, Serving
from shared.messages.operations import ScaleRecord
from shared.messages.registry import HostCopy, WorkerRecord
from shared.permissions import Kind
from shared.registry import read_registry
from shared.settings import Settings

READY_S = 90.0
HOLD_S = 600.0
_POLL_S = 0.05
_MIB = 1024 * 1024
_REGISTRY_S = 5.0
_COPIES_S = 60.0
_QUIET_S = 15.0
_QUIET_SHARE = 0.02
"""Of the nominal rate; below it is noise."""


class LabStack(RunningStack):
    """Starts with ``async with``, which returns once the model serves on one host and all workers are here.

    ``worker_env`` is added to every worker's environment (``UCX_*`` settings to try), ``service_env`` to that of the
    services named in it, ``env`` to that of all. ``num_workers``: on the first hosts only, all by default.
    ``copies_on``: hosts whose workers offer memory for copies outside of their arenas, all by default; ``arenas_on``:
    those whose arenas hold the model. ``served_as``, ``slo``: of the model. ``min_instances``: of each of its roles, 0
    or 1; so many serve once it has started. ``record``: a folder for recordings of services and workers
    (``bench.recording``). ``instance_env``: as ``worker_env``, of the workers of ``arenas_on``. ``model_engine``: an
    engine of others that is to serve it, with these arguments.
    Raises ``StackError`` or ``LabFailed``, with everything stopped.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        checkpoint: Path,
        *,
        weights_bytes: int,
        engine: Literal["mock", "torch"] = "mock",
        worker_env: Mapping[str, str] | None = None,
        service_env: Mapping[str, Mapping[str, str]] | None = None,
        env: Mapping[str, str] | None = None,
        num_workers: int | None = None,
        copies_on: Container[int] | None = None,
        arenas_on: Container[int] | None = None,
        min_instances: int = 1,
        served_as: Serving | None = None,
        slo: Slo | None = None,
        record: Path | None = None,
        instance_env: Mapping[str, str] | None = None,
        model_engine: str = "",
        model_engine_args: dict[str, Any] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._network = network
        self._hosts = network.hosts[:num_workers]
        self._copies_on = range(len(network.hosts)) if copies_on is None else copies_on
        self._arenas_on = range(len(network.hosts)) if arenas_on is None else arenas_on
        self._min_instances = min_instances
        self._served_as = served_as
        self._slo = slo or Slo()
        self._record = record
        self._quiet = _QUIET_SHARE * network.rate.gbps
        self._checkpoint = checkpoint
        self._mib = -(-weights_bytes // _MIB)
        self._worker_env = dict(worker_env or {})
        self._instance_env = dict(instance_env or {})
        self._model_engine = model_engine
        self._model_engine_args = model_engine_args
        self._say = say
        config = StackConfig(
            models=(checkpoint,),
            state_dir=folder,
            workers=len(self._hosts),
            engine=engine,
            stop_grace_s=5.0,
            # What is measured is what is computed.
            env={"BLITZ_GATEWAY_PREFIX_CACHE": "0", **(env or {})},
            service_env=service_env or {},
        )
        state_dir = StateDir(folder)
        super().__init__(config, Supervisor(state_dir.logs, say=say), state_dir)
        self._forks = service_forks(config, state_dir)
        self._worker_forks = worker_forks(config, state_dir)
        self._buses: dict[Kind, NatsBus] = {}

    async def bus_as(self, user: Kind) -> NatsBus:
        """A connection that may what this kind of service may. Raises ``RuntimeError`` before the stack has started."""
        if user not in self._buses:
            url, access = (
                nats_url(self.addresses),
                NatsAccess.from_env(Settings(nats_access(self.state_dir, user))),
            )
            self._buses[user] = await NatsBus.connect(url, name=user, id="bench-lab", access=access)
        return self._buses[user]

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

    async def start(self) -> None:
        """Start everything and wait until the model serves."""
        await self.unless_given_up(self._start())

    async def stop(self) -> None:
        """Stop everything in order. Safe to call twice."""
        while self._buses:
            await self._buses.popitem()[1].close()
        await super().stop()

    async def stop_others(self) -> None:
        """The processes that services and workers were forked from."""
        await self._forks.stop()
        await self._worker_forks.stop()

    async def restart(self, service: str, **env: str) -> None:
        """Another process of it, with other settings."""
        await self._supervisor.remove(service)
        await self._start_service(service, **env)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """What the pool knows of the workers, in the order of ids."""
        return (await read_registry(await self.bus_as("planner"), timeout_s=_REGISTRY_S)).workers

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

    async def host_copies(self, *, at_least: int = 1) -> dict[str, tuple[HostCopy, ...]]:
        """All copies in host memory, by worker id, once so many are ready and none loads.

        Raises ``LabFailed`` when that does not come about.
        """
        deadline_s = time.monotonic() + _COPIES_S
        while True:
            held = {worker.worker.worker_id: worker.host_copies for worker in await self.workers()}
            states = [copy.state for copies in held.values() for copy in copies]
            if states.count("ready") >= at_least and "loading" not in states:
                return held
            if time.monotonic() > deadline_s:
                raise LabFailed(f"waited {_COPIES_S:.0f} s for {at_least} complete copies in host memory: {states}")
            await asyncio.sleep(_POLL_S)

    async def scale(self, instances: int, *, timeout_s: float) -> ScaleRecord:
        """Scale and wait for the end. Raises ``LabFailed`` unless every target serves within ``timeout_s``."""
        return await self.unless_given_up(self._scale(instances, time.monotonic() + timeout_s, timeout_s))

    async def scale_in_to(self, host: int, *, timeout_s: float) -> None:
        """Back to one instance, the one of ``host``: by itself the planner keeps one that is apart from the host copy,
        and the copy's worker would be the next target. Raises ``LabFailed``."""
        others = [w.worker.worker_id for w in await self.workers() if self.host_of(w.worker.worker_id) != host]
        for worker_id in others:
            await self.admin.drain_worker(worker_id)
        await self.scale(1, timeout_s=timeout_s)
        for worker_id in others:
            await self.admin.undrain_worker(worker_id)

    async def begin_scale(self, instances: int, *, live: LiveChoice = "auto") -> ScaleRecord:
        """Scale, without waiting: the record as the operation begins. Raises what ``AdminClient.scale`` raises."""
        return await self.admin.scale(self.model, instances, hold_s=HOLD_S, live=live)

    async def ended(self, record: ScaleRecord, instances: int, *, timeout_s: float) -> ScaleRecord:
        """Wait for the end of an operation and of its pairs; its record. Raises as ``scale``."""
        deadline_s = time.monotonic() + timeout_s
        return await self.unless_given_up(self._ended(record, instances, deadline_s, timeout_s))

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
        return await self._ended(record, instances, deadline_s, timeout_s)

    async def _ended(self, record: ScaleRecord, instances: int, deadline_s: float, timeout_s: float) -> ScaleRecord:
        while _goes_on(record) and time.monotonic() < deadline_s:
            # A record of what has ended comes at once, also while its pairs still work.
            await asyncio.sleep(0 if record.status == "running" else _POLL_S)
            record = await self.admin.scale_record(record.plan_id, wait_s=5.0)
        if record.status != "done" or _goes_on(record):
            failures = [f"{t.worker_id}: {t.failure}" for t in record.targets if t.failure]
            why = "; ".join(failures or [f"pair {p.pair_id}: {p.outcome}" for p in record.live]) or record.status
            said = (self.state_dir.logs / "planner.log").read_text().splitlines()[-3:]
            why = "\n".join([f"{why}; the planner's last lines:", *said])
            raise LabFailed(f"scaling to {instances} did not succeed within {timeout_s:.0f} s: {why}")
        await self._until(lambda s: s.serving(self.model) == instances, f"{instances} instances serve", deadline_s)
        return record

    async def _start(self) -> None:
        self.state_dir.acquire()
        await self._forks.start()
        await self._worker_forks.start()
        socket = self.state_dir.redis_socket
        self._addresses = addresses = Addresses(
            nats_port=free_port(MANAGEMENT_ADDRESS),
            redis_port=0 if socket is not None else free_port(),
            redis_socket=socket,
            gateway_port=free_port(),
        )
        await self.start_servers(
            nats_spec(self.config, self.state_dir, addresses), redis_spec(self.config, self.state_dir, addresses)
        )
        for name in (*CONTROL_PLANE, "gateway"):
            await self._start_service(name)
        for host in self._hosts:
            spec = worker_spec(
                self.config,
                self.state_dir,
                addresses,
                host,
                rate=self._network.rate,
                arena_mib=self._mib,
                offers_copies=host.index in self._copies_on,
                holds_instances=host.index in self._arenas_on,
                env=self._worker_env | (self._instance_env if host.index in self._arenas_on else {}),
                forks=self._worker_forks,
            )
            await self._supervisor.start(self._recorded(spec))
        deadline_s = time.monotonic() + READY_S
        count = len(self._hosts)
        await self._until(lambda s: len(s.workers) == count, f"{count} workers are here", deadline_s)
        await self.admin.add_model(
            str(self._checkpoint),
            name=self.model,
            min_instances=self._min_instances,
            slo_ttft_s=self._slo.ttft_s,
            slo_tbt_s=self._slo.tbt_s,
            served_as=self._served_as,
            engine=self._model_engine,
            engine_args=self._model_engine_args,
        )
        serving = self._min_instances * len(SERVED_BY[self._served_as or "colocated"])
        await self._until(lambda s: s.serving(self.model) == serving, f"{serving} instances serve", deadline_s)

    async def _until(self, condition: Callable[[Status], bool], what: str, deadline_s: float) -> None:
        last = "no answer"
        while True:
            with contextlib.suppress(Unavailable):
                status = await self.admin.status()
                if condition(status):
                    return
                last = f"{len(status.workers)} workers, {status.serving(self.model)} instances serve"
            if time.monotonic() > deadline_s:
                raise StackNotReady(f"waited in vain until {what}: {last}; see {self.state_dir.logs}")
            await asyncio.sleep(_POLL_S)

    async def _start_service(self, name: str, **env: str) -> None:
        spec = service_spec(self.config, self.state_dir, self.addresses, name, self._forks)
        spec = replace(spec, env={**spec.env, "BLITZ_NATS_URL": nats_url(self.addresses), **env})
        await self._supervisor.start(self._recorded(spec))

    def _recorded(self, spec: ChildSpec) -> ChildSpec:
        return spec if self._record is None else recorded(spec, self._record)


def _goes_on(record: ScaleRecord) -> bool:
    return record.status == "running" or any(pair.outcome == "running" for pair in record.live)
