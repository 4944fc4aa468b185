"""Load reports of one host's workers, put together by one of them.

The worker that can bind a socket name of the host and the cluster gathers; the others send it their reports over
that socket (Unix, abstract, ``SOCK_SEQPACKET``). The kernel gives the name back when its holder dies, and tells the
others, so the next one gathers from its next report on. Where workers do not share a network namespace, or where there
are no such sockets, each is alone and speaks for itself.

No member relies on the others: it also speaks for itself until the worker that gathers has confirmed that it passed
something on, and again when the confirmations stop. Both ends accept processes of their own user only.

No event loop: everything happens in ``exchange``, once per report, in calls that do not block.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.messages.codec import MalformedMessage, decode, encode
from shared.messages.load import HostLoad, LoadReport

log = logging.getLogger(__name__)

MAX_MEMBERS = 256
MAX_REPORT_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 200 * 1024
"""Well below what NATS takes."""
READS_PER_EXCHANGE = 8
"""Of each member, at most: it sends one report per exchange, and what is more waits in its socket."""
SILENCE_INTERVALS = 3.5
"""A member whose reports are not confirmed for so long speaks for itself; older reports come from a backlog."""
REFUSED_S = 2.0
"""How long a member that was not let in stays away."""

_CONFIRMED = b"\x01"
_UCRED = struct.Struct("3i")


def group_name(nats_url: str, host: str) -> str:
    """What the workers of one host and cluster share with no other worker; empty where they cannot meet."""
    if not nats_url or not sys.platform.startswith("linux"):
        return ""
    places = sorted(urlsplit(server.strip()).netloc.rpartition("@")[2] or server for server in nats_url.split(","))
    about = "\n".join([*places, host, str(os.geteuid())])
    return f"blitz.v1.load.{hashlib.blake2b(about.encode(), digest_size=16).hexdigest()}"


@dataclass(slots=True)
class _Member:
    connection: socket.socket
    worker_id: str = ""
    """Of its first report; it speaks for no other."""


class HostGroup:
    """One worker's place among those of its host."""

    def __init__(self, name: str, host: str, *, interval_s: float) -> None:
        """``name``: of ``group_name``; empty: alone. ``interval_s``: between two exchanges, of every worker here."""
        self._address = f"\0{name}" if name else ""
        self._host = host
        self._silence_s = SILENCE_INTERVALS * interval_s
        self._listener: socket.socket | None = None
        self._members: list[_Member] = []
        self._gatherer: socket.socket | None = None
        self._confirmed_s = float("-inf")
        self._gathered_s = float("inf")
        """Before the first time, nothing can be old."""
        self._stay_away_until_s = float("-inf")

    @property
    def gathers(self) -> bool:
        """Whether this worker puts the reports together."""
        return self._listener is not None

    def exchange(self, report: LoadReport, now_s: float) -> list[LoadReport | HostLoad]:
        """What this worker must publish now that this is its report."""
        if not self._address:
            return [report]
        if self._gatherer is not None:
            self._read_confirmations(now_s)
        if self._gatherer is None and self._listener is None:
            self._join(now_s)
        if self._listener is not None:
            return self._gather(report, now_s)
        self._send(report)
        return [] if now_s - self._confirmed_s <= self._silence_s else [report]

    def leave(self) -> None:
        """Nothing to report for now: another one gathers, if it was this worker."""
        for member in self._members:
            member.connection.close()
        self._members = []
        for end in (self._listener, self._gatherer):
            if end is not None:
                end.close()
        self._listener = self._gatherer = None
        self._gathered_s = float("inf")
        self._confirmed_s = float("-inf")

    # --- as a member -----------------------------------------------------------------------------

    def _join(self, now_s: float) -> None:
        if now_s < self._stay_away_until_s:
            return
        connection = _new_socket()
        try:
            connection.connect(self._address)
        except ConnectionRefusedError:
            connection.close()
            self._listen()
        except OSError as error:  # its queue of those who want in is full
            connection.close()
            log.debug("not joined the workers of %s: %s", self._host, error)
        else:
            if _same_user(connection):
                self._gatherer = connection
            else:
                log.warning("a process of another user gathers load reports on %s: this worker stays alone", self._host)
                connection.close()
                self._stay_away_until_s = now_s + REFUSED_S

    def _send(self, report: LoadReport) -> None:
        if self._gatherer is None:
            return
        # A full socket belongs to one that hangs: silence will show it. A broken one shows at the next exchange.
        with contextlib.suppress(OSError):
            self._gatherer.send(encode(report))

    def _read_confirmations(self, now_s: float) -> None:
        try:
            while self._gatherer is not None:
                if not self._gatherer.recv(64):
                    raise ConnectionResetError
                self._confirmed_s = now_s
        except BlockingIOError:
            pass
        except OSError:
            if self._confirmed_s == float("-inf"):
                self._stay_away_until_s = now_s + REFUSED_S  # it did not let this one in
            self.leave()

    # --- as the one that gathers -----------------------------------------------------------------

    def _listen(self) -> None:
        listener = _new_socket()
        try:
            listener.bind(self._address)
            listener.listen(MAX_MEMBERS)
        except OSError as error:  # another one was first: join it at the next exchange
            listener.close()
            log.debug("not gathering load reports on %s: %s", self._host, error)
        else:
            self._listener = listener

    def _gather(self, own: LoadReport, now_s: float) -> list[LoadReport | HostLoad]:
        self._accept()
        # What waited in the sockets while this process stood still may be as old as that.
        is_fresh, self._gathered_s = now_s - self._gathered_s <= self._silence_s, now_s
        latest: dict[str, tuple[LoadReport, int]] = {}
        heard, lost = [], []
        for member in self._members:
            try:
                if self._read(member, latest) and is_fresh:
                    heard.append(member)
            except (OSError, MalformedMessage) as error:
                log.debug("%s left the workers of %s: %s", member.worker_id or "a member", self._host, error)
                lost.append(member)
        for member in lost:
            member.connection.close()
            self._members.remove(member)
        for member in heard:
            with contextlib.suppress(OSError):  # it reads nothing, or is gone: the next exchange shows it
                member.connection.send(_CONFIRMED)
        latest.pop(own.worker_id, None)
        if not latest or not is_fresh:
            return [own]
        return [
            HostLoad(host=self._host, reports=tuple(part))
            for part in _parts([(own, len(encode(own))), *latest.values()])
        ]

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(MAX_MEMBERS):
            try:
                connection, _address = self._listener.accept()
            except OSError:  # no other worker wants in
                return
            connection.setblocking(False)
            if len(self._members) < MAX_MEMBERS and _same_user(connection):
                self._members.append(_Member(connection))
            else:
                connection.close()

    def _read(self, member: _Member, latest: dict[str, tuple[LoadReport, int]]) -> bool:
        """The newest report of a member, if it sent one. Raises ``OSError``, ``MalformedMessage``."""
        payload = b""
        for _ in range(READS_PER_EXCHANGE):
            try:
                received = member.connection.recv(MAX_REPORT_BYTES)
            except BlockingIOError:
                break
            if not received:
                raise ConnectionResetError("closed")
            payload = received
        if not payload:
            return False
        report = decode(payload, LoadReport)
        member.worker_id = member.worker_id or report.worker_id
        if report.worker_id != member.worker_id:
            raise MalformedMessage(f"{member.worker_id} speaks for {report.worker_id}")
        latest[report.worker_id] = (report, len(payload))
        return True


def _parts(reports: Iterable[tuple[LoadReport, int]]) -> list[list[LoadReport]]:
    """Reports by message, none of which is too large."""
    parts: list[list[LoadReport]] = [[]]
    num_bytes = 0
    for report, size in reports:
        if parts[-1] and num_bytes + size > MAX_MESSAGE_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(report)
        num_bytes += size
    return parts


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _same_user(connection: socket.socket) -> bool:
    _pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid) == os.geteuid()
