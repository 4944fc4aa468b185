"""One replay, measured: what is sent, what came back, and what the cluster was seen to do meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.replay.document import About, Document
from bench.replay.objectives import Slo
from bench.replay.observations import ClusterLog
from bench.replay.observer import Observer
from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.replay.record import Collector
from bench.replay.runner import Bodies, SendOptions, choose_model, send_all
from bench.stream_client import Endpoint, StreamClient
from bench.traces.request import Trace
from shared.errors import Unauthorized

_FIRST_LOOK_S = 0.1
"""Before the start, where that is given."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Which trace is replayed where, and how."""

    trace: Trace
    about: About
    """Without the model, which the endpoint may have to say."""
    endpoint: Endpoint
    api_key: str | None
    admin_key: str | None
    model: str | None
    shape: Shape
    slo: Slo | None
    until_s: float | None
    timeout_s: float
    sample_outputs: int


@dataclass(slots=True)
class Measured:
    """What there is so far: enough for a result at any time."""

    about: About
    requests: tuple[PlannedRequest, ...]
    collector: Collector
    log: ClusterLog | None = None
    until_s: float = 0.0

    def document(self, slo: Slo | None) -> Document:
        """The result of what there is."""
        cluster = None
        if self.log is not None:
            begin_s = self.requests[0].due_s
            cluster = self.log.sum_up(begin_s, begin_s + self.until_s, started_at_s=self.about.started_at_s)
        return Document.of(self.about, self.requests, self.collector, slo=slo, cluster=cluster)


class Measurement:
    """Made by ``prepare``, which may take seconds; ``run`` it once, and close it."""

    def __init__(
        self,
        settings: Replay,
        client: StreamClient,
        options: SendOptions,
        requests: tuple[PlannedRequest, ...],
        observer: Observer | None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._options = options
        self._requests = requests
        self._observer = observer
        self._bodies = Bodies(requests, options)

    @classmethod
    async def prepare(cls, settings: Replay, *, warn: Callable[[str], None]) -> Measurement:
        """Ask the endpoint for its model and plan the requests. Raises ``Unavailable``, ``Unauthorized``,
        ``ModelNotFound`` and ``BadRequest``. ``warn``: told why the cluster is not observed."""
        client = StreamClient(settings.endpoint, api_key=settings.api_key)
        observer = None
        try:
            card = await choose_model(client, settings.model, timeout_s=min(settings.timeout_s, 10.0))
            requests = plan_requests(settings.trace, replace(settings.shape, context_tokens=card.max_model_len))
            options = SendOptions(
                model=card.id,
                timeout_s=settings.timeout_s,
                concurrency_limit=settings.about.concurrency_limit,
                sample_outputs=settings.sample_outputs,
                prompt_seed=settings.about.seed,
            )
            key = settings.admin_key or settings.api_key
            try:
                observer = await Observer.find(settings.endpoint, card.id, admin_key=key)
            except Unauthorized as error:
                warn(f"the cluster is not observed: {error.message}")
            return cls(settings, client, options, requests, observer)
        except BaseException:
            client.close()
            if observer is not None:
                observer.close()
            raise

    @property
    def model(self) -> str:
        """What is asked for."""
        return self._options.model

    @property
    def requests(self) -> tuple[PlannedRequest, ...]:
        """What will be sent."""
        return self._requests

    async def run(
        self,
        *,
        start_s: float | None = None,
        on_begin: Callable[[Measured], None] = lambda _: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Measured:
        """Send, and look on until everything has ended and GPU seconds are counted.

        ``start_s``: of the replay, as ``time.perf_counter()`` says it; by default as soon as it can be. ``on_begin``
        gets what grows meanwhile, so that an interruption loses nothing.
        """
        observer, requests = self._observer, self._requests
        if start_s is not None:
            await asyncio.sleep(start_s - _FIRST_LOOK_S - time.perf_counter())
        if observer is not None:
            await observer.look(0.0)
        collector = Collector(planned=len(requests), shortened=sum(request.shortened for request in requests))
        start_s = time.perf_counter() if start_s is None else start_s
        started_at_s = time.time() + start_s - time.perf_counter()
        about = replace(self._settings.about, model=self.model, started_at_s=started_at_s)
        measured = Measured(about, requests, collector)
        on_begin(measured)
        sending = send_all(
            self._client, self._bodies, self._options, collector, start_s=start_s, on_progress=on_progress
        )
        if observer is None:
            await sending
            return measured
        first_s, last_s = requests[0].due_s, requests[-1].due_s
        measured.log = observer.log
        measured.until_s = last_s - first_s if self._settings.until_s is None else self._settings.until_s
        looking = asyncio.create_task(observer.run(start_s))
        try:
            await sending
            while (left_s := start_s + first_s + measured.until_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)  # which may end a millisecond early
        finally:
            looking.cancel()
            await asyncio.wait({looking})
        await observer.look(time.perf_counter() - start_s)
        return measured

    def close(self) -> None:
        """Safe to call at any time."""
        self._client.close()
        if self._observer is not None:
            self._observer.close()
