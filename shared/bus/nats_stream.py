"""The streams in JetStream that keep plans and records: made, limited, appended to, and read back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from shared import subjects
from shared.bus.nats_link import answer_to, ending
from shared.bus.refusals import JETSTREAM, AccessRefusals
from shared.bus.wire import Headers
from shared.errors import Unavailable

_log = logging.getLogger(__name__)

DUPLICATE_WINDOW_S = 120
PUBLISH_TIMEOUT_S = 5.0
KEEP_TIMEOUT_S = 10.0
_API_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 10.0
RETRY_WAIT_S = 0.25
_NAME_IN_USE = 10058
"""JetStream's code for a stream that exists with another configuration."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much of what was planned is kept: plans are carried out within minutes, or never."""

    max_bytes: int = 64 << 20
    max_age_s: float = 3600.0
    """0: whatever their age."""
    max_events_each: int = -1
    """On each subject."""
    num_replicas: int = 1


_FEW_SERVERS = 10074
"""JetStream's code where there are fewer servers than replicas."""
PLAN_LIMITS = StreamLimits()
RECORD_LIMITS = StreamLimits(max_age_s=0.0, max_events_each=500)
"""The newest records of each kind survive, however old they are."""


class StreamClock:
    """The clock by which the stream's server stamps events, against this process's monotonic one."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        """What a monotonic time lacks to the server's Unix time."""

    def set(self, server: datetime, now_s: float) -> None:
        """The server just said what its clock shows."""
        self._ahead_s = server.timestamp() - now_s

    def age_s(self, msg: Msg, now_s: float) -> float:
        """How old an event is; negative where the server's clock was set since it was heard."""
        return self._ahead_s + now_s - msg.metadata.timestamp.timestamp()

    def stored_s(self, msg: Msg, now_s: float) -> float:
        """The monotonic time at which the stream took an event."""
        return now_s - max(0.0, self.age_s(msg, now_s))


class EventStream:
    """A stream over ``subject``. Who appends makes it and keeps its limits; who reads waits for it."""

    def __init__(
        self,
        client: Client,
        refusals: AccessRefusals,
        up: asyncio.Event,
        *,
        consumer_prefix: str,
        name: str = subjects.PLAN_STREAM,
        subject: str = subjects.plans(),
        limits: StreamLimits = PLAN_LIMITS,
    ) -> None:
        self._client = client
        self._up = up
        """Set while the connection is there."""
        self.clock = StreamClock()
        self.jetstream: JetStreamContext = client.jetstream(timeout=_API_TIMEOUT_S)
        self.name = name
        self._label = "plan stream" if name == subjects.PLAN_STREAM else "record stream"
        self.refusals = refusals
        self._subject = subject
        self._consumer_names = (f"{consumer_prefix}-{number}" for number in itertools.count())
        self._limits = limits
        self._lock = asyncio.Lock()
        self._known = False

    async def info(self) -> api.StreamInfo:
        """The stream's state; ``clock`` is set by it. Raises ``NotFoundError`` while it does not exist,
        ``nats.errors.Error`` while JetStream is away."""
        # Not by ``stream_info``, which leaves out what the server's clock said.
        try:
            msg = await answer_to(
                self._client, f"{api.DEFAULT_PREFIX}.STREAM.INFO.{self.name}", timeout_s=_API_TIMEOUT_S
            )
        except nats.errors.NoRespondersError as error:
            raise nats.js.errors.ServiceUnavailableError from error
        answer: dict[str, Any] = msgspec.json.decode(msg.data)
        if "error" in answer:
            raise nats.js.errors.APIError.from_error(answer["error"])
        self.clock.set(datetime.fromisoformat(answer["ts"]), time.monotonic())
        state: api.StreamInfo = api.StreamInfo.from_response(answer)
        return state

    def new_consumer_name(self) -> str:
        """Of no consumer before: one that was lost may still be there."""
        return next(self._consumer_names)

    async def keep(self, limits: StreamLimits) -> None:
        """Make the stream, or change it to these limits. Raises ``Unavailable``, ``NotPermitted``."""
        self._limits = limits
        reason: Exception | None = None
        with self.refusals.watch("publish", JETSTREAM) as refused:
            try:
                async with asyncio.timeout(KEEP_TIMEOUT_S) as limit:
                    refused.ends(limit)
                    while True:
                        try:
                            await self._make()
                        except (TimeoutError, nats.js.errors.ServiceUnavailableError) as error:
                            reason = error  # JetStream is still starting
                        else:
                            return
                        await asyncio.sleep(RETRY_WAIT_S)
            except TimeoutError as error:
                refused.check(f"make the {self._label}", self.refusals.user)
                raise Unavailable(f"JetStream did not answer within {KEEP_TIMEOUT_S:.0f} s: {reason}") from error
            except nats.errors.Error as error:
                raise Unavailable(f"NATS refuses the {self._label} with {limits}: {error}") from error

    async def _make(self) -> None:
        async with self._lock:
            wanted = {
                "subjects": [self._subject],
                "max_bytes": self._limits.max_bytes,
                "max_msgs": -1,
                "max_msgs_per_subject": self._limits.max_events_each,
                "max_age": self._limits.max_age_s,
                "num_replicas": self._limits.num_replicas,
                "discard": api.DiscardPolicy.OLD,
                "duplicate_window": min(DUPLICATE_WINDOW_S, self._limits.max_age_s or DUPLICATE_WINDOW_S),
            }
            try:
                info = await self.info()
            except nats.js.errors.NotFoundError:
                fresh = api.StreamConfig(name=self.name, storage=api.StorageType.FILE)
                try:
                    await ending(self.jetstream.add_stream(fresh.evolve(**wanted)))
                except nats.js.errors.BadRequestError as error:
                    if error.err_code != _NAME_IN_USE:
                        raise
                    info = await self.info()  # another process was first, and wants something else
                else:
                    self._known = True
                    return
            if any(getattr(info.config, key) != value for key, value in wanted.items()):
                await ending(self.jetstream.update_stream(info.config.evolve(**wanted)))
                _log.info("the %s keeps %s from now on", self._label, self._limits)
            self._known = True

    async def append(self, subject: str, payload: Callable[[], bytes], headers: Headers) -> None:
        """Append once; retried until the deadline, which ``Nats-Msg-Id`` makes safe. ``payload`` is made for each
        attempt. Raises ``Unavailable``, ``NotPermitted``, and what ``payload`` raises."""
        reason: Exception | None = None
        with self.refusals.watch("publish", subject) as refused, self.refusals.watch("publish", JETSTREAM) as unmade:
            try:
                async with asyncio.timeout(PUBLISH_TIMEOUT_S) as limit:
                    refused.ends(limit)
                    unmade.ends(limit)
                    while True:
                        # Not buffered while down: an event that was given up would be new to the stream afterwards.
                        await self._up.wait()
                        try:
                            if not self._known:
                                await self._make()
                            await ending(
                                self.jetstream.publish(
                                    subject, payload(), timeout=_API_TIMEOUT_S, stream=self.name, headers=headers
                                )
                            )
                        except nats.js.errors.NoStreamResponseError as error:
                            reason, self._known = error, False
                        except (TimeoutError, nats.errors.Error) as error:
                            reason = error
                        else:
                            return
                        await asyncio.sleep(RETRY_WAIT_S)
            except TimeoutError:
                for one in (refused, unmade):
                    one.check(f"append {subject} to the {self._label}", self.refusals.user)
                detail = f": {reason}" if reason else ""
                raise Unavailable(
                    f"the {self._label} took no event on {subject} within {PUBLISH_TIMEOUT_S:.0f} s{detail}"
                ) from reason

    async def past(self, subject: str, limit: int) -> list[Msg]:
        """The newest messages on a subject, oldest first; none while there is no stream. Raises ``Unavailable``,
        ``NotPermitted``."""
        newest: deque[Msg] = deque(maxlen=limit)
        with self.refusals.watch("publish", JETSTREAM) as refused:
            try:
                async with asyncio.timeout(_READ_TIMEOUT_S) as deadline:
                    refused.ends(deadline)
                    await self.info()  # for the clock
                    await self._read(subject, newest)
            except nats.js.errors.NotFoundError:
                return []
            except (TimeoutError, nats.errors.Error) as error:
                refused.check(f"read back {subject}", self.refusals.user)
                raise Unavailable(f"cannot read back the events on {subject}: {error or 'no answer'}") from error
        return list(newest)

    async def _read(self, subject: str, into: deque[Msg]) -> None:
        reading = await self.jetstream.subscribe(
            subject,
            stream=self.name,
            config=api.ConsumerConfig(
                name=self.new_consumer_name(),
                deliver_policy=api.DeliverPolicy.ALL,
                ack_policy=api.AckPolicy.NONE,
                inactive_threshold=_READ_TIMEOUT_S,
            ),
        )
        try:
            info = await ending(reading.consumer_info())
            delivered = info.delivered.consumer_seq if info.delivered is not None else 0
            if not delivered and not info.num_pending:
                return
            while True:
                msg = await ending(reading.next_msg(timeout=_READ_TIMEOUT_S))
                into.append(msg)
                if not msg.metadata.num_pending:
                    return
        finally:
            with contextlib.suppress(nats.errors.Error):  # gone with its connection
                await reading.unsubscribe()


async def cluster_name(jetstream: JetStreamContext, claim: str) -> str:
    """The name that the servers keep. ``claim``: the first that comes is kept; empty: only look.

    Raises ``NotFoundError`` where there is none yet, and ``nats.errors.Error`` or ``TimeoutError`` while JetStream is
    away. The server decides between two claims: it makes a stream once, and says so to the second.
    """
    try:
        return (await ending(jetstream.stream_info(subjects.CLUSTER_STREAM))).config.description or ""
    except nats.js.errors.NotFoundError:
        if not claim:
            raise
    config = api.StreamConfig(
        name=subjects.CLUSTER_STREAM, subjects=[subjects.cluster()], description=claim, max_msgs=1, max_bytes=1024
    )
    for replicas in (3, 1):
        try:
            await ending(jetstream.add_stream(config.evolve(num_replicas=replicas)))
        except nats.js.errors.APIError as error:
            if error.err_code == _NAME_IN_USE:
                break
            if error.err_code != _FEW_SERVERS or replicas == 1:
                raise
        else:
            break
    return (await ending(jetstream.stream_info(subjects.CLUSTER_STREAM))).config.description or ""
