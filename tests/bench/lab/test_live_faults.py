"""Live scaling when processes are killed and links fail: every request ends once, whole, and nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import pytest
import pytest_asyncio

from bench.lab import system
from bench.lab.errors import LabUnavailable
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.live.burst import Answer, BurstClient
from bench.live.checkpoint import make_checkpoint
from bench.replay.plan import prompt_of
from shared import subjects
from shared.checkpoint import inspect_checkpoint
from shared.errors import Conflict, Unavailable
from shared.messages.common import LiveChoice
from shared.messages.load import LoadReport
from shared.messages.scaling import LiveRecord, ScaleRecord, TargetRecord

pytestmark = [
    pytest.mark.root,
    pytest.mark.stack,
    pytest.mark.ucx,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(system.missing()), reason=system.missing() or "a lab can be made"),
]

NUM_HOSTS = 3
NUM_LAYERS = 8
RATE = Rate.parse("120mbit")
"""The model's 34 MB take 2.3 s."""
SLOW = Rate.parse("12mbit")
FAST = Rate.parse("1gbit")
"""For what happens after the requests."""
TOKEN_S = 0.0003
"""Per layer. One instance alone needs 2.4 s for the prompts of a burst."""
PROMPT_TOKENS = (192, 96, 64, 160, 64, 32, 128, 48, 96, 128)
"""Not all equal, and the short ones share a batch."""
PROMPTS = tuple(prompt_of(7, index, tokens, token_ids=range(10, 250)) for index, tokens in enumerate(PROMPT_TOKENS))
OUTPUT_TOKENS = 16
BUSY_S = max(PROMPT_TOKENS) * TOKEN_S
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
NO_DEMAND = {"monitor": {"BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9"}}
"""Nothing scales but what a case asks for."""
HOLD_S = 600.0
FRESH_S = 0.5
ENDS_WITHIN_S = 30.0
SETTLES_WITHIN_S = 30.0
CUT_S = 2.0
_POLL_S = 0.02


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


class Lab:
    """The stack under test, and what is asked of it in every case."""

    def __init__(self, network: Network, stack: LabStack, short: BurstClient, long: BurstClient) -> None:
        self.network = network
        self.stack = stack
        self._short = short
        self._long = long
        self._reports: dict[str, LoadReport] = {}
        self._alone: tuple[tuple[Answer, ...], tuple[Answer, ...]] = ((), ())
        self._queue_limit = 0
        self._bursts: list[Burst] = []

    async def prepare(self) -> None:
        """Ask the one idle instance for everything that will be asked."""
        await self.stack.bus.subscribe(subjects.load(), LoadReport, self._on_load)
        self._alone = await self._long.alone(PROMPTS[:NUM_STREAMS]), await self._short.alone(PROMPTS)
        (instance,) = [w.instance for w in await self.stack.workers() if w.instance is not None]
        self._queue_limit = instance.max_queued_tokens

    def _on_load(self, report: LoadReport) -> None:
        self._reports[report.instance_id] = report

    # --- a case ------------------------------------------------------------------------------

    async def scale(self, instances: int, *, live: LiveChoice = "never") -> ScaleRecord:
        """Begin to scale. Asks again while the workers were leased to another plan just now."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while True:
                with contextlib.suppress(Conflict):
                    return await self.stack.admin.scale(self.stack.model, instances, hold_s=HOLD_S, live=live)

    async def cooperate(self, *, times: int = 1, busy_s: float = BUSY_S) -> tuple[Burst, ScaleRecord, LiveRecord]:
        """A burst at one instance, and a second one that helps: returns once that was so busy, and still loads.

        ``times``: each of its prompts is asked.
        """
        long_expected, short_expected = self._alone
        streams = self._long.burst(PROMPTS[:NUM_STREAMS])
        await self.until(self._decodes, "the streams decode")
        burst = Burst([*streams, *self._short.burst(PROMPTS * times)], (*long_expected, *short_expected * times))
        self._bursts.append(burst)
        await self.until(self._queues, "the burst waits at the instance")
        record = await self.scale(2, live="always")
        (pair,) = record.live
        (target,) = record.targets
        await self.until(lambda: self._helps(target, busy_s), f"{target.worker_id} runs layers")
        record = await self.stack.admin.scale_record(record.plan_id)
        assert record.targets[0].loaded_ms is None, f"too late to disturb anything: {record}"
        assert record.live[0].outcome == "running", record
        assert burst.goes_on()
        return burst, record, pair

    async def _decodes(self) -> bool:
        return any(r.running_requests == NUM_STREAMS and not r.queued_requests for r in self._fresh())

    async def _queues(self) -> bool:
        return any(r.queued_requests >= len(PROMPTS) // 2 for r in self._fresh())

    async def _helps(self, target: TargetRecord, busy_s: float) -> bool:
        return any(
            r.instance_id == target.instance_id and r.state == "live" and r.busy_s_total >= busy_s
            for r in self._fresh()
        )

    def _fresh(self) -> list[LoadReport]:
        """Not of instances that are gone."""
        now_s = time.time()
        return [r for r in self._reports.values() if now_s - r.published_at_s < FRESH_S]

    async def pair_ended(self, record: ScaleRecord) -> LiveRecord:
        """What became of the operation's pair."""
        (pair,) = (await self.ended(record)).live
        return pair

    async def ended(self, record: ScaleRecord) -> ScaleRecord:
        """The operation's end, with its pair's; whoever failed says why."""

        async def over() -> bool:
            nonlocal record
            record = await self.stack.admin.scale_record(record.plan_id)
            return record.status != "running" and all(p.outcome != "running" for p in record.live)

        await self.until(over, "the operation and its pair have ended")
        assert all((t.serving_ms is None) != (t.failure == "") for t in record.targets), record
        assert all(p.reason for p in record.live if p.outcome == "failed"), record
        return record

    def set_rates(self, rate: Rate) -> None:
        """Of every host's link, from now on."""
        for host in range(NUM_HOSTS):
            self.network.set_rate(host, rate)

    async def cut(self, worker_id: str) -> None:
        """Pull the cable of a worker's data link for ``CUT_S``."""
        host = self.stack.host_of(worker_id)
        self.network.set_link(host, up=False)
        try:
            await asyncio.sleep(CUT_S)
        finally:
            self.network.set_link(host, up=True)

    # --- afterwards --------------------------------------------------------------------------

    async def nothing_is_left(self, instances: int) -> None:
        """So many instances serve with equal weights and without requests, KV or a pair; the others are spare."""

        async def well() -> bool:
            workers = await self.stack.workers()
            running = [w.instance for w in workers if w.instance is not None]
            reports = [self._reports.get(i.instance_id) for i in running]
            return (
                len(workers) == NUM_HOSTS
                and len(running) == instances
                and sum(w.state == "serving" for w in workers) == instances
                and sum(w.state == "spare" for w in workers) == NUM_HOSTS - instances
                and not any(w.lease_plan_id or w.lease_model for w in workers)
                and len({i.weights_digest for i in running}) <= 1
                # While it is the source of a pair, an instance takes twice as much.
                and all(i.max_queued_tokens == self._queue_limit for i in running)
                and all(r is not None and _is_idle(r) for r in reports)
                and {r.instance_id for r in self._fresh()} == {i.instance_id for i in running}
            )

        await self.until(well, f"{instances} instances serve and have nothing to do")

    async def scales_again(self) -> None:
        """Out to every host."""
        record = await self.ended(await self.scale(NUM_HOSTS))
        assert record.status == "done", record
        await self.nothing_is_left(NUM_HOSTS)

    async def cancel_bursts(self) -> None:
        """Of a case that failed; otherwise all requests have ended."""
        while self._bursts:
            await self._bursts.pop().cancel()

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Poll, and say what it looked like if it never came."""
        deadline_s = time.monotonic() + SETTLES_WITHIN_S
        while True:
            with contextlib.suppress(Unavailable):
                if await condition():
                    return
            if time.monotonic() > deadline_s:
                states = [
                    (w.worker.worker_id, w.state, w.lease_plan_id, w.instance) for w in await self.stack.workers()
                ]
                pytest.fail(f"waited in vain until {what}: {states}; {self._fresh()}")
            await asyncio.sleep(_POLL_S)


def _is_idle(report: LoadReport) -> bool:
    return (report.queued_requests, report.running_requests, report.queued_tokens, report.kv_blocks_used) == (0,) * 4


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    with contextlib.ExitStack() as entered:
        try:
            network = entered.enter_context(Network(NUM_HOSTS, RATE))
        except LabUnavailable as error:
            if "another lab" not in error.message:
                raise
            pytest.skip(error.message)
        folder = tmp_path_factory.mktemp("live-faults")
        checkpoint = make_checkpoint(folder / "models", NUM_LAYERS)
        stack = LabStack(
            network,
            folder / "state",
            checkpoint,
            weights_bytes=inspect_checkpoint(checkpoint, with_hash=False).layout.num_bytes,
            worker_env=WORKER_ENV,
            service_env=NO_DEMAND,
            # A target with a copy on its own host would need no network.
            copies_on=(),
        )
        async with stack:
            short = BurstClient(stack.url, stack.model, output_tokens=OUTPUT_TOKENS)
            long = BurstClient(stack.url, stack.model, output_tokens=STREAM_TOKENS)
            for client in (short, long):
                entered.callback(client.close)
            lab = Lab(network, stack, short, long)
            await lab.prepare()
            yield lab


@pytest_asyncio.fixture(loop_scope="module")
async def lab(running: Lab) -> AsyncIterator[Lab]:
    """One instance serves, two workers are spare, and the links are quiet."""
    running.set_rates(RATE)
    await running.scale(1)
    await running.nothing_is_left(1)
    await running.stack.wait_quiet()
    yield running
    await running.cancel_bursts()


async def test_a_target_that_is_killed_loses_no_request(lab: Lab) -> None:
    burst, record, pair = await lab.cooperate()
    lab.stack.kill(pair.target)
    await burst.answered_as_alone()
    lab.set_rates(FAST)
    assert (await lab.pair_ended(record)).outcome == "failed"
    # The floor of two holds: another worker takes its place.
    await lab.nothing_is_left(2)
    await lab.scales_again()


async def test_a_source_that_is_killed_leaves_its_requests_to_the_gateway(lab: Lab) -> None:
    burst, record, pair = await lab.cooperate()
    lab.stack.kill(pair.source)
    await burst.answered_as_alone()
    lab.set_rates(FAST)
    record = await lab.ended(record)
    # The target goes on loading, from its own disk.
    assert record.status == "done", record
    # Nobody is left to report what the two did.
    assert record.live[0].outcome in ("failed", "unknown"), record
    await lab.nothing_is_left(2)
    await lab.scales_again()


@pytest.mark.parametrize("member", ["target", "source"])
async def test_a_link_that_is_cut_for_a_moment_loses_no_request(lab: Lab, member: Literal["target", "source"]) -> None:
    deaths = lab.stack.deaths()
    burst, record, pair = await lab.cooperate()
    await lab.cut(getattr(pair, member))
    await burst.answered_as_alone()
    lab.set_rates(FAST)
    record = await lab.ended(record)
    assert record.status == "done", record
    await lab.nothing_is_left(2)
    assert lab.stack.deaths() == deaths
    await lab.scales_again()


async def test_layers_that_come_at_a_tenth_of_the_speed_delay_no_request(lab: Lab) -> None:
    lab.set_rates(SLOW)
    # The first layer may take longer than the burst.
    burst, record, _ = await lab.cooperate(times=2, busy_s=0.0)
    await burst.answered_as_alone()
    record = await lab.stack.admin.scale_record(record.plan_id)
    assert record.targets[0].loaded_ms is None, f"the requests waited for the layers: {record}"
    lab.set_rates(FAST)
    record = await lab.ended(record)
    assert record.status == "done", record
    await lab.nothing_is_left(2)
    await lab.scales_again()


async def test_a_load_that_is_cancelled_loses_no_request(lab: Lab) -> None:
    burst, record, _ = await lab.cooperate()
    path = (await lab.stack.admin.status()).models[0].path
    await lab.stack.admin.remove_model(lab.stack.model)
    await burst.answered_as_alone()
    lab.set_rates(FAST)
    # The target's load is cancelled and the source drains: whichever is heard of first ends the pair.
    assert (await lab.pair_ended(record)).outcome in ("failed", "dissolved")
    await lab.nothing_is_left(0)
    await lab.stack.admin.add_model(path, name=lab.stack.model)
    await lab.nothing_is_left(1)
    await lab.scales_again()
