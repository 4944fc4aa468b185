"""The router under anything that can happen: nobody is lost, keys take turns, no instance gets more than it may."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway.core.bookings import ALONE, OtherGateways
from services.gateway.core.router import Router
from services.gateway.core.stream import StreamState
from shared.errors import Overloaded
from tests.processes import process
from tests.services.gateway.core.routing import load_report, queue_report, route, stream

INSTANCES = ("a", "b")
SLOTS = 3
QUEUE_TOKENS = 60
CONTEXT = 500
"""Of the instance that is always there."""
MAX_QUEUED = 12
DEADLINE_S = 30.0

keys = st.sampled_from(["", "x", "y", "z"])
priorities = st.sampled_from([0, 0, 1, -1])


@dataclass
class Booked:
    stream: StreamState
    instance_id: str
    accepted: bool = False
    started: bool = False


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(max_queued_requests=MAX_QUEUED, gateway_id="me")
        self.others = OtherGateways("me")
        self.foreign: dict[str, tuple[int, int, int]] = {}
        """Requests, queued requests and queued tokens of others, by the latest reports."""
        self.contention = ALONE
        self.now_s = 0.0
        self.number = 0
        self.place: dict[str, tuple[int, int]] = {}
        """Among those of its key: by priority, then by arrival."""
        self.deadlines: dict[str, float] = {}
        self.waiting: dict[str, StreamState] = {}
        self.booked: dict[str, Booked] = {}
        self.passed: dict[str, set[str]] = {}
        """By key that waits: the keys that had a turn since it began to wait, or had its own last one."""
        self.routes(set(INSTANCES))

    # --- what happens ------------------------------------------------------------------------

    @rule(key=keys, prompt=st.integers(1, 30) | st.integers(1, 80), long=st.booleans(), priority=priorities)
    def arrives(self, key: str, prompt: int, long: bool, priority: int) -> None:
        name = str(self.number)
        self.number += 1
        max_tokens = 2 * CONTEXT if long and prompt > 70 else 1
        request = stream(name, prompt, max_tokens=max_tokens, key=key, priority=priority)
        mine = sum(s.key == key for s in self.waiting.values()) if key else 0
        free = MAX_QUEUED - len(self.waiting)
        try:
            self.router.enqueue(request, deadline_s=self.now_s + DEADLINE_S, retry_after_s=1.0)
        except Overloaded:
            assert free <= 0 or mine > free
            return
        assert free > 0
        assert mine <= free
        self.place[name] = (priority, self.number)
        self.deadlines[name] = self.now_s + DEADLINE_S
        self._waits(name, request)

    @rule()
    def dispatches(self) -> None:
        queued = {name: s.key for name, s in self.waiting.items()}
        dispatched = self.router.dispatch("m", now_s=self.now_s)
        for name, _ in dispatched.refused:
            assert self.waiting[name].num_context_tokens > CONTEXT
            self._ended(self.waiting.pop(name))
            queued.pop(name)
        for assignment in dispatched.assignments:
            name, instance_id = assignment.request_id, assignment.route.instance_id
            request = self.waiting.pop(name)
            # Within a key nobody overtakes, but where no instance can hold the other.
            first = [n for n, key in queued.items() if key == request.key and self._holds(n)]
            assert min(first, key=self.place.__getitem__) == name
            del queued[name]
            self._turn(request.key, {key for n, key in queued.items() if self._holds(n)})
            self._may_take(instance_id, request)
            request.submitted_to(instance_id, process(f"w-{instance_id}"))
            self.booked[name] = Booked(request, instance_id)

    @precondition(lambda self: self.booked)
    @rule(data=st.data(), what=st.sampled_from(["accepted", "started", "finished", "refused", "failed", "cancelled"]))
    def goes_on(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.booked)))
        booked = self.booked[name]
        if what == "accepted":
            booked.accepted = True
            self.router.bookings.accepted(name)
        elif what == "started":
            booked.accepted = booked.started = True
            self.router.bookings.started(name)
        elif what in ("finished", "cancelled"):
            del self.booked[name]
            self.router.finish(name, "m")
        else:
            del self.booked[name]
            if what == "refused":
                self.router.refused(booked.instance_id, now_s=self.now_s)
            else:
                self.router.suspend(booked.instance_id, until_s=self.now_s + 1.0)
            booked.stream.requeued(fault=what == "failed")
            self.router.requeue(booked.stream, deadline_s=self.deadlines[name] + 1.0)
            self.deadlines[name] += 1.0
            self._waits(name, booked.stream)
            # Its turn is given back: nobody has passed over the others with it.
            for passed in self.passed.values():
                passed.discard(booked.stream.key)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self._ended(self.waiting.pop(name))
        self.router.finish(name, "m")

    @rule(instance_id=st.sampled_from(INSTANCES), foreign=st.tuples(*[st.integers(0, SLOTS)] * 2))
    def instance_reports(self, instance_id: str, foreign: tuple[int, int]) -> None:
        if instance_id not in self.known:
            return
        running, queued = foreign
        mine = [b for b in self.booked.values() if b.instance_id == instance_id and b.accepted]
        unstarted = [b for b in mine if not b.started]
        report = load_report(
            instance_id,
            running=running + len(mine) - len(unstarted),
            queued=queued + len(unstarted),
            queued_tokens=10 * queued + sum(b.stream.num_known_tokens for b in unstarted),
        )
        self.router.reported(report, now_s=self.now_s)
        self.foreign[instance_id] = (running + queued, queued, 10 * queued)

    @rule(queued=st.integers(0, 2), inflight=st.integers(0, 1), head=st.integers(0, 50))
    def gateway_reports(self, queued: int, inflight: int, head: int) -> None:
        report = queue_report("other", queued=queued, inflight=inflight, head_tokens=head if queued else 0)
        self.router.others_reported(report, now_s=self.now_s)
        self.others.take(report, self.now_s)
        self.contention = self.others.about("m")

    @rule(seconds=st.sampled_from([0.01, 0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for request in self.router.expired(now_s=self.now_s):
            assert self.deadlines[request.request_id] <= self.now_s
            self._ended(self.waiting.pop(request.request_id))
        assert all(self.deadlines[name] > self.now_s for name in self.waiting)

    @rule(known=st.sets(st.sampled_from(INSTANCES)))
    def routes(self, known: set[str]) -> None:
        self.known = known
        self.foreign = {name: row for name, row in self.foreign.items() if name in known}
        self.router.prune(now_s=self.now_s)
        rows = [route(n, running=SLOTS, queued_tokens=QUEUE_TOKENS, context=CONTEXT) for n in sorted(known)]
        self.router.set_routes("m", "", rows)
        self.router.prune(now_s=self.now_s)
        self.others.expire(self.now_s)
        self.contention = self.others.about("m")
        for instance_id in known:
            self.foreign.setdefault(instance_id, (0, 0, 0))
            at = self.router.bookings.load_of(instance_id).foreign
            self.foreign[instance_id] = (at.requests, at.queued_requests, at.queued_tokens)

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def nobody_is_lost(self) -> None:
        assert self.router.queued("m")[0] == len(self.waiting)
        assert self.router.queued("m")[1] == sum(s.num_known_tokens for s in self.waiting.values())
        for instance_id in INSTANCES:
            mine = [b for b in self.booked.values() if b.instance_id == instance_id]
            load = self.router.bookings.load_of(instance_id)
            assert load.inflight_requests == len(mine)
            assert load.unstarted_tokens == sum(b.stream.num_known_tokens for b in mine if not b.started)

    def _waits(self, name: str, request: StreamState) -> None:
        if not any(s.key == request.key for s in self.waiting.values()):
            self.passed[request.key] = set()
        self.waiting[name] = request

    def _ended(self, request: StreamState) -> None:
        if not any(s.key == request.key for s in self.waiting.values()):
            self.passed.pop(request.key, None)

    def _turn(self, key: str, queued: set[str]) -> None:
        """``key`` had a turn while those of ``queued`` waited: a second one before theirs would be unfair."""
        for other in queued - {key}:
            passed = self.passed.setdefault(other, set())
            assert key not in passed, f"{key!r} has two turns while {other!r} waits"
            passed.add(key)
        self.passed[key] = set()

    def _holds(self, name: str) -> bool:
        return self.waiting[name].num_context_tokens <= CONTEXT if name in self.waiting else True

    def _may_take(self, instance_id: str, request: StreamState) -> None:
        mine = [b for b in self.booked.values() if b.instance_id == instance_id]
        alone = self.contention.num_gateways == 1
        requests, queued, queued_tokens = (0, 0, 0) if alone else self.foreign[instance_id]
        if not mine and not requests:
            return
        share = -(-SLOTS // self.contention.num_gateways)
        assert len(mine) + requests < SLOTS or len(mine) < share
        unstarted = [b for b in mine if not b.started]
        if unstarted or queued:
            tokens = sum(b.stream.num_known_tokens for b in unstarted) + request.num_known_tokens
            assert tokens + queued_tokens <= QUEUE_TOKENS
            if self.contention.waiting:
                assert tokens <= QUEUE_TOKENS - self.contention.head_tokens
                assert tokens <= -(-QUEUE_TOKENS // self.contention.num_gateways)

    def teardown(self) -> None:
        # Whatever happened: with instances that take, everybody gets a turn.
        self.router.prune(now_s=self.now_s + 10.0)
        self.now_s += 10.0
        self.routes(set(INSTANCES))
        self.others.expire(self.now_s)
        self.contention = self.others.about("m")
        self.foreign = dict.fromkeys(INSTANCES, (0, 0, 0))
        for _ in range(2 * len(self.waiting) + 1):
            for name in sorted(self.booked):
                del self.booked[name]
                self.router.finish(name, "m")
            self.dispatches()
        assert not self.waiting


TestRouter = Machine.TestCase
TestRouter.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
