"""Late binding: which instance gets which waiting request, and when.

Rules
- There is one queue per model, in which keys take turns (``FairQueue``). The request whose turn it is waits for
  capacity, and no other overtakes it, except where no instance can hold it. A resubmitted request returns to its
  place.
- A ``max_tokens`` that the caller left open is cut to what the instances can hold. A request that none of them can
  hold is refused if no instance has had it; one that has been running is set aside until an instance that can hold it
  appears.
- An instance takes a request while it serves, is not suspended, holds fewer requests than it can run, and has
  capacity in its queue beside the prompts that it has not begun. An idle instance always takes one. Among those that
  qualify, the one with the fewest outstanding tokens gets it, then the one with the lowest id; but see the next rule.
- A prompt that belongs with others (``affinity``) goes to where the last of them went, unless that has more to do than
  others by more than this request. The first of them go to the less loaded of two instances that all gateways name, if
  that has about as little to do as any. Neither where it would have to wait for a slot and not elsewhere, nor beyond an
  imbalance: an instance may have so many times what its model's instances have on average, this request included.
- An instance with a free slot, as far as this gateway knows, comes before those without; other gateways may have
  taken the slot since the last report. Then the instance refuses, and counts as having no free slot until it reports
  again: so no request waits behind those of another gateway while another instance has capacity.
- While other gateways have requests for the model, theirs count according to the instances' reports. Each gateway may
  fill its share of an instance's slots whatever the others have there, so that none starves. Of the waiting prompts
  it takes no more than its share, and while a request waits in another gateway's queue it leaves capacity for that
  one.
- An instance that says that it is full gets no requests for a while, each time twice as long, until it accepts one or
  reports no queue.
- A decode instance gets no requests from here. A request for a prefill instance names the decode instance that
  continues it: the one with the fewest outstanding tokens, including those promised to it, or the one that has decoded
  the last of those that the prompt belongs with, on the same condition as above: it need not be sent the KV that it
  has. However full that is, the request does not wait here: the prefill instance decides how long to wait. If none is
  named, the prefill instance decodes by itself.
- A queue is of one model's weights: what was tokenized for others of the same name is refused, and leaves with them.
- The queue is bounded; a full one refuses. One key occupies no more places than it leaves free.
- A request that another instance takes over counts there from then on.

The cost of a request does not grow with the number of waiting requests, and grows with the logarithm of the number of
instances (``InstanceIndex``). An instance that comes or goes makes no other one be looked at again. What happens
regularly costs nothing for models that nothing waits for; another gateway's report costs as much as it names models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from services.gateway.core.affinity import Homes, SharedBeginnings
from services.gateway.core.bookings import (
    ALONE,
    NOTHING,
    Bookings,
    Contention,
    InstanceLoad,
    OtherGateways,
    outstanding_tokens,
)
from services.gateway.core.fair_queue import FairQueue, QueuedRequest
from services.gateway.core.instance_index import InstanceIndex
from services.gateway.core.rendezvous import CHOICES, Rendezvous
from services.gateway.core.routes import TAKES_REQUESTS, takes_new
from services.gateway.core.stream import StreamState
from shared.errors import ContextLengthExceeded, ModelNotFound, Overloaded
from shared.messages.common import DECODES_FOR_OTHERS, NEEDS_DECODER, TAKES_PROMPTS
from shared.messages.load import LoadReport, QueueReport
from shared.messages.registry import Route

TICK_S = 0.05
"""How often waiting requests are looked at, beside whenever something happens."""
FULL_PAUSE_S = 0.05
"""How long an instance that said "full" gets no requests."""
MAX_FULL_PAUSE_S = 1.0
"""The same, after saying so repeatedly."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Send this request to that instance."""

    request_id: str
    route: Route
    decode: Route | None = None
    """The instance that decodes it, if that is another one."""
    may_wait: bool = True
    """No instance has a free slot, as far as this gateway knows: the request waits for one there."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What became of requests whose turn came."""

    assignments: tuple[Assignment, ...] = ()
    refused: tuple[tuple[str, ContextLengthExceeded], ...] = ()
    """Requests that no instance can hold; they have left the queue."""


@dataclass(slots=True)
class _Queue:
    model_hash: str
    waiting: FairQueue = field(default_factory=FairQueue)
    routes: dict[str, Route] = field(default_factory=dict)
    takers: InstanceIndex = field(default_factory=InstanceIndex)
    decoders: InstanceIndex = field(default_factory=InstanceIndex)
    changed: set[str] = field(default_factory=set)
    """Instances whose place in the indexes has to be computed again."""
    holds_tokens: float = 0.0
    """The longest context of those that take requests; 0: there are none."""
    may_hold_tokens: float = 0.0
    """The same, including draining instances: one may come back."""
    contention: Contention = ALONE
    beginnings: SharedBeginnings = field(default_factory=SharedBeginnings)
    places: Rendezvous = field(default_factory=Rendezvous)
    """Of those that take requests."""
    outstanding: dict[str, int] = field(default_factory=dict)
    """Tokens, by instance that takes requests."""
    total_outstanding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityPolicy:
    """How far a prompt is sent to where prompts like it went."""

    choices: int = CHOICES
    """Instances of a place: 0, 1 or 2."""
    imbalance: float = 1.5
    """Times the mean of outstanding tokens that an instance may have which is chosen so. What is above 1 is also what
    it is worth (``_HOME_WORTH``)."""
    secret: bytes = b""
    """The same at all gateways, and known to no client."""


NO_POLICY = AffinityPolicy()
_HOME_WORTH, _CHOICE_WORTH = 3.0, 0.5
"""How many times a request's own tokens, times what an instance may have above the mean, it is worth to go where its
like went, and to where others' gateways would send the next."""


class Router:
    """Queues and bookings of one gateway."""

    def __init__(self, *, max_queued_requests: int, gateway_id: str = "", affinity: AffinityPolicy = NO_POLICY) -> None:
        self._max_queued_requests = max_queued_requests
        self._affinity = affinity
        self._queues: dict[str, _Queue] = {}
        """By name, of the weights that are registered under it."""
        self._waiting: set[str] = set()
        """Models with waiting requests, and some that had any when ``waiting`` was asked last."""
        self._model_of: dict[str, str] = {}
        self.bookings = Bookings(self._load_changed)
        self.others = OtherGateways(gateway_id)
        self._sequences: dict[str, int] = {}
        self._next_sequence = 0
        self._wakes: list[tuple[float, str]] = []
        self._homes, self._decode_homes = Homes(), Homes()

    def queued(self, model: str) -> tuple[int, int]:
        """Waiting requests of a model, and the prompt tokens that they bring."""
        queue = self._queues.get(model)
        return (len(queue.waiting), queue.waiting.num_tokens) if queue else (0, 0)

    def num_aside(self, model: str) -> int:
        """Of a model's waiting requests, those that none of its instances can hold."""
        queue = self._queues.get(model)
        return queue.waiting.num_aside if queue is not None else 0

    def waiting(self) -> list[str]:
        """The models that requests wait for, in order."""
        self._waiting = {name for name in self._waiting if self.queued(name)[0]}
        return sorted(self._waiting)

    def sleeps(self, model: str) -> bool:
        """Whether no instance of a model takes requests."""
        queue = self._queues.get(model)
        return queue is None or not queue.holds_tokens

    def wakes(self, model: str) -> bool:
        """Whether a model that sleeps has just got its first waiting request: others should hear of it at once."""
        return self.sleeps(model) and self.queued(model)[0] == 1

    def head_tokens(self, model: str) -> int:
        """Prompt tokens of the request whose turn it is; 0 if none waits."""
        queue = self._queues.get(model)
        head = queue.waiting.head() if queue is not None else None
        return head.stream.num_known_tokens if head is not None else 0

    def set_routes(self, model: str, model_hash: str, routes: Iterable[Route]) -> list[StreamState]:
        """Replace a model's instances. Bookings at instances that are gone stay until released. Returns the requests
        that waited for other weights of the name, in order: they have left."""
        queue = self._queues.get(model)
        left: list[StreamState] = []
        if queue is None or queue.model_hash != model_hash:
            left = self.remove_model(model)
            queue = self._queues[model] = _Queue(
                model_hash, contention=self.others.about(model), places=Rendezvous(self._affinity.secret)
            )
        before = queue.routes
        self._forget_routes(model, queue)
        queue.routes = {route.instance_id: route for route in routes}
        self._model_of.update(dict.fromkeys(queue.routes, model))
        takers = [route.instance_id for route in queue.routes.values() if takes_new(route)]
        queue.takers.keep(takers)
        queue.places.keep(takers)
        queue.beginnings.keep(queue.routes)
        queue.outstanding = {name: queue.outstanding.get(name, 0) for name in takers}
        queue.total_outstanding = sum(queue.outstanding.values())
        queue.decoders.keep([route.instance_id for route in queue.routes.values() if _decodes(route)])
        # What is known of the others holds: instances come and go one by one, and there may be thousands.
        changed = [name for name, route in queue.routes.items() if before.get(name) != route]
        # Nobody looks at an idle model: those that are gone must not pile up.
        queue.changed = (queue.changed & queue.routes.keys()).union(changed)
        taking = [_context(route) for route in queue.routes.values() if takes_new(route)]
        drained = [_context(r) for r in queue.routes.values() if r.state == "draining" and r.role in TAKES_PROMPTS]
        queue.holds_tokens = max(taking, default=0.0)
        queue.may_hold_tokens = max([*taking, *drained], default=0.0)
        queue.waiting.bring_back()
        return left

    def remove_model(self, model: str) -> list[StreamState]:
        """Forget a model. Returns the requests that waited for it, in order."""
        queue = self._queues.pop(model, None)
        if queue is None:
            return []
        self._forget_routes(model, queue)
        return [self._forget(item) for item in queue.waiting.clear()]

    def clear(self, model: str) -> list[StreamState]:
        """The model's waiting requests leave, in order."""
        queue = self._queues.get(model)
        return [self._forget(item) for item in queue.waiting.clear()] if queue is not None else []

    def enqueue(self, stream: StreamState, *, deadline_s: float, retry_after_s: float) -> None:
        """Append a request to its key's part of its model's queue. Raises ``Overloaded`` when there is no place,
        ``ModelNotFound`` for a model, or weights of it, that are not registered (any more)."""
        queue = self._queues.get(stream.model)
        if queue is None or queue.model_hash != stream.model_hash:
            raise gone(stream.model)
        free = self._max_queued_requests - len(queue.waiting)
        if free <= 0:
            raise Overloaded(
                f"{len(queue.waiting)} requests already wait for model {stream.model!r}; try again later",
                retry_after_s=retry_after_s,
            )
        mine = queue.waiting.num_waiting(stream.key) if stream.key else 0
        if mine > free:
            raise Overloaded(
                f"{mine} requests of key {stream.key!r} already wait for model {stream.model!r}, and {free} places "
                "are left for all; try again later",
                retry_after_s=retry_after_s,
            )
        if self._affinity.choices:
            stream.beginning = queue.beginnings.beginning_of(stream, self._affinity.secret)
        self._sequences[stream.request_id] = self._next_sequence
        queue.waiting.push(QueuedRequest(self._next_sequence, stream, deadline_s))
        self._waiting.add(stream.model)
        self._next_sequence += 1

    def requeue(self, stream: StreamState, *, deadline_s: float) -> None:
        """Put a request whose attempt ended back into its place, even if the queue is full. Its model is registered."""
        self.bookings.release(stream.request_id)
        waiting = self._queues[stream.model].waiting
        waiting.push(QueuedRequest(self._sequences[stream.request_id], stream, deadline_s), back=True)
        self._waiting.add(stream.model)

    def suspend(self, instance_id: str, *, until_s: float) -> None:
        """Send that instance no requests until then."""
        self.bookings.load_of(instance_id).suspended_until_s = until_s
        heappush(self._wakes, (until_s, instance_id))
        self._load_changed(instance_id)

    def refused(self, instance_id: str, *, now_s: float) -> None:
        """The instance said that it is full: send it no requests for a while, longer each time."""
        load = self.bookings.load_of(instance_id)
        pause_s = min(MAX_FULL_PAUSE_S, FULL_PAUSE_S * 2.0 ** min(load.refusals, 30))
        load.refusals += 1
        self.suspend(instance_id, until_s=max(load.suspended_until_s, now_s + pause_s))

    def slots_taken(self, instance_id: str, *, now_s: float) -> None:
        """The instance refused a request that should not wait there: it has no free slot, whatever its reports said."""
        self.bookings.load_of(instance_id).slots_taken_at_s = now_s
        self._load_changed(instance_id)

    def dispatch(self, model: str, *, now_s: float) -> Dispatched:
        """Bind as many waiting requests as instances take, in order."""
        queue = self._queues.get(model)
        if queue is None or not len(queue.waiting):
            return Dispatched()
        self._wake(now_s)
        assignments: list[Assignment] = []
        refused: list[tuple[str, ContextLengthExceeded]] = []
        while (item := queue.waiting.head()) is not None:
            self._reindex(queue, now_s)
            stream = item.stream
            if not self._can_be_held(queue, item, refused):
                continue
            instance_id = queue.takers.best(stream.num_known_tokens, stream.num_context_tokens, stream.avoid)
            if instance_id is None:
                break
            if stream.beginning is not None:
                instance_id = self._with_its_like(queue, stream, stream.beginning, instance_id)
            route = queue.routes[instance_id]
            decode = self._choose_decode(queue, stream) if route.role in NEEDS_DECODER else None
            queue.waiting.take(item)
            may_wait = _is_full(route, self.bookings.load_of(instance_id), queue.contention)
            decode_id = decode.instance_id if decode is not None else ""
            self.bookings.book(stream, instance_id, decode_instance_id=decode_id)
            assignments.append(Assignment(stream.request_id, route, decode, may_wait))
        return Dispatched(tuple(assignments), tuple(refused))

    def finish(self, request_id: str, model: str) -> None:
        """The request has ended, wherever it is."""
        self._sequences.pop(request_id, None)
        if request_id in self.bookings:
            self.bookings.release(request_id)
        elif model in self._queues:
            self._queues[model].waiting.remove(request_id)

    def expired(self, *, now_s: float) -> list[StreamState]:
        """Requests that waited past their deadline; they leave the queues."""
        return [self._forget(item) for name in self.waiting() for item in self._queues[name].waiting.expired(now_s)]

    def held(self, *, due_s: Callable[[str], float]) -> list[str]:
        """Models that sleep and have a request with a deadline by what ``due_s`` says of the model."""
        return [m for m, q in self._queues.items() if not q.holds_tokens and q.waiting.next_deadline_s() <= due_s(m)]

    def give_up(self, model: str, *, due_s: float) -> list[StreamState]:
        """The requests of a model with deadlines by then; they leave the queue."""
        queue = self._queues.get(model)
        return [self._forget(item) for item in queue.waiting.expired(due_s)] if queue is not None else []

    def too_long(self, stream: StreamState) -> ContextLengthExceeded | None:
        """Why none of the existing instances can hold the request; None if one can."""
        queue = self._queues.get(stream.model)
        if queue is None or not 0 < queue.holds_tokens < stream.num_context_tokens:
            return None
        return _too_long(stream, queue.holds_tokens)

    def reported(self, report: LoadReport, *, now_s: float) -> None:
        """Take an instance's load report, which counts the requests of all gateways. Instances without a route are
        ignored."""
        model = self._model_of.get(report.instance_id)
        if model is None:
            return
        self.bookings.reported(report, now_s)
        queue = self._queues[model]
        queue.beginnings.reported(report, len(queue.outstanding), now_s)
        load = self.bookings.load_of(report.instance_id)
        if load.refusals and report.queued_requests == 0 and load.suspended_until_s > now_s:
            self.suspend(report.instance_id, until_s=now_s)

    def queued_anywhere(self, model: str) -> int:
        """Requests that wait here and, by their reports, in the other gateways."""
        return self.queued(model)[0] + self.others.queued(model)

    def others_reported(self, report: QueueReport, *, now_s: float) -> None:
        """Take a gateway's queue report."""
        self._contend(self.others.take(report, now_s))

    def prune(self, *, now_s: float) -> None:
        """Forget the loads of instances that are gone, hold nothing of ours and were promised nothing, and what
        silent instances and gateways reported."""
        self.bookings.prune(self._model_of.keys(), now_s)
        self._contend(self.others.expire(now_s))
        self._wake(now_s)

    def _contend(self, models: Iterable[str]) -> None:
        for model in models:
            queue = self._queues.get(model)
            contention = self.others.about(model)
            if queue is not None and contention != queue.contention:
                queue.contention = contention
                queue.changed.update(queue.routes)

    def _forget(self, item: QueuedRequest) -> StreamState:
        self._sequences.pop(item.stream.request_id, None)
        return item.stream

    def _forget_routes(self, model: str, queue: _Queue) -> None:
        for instance_id in queue.routes:
            if self._model_of.get(instance_id) == model:
                del self._model_of[instance_id]

    def _load_changed(self, instance_id: str) -> None:
        model = self._model_of.get(instance_id)
        if model is not None:
            self._queues[model].changed.add(instance_id)

    def _wake(self, now_s: float) -> None:
        while self._wakes and self._wakes[0][0] <= now_s:
            self._load_changed(heappop(self._wakes)[1])

    def _reindex(self, queue: _Queue, now_s: float) -> None:
        for instance_id in queue.changed:
            route = queue.routes.get(instance_id)
            if route is None:
                continue
            load = self.bookings.load_of(instance_id)
            foreign = load.foreign if queue.contention.num_gateways > 1 else NOTHING
            awake = load.suspended_until_s <= now_s
            if instance_id in queue.takers:
                outstanding = load.outstanding_tokens + foreign.outstanding_tokens
                queue.total_outstanding += outstanding - queue.outstanding[instance_id]
                queue.outstanding[instance_id] = outstanding
                capacity = _capacity_tokens(route, load, queue.contention) if awake else -1.0
                if capacity < 0:
                    queue.takers.withdraw(instance_id)
                else:
                    rank = (_is_full(route, load, queue.contention), outstanding, load.inflight_requests)
                    queue.takers.offer(instance_id, rank, free_tokens=capacity, context_tokens=_context(route))
            elif instance_id in queue.decoders:
                if not awake:
                    queue.decoders.withdraw(instance_id)
                else:
                    decode_rank = (load.decode_tokens + foreign.outstanding_tokens, 0)
                    queue.decoders.offer(instance_id, decode_rank, free_tokens=math.inf, context_tokens=_context(route))
        queue.changed.clear()

    def _can_be_held(
        self, queue: _Queue, item: QueuedRequest, refused: list[tuple[str, ContextLengthExceeded]]
    ) -> bool:
        """Whether the head's turn may be waited for. If not, it has left the others' way."""
        stream, holds = item.stream, queue.holds_tokens
        if not holds or stream.num_context_tokens <= holds or stream.cut_output(int(holds)):
            return True
        if stream.attempt == 0 and stream.num_context_tokens > queue.may_hold_tokens:
            queue.waiting.remove(stream.request_id)
            self._forget(item)
            refused.append((stream.request_id, _too_long(stream, holds)))
        else:
            queue.waiting.set_aside(item)
        return False

    def _with_its_like(self, queue: _Queue, stream: StreamState, beginning: int, best: str) -> str:
        """Which instance gets a request that belongs with others. ``best``: what it gets otherwise."""
        known, context, own = stream.num_known_tokens, stream.num_context_tokens, outstanding_tokens(stream)
        policy, outstanding = self._affinity, queue.outstanding
        most = policy.imbalance * (queue.total_outstanding / len(outstanding) + own)
        worth = (policy.imbalance - 1) * own
        best_rank = queue.takers.rank_of(best, known, context)
        chosen, least = best, float(outstanding[best])
        offers = [(name, _CHOICE_WORTH * worth) for name in queue.places.of(beginning)[: policy.choices]]
        if (home := self._homes.of(beginning)) in outstanding:
            offers.append((home, _HOME_WORTH * worth))
        for name, less in offers:
            rank = queue.takers.rank_of(name, known, context)
            if rank is None or name in stream.avoid:
                continue
            must_wait = best_rank is not None and rank[0] > best_rank[0]
            if not must_wait and outstanding[name] <= most and outstanding[name] - less < least:
                chosen, least = name, outstanding[name] - less
        self._homes.went(beginning, chosen)
        return chosen

    def _choose_decode(self, queue: _Queue, stream: StreamState) -> Route | None:
        if stream.sampling.max_tokens - len(stream.output_token_ids) <= 1 or stream.alone_tokens:
            # It ends with the token that the prompt's computation gives; or it is watched, in one place.
            return None
        context = stream.num_context_tokens
        chosen = queue.decoders.best(0, context, stream.avoid)
        if chosen is None:
            return None
        if stream.beginning is not None:
            home = self._decode_homes.of(stream.beginning)
            least, there = queue.decoders.rank_of(chosen, 0, context), queue.decoders.rank_of(home, 0, context)
            worth = _HOME_WORTH * (self._affinity.imbalance - 1) * outstanding_tokens(stream)
            if least is not None and there is not None and home not in stream.avoid and there[0] - least[0] <= worth:
                chosen = home
            self._decode_homes.went(stream.beginning, chosen)
        return queue.routes[chosen]


def _decodes(route: Route) -> bool:
    return route.role in DECODES_FOR_OTHERS and route.state in TAKES_REQUESTS


def _context(route: Route) -> float:
    return route.context_tokens or math.inf


def _is_full(route: Route, load: InstanceLoad, contention: Contention) -> bool:
    """Whether no slot is free, as far as is known."""
    foreign = load.foreign if contention.num_gateways > 1 else NOTHING
    return load.slots_taken or load.inflight_requests + foreign.requests >= route.max_running_requests


def _capacity_tokens(route: Route, load: InstanceLoad, contention: Contention) -> float:
    """The longest prompt that the instance takes now; negative: none."""
    gateways = contention.num_gateways
    foreign = load.foreign if gateways > 1 else NOTHING
    if load.inflight_requests + foreign.requests == 0:
        return math.inf
    share = -(-route.max_running_requests // gateways)
    if _is_full(route, load, contention) and load.inflight_requests >= share:
        return -1.0
    if load.unstarted_requests + foreign.queued_requests == 0:
        return math.inf
    capacity = route.max_queued_tokens - load.unstarted_tokens - foreign.queued_tokens
    if contention.waiting:
        share = min(-(-route.max_queued_tokens // gateways), route.max_queued_tokens - contention.head_tokens)
        capacity = min(capacity, share - load.unstarted_tokens)
    return capacity


def gone(model: str) -> ModelNotFound:
    """Of a request for weights that are registered no more."""
    return ModelNotFound(f"model {model!r} was removed, or is another by now", param="model")


def _too_long(stream: StreamState, limit: float) -> ContextLengthExceeded:
    prompt = len(stream.prompt_token_ids)
    return ContextLengthExceeded(
        f"the instances of model {stream.model!r} hold {limit:.0f} tokens; {prompt} of the prompt and "
        f"{stream.sampling.max_tokens} of output exceed that",
        param="max_tokens" if prompt < limit else None,
    )
