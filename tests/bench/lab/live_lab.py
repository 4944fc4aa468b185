"""The lab in which a pair works off a burst of requests, and what a fault test needs to know of the two."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.live.burst import Answer, BurstClient
from bench.replay.plan import prompt_of
from shared import subjects
from shared.bus.base import Stored
from shared.load_feed import subscribe_load
from shared.messages.common import Ack, AtWorker
from shared.messages.live import WorkerOrder, ZigzagAssignment
from shared.messages.load import LoadReport
from shared.messages.operations import LiveRecord, ScaleRecord
from shared.messages.plans import ScalePlan
from shared.messages.registry import InstanceInfo, LeaseBatch, LeaseVerdicts, LeaseWorkers, ReleaseWorkers
from tests.bench.lab.labs import ENDS_WITHIN_S, Lab

RATE = Rate.parse("120mbit")
"""The model's 34 MB take 2.3 s."""
FAST = Rate.parse("1gbit")
"""For what happens after the requests."""
TOKEN_S = 0.0003
"""Per layer. One instance alone needs 2.4 s for the prompts of a burst."""


def _prompts(num_tokens: Sequence[int], *, first: int = 0) -> tuple[tuple[int, ...], ...]:
    return tuple(prompt_of(7, first + i, count, token_ids=range(10, 250)) for i, count in enumerate(num_tokens))


BURST = _prompts((192, 96, 64, 160, 64, 32, 128, 48, 96, 128))
"""Not all equal, and the short ones share a batch."""
LONG_TOKENS = 480
LONG = _prompts((LONG_TOKENS, LONG_TOKENS), first=len(BURST))
UNEVEN = (*BURST[:2], *LONG, LONG[0], *(BURST[6], BURST[9]) * 2)
"""Behind what keeps the source busy until there is a pair, long prompts stand before short ones: a pair gains from
gates, also if the source has begun the first long one by then."""
OUTPUT_TOKENS = 16
BUSY_S = len(BURST[0]) * TOKEN_S
"""Some layers, of whichever prompts."""
NUM_STREAMS, STREAM_TOKENS = 3, 100
"""Requests that decode already when the burst comes, and still do when it is disturbed."""
WORKER_ENV = {
    "BLITZ_MOCK_LAYER_PER_TOKEN_US": f"{TOKEN_S * 1e6:g}",
    "BLITZ_WORKER_PREFILL_CHUNK": "192",
    "BLITZ_WORKER_MAX_BATCH_TOKENS": "224",
    "BLITZ_WORKER_MAX_QUEUED_TOKENS": "8192",
}
"""The whole burst fits one instance's queue."""
MAX_BURSTS = 5
_FRESH_S = 0.5
_LEASE_S = 5.0
_RPC_S = 5.0


class _Over(Exception):
    """The burst has been answered, or the target has loaded, before what is waited for."""


class Burst:
    """Requests that are under way, and the answers that an idle instance gave to the same prompts before."""

    def __init__(self, asked: list[asyncio.Task[Answer]], expected: tuple[Answer, ...]) -> None:
        self._asked = asked
        self._expected = expected

    async def answered_as_alone(self) -> None:
        """Every request ends, with exactly its tokens: a token lost, repeated or of another request shows."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            answers = await asyncio.gather(*self._asked)
        assert [(a.text, a.num_tokens) for a in answers] == [(e.text, e.num_tokens) for e in self._expected]

    def goes_on(self) -> bool:
        """Not all are answered."""
        return not all(task.done() for task in self._asked)

    async def cancel(self) -> None:
        """Of a case that failed; otherwise all have ended."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)


@dataclass(slots=True)
class Cooperation:
    """A pair and the burst that it works off."""

    burst: Burst
    record: ScaleRecord
    """The newest known of the operation."""

    @property
    def live(self) -> LiveRecord:
        """What is recorded of the pair."""
        (pair,) = self.record.live
        return pair

    @property
    def target_layers(self) -> dict[str, int]:
        """The layers that the target has run, by batch."""
        return {batch.batch_id: batch.target_layers for batch in self.live.batches}


class LiveLab(Lab):
    """Call ``prepare`` first."""

    def __init__(self, network: Network, stack: LabStack, short: BurstClient, long: BurstClient) -> None:
        """``short``, ``long``: clients that ask for ``OUTPUT_TOKENS`` and for ``STREAM_TOKENS``."""
        super().__init__(network, stack)
        self._short = short
        self._long = long
        self._reports: dict[str, LoadReport] = {}
        self._reported_s: dict[str, float] = {}
        """When those came (monotonic)."""
        self._plans: dict[str, ScalePlan] = {}
        self._assignments: dict[str, ZigzagAssignment] = {}
        self._streams_alone: tuple[Answer, ...] = ()
        self._alone: dict[tuple[int, ...], Answer] = {}
        self._queue_limit = 0

    async def prepare(self) -> None:
        """Ask the one idle instance for everything that will be asked, and listen to what services tell each other."""
        bus = await self.stack.bus_as("planner")
        await subscribe_load(bus, self._on_load)
        await bus.subscribe_events(subjects.scale_plans(), ScalePlan, self._on_plan)
        await bus.subscribe_events(subjects.zigzag_assignments(), ZigzagAssignment, self._on_assignment)
        self._streams_alone = await self._long.alone(BURST[:NUM_STREAMS])
        prompts = (*BURST, *LONG)
        self._alone = dict(zip(prompts, await self._short.alone(prompts), strict=True))
        (instance,) = [w.instance for w in await self.stack.workers() if w.instance is not None]
        self._queue_limit = instance.max_queued_tokens

    def _on_load(self, report: LoadReport) -> None:
        self._reports[report.instance_id] = report
        self._reported_s[report.instance_id] = time.monotonic()

    async def _on_plan(self, plan: Stored[ScalePlan]) -> None:
        self._plans[plan.event.plan_id] = plan.event

    async def _on_assignment(self, assignment: Stored[ZigzagAssignment]) -> None:
        self._assignments[assignment.event.pair_id] = assignment.event

    # --- the situation -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def cooperating(
        self, prompts: tuple[tuple[int, ...], ...] = BURST, *, busy_s: float = BUSY_S
    ) -> AsyncIterator[Cooperation]:
        """A burst at one instance, and a second one that helps: enters once that was so busy, and still loads.

        At the end every request is answered as it is by an idle instance; then the links become fast, and the
        operation and its pair have ended.
        """
        pair = await self._cooperation(prompts, busy_s)
        try:
            yield pair
            await pair.burst.answered_as_alone()
            self.set_rates(FAST)
            pair.record = await self.ended(pair.record)
        finally:
            await pair.burst.cancel()

    async def _cooperation(self, prompts: tuple[tuple[int, ...], ...], busy_s: float) -> Cooperation:
        """Asks again after a burst that was over, or a load, before the two were seen to help each other: on a machine
        that is busy otherwise."""
        for _ in range(MAX_BURSTS):
            await self.until(self._one_instance, "what was before is gone")
            streams = self._long.burst(BURST[:NUM_STREAMS])
            expected = (*self._streams_alone, *[self._alone[prompt] for prompt in prompts])
            burst, record = Burst(streams, expected[:NUM_STREAMS]), None
            try:
                await self.until(self._while(burst, self._decodes), "the streams decode")
                burst = Burst([*streams, *self._short.burst(prompts)], expected)
                await self.until(self._while(burst, self._queues(len(prompts) // 2)), "the burst waits at the instance")
                record = await self.scale(2, live="always")
                return Cooperation(burst, await self._paired(record, burst, busy_s))
            except _Over:
                await burst.answered_as_alone()
                if record is not None:
                    await self.ended(record)
                await self.scale(1)
                await self.settled(1)
            except BaseException:
                await burst.cancel()
                raise
        raise AssertionError(f"{MAX_BURSTS} bursts were over before two instances helped each other")

    def _while(self, burst: Burst, condition: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
        """The condition, which can no longer come once the burst is over."""

        async def still() -> bool:
            if await condition():
                return True
            if not burst.goes_on():
                raise _Over
            return False

        return still

    async def _one_instance(self) -> bool:
        """No other instance, and no worker that is leased for one: a second one will have to be loaded."""
        workers = await self.stack.workers()
        return sum(w.instance is not None or bool(w.lease_plan_id) for w in workers) == 1

    async def _paired(self, record: ScaleRecord, burst: Burst, busy_s: float) -> ScaleRecord:
        """Raises: ``_Over``."""
        assert len(record.targets) == 1, record
        (target,) = record.targets

        async def helps() -> bool:
            mine = [r for r in self._fresh() if r.instance_id == target.instance_id]
            if any(r.state == "serving" for r in mine):
                raise _Over
            return any(r.state == "live" and r.busy_s_total >= busy_s for r in mine)

        await self.until(self._while(burst, helps), f"{target.worker_id} runs layers")
        record = await self.stack.admin.scale_record(record.plan_id)
        if record.targets[0].loaded_ms is not None or not burst.goes_on():
            raise _Over
        assert [p.outcome for p in record.live] == ["running"], record
        return record

    def _queues(self, num_requests: int) -> Callable[[], Awaitable[bool]]:
        async def queues() -> bool:
            return any(r.queued_requests >= num_requests for r in self._fresh())

        return queues

    async def _decodes(self) -> bool:
        return any(r.running_requests == NUM_STREAMS and not r.queued_requests for r in self._fresh())

    def _fresh(self) -> list[LoadReport]:
        """Not of instances that are gone."""
        now_s = time.monotonic()
        return [r for i, r in self._reports.items() if now_s - self._reported_s[i] < _FRESH_S]

    async def loads(self, pair: Cooperation) -> bool:
        """The pair's target does not have everything yet."""
        record = await self.stack.admin.scale_record(pair.record.plan_id)
        return record.targets[0].loaded_ms is None

    async def gates(self, pair: Cooperation) -> dict[str, int]:
        """The layers that the target shall run, by batch, once the planner has split what waits."""

        async def split() -> bool:
            assignment = self._assignments.get(pair.live.pair_id)
            return assignment is not None and assignment.revision > 0

        await self.until(split, "the planner splits the batches")
        return {gate.batch_id: gate.num_layers for gate in self._assignments[pair.live.pair_id].gates}

    def gates_lapsed(self, pair: Cooperation) -> bool:
        """Whether the target dropped the split, because a layer was late: on a machine that is busy otherwise."""
        said = f"pair {pair.live.pair_id}: layers are late"
        return any(said in log.read_text(errors="replace") for log in self.stack.logs.glob(f"{pair.live.target}*.log"))

    # --- faults ------------------------------------------------------------------------------

    def set_rates(self, rate: Rate) -> None:
        """Of every host's link, from now on."""
        for host in range(len(self.network.hosts)):
            self.network.set_rate(host, rate)

    async def supersede(self, pair: Cooperation) -> ScalePlan:
        """Send the target of a pair a newer plan: as after a registry that lost the target's lease and gave another."""
        old = self._plans[pair.record.plan_id]
        (target,) = old.targets
        plan_id = f"{old.plan_id}-newer"
        member = msgspec.structs.replace(
            target, instance_id=f"{target.instance_id}-newer", epoch=await self._epoch(old.term)
        )
        newer = msgspec.structs.replace(
            old, plan_id=plan_id, members=(*[m for m in old.members if m is not target], member)
        )
        subject, order = subjects.worker_plans(target.worker), WorkerOrder(scale=newer)
        planner = await self.stack.bus_as("planner")
        await planner.publish_event(subject, order, message_id=plan_id)
        return newer

    async def _epoch(self, term: int) -> int:
        """The newest of all: of the lease of a spare worker, which is given back."""
        bus, plan_id = await self.stack.bus_as("planner"), "plan-for-an-epoch"
        (spare, *_) = [w.worker for w in await self.stack.workers() if w.state == "spare"]
        at = AtWorker(worker_id=spare.worker_id, incarnation=spare.incarnation)
        lease = LeaseWorkers(plan_id=plan_id, model=self.stack.model, workers=(at,), ttl_s=_LEASE_S, term=term)
        batch = LeaseBatch(leases=(lease,), term=term)
        (verdict,) = (await bus.request(subjects.pool("lease_batch"), batch, LeaseVerdicts, timeout_s=_RPC_S)).verdicts
        assert verdict.grant is not None, verdict.error
        release = ReleaseWorkers(plan_id=plan_id, worker_ids=(spare.worker_id,), term=term)
        await bus.request(subjects.pool("release"), release, Ack, timeout_s=_RPC_S)
        return verdict.grant.epochs[0][1]

    # --- afterwards --------------------------------------------------------------------------

    def is_idle(self, running: list[InstanceInfo]) -> bool:
        """No requests, KV or pair is left."""
        reports = [self._reports.get(i.instance_id) for i in running]
        return (
            # While it is the source of a pair, an instance takes twice as much.
            all(i.max_queued_tokens == self._queue_limit for i in running)
            and all(r is not None and _has_nothing(r) for r in reports)
            and {r.instance_id for r in self._fresh()} == {i.instance_id for i in running}
        )

    def seen(self) -> str:
        return f"{self._fresh()}"

    async def recovers(self, instances: int) -> None:
        """So many instances serve and have nothing to do; then the model scales out to every host."""
        await self.settled(instances)
        num_hosts = len(self.network.hosts)
        record = await self.ended(await self.scale(num_hosts))
        assert record.status == "done", record
        await self.settled(num_hosts)


def _has_nothing(report: LoadReport) -> bool:
    return (report.queued_requests, report.running_requests, report.queued_tokens, report.kv_blocks_used) == (0,) * 4
