"""RPC endpoints as plain subscriptions, in the NATS services API: discovery, PING, INFO and STATS come with it.

The library's own endpoints are members of queue groups, a group of one at least. Of a group the server gives a request
to one member, and the other servers of a cluster know of a member for as long as its own server says so: one that
stands still, or was cut off, takes its share of requests to processes that have long been connected elsewhere. A plain
subscription gets every request by each way that leads to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.micro.service import EndpointInfo, EndpointStats, Service, ServiceConfig, ServiceInfo, ServiceStats
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
    """What STATS reports of a subject."""

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
        self._subscription: NatsSubscription
        self._tasks = OwnedTasks()
        self._told = False
        """Whether the log says already that a sender wants no reply."""

    async def start(self) -> None:
        """Take requests from when this returns."""
        self._subscription = await self._client.subscribe(self._subject, cb=self._handle)

    async def close(self) -> None:
        """Take no more requests. Those that came are answered; answers that take too long are cancelled."""
        self._on_close(self)
        await drain(self._client, self._subscription)
        try:
            async with asyncio.timeout(ANSWERS_S):
                await self._tasks.finish()
        except TimeoutError:
            _log.warning("cancelled %d answers on %s after %.0f s", len(self._tasks), self._subject, ANSWERS_S)
            await self._tasks.close()

    async def _handle(self, msg: Msg) -> None:
        """Start answering and return, so that the next request is looked at."""
        self._tasks.start(self._respond(msg))

    async def _respond(self, msg: Msg) -> None:
        started_ns = time.perf_counter_ns()
        payload, headers = await answer(
            msg.data, msg.headers, self._kind, self._responder, self._malformed, self._subject
        )
        try:
            check_size(f"the reply on {self._subject}", payload, headers, self._client.max_payload)
        except PayloadTooLarge as error:
            payload, headers = b"", error_headers(error)
        self._stats.num_requests += 1
        self._stats.num_errors += headers is not None
        self._stats.processing_time_ns += time.perf_counter_ns() - started_ns
        if not msg.reply:
            if not self._told:
                self._told = True
                _log.warning("a message on %s asked for no reply: answers need a request (said once)", self._subject)
            return
        try:
            await self._client.publish(msg.reply, payload, headers=headers)
        except nats.errors.Error as error:
            _log.warning("could not send a reply on %s, its caller will time out: %s", self._subject, error)


class _Service(Service):
    """What a process says of itself and of its subjects."""

    def __init__(self, client: Client, config: ServiceConfig, answers: dict[str, AnswerStats]) -> None:
        super().__init__(client, config)
        self._answers = answers

    def info(self) -> ServiceInfo:
        endpoints = [EndpointInfo(_endpoint_name(subject), subject, "", {}) for subject in self._answers]
        return replace(super().info(), endpoints=endpoints)

    def stats(self) -> ServiceStats:
        endpoints = [
            EndpointStats(
                name=_endpoint_name(subject),
                subject=subject,
                queue_group="",
                num_requests=stats.num_requests,
                num_errors=stats.num_errors,
                processing_time=stats.processing_time_ns,
                average_processing_time=stats.processing_time_ns // max(1, stats.num_requests),
            )
            for subject, stats in self._answers.items()
        ]
        return replace(super().stats(), endpoints=endpoints)


def _endpoint_name(subject: str) -> str:
    return subject.replace(".", "-")  # names of endpoints take no dots


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
        self._stats: dict[str, AnswerStats] = {}
        self._lock = asyncio.Lock()

    async def add(self, subject: str, kind: type[M], responder: Responder[M, R]) -> Subscription:
        """Answer requests on ``subject`` from when this returns."""
        async with self._lock:
            # Handlers inherit the context of the task that subscribes; a request's trace must not.
            token = otel_context.attach(otel_context.Context())
            try:
                stats = self._stats.setdefault(subject, AnswerStats())
                rpc = RpcEndpoint(self._client, subject, kind, responder, self._malformed, stats, self._on_close)
                await self._start()
                await rpc.start()
            finally:
                otel_context.detach(token)
        return rpc

    async def _start(self) -> None:
        if self._service is None:
            config = ServiceConfig(name=self._name, version=SERVICE_VERSION, metadata=self._about)
            service = _Service(self._client, config, self._stats)
            await service.start()
            self._service = service

    async def stop(self) -> None:
        """Withdraw from discovery; the endpoints are closed by their own subscriptions."""
        if self._service is not None:
            with contextlib.suppress(nats.errors.Error):  # disconnected: the server has forgotten it already
                await self._service.stop()
            self._service = None
