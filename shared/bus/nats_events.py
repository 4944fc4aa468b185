"""Durable events: the plan stream in JetStream and its readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Generic

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from opentelemetry import context as otel_context

from shared import subjects
from shared.bus.base import AsyncListener, M
from shared.bus.nats_order import end
from shared.bus.wire import Headers, MalformedLog, enter_sender_context, leave_sender_context
from shared.errors import Unavailable
from shared.messages.codec import MalformedMessage, decode

_log = logging.getLogger(__name__)

MAX_AGE_S = 7 * 24 * 3600
DUPLICATE_WINDOW_S = 120
PUBLISH_TIMEOUT_S = 5.0
_API_TIMEOUT_S = 2.0
_RETRY_WAIT_S = 0.25
_ACK_WAIT_S = 30.0
_WATCH_INTERVAL_S = 15.0
_CLOSE_TIMEOUT_S = 10.0


class PlanStream:
    """The stream over ``subjects.plans()``, created when missing."""

    def __init__(self, client: Client) -> None:
        self.jetstream: JetStreamContext = client.jetstream(timeout=_API_TIMEOUT_S)
        self._lock = asyncio.Lock()
        self._known = False

    async def info(self) -> api.StreamInfo:
        """The stream's state. Raises ``nats.errors.Error`` while JetStream is away."""
        async with self._lock:
            try:
                info = await self.jetstream.stream_info(subjects.PLAN_STREAM)
            except nats.js.errors.NotFoundError:
                with contextlib.suppress(nats.js.errors.BadRequestError):  # another process was first
                    await self.jetstream.add_stream(
                        api.StreamConfig(
                            name=subjects.PLAN_STREAM,
                            subjects=[subjects.plans()],
                            storage=api.StorageType.FILE,
                            max_age=MAX_AGE_S,
                            discard=api.DiscardPolicy.OLD,
                            duplicate_window=DUPLICATE_WINDOW_S,
                        )
                    )
                info = await self.jetstream.stream_info(subjects.PLAN_STREAM)
            self._known = True
            return info

    async def append(self, subject: str, payload: bytes, headers: Headers) -> None:
        """Append once; retried until the deadline, which ``Nats-Msg-Id`` makes safe. Raises ``Unavailable``."""
        reason: Exception | None = None
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                while True:
                    try:
                        if not self._known:
                            await self.info()
                        await self.jetstream.publish(
                            subject, payload, timeout=_API_TIMEOUT_S, stream=subjects.PLAN_STREAM, headers=headers
                        )
                    except nats.js.errors.NoStreamResponseError as error:
                        reason, self._known = error, False
                    except (TimeoutError, nats.errors.Error) as error:
                        reason = error
                    else:
                        return
                    await asyncio.sleep(_RETRY_WAIT_S)
        except TimeoutError:
            detail = f": {reason}" if reason else ""
            raise Unavailable(
                f"the plan stream took no event on {subject} within {PUBLISH_TIMEOUT_S:.0f} s{detail}"
            ) from reason


class EventSubscription(Generic[M]):
    """An ephemeral consumer from now on, made again wherever it is lost, at the next event not yet seen."""

    def __init__(
        self,
        stream: PlanStream,
        subject: str,
        kind: type[M],
        listener: AsyncListener[M],
        malformed: MalformedLog,
        on_close: Callable[[EventSubscription[M]], None],
    ) -> None:
        self._stream = stream
        self._subject = subject
        self._kind = kind
        self._listener = listener
        self._malformed = malformed
        self._on_close = on_close
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()
        self._pending: set[int] = set()
        self._stream_created: datetime | None = None
        self._next_sequence = 0
        self._consumer: JetStreamContext.PushSubscription | None = None
        self._reconnected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises ``Unavailable`` when JetStream does not answer."""
        token = otel_context.attach(otel_context.Context())
        try:
            await self._attach()
            self._tasks = [asyncio.create_task(self._handle_events()), asyncio.create_task(self._watch())]
        except (TimeoutError, nats.errors.Error) as error:
            raise Unavailable(f"cannot subscribe to events on {self._subject}: {error}") from error
        finally:
            otel_context.detach(token)

    def reconnected(self) -> None:
        """The connection is back: the server may have forgotten the consumer."""
        self._reconnected.set()

    async def close(self) -> None:
        """Stop receiving; the event being handled is finished (and acknowledged)."""
        if not self._tasks:
            return
        self._on_close(self)
        handler, watcher = self._tasks
        self._tasks = []
        await end(watcher)
        await self._detach()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._arrived.join()
        await end(handler)

    async def _attach(self) -> None:
        info = await self._stream.info()
        if info.created != self._stream_created:
            # A stream made anew counts from 1, and all that it holds came after this subscription.
            self._next_sequence = info.state.last_seq + 1 if self._stream_created is None else 1
            self._stream_created = info.created
        await self._detach()
        self._consumer = await self._stream.jetstream.subscribe(
            self._subject,
            stream=subjects.PLAN_STREAM,
            cb=self._arrive,
            manual_ack=True,
            config=api.ConsumerConfig(
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._next_sequence,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=_ACK_WAIT_S,
                max_ack_pending=1,
            ),
        )

    async def _detach(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with contextlib.suppress(nats.errors.Error):  # gone with its connection
                await consumer.unsubscribe()

    async def _watch(self) -> None:
        """Make the consumer again after each reconnection, and when the server has lost it otherwise."""
        while True:
            try:
                async with asyncio.timeout(_WATCH_INTERVAL_S):
                    await self._reconnected.wait()
            except TimeoutError:
                if await self._consumer_lives():
                    continue
                _log.warning("the event consumer on %s is gone; making it again", self._subject)
            while True:
                self._reconnected.clear()
                try:
                    await self._attach()
                except (TimeoutError, nats.errors.Error) as error:
                    _log.warning("cannot resume events on %s yet: %s", self._subject, error)
                    await asyncio.sleep(_RETRY_WAIT_S)
                else:
                    break

    async def _consumer_lives(self) -> bool:
        try:
            if self._consumer is not None:
                await self._consumer.consumer_info()
        except nats.js.errors.NotFoundError:
            return False
        except (TimeoutError, nats.errors.Error):
            return True  # no answer says nothing; a reconnection will wake the watcher
        return self._consumer is not None

    async def _arrive(self, msg: Msg) -> None:
        sequence = msg.metadata.sequence.stream
        if sequence >= self._next_sequence:
            self._next_sequence = sequence + 1
            self._pending.add(sequence)
            self._arrived.put_nowait(msg)
        elif sequence not in self._pending:
            await self._acknowledge(msg)  # handled before; its acknowledgement was lost

    async def _handle_events(self) -> None:
        while True:
            msg = await self._arrived.get()
            try:
                await self._handle(msg)
            finally:
                self._pending.discard(msg.metadata.sequence.stream)
                self._arrived.task_done()

    async def _handle(self, msg: Msg) -> None:
        try:
            event = decode(msg.data, self._kind)
        except MalformedMessage as error:
            self._malformed.record(self._kind, msg.subject, error)
            await self._acknowledge(msg)
            return
        keep_alive = asyncio.create_task(self._extend(msg))
        token = enter_sender_context(msg.headers)
        try:
            await self._listener(event)
        except Exception:  # noqa: BLE001 - acknowledged all the same: an event that fails once would fail for ever
            _log.exception("the listener of %s failed", msg.subject)
        finally:
            leave_sender_context(token)
            await end(keep_alive)
        await self._acknowledge(msg)

    async def _extend(self, msg: Msg) -> None:
        while True:
            await asyncio.sleep(_ACK_WAIT_S / 3)
            with contextlib.suppress(nats.errors.Error):  # disconnected: redelivery is recognised by its sequence
                await msg.in_progress()

    async def _acknowledge(self, msg: Msg) -> None:
        with contextlib.suppress(nats.errors.Error):  # disconnected: the redelivery will be acknowledged
            await msg.ack()
