"""The bus over NATS. See ``shared.bus.base`` for the contract."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.api import Header
from opentelemetry import context as otel_context

from shared import subjects
from shared.bus.access import ANYBODY, NatsAccess
from shared.bus.base import Bus, EventListener, EventMaker, Listener, M, R, Responder, Stored, Subscription
from shared.bus.departures import DepartureListener, departure_of
from shared.bus.nats_events import EventSubscription
from shared.bus.nats_link import NatsLink, answer_to, drain, drop_unsent, round_trip
from shared.bus.nats_service import RpcService
from shared.bus.nats_stream import RECORD_LIMITS, EventStream, StreamLimits, cluster_name
from shared.bus.refusals import JETSTREAM
from shared.bus.wire import (
    MalformedLog,
    check_size,
    enter_sender_context,
    leave_sender_context,
    reply_of,
    trace_headers,
)
from shared.errors import DeadlineExceeded, NoResponder, NotPermitted, Unavailable
from shared.messages.codec import MalformedMessage, Message, decode, encode, prepare

_log = logging.getLogger(__name__)

CLUSTER_TIMEOUT_S = 1.0
"""For the servers to say whose they are."""


class NatsBus(Bus):
    """One process's connection, as ``NatsLink`` keeps it; subscriptions survive it."""

    def __init__(self, link: NatsLink, kind: str, about: dict[str, str]) -> None:
        self._link = link
        self._client = link.client
        self._refusals = link.refusals
        self._malformed = MalformedLog()
        self._service = RpcService(link.client, kind, self._malformed, self._forget, about)
        self._subscriptions: set[Subscription] = set()
        prefix = f"{kind}-{secrets.token_hex(8)}"
        self._stream = EventStream(link.client, link.refusals, link.up, consumer_prefix=prefix)
        self._records = EventStream(
            link.client,
            link.refusals,
            link.up,
            consumer_prefix=f"{prefix}-record",
            name=subjects.RECORD_STREAM,
            subject=subjects.records(),
            limits=RECORD_LIMITS,
        )
        self._unbuffered: set[str] = set()
        """Subjects of messages that must not outlast an outage."""

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        id: str = "",  # noqa: A002 - as everywhere else
        incarnation: str = "",
        access: NatsAccess = ANYBODY,
        connect_timeout_s: float | None = 10.0,
    ) -> NatsBus:
        """Connect as the process ``id`` of the kind ``name`` to ``url`` (several: separated by commas). With
        ``connect_timeout_s`` None it waits for as long as it takes.

        Raises ``NotPermitted`` when the server refuses the credentials, ``Unavailable``, naming the URL, when none can
        be reached in time.
        """
        link = NatsLink(access)
        about = {"id": id or name, "incarnation": incarnation or secrets.token_hex(8)}
        bus = cls(link, name, about)
        await link.connect(
            url,
            name,
            about["id"],
            about["incarnation"],
            down=bus._on_down,
            up_again=bus._on_up_again,
            timeout_s=connect_timeout_s,
        )
        return bus

    @property
    def max_payload_bytes(self) -> int:
        return self._client.max_payload

    @property
    def connected_since_s(self) -> float | None:
        return self._link.connected_since_s

    async def publish(self, subject: str, message: Message, *, buffer: bool = True) -> None:
        payload = encode(message)
        headers = trace_headers()
        check_size(subject, payload, headers, self._client.max_payload)
        if not buffer:
            self._unbuffered.add(subject)
            if self.connected_since_s is None:
                raise Unavailable(f"NATS is disconnected (publishing {subject})")
        try:
            await self._client.publish(subject, payload, headers=headers)
        except nats.errors.OutboundBufferLimitError as error:
            raise Unavailable(f"NATS is disconnected and the outgoing buffer is full (publishing {subject})") from error
        except nats.errors.Error as error:
            raise Unavailable(f"cannot publish on {subject}: {error}") from error

    async def flush(self) -> None:
        await round_trip(self._client)

    async def subscribe(self, subject: str, kind: type[M], listener: Listener[M]) -> Subscription:
        prepare(kind)

        async def receive(msg: Msg) -> None:
            try:
                message = decode(msg.data, kind)
            except MalformedMessage as error:
                self._malformed.record(kind, msg.subject, error)
                return
            token = enter_sender_context(msg.headers)
            try:
                listener(message)
            except Exception:  # noqa: BLE001 - a listener must not raise; one that does loses this message only
                _log.exception("the listener of %s failed", msg.subject)
            finally:
                leave_sender_context(token)

        return await self._listen(subject, receive)

    async def watch_departures(self, listener: DepartureListener) -> Subscription:
        async def receive(msg: Msg) -> None:
            departure = departure_of(msg.data)
            if departure is not None:
                listener(departure)

        try:
            return await self._listen(subjects.departures(), receive)
        except NotPermitted:
            _log.info("this NATS server does not tell of connections that end: silence has to")
            return _Silent()

    async def _listen(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> Subscription:
        # The task that the client starts for this subscription copies the context: it must hold no span.
        token = otel_context.attach(otel_context.Context())
        try:
            with self._refusals.watch("subscription", subject) as refused:
                inner = await self._client.subscribe(subject, cb=receive)
                await round_trip(self._client)
        except nats.errors.Error as error:
            raise Unavailable(f"cannot subscribe to {subject}: {error}") from error
        finally:
            otel_context.detach(token)
        subscription = _Subscribed(self, inner)
        if refused.subject:
            await subscription.close()
            refused.check(f"subscribe to {subject}", self._refusals.user)
        self._subscriptions.add(subscription)
        return subscription

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        payload = encode(message)
        headers = trace_headers()
        check_size(subject, payload, headers, self._client.max_payload)
        with self._refusals.watch("publish", subject) as refused:
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    refused.ends(limit)
                    # Not buffered while down: a request delivered after its deadline would be acted upon, unheard.
                    await self._link.up.wait()
                    answer = await answer_to(self._client, subject, payload, headers, timeout_s=timeout_s)
            except nats.errors.NoRespondersError as error:
                raise NoResponder(f"nobody listens on {subject}") from error
            except TimeoutError as error:
                refused.check(f"ask on {subject}", self._refusals.user)
                down = "" if self._link.up.is_set() else " (NATS is disconnected)"
                raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:g} s{down}") from error
            except nats.errors.Error as error:
                raise Unavailable(f"cannot send a request on {subject}: {error}") from error
        return reply_of(answer.data, answer.headers, reply)

    async def respond(self, subject: str, kind: type[M], responder: Responder[M, R]) -> Subscription:
        prepare(kind)
        with self._refusals.watch("subscription", subject) as refused:
            try:
                subscription = await self._service.add(subject, kind, responder)
            except nats.errors.Error as error:
                raise Unavailable(f"cannot respond on {subject}: {error}") from error
            await round_trip(self._client)
        if refused.subject:
            await subscription.close()
            refused.check(f"answer on {subject}", self._refusals.user)
        self._subscriptions.add(subscription)
        return subscription

    async def keep_plan_stream(self, limits: StreamLimits) -> None:
        """Make the plan stream, or give it these limits; that of the records is on as many servers. Raises
        ``Unavailable``, ``NotPermitted``."""
        await self._stream.keep(limits)
        await self._records.keep(replace(RECORD_LIMITS, num_replicas=limits.num_replicas))

    async def publish_event(self, subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        headers = {**(trace_headers() or {}), Header.MSG_ID.value: message_id}

        def payload() -> bytes:
            encoded = encode(message() if callable(message) else message)
            check_size(subject, encoded, headers, self._client.max_payload)
            return encoded

        await self._stream_of(subject).append(subject, payload, headers)

    async def past_events(self, subject: str, kind: type[M], *, limit: int) -> tuple[Stored[M], ...]:
        found, stream = [], self._stream_of(subject)
        for msg in await stream.past(subject, limit):
            try:
                found.append(Stored(decode(msg.data, kind), stream.clock.stored_s(msg, time.monotonic())))
            except MalformedMessage as error:
                self._malformed.record(kind, msg.subject, error)
        return tuple(found)

    def _stream_of(self, subject: str) -> EventStream:
        return self._records if subject.startswith(subjects.records().removesuffix(">")) else self._stream

    async def subscribe_events(self, subject: str, kind: type[M], listener: EventListener[M]) -> Subscription:
        subscription = EventSubscription(self._stream, subject, kind, listener, self._malformed, self._forget)
        await subscription.start()
        self._subscriptions.add(subscription)
        return subscription

    async def cluster_name(self, claim: str = "") -> str:
        with self._refusals.watch("publish", JETSTREAM) as refused:
            try:
                async with asyncio.timeout(CLUSTER_TIMEOUT_S) as limit:
                    refused.ends(limit)
                    return await cluster_name(self._stream.jetstream, claim)
            except nats.js.errors.NotFoundError:
                return ""
            except (TimeoutError, nats.errors.Error) as error:
                refused.check("ask for the cluster's name", self._refusals.user)
                raise Unavailable(f"the cluster's name cannot be read: {str(error) or 'no answer'}") from error

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._link.lost)

    async def close(self) -> None:
        self._link.closes()
        for subscription in list(self._subscriptions):
            await subscription.close()
        self._subscriptions.clear()
        await self._service.stop()
        await round_trip(self._client)
        await self._link.close()

    def _forget(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def _on_down(self) -> None:
        # Nor plans: who published one was told that it was not, and has given its lease back.
        drop_unsent(self._client, self._unbuffered, prefix=subjects.plans().removesuffix(">"))

    def _on_up_again(self) -> None:
        for subscription in self._subscriptions:
            if isinstance(subscription, EventSubscription):
                subscription.reconnected()


class _Subscribed:
    """A plain subscription that runs."""

    def __init__(self, bus: NatsBus, inner: NatsSubscription) -> None:
        self._bus = bus
        self._inner = inner

    async def close(self) -> None:
        self._bus._forget(self)
        await drain(self._bus._client, self._inner)


class _Silent:
    """A subscription to what this server does not offer."""

    async def close(self) -> None:
        pass
