"""Reading durable events from the plan stream in JetStream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Generic

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from opentelemetry import context as otel_context

from shared.bus.base import EventListener, M, Stored
from shared.bus.nats_link import end
from shared.bus.nats_stream import EventStream
from shared.bus.refusals import JETSTREAM
from shared.bus.wire import MalformedLog, enter_sender_context, leave_sender_context
from shared.errors import Unavailable
from shared.messages.codec import MalformedMessage, decode

_log = logging.getLogger(__name__)

RETRY_WAIT_S = 0.25
MAX_RETRY_WAIT_S = 1.0
_ACK_WAIT_S = 30.0
_WATCH_INTERVAL_S = 15.0
_START_TIMEOUT_S = 8.0
_CLOSE_TIMEOUT_S = 10.0
_DOUBT_S = 1.0
"""An event that seems to be older than this, or to come from the future by as much, is looked at twice."""


class EventSubscription(Generic[M]):
    """An ephemeral consumer from now on, made again wherever it is lost, at the next event not yet seen."""

    def __init__(
        self,
        stream: EventStream,
        subject: str,
        kind: type[M],
        listener: EventListener[M],
        malformed: MalformedLog,
        on_close: Callable[[EventSubscription[M]], None],
    ) -> None:
        self._stream = stream
        self._subject = subject
        self._kind = kind
        self._listener = listener
        self._malformed = malformed
        self._on_close = on_close
        self._arrived: asyncio.Queue[tuple[Msg, float]] = asyncio.Queue()
        """With the time of arrival."""
        self._pending: set[int] = set()
        self._stream_created: datetime | None = None
        self._waits = False
        """For a stream that did not exist when this began: all that it will hold came after."""
        self._next_sequence = 0
        self._consumer: JetStreamContext.PushSubscription | None = None
        self._reconnected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises ``Unavailable`` when JetStream does not answer, ``NotPermitted``."""
        token = otel_context.attach(otel_context.Context())
        refusals = self._stream.refusals
        try:
            with refusals.watch("publish", JETSTREAM) as refused:
                try:
                    async with asyncio.timeout(_START_TIMEOUT_S) as limit:
                        refused.ends(limit)
                        await self._attach()
                except nats.js.errors.NotFoundError:
                    _log.info("waiting for a planner to make the plan stream (events on %s)", self._subject)
                    self._waits = True
                    self._reconnected.set()
                except (TimeoutError, nats.errors.Error) as error:
                    refused.check(f"read events on {self._subject}", refusals.user)
                    raise Unavailable(f"cannot subscribe to events on {self._subject}: {error}") from error
            self._tasks = [asyncio.create_task(self._handle_events()), asyncio.create_task(self._watch())]
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
            first = self._stream_created is None and not self._waits
            self._next_sequence = info.state.last_seq + 1 if first else 1
            self._stream_created = info.created
        await self._detach()
        self._consumer = await self._stream.jetstream.subscribe(
            self._subject,
            stream=self._stream.name,
            cb=self._arrive,
            manual_ack=True,
            config=api.ConsumerConfig(
                # With a name and one filter the server sees on the subject of the request what it is for.
                name=self._stream.new_consumer_name(),
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
            await self._attach_again()

    async def _attach_again(self) -> None:
        wait_s, said = RETRY_WAIT_S, ""
        while True:
            self._reconnected.clear()
            try:
                await self._attach()
            except nats.js.errors.NotFoundError:
                pass  # there is no stream (again) yet, so there are no events
            except Exception as error:  # noqa: BLE001 - whatever the client raises: without a consumer nothing is heard
                if str(error) != said:
                    expected = isinstance(error, TimeoutError | nats.errors.Error)
                    _log.warning("cannot resume events on %s yet: %s", self._subject, error, exc_info=not expected)
                said = str(error)
            else:
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_WAIT_S)

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
            self._arrived.put_nowait((msg, time.monotonic()))
        elif sequence not in self._pending:
            await self._acknowledge(msg)  # handled before; its acknowledgement was lost

    async def _handle_events(self) -> None:
        while True:
            msg, arrived_s = await self._arrived.get()
            try:
                await self._handle(msg, arrived_s)
            finally:
                self._pending.discard(msg.metadata.sequence.stream)
                self._arrived.task_done()

    async def _stored_s(self, msg: Msg, arrived_s: float) -> float:
        """When the stream took the event (monotonic). Where that is not just now, its clock may have been set: it is
        asked again."""
        clock = self._stream.clock
        if abs(clock.age_s(msg, arrived_s)) > _DOUBT_S:
            with contextlib.suppress(TimeoutError, nats.errors.Error):  # what was known before has to do
                await self._stream.info()
        return clock.stored_s(msg, arrived_s)

    async def _handle(self, msg: Msg, arrived_s: float) -> None:
        try:
            event = decode(msg.data, self._kind)
        except MalformedMessage as error:
            self._malformed.record(self._kind, msg.subject, error)
            await self._acknowledge(msg)
            return
        keep_alive = asyncio.create_task(self._extend(msg))
        token = enter_sender_context(msg.headers)
        try:
            await self._listener(Stored(event, await self._stored_s(msg, arrived_s)))
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
