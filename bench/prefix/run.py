"""One stack for all systems: workers that are the same, and a gateway of each system's own, of which one is asked.

Every run has a model of its own name, so that its instances have computed nothing before, and no load scales it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.prefix.checkpoint import make_checkpoint, printable_ids
from bench.prefix.computed import Computed, since
from bench.prefix.load import Load, first_error, sustained_per_s
from bench.prefix.result import Run
from bench.prefix.systems import BASE, SYSTEMS, ordered
from bench.prefix.workload import Plan, make_plan, prompts
from bench.stream_client import Endpoint, StreamClient
from compose.children import service_names
from compose.config import StackConfig
from compose.stack import Stack
from shared.bus.nats import NatsBus
from shared.errors import BadRequest, Internal
from shared.messages.admin import Status

Say = Callable[[str], None]
INSTANCES, MOST_INSTANCES = 3, 4
LOAD_SHARE = 0.7
"""Of what is sustained."""
LEAST_S, MOST_S = 4.0, 3600.0
READY_S = 120.0
_CALIBRATION_SEED = -1
_CALIBRATED_AT_A_TIME = 12
_CALIBRATION_PER_S = 10.0
"""Enough different prompts; nobody waits for their times."""
_SETTLE_S = 5.0
_HOLD_S = 3600.0
_LOOK_S = 0.05
ENV = {
    "BLITZ_WORKER_ARENA_MIB": "160",
    "BLITZ_WORKER_KV_MIB": "256",
    # Nothing is loaded or drained but by the benchmark.
    "BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9",
    "BLITZ_MONITOR_RATE_WINDOW_S": "60",
    "BLITZ_MONITOR_DOWN_WINDOW_S": "600",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """``seconds`` of each run, of which the first ``warm_s`` are in no figure."""

    workloads: tuple[str, ...]
    systems: tuple[str, ...]
    seeds: int = 5
    seconds: float = 13.0
    calibrated_s: float = 15.0
    """How long it is looked at what is sustained."""

    def __post_init__(self) -> None:
        if not LEAST_S <= self.seconds <= MOST_S:
            raise BadRequest(f"--seconds must be from {LEAST_S:g} to {MOST_S:g}, not {self.seconds:g}", param="seconds")

    @property
    def warm_s(self) -> float:
        """Caches are empty at the begin: a quarter of the time, and no more than five seconds, goes by before."""
        return min(5.0, self.seconds / 4)


async def measure(setting: Setting, folder: Path, *, say: Say) -> tuple[dict[str, float], list[Run]]:
    """What is sustained without the cache, in requests per second by workload, and all runs. Raises ``StackError``,
    ``BlitzError`` and ``StreamFailed``; nothing is left behind."""
    checkpoint = await asyncio.to_thread(make_checkpoint, folder / "models")
    async with _running(setting.systems, checkpoint, folder / "stack") as bench:
        return await bench.stack.unless_given_up(_measure(bench, setting, say))


async def _measure(bench: _Bench, setting: Setting, say: Say) -> tuple[dict[str, float], list[Run]]:
    sustained: dict[str, float] = {}
    for workload in setting.workloads:
        sustained[workload] = await bench.sustained(workload, setting)
        say(f"{workload}: {INSTANCES} instances sustain {sustained[workload]:.2f} requests/s without the cache")
        if not sustained[workload]:
            raise Internal(f"{workload}: no request was answered within {_SETTLE_S + setting.calibrated_s:g} s")
    runs = []
    for seed in range(setting.seeds):
        for workload in setting.workloads:
            plan = make_plan(workload, seed, LOAD_SHARE * sustained[workload], setting.seconds)
            for system in ordered(setting.systems, seed):
                run = await bench.run(workload, system, seed, plan, setting)
                d = run.document()
                say(
                    f"{workload}, {system}, seed {seed}: {d['requests']} requests, {d['failed']} failed, hit rate "
                    f"{d['hit_rate']}, TTFT mean {d['ttft_mean_s']}, p99 {d['ttft_p99_s']} s, "
                    f"imbalance {d['imbalance']}"
                )
                runs.append(run)
    return sustained, runs


@asynccontextmanager
async def _running(systems: Sequence[str], checkpoint: Path, folder: Path) -> AsyncIterator[_Bench]:
    gateways = service_names("gateway", len(systems))
    config = StackConfig(
        models=(),
        state_dir=folder,
        workers=MOST_INSTANCES,
        gateways=len(systems),
        port=0,
        engine="torch",
        env=ENV,
        service_env={gateway: SYSTEMS[system] for gateway, system in zip(gateways, systems, strict=True)},
        log_level="warning",
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        clients = {system: StreamClient(Endpoint.of(url)) for system, url in zip(systems, stack.urls, strict=True)}
        # As a gateway, who hears load.
        access = stack.nats_access("gateway")
        bus = await NatsBus.connect(stack.addresses.nats_url, name="gateway", id="bench-prefix", access=access)
        try:
            computed = Computed()
            await computed.listen(bus)
            yield _Bench(stack, clients, computed, checkpoint)
        finally:
            for client in clients.values():
                client.close()
            await bus.close()


class _Bench:
    def __init__(self, stack: Stack, clients: Mapping[str, StreamClient], computed: Computed, checkpoint: Path) -> None:
        self.stack = stack
        self._clients = clients
        self._computed = computed
        self._checkpoint = checkpoint
        self._token_of = printable_ids(checkpoint)

    async def sustained(self, workload: str, setting: Setting) -> float:
        """Requests per second without the cache."""
        plan = make_plan(workload, _CALIBRATION_SEED, _CALIBRATION_PER_S, setting.seconds)
        async with self._served(f"{workload}-calibration") as model:
            return await sustained_per_s(
                self._clients[BASE],
                model,
                plan,
                prompts(plan, _CALIBRATION_SEED),
                at_a_time=_CALIBRATED_AT_A_TIME,
                settle_s=_SETTLE_S,
                seconds=setting.calibrated_s,
            )

    async def run(self, workload: str, system: str, seed: int, plan: Plan, setting: Setting) -> Run:
        """The plan, and one instance more in the middle of what is measured."""
        async with self._served(f"{workload}-{system}-{seed}") as model:
            lasting = frozenset(i.id for i in (await self.stack.admin.status()).instances if i.model == model)
            load = Load(self._clients[system], model, plan, self._token_of)
            with first_error():
                async with asyncio.TaskGroup() as tasks:
                    asking = tasks.create_task(load.run())
                    warmed = tasks.create_task(self._computed_after(setting.warm_s, model))
                    scaling = tasks.create_task(self._scaled_after((setting.warm_s + setting.seconds) / 2, model))
            computed = since(warmed.result(), await self._computed.settled(model))
        return Run(workload, system, seed, setting.warm_s, asking.result(), computed, lasting, scaling.result())

    async def _computed_after(self, delay_s: float, model: str) -> dict[str, int]:
        await asyncio.sleep(delay_s)
        return self._computed.of(model)

    async def _scaled_after(self, delay_s: float, model: str) -> float:
        """How long it took until the last instance served."""
        await asyncio.sleep(delay_s)
        asked_s = time.perf_counter()
        await self.stack.admin.scale(model, MOST_INSTANCES, hold_s=_HOLD_S)
        await self._until(lambda status: status.serving(model) == MOST_INSTANCES)
        return time.perf_counter() - asked_s

    @asynccontextmanager
    async def _served(self, name: str) -> AsyncIterator[str]:
        """A model with instances that know nothing; when the block is left, workers are spare again."""
        admin, path = self.stack.admin, str(self._checkpoint)
        await admin.add_model(path, name=name, min_instances=INSTANCES, max_instances=MOST_INSTANCES)
        await self._until(lambda status: status.serving(name) == INSTANCES)
        yield name
        await admin.remove_model(name)
        await self._until(
            lambda status: not status.instances and all(worker.state == "spare" for worker in status.workers)
        )

    async def _until(self, condition: Callable[[Status], bool]) -> None:
        try:
            async with asyncio.timeout(READY_S):
                while not condition(await self.stack.admin.status()):
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise Internal("the stack did not come to what is to be measured") from error
