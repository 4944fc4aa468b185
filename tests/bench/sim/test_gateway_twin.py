"""The simulated gateway against the real dispatcher: the same things happen to both, and they do the same.

Workers and messages are a script here, the same for both; messages take no time.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from bench.sim.clock import Clock
from bench.sim.gateway import GatewaySettings, SimGateway
from bench.sim.latencies import Latencies
from bench.sim.requests import Served, SimRequest
from services.gateway.config import GatewayConfig
from services.gateway.core.router import TICK_S, Assignment
from services.gateway.core.routes import ModelRoutes, RouteDiff, RouteView
from services.gateway.core.stream import StreamState
from services.gateway.dispatcher import Dispatcher
from services.gateway.metrics import GatewayMetrics
from shared import subjects
from shared.errors import BlitzError, Conflict, ContextLengthExceeded, EngineBroken, Overloaded, SentBack
from shared.messages.common import Ack, ErrorInfo, InstanceState, Role
from shared.messages.generation import FinishReason, SamplingParams, StreamPart, Submit, TokenBatch, TokenLogprobs
from shared.messages.load import LoadReport
from shared.messages.registry import Route
from tests.processes import INCARNATION, process
from tests.records import model
from tests.services.gateway.core.routing import route
from tests.services.monitor.core.reports import report
from tests.shared.bus.memory import MemoryBroker

QUEUED, TIMEOUT_S, ATTEMPTS = 12, 4.0, 3
PATIENCE_S = 3.0
"""No request waits for longer at its instance: what then happens is not what this compares."""
NO_LATENCY = Latencies(*[0.0] * len(Latencies()))
NAMES = ("a", "b", "c")
ROLES: Sequence[Sequence[Role]] = (("colocated",) * 3, ("prefill", "prefill", "decode"))


@dataclass
class Held:
    """A request at an instance."""

    request_id: str
    attempt: int
    worker_id: str
    instance_id: str
    decode: tuple[str, str] | None
    tokens: int
    max_tokens: int
    since_s: float


@dataclass
class Twin(ABC):
    """A gateway between a client and workers that are made of nothing."""

    now_s: float = 0.0
    log: list[object] = field(default_factory=list)
    """Submits, and how many requests wait and are at instances, in order."""
    ends: list[tuple[float, str, str]] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    answers: dict[str, BlitzError] = field(default_factory=dict)
    """By instance, how it refuses."""
    routes: dict[str, Route] = field(default_factory=dict)

    @abstractmethod
    async def start(self) -> None: ...
    @abstractmethod
    async def pass_time(self, until_s: float) -> None: ...
    @abstractmethod
    async def arrive(self, index: int, prompt: int, output: int) -> None: ...
    @abstractmethod
    async def show(self) -> None: ...
    @abstractmethod
    async def hear(self, said: LoadReport) -> None: ...
    @abstractmethod
    async def tokens(self, held: Held, count: int) -> None: ...
    @abstractmethod
    async def fail(self, held: Held, error: BlitzError) -> None: ...
    @abstractmethod
    def queued(self) -> tuple[int, int, int]:
        """Requests and tokens that wait, requests at instances."""

    def take(self, held: Held, *, may_wait: bool) -> None:
        """A submit is here: answer it."""
        to = held.attempt, held.instance_id, held.decode, held.tokens, may_wait
        self.log.append(("submit", round(self.now_s, 6), held.request_id, *to))
        if held.instance_id in self.answers:
            raise self.answers[held.instance_id]
        self.held[held.request_id] = held

    def ended(self, request_id: str, how: str) -> None:
        self.ends.append((round(self.now_s, 6), request_id, how))

    async def put(self, name: str, role: Role, state: InstanceState) -> None:
        self.routes[name] = route(name, running=3, queued_tokens=60, state=state, role=role, context=100)
        await self.show()

    async def step(self, which: int, count: int) -> None:
        """One of the requests gets tokens; its decode instance takes it over after the first."""
        if not self.held:
            return
        held = self.held[sorted(self.held)[which % len(self.held)]]
        if held.decode is not None and held.tokens:
            (held.worker_id, held.instance_id), held.decode = held.decode, None
        count = min(count, held.max_tokens - held.tokens)
        held.tokens += count
        held.since_s = self.now_s
        if held.tokens == held.max_tokens:
            del self.held[held.request_id]
        await self.tokens(held, count)

    async def lose(self, which: int, error: BlitzError) -> None:
        if self.held:
            held = self.held.pop(sorted(self.held)[which % len(self.held)])
            await self.fail(held, error)

    async def go_on(self) -> None:
        """Those that have waited for long get a token."""
        for held in list(self.held.values()):
            if self.now_s - held.since_s > PATIENCE_S:
                await self.step(sorted(self.held).index(held.request_id), 1)


class Simulated(Twin):
    async def start(self) -> None:
        self.clock = Clock()
        self.gateway = SimGateway(
            self.clock,
            self._submit,
            self._served,
            settings=GatewaySettings(QUEUED, TIMEOUT_S, ATTEMPTS),
            latencies=NO_LATENCY,
        )

    def _served(self, served: Served) -> None:
        self.now_s = self.clock.now_s
        self.ended(f"r{served.request.index}", served.failure or "finished")

    def _submit(self, assignment: Assignment, stream: StreamState) -> None:
        self.now_s = self.clock.now_s
        self.take(
            Held(
                stream.request_id,
                stream.attempt,
                stream.worker.id,
                stream.instance_id,
                (stream.decode_at.worker_id, stream.decode_at.instance_id) if stream.decode_at is not None else None,
                len(stream.output_token_ids),
                stream.sampling.max_tokens,
                self.now_s,
            ),
            may_wait=assignment.may_wait,
        )

    async def pass_time(self, until_s: float) -> None:
        self.clock.run(until_s)
        self.now_s = until_s
        self.gateway.check_conserved()

    async def arrive(self, index: int, prompt: int, output: int) -> None:
        self.gateway.arrive(SimRequest(index, self.now_s, "m", prompt, output))
        await self.pass_time(self.now_s)

    async def show(self) -> None:
        self.gateway.routes_changed("m", self.routes.values())
        await self.pass_time(self.now_s)

    async def hear(self, said: LoadReport) -> None:
        self.gateway.on_load(said)
        await self.pass_time(self.now_s)

    async def tokens(self, held: Held, count: int) -> None:
        times_s = [self.now_s] * count
        key = held.request_id, held.attempt
        self.gateway.on_tokens([key], times_s, worker=process(held.worker_id), instance_id=held.instance_id)
        if held.tokens == held.max_tokens:
            self.gateway.on_end(key)
        await self.pass_time(self.now_s)

    async def fail(self, held: Held, error: BlitzError) -> None:
        self.gateway.on_failed((held.request_id, held.attempt), error)
        await self.pass_time(self.now_s)

    def queued(self) -> tuple[int, int, int]:
        waiting = self.gateway.router.queued("m")
        return *waiting, self.gateway.num_active - waiting[0]


class _Sink:
    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended

    def on_tokens(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        now_s: float,
    ) -> bool:
        if finish_reason is not None:
            self._ended("finished")
        return False

    def on_error(self, error: BlitzError) -> None:
        if isinstance(error, ContextLengthExceeded):
            self._ended("too_long")
        else:
            self._ended("timeout" if error.message.startswith("no instance") else "gave_up")


class Real(Twin):
    async def start(self) -> None:
        broker = MemoryBroker()
        self.view = RouteView()
        self.view.models["m"] = ModelRoutes(model(), {})
        config = GatewayConfig(
            max_queued_requests=QUEUED,
            queue_timeout_s=TIMEOUT_S,
            max_attempts=ATTEMPTS,
            # Nobody is asked whether he lives, and no answer is late: only the clock of the test decides.
            submit_timeout_s=1e6,
            stall_s=1e6,
            probe_s=1e6,
        )
        self.dispatcher = Dispatcher(
            broker.bus("gateway"), self.view, GatewayMetrics(self.view), config, clock=lambda: self.now_s
        )
        bus = broker.bus("workers")
        for name in NAMES:
            await bus.respond(subjects.worker_submit(process(f"w-{name}")), Submit, self._submit)
        self.num_ticks = 0

    async def _submit(self, message: Submit) -> Ack:
        decode_at, worker_id = message.decode_at, f"w-{message.instance_id}"
        self.take(
            Held(
                message.request_id,
                message.attempt,
                worker_id,
                message.instance_id,
                (decode_at.worker_id, decode_at.instance_id) if decode_at is not None else None,
                len(message.output_token_ids),
                message.sampling.max_tokens,
                self.now_s,
            ),
            may_wait=message.may_wait,
        )
        return Ack()

    async def _settle(self) -> None:
        while len(self.dispatcher.tasks):
            await asyncio.sleep(0)

    async def pass_time(self, until_s: float) -> None:
        while (self.num_ticks + 1) * TICK_S <= until_s:
            self.num_ticks += 1
            self.now_s = self.num_ticks * TICK_S
            self.dispatcher.tick()
            await self._settle()
        self.now_s = until_s

    async def arrive(self, index: int, prompt: int, output: int) -> None:
        request_id = f"r{index}"
        stream = StreamState(
            request_id=request_id,
            model="m",
            prompt_token_ids=(1,) * prompt,
            sampling=SamplingParams(max_tokens=output, seed=0),
            arrived_at_s=self.now_s,
            model_hash=model().model_hash,
        )
        try:
            self.dispatcher.start(stream, _Sink(lambda how: self.ended(request_id, how)))
        except Overloaded:
            self.ended(request_id, "overloaded")
        await self._settle()

    async def show(self) -> None:
        self.view.models["m"] = ModelRoutes(model(), dict(self.routes))
        self.dispatcher.routes_changed(RouteDiff(models={"m"}))
        await self._settle()

    async def hear(self, said: LoadReport) -> None:
        self.dispatcher.on_load(said)
        await self._settle()

    async def tokens(self, held: Held, count: int) -> None:
        done: FinishReason | None = "length" if held.tokens == held.max_tokens else None
        await self._send(held, (7,) * count, done, None)

    async def fail(self, held: Held, error: BlitzError) -> None:
        await self._send(held, (), "error", ErrorInfo.of(error))

    async def _send(
        self, held: Held, tokens: tuple[int, ...], reason: FinishReason | None, error: ErrorInfo | None
    ) -> None:
        part = StreamPart(
            request_id=held.request_id,
            attempt=held.attempt,
            offset=held.tokens - len(tokens),
            token_ids=tokens,
            finish_reason=reason,
            error=error,
        )
        self.dispatcher.on_batch(
            TokenBatch(worker_id=held.worker_id, incarnation=INCARNATION, instance_id=held.instance_id, parts=(part,))
        )
        await self._settle()

    def queued(self) -> tuple[int, int, int]:
        inflight = self.dispatcher.requests.inflight_by_model().get("m", 0)
        return *self.dispatcher.router.queued("m"), inflight


async def act(twin: Twin, seed: int, roles: Sequence[Role]) -> None:
    """A random course of events."""
    draw = random.Random(seed)
    await twin.start()
    for name, role in zip(NAMES, roles, strict=True):
        await twin.put(name, role, "serving")
    num_requests = 0
    for step in range(300):
        what, which, count = draw.random(), draw.randrange(1000), draw.randint(1, 6)
        name, role = NAMES[which % 3], roles[which % 3]
        await twin.pass_time(twin.now_s + draw.choice([0.0, 0.013, 0.04, 0.3]))
        await twin.go_on()
        if step % 10 == 0:  # no report is so old that it counts no more
            for each in NAMES:
                await twin.hear(report(each))
        if what < 0.35:
            await twin.arrive(num_requests, draw.randint(1, 50), draw.randint(1, 65))
            num_requests += 1
        elif what < 0.75:
            await twin.step(which, 4 * count)
        elif what < 0.8:
            await twin.lose(which, SentBack("goes") if count > 2 else EngineBroken("broken"))
        elif what < 0.85:
            twin.answers[name] = Overloaded("full") if count > 2 else Conflict("not serving")
        elif what < 0.92:
            twin.answers.pop(name, None)
            await twin.hear(report(name))
        else:
            await twin.put(name, role, "serving" if count > 2 else "draining")
        twin.log.append(twin.queued())
    await twin.pass_time(twin.now_s + 0.5)


@pytest.mark.parametrize("roles", ROLES, ids=["colocated", "disaggregated"])
@pytest.mark.parametrize("seed", range(3))
async def test_it_does_what_the_dispatcher_does(seed: int, roles: Sequence[Role]) -> None:
    real, simulated = Real(), Simulated()
    await act(real, seed, roles)
    await act(simulated, seed, roles)
    for at, (theirs, mine) in enumerate(zip(real.log, simulated.log, strict=False)):
        assert mine == theirs, f"after {real.log[max(0, at - 10) : at]}"
    assert len(simulated.log) == len(real.log)
    # Those that end at one tick end in no particular order: the real one asks the planner first why some do.
    assert sorted(simulated.ends) == sorted(real.ends)
    assert {how for *_, how in real.ends} >= {"finished", "timeout", "overloaded", "too_long"}
