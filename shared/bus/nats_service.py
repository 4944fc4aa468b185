"""RPC endpoints over the NATS services API: discovery, PING, INFO and STATS come with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import nats.errors
from nats.aio.client import Client
from nats.micro.request import Request
from nats.micro.service import Endpoint, EndpointStats, Service, ServiceConfig
from opentelemetry import context as otel_context

from shared.aio import OwnedTasks
from shared.bus.base import M, R, Responder, Subscription
from shared.bus.nats_link import drain
from shared.bus.wire import MalformedLog, answer, check_size, error_headers
from shared.ending import ANSWERS_S
from shared.errors import PayloadTooLarge

_log = logging.getLogger(__name__)

SERVICE_VERSION = "1.0.0"


@dataclass
class AnswerStats:
    """What STATS reports per subject: the library's own figures would only time the hand-over to a task."""

    num_requests: int = 0
    num_errors: int = 0
    processing_time_ns: int = 0


class RpcEndpoint(Generic[M, R]):
    """One responder that runs: a task per request, so that a slow answer holds up no other."""

    def __init__(
        self,
        client: Client,
        subject: str,
        kind: type[M],
        responder: Responder[M, R],
        malformed: MalformedLog,
        stats: AnswerStats,
        on_close: Callable[[Subscription], None],
    ) -> None:
        self._client = client
        self._subject = subject
        self._kind = kind
        self._responder = responder
        self._malformed = malformed
        self._stats = stats
        self._on_close = on_close
        self._service: Service
        self._endpoint: Endpoint
        self._tasks = OwnedTasks()
        self._told = False
        """Whether the log says already that a sender wants no reply."""

    async def start(self, service: Service, group: str | None) -> None:
        """Take requests, each by one process of the ``group``; None: of all."""
        # Endpoint names take no dots.
        name = self._subject.replace(".", "-")
        await service.add_endpoint(name=name, subject=self._subject, handler=self._handle, queue_group=group)
        self._service, self._endpoint = service, service._endpoints[-1]

    async def close(self) -> None:
        """Take no more requests. Those that came are answered; answers that take too long are cancelled."""
        self._on_close(self)
        if self._endpoint in self._service._endpoints:
            self._service._endpoints.remove(self._endpoint)
            subscription = self._endpoint._subscription
            if subscription is not None:
                # Not the library's own stop: it would throw away requests that are here already.
                await drain(self._client, subscription)
        try:
            async with asyncio.timeout(ANSWERS_S):
                await self._tasks.finish()
        except TimeoutError:
            _log.warning("cancelled %d answers on %s after %.0f s", len(self._tasks), self._subject, ANSWERS_S)
            await self._tasks.close()

    async def _handle(self, request: Request) -> None:
        """Start answering and return, so that the next request is looked at."""
        self._tasks.start(self._respond(request))

    async def _respond(self, request: Request) -> None:
        started_ns = time.perf_counter_ns()
        payload, headers = await answer(
            request.data, request.headers, self._kind, self._responder, self._malformed, self._subject
        )
        try:
            check_size(f"the reply on {self._subject}", payload, headers, self._client.max_payload)
        except PayloadTooLarge as error:
            payload, headers = b"", error_headers(error)
        self._stats.num_requests += 1
        self._stats.num_errors += headers is not None
        self._stats.processing_time_ns += time.perf_counter_ns() - started_ns
        try:
            await request.respond(payload, headers=headers)
        except ValueError:
            if not self._told:
                self._told = True
                _log.warning("a message on %s asked for no reply: answers need a request (said once)", self._subject)
        except nats.errors.Error as error:
            _log.warning("could not send a reply on %s, its caller will time out: %s", self._subject, error)


class RpcService:
    """This process's one micro service; ``add`` gives it endpoints."""

    def __init__(
        self,
        client: Client,
        name: str,
        malformed: MalformedLog,
        on_close: Callable[[Subscription], None],
        about: dict[str, str],
    ) -> None:
        """``name``: of the kind of service; ``about``: which one of them this is."""
        self._client = client
        self._name = re.sub(r"[^A-Za-z0-9_\-]", "-", name)
        self._malformed = malformed
        self._on_close = on_close
        self._about = about
        self._service: Service | None = None
        self._own_group = f"{self._name}-{secrets.token_hex(8)}"
        """Of each group the server gives a request to one."""
        self._stats: dict[str, AnswerStats] = {}
        self._lock = asyncio.Lock()

    async def add(self, subject: str, kind: type[M], responder: Responder[M, R], *, shared: bool) -> Subscription:
        """Answer requests on ``subject`` from when this returns; ``shared`` as ``Bus.respond``."""
        async with self._lock:
            # Handlers inherit the context of the task that subscribes; a request's trace must not.
            token = otel_context.attach(otel_context.Context())
            try:
                stats = self._stats.setdefault(subject, AnswerStats())
                rpc = RpcEndpoint(self._client, subject, kind, responder, self._malformed, stats, self._on_close)
                await rpc.start(await self._started(), None if shared else self._own_group)
            finally:
                otel_context.detach(token)
        return rpc

    async def _started(self) -> Service:
        if self._service is None:
            config = ServiceConfig(
                name=self._name, version=SERVICE_VERSION, metadata=self._about, stats_handler=self._stats_of
            )
            service = Service(self._client, config)
            await service.start()
            self._service = service
        return self._service

    async def stop(self) -> None:
        """Withdraw from discovery; the endpoints are closed by their own subscriptions."""
        if self._service is not None:
            with contextlib.suppress(nats.errors.Error):  # disconnected: the server has forgotten it already
                await self._service.stop()
            self._service = None

    def _stats_of(self, endpoint: EndpointStats) -> dict[str, int]:
        stats = self._stats.get(endpoint.subject, AnswerStats())
        endpoint.num_requests = stats.num_requests
        endpoint.num_errors = stats.num_errors
        endpoint.processing_time = stats.processing_time_ns
        endpoint.average_processing_time = stats.processing_time_ns // max(1, stats.num_requests)
        return {"num_endpoints": len(self._stats)}
