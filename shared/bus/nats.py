"""The bus over NATS. See ``shared.bus.base`` for the contract."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Generic
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.api import Header
from opentelemetry import context as otel_context

from shared.bus.base import AsyncListener, Bus, Listener, M, R, Responder, Subscription
from shared.bus.nats_events import EventSubscription, PlanStream
from shared.bus.nats_order import drain, drop_unsent, round_trip
from shared.bus.nats_service import RpcService
from shared.bus.wire import (
    MalformedLog,
    check_size,
    enter_sender_context,
    leave_sender_context,
    reply_of,
    trace_headers,
)
from shared.errors import DeadlineExceeded, NoResponder, Unavailable
from shared.messages.codec import MalformedMessage, Message, decode, encode

_log = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
_PING_INTERVAL_S = 0.4
"""A server that stopped answering is noticed after three of these: sooner than the default lease of 2 s,
after which the silence would be blamed on peers."""


class NatsBus(Bus):
    """One process's connection. Reconnects for ever; subscriptions survive."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._malformed = MalformedLog()
        self._service = RpcService(client, name, self._malformed, self._forget)
        self._subscriptions: set[Subscription] = set()
        self._events: set[EventSubscription[Any]] = set()
        self._stream: PlanStream | None = None
        self._up = asyncio.Event()
        self._connected_since_s: float | None = None
        self._last_error: Exception | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._unbuffered: set[str] = set()
        """Subjects of messages that must not outlast an outage."""
        self._closing = False

    @classmethod
    async def connect(cls, url: str, *, name: str, connect_timeout_s: float = 10.0) -> NatsBus:
        """Connect as ``name`` to ``url`` (several: separated by commas).

        Raises ``Unavailable``, naming the URL, when no server can be reached in time.
        """
        client = Client()
        bus = cls(client, name)
        servers = [server.strip() for server in url.split(",")]
        try:
            async with asyncio.timeout(connect_timeout_s):
                await client.connect(
                    servers=servers,
                    name=name,
                    error_cb=bus._on_error,
                    disconnected_cb=bus._on_disconnect,
                    reconnected_cb=bus._on_reconnect,
                    closed_cb=bus._on_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=max(1, int(connect_timeout_s)),
                    ping_interval=_PING_INTERVAL_S,  # type: ignore[arg-type]
                )
        except (OSError, ValueError, nats.errors.Error) as error:
            reason = bus._last_error or error
            bus._closing = True
            with contextlib.suppress(OSError, nats.errors.Error):
                await client.close()
            places = ", ".join(_without_password(server) for server in servers)
            detail = f" ({reason})" if str(reason) else ""
            raise Unavailable(f"cannot reach NATS at {places} within {connect_timeout_s:g} s{detail}") from error
        bus._set_up()
        return bus

    @property
    def max_payload_bytes(self) -> int:
        return self._client.max_payload

    @property
    def connected_since_s(self) -> float | None:
        # The client knows of an outage before it says so: it closes the old connection first.
        return self._connected_since_s if self._client.is_connected else None

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
        subscription = _Listening(self, kind, listener)
        # The task that the client starts for this subscription copies the context: it must hold no span.
        token = otel_context.attach(otel_context.Context())
        try:
            subscription.inner = await self._client.subscribe(subject, cb=subscription.receive)
        except nats.errors.Error as error:
            raise Unavailable(f"cannot subscribe to {subject}: {error}") from error
        finally:
            otel_context.detach(token)
        await round_trip(self._client)
        self._subscriptions.add(subscription)
        return subscription

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        payload = encode(message)
        headers = trace_headers()
        check_size(subject, payload, headers, self._client.max_payload)
        try:
            async with asyncio.timeout(timeout_s):
                # Not buffered while down: a request delivered after its deadline would be acted upon, unheard.
                await self._up.wait()
                answer = await self._client.request(subject, payload, timeout=timeout_s, headers=headers)
        except nats.errors.NoRespondersError as error:
            raise NoResponder(f"nobody listens on {subject}") from error
        except TimeoutError as error:
            down = "" if self._up.is_set() else " (NATS is disconnected)"
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:g} s{down}") from error
        except nats.errors.Error as error:
            raise Unavailable(f"cannot send a request on {subject}: {error}") from error
        return reply_of(answer.data, answer.headers, reply)

    async def respond(self, subject: str, kind: type[M], responder: Responder[M, R]) -> Subscription:
        try:
            subscription = await self._service.add(subject, kind, responder)
        except nats.errors.Error as error:
            raise Unavailable(f"cannot respond on {subject}: {error}") from error
        await round_trip(self._client)
        self._subscriptions.add(subscription)
        return subscription

    async def publish_event(self, subject: str, message: Message, *, message_id: str) -> None:
        payload = encode(message)
        headers = {**(trace_headers() or {}), Header.MSG_ID.value: message_id}
        check_size(subject, payload, headers, self._client.max_payload)
        await self._plan_stream().append(subject, payload, headers)

    async def subscribe_events(self, subject: str, kind: type[M], listener: AsyncListener[M]) -> Subscription:
        subscription = EventSubscription(self._plan_stream(), subject, kind, listener, self._malformed, self._forget)
        await subscription.start()
        self._subscriptions.add(subscription)
        self._events.add(subscription)
        return subscription

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        self._closing = True
        for subscription in list(self._subscriptions):
            await subscription.close()
        self._subscriptions.clear()
        self._events.clear()
        await self._service.stop()
        await round_trip(self._client)
        await self._client.close()
        self._connected_since_s = None

    def _forget(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        if isinstance(subscription, EventSubscription):
            self._events.discard(subscription)

    def _plan_stream(self) -> PlanStream:
        if self._stream is None:
            self._stream = PlanStream(self._client)
        return self._stream

    def _set_up(self) -> None:
        self._connected_since_s = time.monotonic()
        self._last_error = None
        self._up.set()

    async def _on_disconnect(self) -> None:
        self._connected_since_s = None
        self._up.clear()
        drop_unsent(self._client, self._unbuffered)
        reconnecting = asyncio.current_task()
        if reconnecting is not None and reconnecting is self._client._reconnection_task:
            reconnecting.add_done_callback(self._reconnection_ended)
        if not self._closing and not self._client.is_closed:
            _log.warning("NATS is disconnected; reconnecting")

    async def _on_reconnect(self) -> None:
        self._set_up()
        _log.info("NATS is connected again")
        for subscription in self._events:
            subscription.reconnected()

    async def _on_closed(self) -> None:
        self._connected_since_s = None
        # Whoever waits for the connection learns from the client that it is closed.
        self._up.set()
        if not self._closing:
            reason = str(self._client.last_error or "without a reason")
            _log.error("the NATS server closed the connection for good: %s", reason)
            self._lose(reason)

    def _reconnection_ended(self, task: asyncio.Task[None]) -> None:
        """The client's task that reconnects is over: with a connection, or replaced, or by a fault of its own."""
        if not task.cancelled() and task is self._client._reconnection_task and self._client.is_reconnecting:
            self._up.set()
            self._lose(f"the client gave up reconnecting: {task.exception()!r}")

    def _lose(self, reason: str) -> None:
        if not self._closing and not self._lost.done():
            self._lost.set_result(reason)

    async def _on_error(self, error: Exception) -> None:
        # The client reports every failed attempt; one line per outage and reason is enough.
        if str(error) != str(self._last_error):
            _log.warning("NATS: %s", error or type(error).__name__)
        self._last_error = error


class _Listening(Generic[M]):
    """A plain subscription: decode and call, inline."""

    inner: NatsSubscription

    def __init__(self, bus: NatsBus, kind: type[M], listener: Listener[M]) -> None:
        self._bus = bus
        self._kind = kind
        self._listener = listener

    async def receive(self, msg: Msg) -> None:
        try:
            message = decode(msg.data, self._kind)
        except MalformedMessage as error:
            self._bus._malformed.record(self._kind, msg.subject, error)
            return
        token = enter_sender_context(msg.headers)
        try:
            self._listener(message)
        except Exception:  # noqa: BLE001 - a listener must not raise; one that does loses this message only
            _log.exception("the listener of %s failed", msg.subject)
        finally:
            leave_sender_context(token)

    async def close(self) -> None:
        self._bus._forget(self)
        await drain(self._bus._client, self.inner)


def _without_password(server: str) -> str:
    parts = urlsplit(server)
    return server.replace(f"{parts.netloc.rpartition('@')[0]}@", "") if "@" in parts.netloc else server
