"""One process's connection to NATS: made, lost, made again, or gone for good; and what the client library leaves open:
being sure that the server has seen what was sent, that a task ends, and that what is late is not sent at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from prometheus_client import Gauge

from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.departures import connection_name
from shared.bus.refusals import AccessRefusals
from shared.bus.renewal import CurrentAccess, RenewingClient
from shared.errors import NotPermitted, Unavailable
from shared.permissions import inbox_prefix

_log = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
PING_INTERVAL_S = 0.4
"""A server that stopped answering is noticed after three of these: sooner than the default lease of 2 s,
after which the silence would be blamed on peers."""
_ATTEMPT_S = 2
"""For one server to take a connection: of several, one that stands still must not cost more than a lease."""
REFUSED_FOR_S = 5.0
"""A server that comes back and does not know this user may be about to read its new passwords; not for longer."""
_REFUSED_PLAIN_START_S = 1.0
"""The same at a process's start."""
REFUSED_IN_FILES_S = 90.0
"""The same where user or password stand in files: a Secret that was replaced may not have arrived. Kubernetes brings it
to a mounted volume about once a minute, and would start a process that ends again and again only after minutes."""
_FORGOTTEN_S = 15.0
"""A refusal is of the past if so long none has followed: no server could be reached that would have refused."""
_MAX_SAID = 20
_UNKNOWN_USER = "authorization violation"
ROUND_TRIP_S = 2.0
_CANCEL_AGAIN_S = 0.1
_CLOSE_S = 1.0

WARN_BEFORE_S = 30 * 24 * 3600.0
_CERTIFICATE_ENDS = Gauge(
    "blitz_nats_certificate_end_timestamp_seconds",
    "Until when the certificate is valid that the NATS server showed at the last connection (Unix time); 0: none.",
)

T = TypeVar("T")


class NatsLink:
    """Connects, and connects again for as long as the server may take it."""

    def __init__(self, access: NatsAccess) -> None:
        self._access = CurrentAccess(access)
        self.client = RenewingClient(self._access)
        self.refusals = AccessRefusals(access.user)
        self.up = asyncio.Event()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the connection has ended and will not be back."""
        self._connected_since_s: float | None = None
        self._down: Callable[[], None] = _nothing
        self._up_again: Callable[[], None] = _nothing
        self._last_error: Exception | None = None
        self._said: set[str] = set()
        """Reasons that the log has, of this outage."""
        self._connecting: asyncio.Timeout | None = None
        self._unknown_since_s: float | None = None
        """Since when servers refuse this process; those that cannot be reached meanwhile change nothing."""
        self._unknown_last_s = 0.0
        self._closing = False

    @property
    def connected_since_s(self) -> float | None:
        """As ``Bus.connected_since_s``."""
        # The client knows of an outage before it says so: it closes the old connection first.
        return self._connected_since_s if self.client.is_connected else None

    async def connect(
        self,
        url: str,
        kind: str,
        name: str,
        incarnation: str,
        *,
        down: Callable[[], None],
        up_again: Callable[[], None],
        timeout_s: float | None,
    ) -> None:
        """``down`` and ``up_again`` are called when the connection is lost and when it is back. ``timeout_s`` None: a
        server that cannot be reached yet is waited for, and the log says so.

        Raises ``NotPermitted`` when the server refuses the credentials: at once, or, if they stand in files, where
        others may still arrive, after ``REFUSED_IN_FILES_S`` of attempts that read them again. Raises ``Unavailable``,
        naming the URL, when none can be reached in time."""
        self._down, self._up_again = down, up_again
        access = self._access
        servers = [server.strip() for server in url.split(",")]
        # Once, and not again by the client after each loss: it tries in turn, the one that it has just lost last.
        random.shuffle(servers)
        places = ", ".join(_without_password(server) for server in servers)
        try:
            connecting = asyncio.create_task(
                self.client.connect(
                    servers=servers,
                    name=connection_name(kind, name, incarnation),
                    user=access.next_user if access.user else None,
                    password=access.password if access.user else None,
                    user_credentials=access.creds(),
                    # Over tls:// nothing, not even a greeting, is taken from a server that has not shown who it is.
                    tls_handshake_first=any(server.startswith("tls://") for server in servers),
                    inbox_prefix=f"{inbox_prefix(kind)}.{secrets.token_hex(8)}",
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                    closed_cb=self._on_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=_ATTEMPT_S,
                    dont_randomize=True,
                    ping_interval=PING_INTERVAL_S,  # type: ignore[arg-type]
                )
            )
            try:
                async with asyncio.timeout(timeout_s) as self._connecting:
                    await asyncio.wait({connecting})
            finally:
                await end(connecting)
            await connecting
        except (OSError, ValueError, ImportError, nats.errors.Error) as error:
            reason = self._last_error or error
            await self.close()
            if self._unknown_since_s is not None and time.monotonic() - self._unknown_last_s < _FORGOTTEN_S:
                raise NotPermitted(f"NATS at {places} {self._unknown()}") from error
            detail = f" ({reason})" if str(reason) else ""
            within = f" within {timeout_s:g} s" if timeout_s is not None else ""
            raise Unavailable(f"cannot reach NATS at {places}{within}{detail}") from error
        finally:
            self._connecting = None
        if not self.client._server_info.get("auth_required", False):
            _log.warning("NATS at %s takes anybody: whoever reaches it reads prompts and sends tokens", places)
        self._set_up()

    def closes(self) -> None:
        """The end that comes is meant."""
        self._closing = True

    async def close(self) -> None:
        """Disconnect."""
        self.closes()
        # Never connected, or closed by the server; of the latter uvloop says RuntimeError.
        with contextlib.suppress(OSError, RuntimeError, nats.errors.Error):
            # After a TLS handshake that was broken off, the client waits for an end that nobody will tell it of.
            async with asyncio.timeout(_CLOSE_S):
                await self.client.close()
        # The client cancels it once, which is lost where it comes together with a refused connection.
        reconnecting = self.client._reconnection_task
        if reconnecting is not None and reconnecting is not asyncio.current_task():
            await end(reconnecting)
        self._connected_since_s = None

    def _set_up(self) -> None:
        self._connected_since_s = time.monotonic()
        self._last_error = None
        self._unknown_since_s = None
        self._said.clear()
        self._access.accepted()
        self.refusals.user = self._access.user
        self.up.set()
        self._look_at_certificate()

    def _look_at_certificate(self) -> None:
        ends_unix_s = self.client.server_certificate_ends_unix_s
        if ends_unix_s is None:
            return
        _CERTIFICATE_ENDS.set(ends_unix_s)
        left_s = ends_unix_s - time.time()
        if left_s < WARN_BEFORE_S:
            _log.warning(
                "the NATS server's certificate is valid for another %.0f h: nobody can connect after that unless the "
                "server reloads a new one",
                left_s / 3600,
            )

    async def _on_disconnect(self) -> None:
        self._connected_since_s = None
        self.up.clear()
        self._down()
        reconnecting = asyncio.current_task()
        if reconnecting is not None and reconnecting is self.client._reconnection_task:
            reconnecting.add_done_callback(self._reconnection_ended)
        if not self._closing and not self.client.is_closed:
            _log.warning("NATS is disconnected; reconnecting")

    async def _on_reconnect(self) -> None:
        self._set_up()
        _log.info("NATS is connected again")
        self._up_again()

    async def _on_closed(self) -> None:
        self._connected_since_s = None
        # Whoever waits for the connection learns from the client that it is closed.
        self.up.set()
        if not self._closing:
            reason = str(self.client.last_error or "without a reason")
            _log.error("the NATS server closed the connection for good: %s", reason)
            self._lose(reason)

    def _reconnection_ended(self, task: asyncio.Task[None]) -> None:
        """The client's task that reconnects is over: with a connection, or replaced, or by a fault of its own."""
        if not task.cancelled() and task is self.client._reconnection_task and self.client.is_reconnecting:
            self.up.set()
            self._lose(f"the client gave up reconnecting: {task.exception()!r}")

    async def _on_error(self, error: Exception) -> None:
        if self.refusals.take(str(error)):
            return
        told, ends_at_once = str(error) or type(error).__name__, False
        if _UNKNOWN_USER in str(error).lower():
            told = f"the server {self._unknown()}"
            # The error will say so.
            ends_at_once = self._connecting is not None and not self._access.at_start.in_files
            self._on_unknown()
        # The client reports every failed attempt; one line per outage and reason is enough.
        if told not in self._said and len(self._said) < _MAX_SAID and not ends_at_once:
            _log.warning("%s: %s", "waiting for NATS" if self._connecting is not None else "NATS", told)
        self._said.add(told)
        self._last_error = error

    def _on_unknown(self) -> None:
        self._access.refused()
        now_s, last_s = time.monotonic(), self._unknown_last_s
        if self._unknown_since_s is None or now_s - last_s > _FORGOTTEN_S:
            self._unknown_since_s = now_s
        self._unknown_last_s = now_s
        plain_s = REFUSED_FOR_S if self._connecting is None else _REFUSED_PLAIN_START_S
        if now_s - self._unknown_since_s < (REFUSED_IN_FILES_S if self._access.at_start.in_files else plain_s):
            return
        if self._connecting is None:
            self._lose(f"the server is back and {self._unknown()}")
        elif not self._connecting.expired():
            self._connecting.reschedule(asyncio.get_running_loop().time())

    def _unknown(self) -> str:
        """What a server does that does not know these credentials."""
        access = self._access
        if access.at_start.creds_file is not None:
            return f"refuses the credentials in {access.at_start.creds_file} (BLITZ_NATS_CREDS_FILE)"
        if access.user:
            user = "BLITZ_NATS_USER" if access.at_start.user_file is None else "BLITZ_NATS_USER_FILE"
            return f"refuses user {access.user!r} with this password ({user}, BLITZ_NATS_PASSWORD_FILE)"
        return "wants a user and a password: set BLITZ_NATS_USER and BLITZ_NATS_PASSWORD_FILE"

    def _lose(self, reason: str) -> None:
        if not self._closing and not self.lost.done():
            self.lost.set_result(reason)


def _nothing() -> None:
    pass


def _without_password(server: str) -> str:
    parts = urlsplit(server)
    return server.replace(f"{parts.netloc.rpartition('@')[0]}@", "") if "@" in parts.netloc else server


async def round_trip(client: Client) -> None:
    """Return once the server has processed everything sent so far, or after 2 s. At once while disconnected."""
    # The client's own ``flush`` writes its PING ahead of commands that wait in its buffer, so it can return before the
    # server knows of a subscription just made. A request queues behind them.
    if client.is_connected:
        with contextlib.suppress(nats.errors.Error):  # "no responders" is the answer expected
            await answer_to(client, subjects.nobody(), timeout_s=ROUND_TRIP_S)


async def answer_to(
    client: Client, subject: str, payload: bytes = b"", headers: dict[str, str] | None = None, *, timeout_s: float
) -> Msg:
    """The client's own ``request``, but a cancellation always ends it. Raises ``nats.errors.Error``."""
    return await ending(client.request(subject, payload, timeout=timeout_s, headers=headers))


async def ending(call: Coroutine[Any, Any, T]) -> T:
    """A call of the client that asks the server, but a cancellation always ends it: the client waits with wait_for,
    which in Python 3.11 loses one that comes together with the answer. Raises what the call raises."""
    asking = asyncio.create_task(call)
    try:
        await asyncio.wait({asking})
    finally:
        await end(asking)
        if not asking.cancelled():
            asking.exception()  # retrieved, so that asyncio does not warn of it
    return asking.result()


async def drain(client: Client, subscription: Subscription) -> None:
    """Withdraw the subscription; what the server had sent by then is handled before this returns."""
    with contextlib.suppress(nats.errors.Error):  # closed before, or disconnected meanwhile
        if client.is_connected:
            await client._send_unsubscribe(subscription._id)
            await round_trip(client)
            await subscription.drain()  # type: ignore[no-untyped-call]
        else:
            await subscription.unsubscribe()


def drop_unsent(client: Client, subjects: Collection[str], *, prefix: str) -> None:
    """Take messages on these subjects, and on those that begin so, out of what is to be sent once the connection is
    there again."""
    begin = (prefix, *(f"{subject} " for subject in subjects))
    starts = tuple(f"{verb} {subject}".encode() for subject in begin for verb in ("PUB", "HPUB"))
    client._pending = [command for command in client._pending if not command.startswith(starts)]
    client._pending_data_size = sum(map(len, client._pending))


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it is done: the client swallows a cancellation that meets it while it flushes, and one that
    comes just when a connection is there or has failed. Whoever is cancelled meanwhile waits for it first."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
