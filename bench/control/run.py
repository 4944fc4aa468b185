"""One run: the control plane, the fleets, the models, and then the measurement."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.control import histogram
from bench.control.checkpoints import make_checkpoints
from bench.control.child import BenchChild
from bench.control.formation import ANSWER_S, Fleets
from bench.control.load import Clients
from bench.control.plane import TAP, ControlPlane
from bench.control.result import Look, Result
from bench.control.scaler import Scaler
from bench.control.setting import Setting
from bench.control.tap import TapResult

Say = Callable[[str], None]
MARGIN_S = 5.0
"""Of the load, before and after it is measured. Before is when the tap listens."""
_ROUND = "blitz_planner_round_seconds"


async def run(setting: Setting, folder: Path, *, state_dir: Path | None = None, say: Say = lambda _: None) -> Result:
    """Take everything up, measure, take it down. ``folder`` is empty; ``state_dir``: None is in it.

    Raises ``StackError`` and ``BlitzError``; nothing is left behind.
    """
    models = [f"model-{index:04d}" for index in range(setting.models)]
    probes = [f"probe-{index:02d}" for index in range(setting.probes)]
    paths = await asyncio.to_thread(make_checkpoints, folder / "models", [*models, *probes])
    async with ControlPlane(state_dir or folder / "state", gateways=setting.gateways, say=say) as plane:
        return await plane.unless_given_up(_Run(setting, plane, say).measure(paths, models, probes))


class _Run:
    def __init__(self, setting: Setting, plane: ControlPlane, say: Say) -> None:
        self._setting = setting
        self._plane = plane
        self._say = say
        self._fleets = Fleets(setting, plane, say)
        self._clients = Clients(plane.urls)

    async def measure(self, paths: Mapping[str, Path], models: list[str], probes: list[str]) -> Result:
        setting, plane, clients, fleets = self._setting, self._plane, self._clients, self._fleets
        scaler = Scaler(plane.urls, clients, probes, out_s=setting.out_s)
        margin_s = min(MARGIN_S, setting.seconds / 3)
        tap = await BenchChild.start("bench.control.tap", str(plane.addresses.nats_port), TAP)
        disturbing: asyncio.Task[None] | None = None
        try:
            await tap.say(plane.tap_password.encode())
            begun_s = time.monotonic()
            await fleets.form(paths, frozenset(probes))
            formed_s = time.monotonic() - begun_s
            self._say("every gateway asks for every model")
            await clients.ask_everywhere(models)
            disturbing = asyncio.create_task(self._disturb(scaler, models, setting.seconds + 2 * margin_s))
            await asyncio.sleep(margin_s)
            await tap.say(b"end")
            heard = await tap.answer(TapResult, ANSWER_S)
            self._say(f"measuring for {setting.seconds:g} s")
            await fleets.begin()
            before = await self._look(scaler)
            await asyncio.sleep(setting.seconds)
            after = await self._look(scaler)
            measured = await fleets.end()
            await disturbing
            return Result(
                setting=setting,
                before=before,
                after=after,
                fleets=measured,
                parked=scaler.parked,
                tap=heard,
                ttft_s=clients.ttft_s[before.answered : after.answered],
                faults=clients.faults,
                fault_example=clients.fault_example,
                formed_s=formed_s,
                restarts=plane.restarts(),
            )
        finally:
            if disturbing is not None:
                disturbing.cancel()
                await asyncio.gather(disturbing, return_exceptions=True)
            await scaler.close()
            clients.close()
            await fleets.close()
            await tap.kill()

    async def _disturb(self, scaler: Scaler, models: list[str], seconds: float) -> None:
        """The load and the scale operations of the setting. Returns when all have ended."""
        setting = self._setting
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._clients.run(models, setting.rate, seconds))
            if setting.scales:
                tasks.create_task(scaler.run(setting.scales, seconds))

    async def _look(self, scaler: Scaler) -> Look:
        clients, metrics = self._clients, await self._plane.planner_metrics()
        return Look(
            at_s=time.monotonic(),
            cpu_s=self._plane.cpu_seconds(),
            bench_cpu_s=time.process_time() + self._fleets.cpu_seconds(),
            rounds=histogram.buckets(metrics, _ROUND),
            sent=clients.sent,
            answered=clients.answered,
            unsent=clients.unsent,
            scales=Counter(scaler.outcomes),
        )
