"""The worker's standing with the pool: reports at every change and well within each lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, DuplicateId
from shared.messages.common import Ack, InstanceState
from shared.messages.copies import RetireCopy
from shared.messages.registry import (
    HeartbeatAck,
    HostCopy,
    InstanceInfo,
    ModelRecord,
    RestoreModel,
    WarmEngine,
    WorkerHeartbeat,
    WorkerInfo,
)
from shared.outage import Outage

log = logging.getLogger(__name__)

FIRST_LEASE_S = 1.0
"""Assumed until the pool tells."""
RETIRE_TIMEOUT_S = 5.0
ASK_INTERVAL_S = 0.3
POOL_SILENT_S = 5.0
"""A pool that does not answer for so long finds no successor for a copy either."""


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """What a report says, as of now."""

    state: InstanceState
    instance: InstanceInfo | None
    host_copies: tuple[HostCopy, ...]
    nic_egress_gbps: float
    nic_ingress_gbps: float
    warm: WarmEngine | None = None


class ClockSkew:
    """How far this host's time of day is from the pool's. For people: nothing is decided by it."""

    def __init__(self, limit_s: float = 1.0, metrics: CollectorRegistry | None = None) -> None:
        """Up to ``limit_s`` nobody is told."""
        self._limit_s = limit_s
        self._gauge = Gauge(
            "blitz_worker_clock_ahead_seconds", "Time of day here, ahead of the pool's.", registry=metrics
        )
        self.told_s = 0.0
        """What people are told; 0: the two agree."""

    def measured(self, asked_s: float, answered_s: float, pool_s: float) -> None:
        """The pool said ``pool_s`` between these two times of day here; how much of that was which way is unknown."""
        ahead_s, way_s = (asked_s + answered_s) / 2 - pool_s, abs(answered_s - asked_s) / 2
        self._gauge.set(ahead_s)
        if abs(ahead_s) - way_s > self._limit_s:
            if abs(ahead_s - self.told_s) > max(way_s, self._limit_s / 2):
                self.told_s = round(ahead_s, 1)
                where = "ahead of" if ahead_s > 0 else "behind"
                log.warning("the clock of this host is %.1f s %s the pool's: set it", abs(ahead_s), where)
        elif self.told_s and abs(ahead_s) + way_s < self._limit_s:
            self.told_s = 0.0
            log.info("the clock of this host agrees with the pool's again")


class Registration:
    """Sends ``WorkerHeartbeat``. A report that fails is repeated; the newest state wins by sequence."""

    def __init__(
        self,
        bus: Bus,
        worker: WorkerInfo,
        standing: Callable[[], WorkerStanding],
        model: Callable[[str], ModelRecord | None],
        skew: ClockSkew | None = None,
    ) -> None:
        """``standing`` gives what to report; ``model`` the record of a model hash, if a registry lost it."""
        self._bus = bus
        self._worker = worker
        self._standing = standing
        self._model = model
        self._skew = skew or ClockSkew()
        self._sequence = 0
        self._lease_s = FIRST_LEASE_S
        self._changed = asyncio.Event()
        self._reported = asyncio.Condition()
        self._confirmed = 0
        self.registered = asyncio.Event()
        self._leaving = False
        self._stopping = False
        self._outage = Outage(log, "the pool takes our reports again")

    def changed(self) -> None:
        """The state changed: report now."""
        self._changed.set()

    def stopping(self) -> None:
        """The process is about to end: say so with every report from now on."""
        self._stopping = True
        self._changed.set()

    async def confirmed(self, timeout_s: float) -> bool:
        """Report now and wait until the pool has it; False if it did not answer in time."""
        wanted = self._sequence + 1
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s), self._reported:
                await self._reported.wait_for(lambda: self._confirmed >= wanted)
        except TimeoutError:
            return False
        return True

    async def run(
        self,
        stop_instance: Callable[[str], Awaitable[None]],
        planner_term: Callable[[int], None],
        keep_tbt: Callable[[str, float], None],
        prepare: Callable[[ModelRecord], None],
    ) -> None:
        """Report until cancelled. Raises ``DuplicateId`` when another process that lives has this worker's id.

        ``stop_instance`` is called when the registry says that the instance's model was removed, ``planner_term`` with
        the term of the planner that leads, ``keep_tbt`` with the instance that was reported and its model's objective
        for the time between two tokens, ``prepare`` with the model for which an engine is to wait here.
        """
        while True:
            self._changed.clear()
            now = self._standing()
            ack = await self._report(now)
            if ack is not None:
                planner_term(ack.planner_term)
                if now.instance is not None and ack.slo_tbt_s is not None:
                    keep_tbt(now.instance.instance_id, ack.slo_tbt_s)
                if ack.stop_instance:
                    await stop_instance(ack.stop_instance)
                if ack.prepare is not None:
                    prepare(ack.prepare)
            else:
                await asyncio.sleep(min(0.2, self._lease_s / 4))
                continue
            # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._changed.wait()

    async def leave(self) -> None:
        """The last report: the pool forgets this incarnation at once."""
        self._leaving = True
        await self._report(self._standing())

    async def retire(
        self, instance: InstanceInfo, *, undo: bool = False, leaving: bool = False, stays: bool = False
    ) -> None:
        """Ask whether the instance's copy may go, or say (``undo``) that it stays after all.

        ``leaving``: the process ends, the pool looks for a worker that takes the copy over. ``stays``: the instance
        serves on without it. Raises ``Conflict`` when it is the model's last, or what ``Bus.request`` raises.
        """
        await self._retire(
            RetireCopy(
                worker_id=self._worker.worker_id,
                kind="gpu",
                model=instance.model,
                model_hash=instance.model_hash,
                instance_id=instance.instance_id,
                undo=undo,
                leaving=leaving,
                stays=stays,
                sequence=self._sequence,
            )
        )

    async def retire_host(self, copy: HostCopy, *, leaving: bool = False) -> None:
        """Ask whether a host copy may go. Raises as ``retire``."""
        await self._retire(
            RetireCopy(
                worker_id=self._worker.worker_id,
                kind="host",
                model=copy.model,
                model_hash=copy.model_hash,
                leaving=leaving,
                sequence=self._sequence,
            )
        )

    async def _retire(self, request: RetireCopy) -> None:
        await self._bus.request(subjects.pool("retire_copy"), request, Ack, timeout_s=RETIRE_TIMEOUT_S)

    async def _report(self, now: WorkerStanding) -> HeartbeatAck | None:
        """The pool's answer to a report; None if there was none."""
        self._sequence += 1
        sequence = self._sequence
        report = WorkerHeartbeat(
            worker=self._worker,
            state=now.state,
            instance=now.instance,
            sequence=sequence,
            leaving=self._leaving,
            stopping=self._stopping,
            host_copies=now.host_copies,
            nic_egress_gbps=now.nic_egress_gbps,
            nic_ingress_gbps=now.nic_ingress_gbps,
            clock_ahead_s=self._skew.told_s,
            warm=now.warm,
        )
        asked_s = time.time()
        try:
            ack = await self._bus.request(
                subjects.pool("heartbeat"), report, HeartbeatAck, timeout_s=max(0.2, self._lease_s / 2)
            )
        except DuplicateId:
            # Not this process's to repair: it ends.
            raise
        except BlitzError as error:
            if self.registered.is_set():
                self._outage.failed("the pool did not take our report: %s", error)
            else:
                log.debug("the pool did not take our report: %s", error)
            return None
        if ack.unix_s is not None:
            self._skew.measured(asked_s, time.time(), ack.unix_s)
        self._outage.worked()
        if not self.registered.is_set():
            log.info("registered with the pool")
        self.registered.set()
        self._lease_s = ack.lease_s
        async with self._reported:
            self._confirmed = sequence
            self._reported.notify_all()
        wanted = [*ack.wants_models]
        if ack.wants_model and now.instance is not None:
            wanted.append(now.instance.model_hash)
        for model_hash in dict.fromkeys(wanted):
            await self._restore(model_hash)
        return ack

    async def _restore(self, model_hash: str) -> None:
        model = self._model(model_hash)
        if model is None:
            return
        try:
            await self._bus.request(
                subjects.pool("restore_model"), RestoreModel(model=model), Ack, timeout_s=self._lease_s
            )
        except BlitzError as error:
            log.warning("the pool did not take model %s back: %s", model.name, error)


async def wait_until_retired(ask: Callable[[], Awaitable[None]], what: str) -> None:
    """Return once the pool lets a copy go: there is another copy, or no other worker could hold one. Until then the
    pool has another worker load it, perhaps from this one. ``ask`` raises ``Conflict`` as long as the copy must stay.

    Returns, too, if the pool cannot be asked. No limit of its own: cancel it.
    """
    loop = asyncio.get_running_loop()
    heard_s, waits = loop.time(), False
    while True:
        try:
            await ask()
        except Conflict as error:
            heard_s = loop.time()
            if not waits:
                log.info("%s waits for another worker to take it over: %s", what, error)
            waits = True
        except BlitzError as error:
            if loop.time() - heard_s >= POOL_SILENT_S:
                log.warning("%s goes without the pool's word: %s", what, error)
                return
        else:
            return
        await asyncio.sleep(ASK_INTERVAL_S)
