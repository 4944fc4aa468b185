"""The one-box stack: every service on this machine, supervised, as one object.

async with Stack(StackConfig(models=(path,), state_dir=folder, port=0)) as stack:
    await stack.wait_ready(120)
    ...  # stack.url serves
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping

from compose import preflight
from compose.child import Child, ChildSpec
from compose.children import (
    CONTROL_PLANE,
    Addresses,
    kind_of,
    nats_access,
    nats_specs,
    redis_spec,
    service_forks,
    service_names,
    service_spec,
    worker_forks,
    worker_spec,
)
from compose.config import StackConfig
from compose.errors import StackNotReady
from compose.log_lines import LOG_NAME, LineSink, ProcessLog, ignore_line, log_time
from compose.ports import free_port, next_free_ports
from compose.preflight import Findings
from compose.restart_policy import RestartPolicy
from compose.settings_check import check_settings
from compose.state_dir import StateDir
from compose.supervisor import RunningStack, Supervisor
from shared.bus.access import NatsAccess
from shared.errors import Conflict, DeadlineExceeded, Unavailable
from shared.messages.admin import Status
from shared.permissions import User
from shared.settings import Settings

_POLL_S = 0.1


class Stack(RunningStack):
    """Starts with ``async with``; leaving it stops everything in order.

    ``sink`` takes the children's lines, ``say`` what the supervisor and ``wait_ready`` have to tell.
    Belongs to one event loop, whose thread must outlive the stack.
    """

    def __init__(
        self,
        config: StackConfig,
        *,
        sink: LineSink = ignore_line,
        say: Callable[[str], None] | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        state_dir = StateDir(config.state_dir)
        self._say_aloud = say if say is not None else (lambda text: sink("blitzscale", text))
        self._log: ProcessLog | None = None
        supervisor = Supervisor(
            state_dir.logs, sink=sink, say=self.say, policy=policy, serves_on=self._serves_on_without
        )
        super().__init__(config, supervisor, state_dir)
        self._was_ready = False
        self._worker_forks = worker_forks(config, state_dir)
        self._service_forks = service_forks(config, state_dir)
        self._findings = Findings(prefault_bytes=0)
        self._next_worker = config.workers

    def nats_access(self, user: User) -> NatsAccess:
        """To connect as ``user``."""
        return NatsAccess.from_env(Settings(nats_access(self.state_dir, user)))

    def say(self, text: str) -> None:
        """Tell people, and ``logs/blitz.log``, where the stack has it already."""
        self._say_aloud(text)
        self.note(text)

    def note(self, text: str) -> None:
        """Only in ``logs/blitz.log``."""
        if self._log is not None:
            self._log.write(f"{log_time()} INFO {LOG_NAME}: {text}".encode())

    @property
    def processes(self) -> Mapping[str, Child]:
        """By name: nats, redis, pool, planner, monitor, gateway, worker-0, ...; planner-0, planner-1, ... where there
        are several."""
        return self._supervisor.children

    async def start(self) -> None:
        """Check, then start every process. Raises ``StackRefused`` with nothing left behind, ``StackNotReady``."""
        self._findings = await asyncio.to_thread(preflight.check, self.config)
        many = self.config.nats_servers > 1
        routes = tuple(f"127.0.0.1:{free_port()}" for _ in range(self.config.nats_servers)) if many else ()
        self.state_dir.acquire(routes)
        self._log = ProcessLog(LOG_NAME, self.state_dir.logs)
        self.say(f"starting; logs in {self.state_dir.logs}")
        # What is imported takes longest of all, so it comes first.
        if self.config.forks:
            await self._worker_forks.start()
            await self._service_forks.start()
        socket = self.state_dir.redis_socket
        first = self.config.port or free_port(self.config.host)
        self._addresses = addresses = Addresses(
            nats_port=self.config.nats_port or free_port(),
            redis_port=0 if socket is not None else free_port(),
            redis_socket=socket,
            gateway_port=first,
            other_gateway_ports=next_free_ports(self.config.host, first, self.config.gateways - 1),
            other_nats_ports=tuple(free_port() for _ in routes[1:]),
        )
        forks = self._service_forks if self.config.forks else None
        services = [service_spec(self.config, self.state_dir, addresses, name, forks) for name in self._service_names()]
        workers = [self._worker_spec(index) for index in range(self.config.workers)]
        for line in await asyncio.to_thread(check_settings, (*services, *workers)):
            self.say(line)
        await self.start_servers(
            *nats_specs(self.config, self.state_dir, addresses), redis_spec(self.config, self.state_dir, addresses)
        )
        for spec in (*services, *workers):
            await self._supervisor.start(spec)

    async def stop_others(self) -> None:
        """The processes that services were forked from, and the log."""
        await self._service_forks.stop()
        await self._worker_forks.stop()
        if self._log is not None:
            self.note("stopped")
            self._log.close()
            self._log = None

    def kill_all(self) -> None:
        """SIGKILL to every process, now: makes a ``stop`` that is under way end at once."""
        self._supervisor.kill_all()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process; if it dies of it, it is started again. Raises ``KeyError``."""
        self.processes[name].signal(number)

    async def add_worker(self) -> str:
        """Start one more worker; its name."""
        index, self._next_worker = self._next_worker, self._next_worker + 1
        await self._supervisor.start(self._worker_spec(index))
        return f"worker-{index}"

    async def remove_process(self, name: str) -> None:
        """Stop one process (it drains) and start it no more. Raises ``KeyError``."""
        await self._supervisor.remove(name)

    async def wait_gave_up(self) -> None:
        """Returns never; raises ``ProcessGaveUp`` when a process without which nothing is served cannot be kept
        running."""
        error = await self._supervisor.wait_gave_up()
        self.note(str(error))
        raise error

    async def wait_ready(self, timeout_s: float = 180.0) -> Status:
        """Wait for the services and workers, register the models, and wait until each has an instance that serves, and
        its least number in both roles if it is served disaggregated; or sleeps: it need not have one, and nothing is
        asked of it.

        Raises ``StackNotReady`` saying what is missing, ``ProcessGaveUp``, or the gateway's ``BlitzError``
        for a model that it refuses.
        """
        become_ready = self._become_ready(time.monotonic() + timeout_s, timeout_s)
        status = await self.unless_given_up(become_ready)
        self._was_ready = True
        return status

    def _serves_on_without(self, name: str) -> bool:
        """Whether anything is served without this process: by others of its kind; and once all is up, requests need
        only NATS, a gateway and a worker."""
        kind = kind_of(name)
        if any(child.state != "gave_up" for child in self._of_kind(kind).values()):
            return True
        return self._was_ready and kind not in ("nats", "gateway", "worker")

    def _of_kind(self, kind: str) -> dict[str, Child]:
        return {name: child for name, child in self.processes.items() if kind_of(name) == kind}

    def _service_names(self) -> tuple[str, ...]:
        counts = self.config.counts
        return tuple(name for kind in (*CONTROL_PLANE, "gateway") for name in service_names(kind, counts[kind]))

    def _worker_spec(self, index: int) -> ChildSpec:
        forks = self._worker_forks if self.config.forks else None
        return worker_spec(self.config, self.state_dir, self.addresses, index, self._findings, forks)

    async def _become_ready(self, deadline_s: float, timeout_s: float) -> Status:
        models = preflight.model_names(self.config.models)
        announced = ""
        registered: set[str] = set()
        while True:
            try:
                status = await self.admin.status()
                present = {worker.id for worker in status.workers}
                wanted = {name for name, child in self._of_kind("worker").items() if child.state != "gave_up"}
                services = {name: self.processes[name] for name in self._service_names()}
                unready = [n for n, child in services.items() if not child.ready and child.state != "gave_up"]
                if unready:
                    missing = f"waiting for {', '.join(unready)}"
                elif not wanted <= present:
                    missing = f"waiting for workers: {len(present & wanted)} of {len(wanted)} are here"
                else:
                    for name in [name for name in models if name not in registered]:
                        await self._register(name, str(models[name]))
                        registered.add(name)
                        status = await self.admin.status()
                    asleep = {model.name for model in status.models if status.sleeps(model)}
                    served = {model.name for model in status.models if status.is_served(model)}
                    awaited = [name for name in models if name not in asleep | served]
                    if not awaited:
                        return status
                    missing = f"waiting for the first instances of {', '.join(awaited)}"
            except (Unavailable, DeadlineExceeded) as error:
                # Services find each other within seconds of starting; until then this is normal.
                missing = (
                    "waiting for the gateway" if error.code == "gateway_unreachable" else f"waiting: {error.message}"
                )
            if missing != announced:
                self.say(missing)
                announced = missing
            if time.monotonic() > deadline_s:
                raise StackNotReady(f"not ready after {timeout_s:g} s: {missing}; see {self.state_dir.logs}")
            await asyncio.sleep(_POLL_S)

    async def _register(self, name: str, path: str) -> None:
        try:
            await self.admin.add_model(
                path,
                name=name,
                slo_ttft_s=self.config.slo_ttft_s,
                slo_tbt_s=self.config.slo_tbt_s,
                keep_alive_s=self.config.keep_alive_s,
                served_as=self.config.served_as or None,
            )
        except Conflict:
            known = {model.name: model.path for model in (await self.admin.status()).models}
            if known.get(name) != path:
                raise
        self.say(f"registered model {name} ({path})")
