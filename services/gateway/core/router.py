"""Late binding: which instance gets which waiting request, and when.

Rules
- One FCFS queue per model; nobody overtakes. A resubmitted request goes back to its place by arrival.
- An instance takes a request while it serves, is not suspended, holds fewer of our requests than
  it can run, and the prompts that it has not begun leave room in its queue. An idle instance
  always takes one. Among those, the one with the fewest outstanding tokens, then the lowest id.
- A decode instance gets no request from here. A request for a prefill instance names the decode instance that goes on
  with it: the one with the fewest outstanding tokens, those promised to it included. However full it is, the request
  does not wait here for it: how long to, the prefill instance knows. Without any it decodes by itself.
- The queue is bounded; a full one refuses.
- A request that another instance takes over counts there from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.gateway.core.bookings import Bookings, InstanceLoad
from services.gateway.core.routes import TAKES_REQUESTS, takes_new
from services.gateway.core.stream import StreamState
from shared.errors import Overloaded
from shared.messages.registry import Route


@dataclass(frozen=True, slots=True)
class Assignment:
    """Send this request to that instance."""

    request_id: str
    route: Route
    decode: Route | None = None
    """Who decodes it, if that is another instance."""


@dataclass(slots=True)
class _Waiting:
    sequence: int
    stream: StreamState
    deadline_s: float


@dataclass(slots=True)
class _Queue:
    waiting: deque[_Waiting] = field(default_factory=deque)
    waiting_tokens: int = 0
    routes: dict[str, Route] = field(default_factory=dict)


class Router:
    """Queues and bookings of one gateway."""

    def __init__(self, *, max_queued_requests: int) -> None:
        self._max_queued_requests = max_queued_requests
        self._queues: dict[str, _Queue] = {}
        self._bookings = Bookings()
        self._sequences: dict[str, int] = {}
        self._next_sequence = 0

    def queued(self, model: str) -> tuple[int, int]:
        """Waiting requests of a model, and the prompt tokens that they bring."""
        queue = self._queues.get(model)
        return (len(queue.waiting), queue.waiting_tokens) if queue else (0, 0)

    def load_of(self, instance_id: str) -> InstanceLoad:
        """What we have at an instance."""
        return self._bookings.load_of(instance_id)

    def set_routes(self, model: str, routes: Iterable[Route]) -> None:
        """Replace a model's instances. Bookings at instances that are gone stay until released."""
        queue = self._queues.setdefault(model, _Queue())
        queue.routes = {route.instance_id: route for route in sorted(routes, key=lambda r: r.instance_id)}

    def remove_model(self, model: str) -> list[StreamState]:
        """Forget a model. Returns the requests that waited for it, in order."""
        queue = self._queues.pop(model, None)
        return [self._forget(item) for item in queue.waiting] if queue else []

    def enqueue(self, stream: StreamState, *, deadline_s: float, retry_after_s: float) -> None:
        """Append a request to its model's queue. Raises ``Overloaded`` when the queue is full."""
        queue = self._queues.setdefault(stream.model, _Queue())
        if len(queue.waiting) >= self._max_queued_requests:
            raise Overloaded(
                f"{len(queue.waiting)} requests already wait for model {stream.model!r}; try again later",
                retry_after_s=retry_after_s,
            )
        self._sequences[stream.request_id] = self._next_sequence
        queue.waiting.append(_Waiting(self._next_sequence, stream, deadline_s))
        queue.waiting_tokens += stream.num_known_tokens
        self._next_sequence += 1

    def requeue(self, stream: StreamState, *, deadline_s: float) -> None:
        """Put a request whose attempt ended back into its place, full queue or not."""
        self.release(stream.request_id)
        queue = self._queues.setdefault(stream.model, _Queue())
        sequence = self._sequences[stream.request_id]
        place = 0
        while place < len(queue.waiting) and queue.waiting[place].sequence < sequence:
            place += 1
        queue.waiting.insert(place, _Waiting(sequence, stream, deadline_s))
        queue.waiting_tokens += stream.num_known_tokens

    def suspend(self, instance_id: str, *, until_s: float) -> None:
        """Send that instance nothing until then."""
        self.load_of(instance_id).suspended_until_s = until_s

    def dispatch(self, model: str, *, now_s: float) -> list[Assignment]:
        """Bind as many waiting requests as instances take, in order."""
        queue = self._queues.get(model)
        if queue is None:
            return []
        assignments = []
        while queue.waiting:
            item = queue.waiting[0]
            route = self._choose(queue, item.stream, now_s)
            if route is None:
                break
            queue.waiting.popleft()
            queue.waiting_tokens -= item.stream.num_known_tokens
            decode = self._choose_decode(queue, item.stream, now_s) if route.role == "prefill" else None
            self._bookings.book(
                item.stream, route.instance_id, decode_instance_id=decode.instance_id if decode is not None else ""
            )
            assignments.append(Assignment(item.stream.request_id, route, decode))
        return assignments

    def started(self, request_id: str) -> None:
        """The request's first part came: its prompt no longer waits at the instance."""
        self._bookings.started(request_id)

    def moved(self, request_id: str, instance_id: str) -> None:
        """Another instance took the request over, whether it has a route or not. Unknown requests are ignored."""
        self._bookings.moved(request_id, instance_id)

    def release(self, request_id: str) -> None:
        """The request holds nothing at its instance any more."""
        self._bookings.release(request_id)

    def finish(self, request_id: str, model: str) -> None:
        """The request is over, wherever it is."""
        self._sequences.pop(request_id, None)
        if request_id in self._bookings:
            self.release(request_id)
            return
        queue = self._queues.get(model)
        if queue is not None:
            for item in queue.waiting:
                if item.stream.request_id == request_id:
                    queue.waiting.remove(item)
                    queue.waiting_tokens -= item.stream.num_known_tokens
                    break

    def expired(self, *, now_s: float) -> list[StreamState]:
        """Requests that waited past their deadline; they leave the queues."""
        late: list[StreamState] = []
        for model in sorted(self._queues):
            queue = self._queues[model]
            gone = [item for item in queue.waiting if item.deadline_s <= now_s]
            for item in gone:
                queue.waiting.remove(item)
                queue.waiting_tokens -= item.stream.num_known_tokens
                late.append(self._forget(item))
        return late

    def prune(self) -> None:
        """Forget the loads of instances that are gone, hold nothing of ours and were promised nothing."""
        known = {instance_id for queue in self._queues.values() for instance_id in queue.routes}
        self._bookings.prune(known)

    def _forget(self, item: _Waiting) -> StreamState:
        self._sequences.pop(item.stream.request_id, None)
        return item.stream

    def _choose(self, queue: _Queue, stream: StreamState, now_s: float) -> Route | None:
        best: Route | None = None
        best_rank: tuple[bool, int, int] | None = None
        for route in queue.routes.values():
            load = self.load_of(route.instance_id)
            if not self._fits(route, load, stream, now_s):
                continue
            avoided = route.instance_id in stream.avoid
            rank = (avoided, load.outstanding_tokens, load.inflight_requests)
            if best_rank is None or rank < best_rank:
                best, best_rank = route, rank
        return best

    @staticmethod
    def _fits(route: Route, load: InstanceLoad, stream: StreamState, now_s: float) -> bool:
        if not takes_new(route) or load.suspended_until_s > now_s or not _holds(route, stream):
            return False
        if load.inflight_requests == 0:
            return True
        return load.inflight_requests < route.max_running_requests and (
            load.unstarted_requests == 0 or load.unstarted_tokens + stream.num_known_tokens <= route.max_queued_tokens
        )

    def _choose_decode(self, queue: _Queue, stream: StreamState, now_s: float) -> Route | None:
        if stream.sampling.max_tokens - len(stream.output_token_ids) <= 1:
            # It ends with the token that the prompt's computation gives.
            return None
        best: Route | None = None
        best_rank: tuple[bool, int] | None = None
        for route in queue.routes.values():
            load = self.load_of(route.instance_id)
            if route.role != "decode" or route.state not in TAKES_REQUESTS or load.suspended_until_s > now_s:
                continue
            if not _holds(route, stream):
                continue
            rank = (route.instance_id in stream.avoid, load.decode_tokens)
            if best_rank is None or rank < best_rank:
                best, best_rank = route, rank
        return best


def _holds(route: Route, stream: StreamState) -> bool:
    return not route.context_tokens or stream.num_context_tokens <= route.context_tokens
