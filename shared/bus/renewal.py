"""What a process shows a NATS server, read anew for each attempt to connect: whoever replaces passwords or certificates
in their files need not restart the services."""

from __future__ import annotations

import logging
import ssl

from nats.aio.client import Client, RawCredentials
from nats.aio.transport import TcpTransport

from shared.bus.access import NatsAccess
from shared.last_good import LastGood

_log = logging.getLogger(__name__)

_NO_LONGER_VALID = ("authorization violation", "authentication expired", "authentication revoked")
"""What a server says when it ends a connection whose credentials were replaced, or are too old."""


class CurrentAccess:
    """A ``NatsAccess`` as its files are now. What cannot be used at an attempt is as it was before."""

    def __init__(self, access: NatsAccess) -> None:
        """Raises ``SettingsError``."""
        self.at_start = access
        self._shown = access.user, access.password
        """User and password of the newest attempt."""
        self._accepted: tuple[str, str] | None = None
        """With which a server took this process last."""
        self._refused = False
        """The newest attempt was."""
        self._login = LastGood(access.login, self._shown)
        self._creds = LastGood(access.creds, access.creds())
        self._certificates = access.certificates()
        self._context = access.tls()
        self._tls = LastGood(self._read_tls, self._context)

    @property
    def user(self) -> str:
        """Of the newest attempt."""
        return self._shown[0]

    def next_user(self) -> str:
        """The user for another attempt; the client asks for it first. Where a server refuses what stands in the files,
        it may not have read its own yet: what was accepted last is tried in turn."""
        in_files = self._login.now()
        if self._refused and self._accepted is not None and self._shown == in_files:
            self._shown = self._accepted
        else:
            self._shown = in_files
        self._refused = False
        return self.user

    def password(self) -> str:
        """That belongs to the user."""
        return self._shown[1]

    def accepted(self) -> None:
        """A server took this process."""
        self._accepted = self._shown

    def refused(self) -> None:
        """A server did not know it."""
        self._refused = True

    def creds(self) -> RawCredentials | None:
        """For the client, which reads them at each attempt. None: there is no such file."""
        return _Creds(self._creds) if self.at_start.creds_file is not None else None

    def tls(self) -> ssl.SSLContext | None:
        """As ``NatsAccess.tls``."""
        return self._tls.now()

    def _read_tls(self) -> ssl.SSLContext | None:
        # Not made anew from the same files: what the system trusts takes tens of milliseconds to read.
        certificates = self.at_start.certificates()
        if certificates != self._certificates:
            self._context = self.at_start.tls()
            self._certificates = certificates
        return self._context


class _Creds(RawCredentials):
    """The client asks for ``data`` whenever it has to sign."""

    def __init__(self, text: LastGood[str]) -> None:
        self._text = text

    @property
    def data(self) -> str:  # type: ignore[override]
        return self._text.now()


class RenewingClient(Client):
    """The client library, with certificates and credentials as they are at each connection."""

    def __init__(self, access: CurrentAccess) -> None:
        super().__init__()
        self._access = access
        self._system: ssl.SSLContext | None = None
        """What this system trusts: it takes a tenth of a second to read."""

    @property
    def ssl_context(self) -> ssl.SSLContext:
        context = self._access.tls() or self._system
        if context is None:
            context = self._system = super().ssl_context
        return context

    @property
    def server_certificate_ends_unix_s(self) -> float | None:
        """Until when the certificate that the server showed is valid. None: it showed none, or is gone."""
        writer = getattr(self._transport, "_io_writer", None)
        try:
            shown = writer.get_extra_info("peercert") if writer is not None else None
        except AttributeError:  # asyncio's, of a connection that was lost in this moment
            return None
        return float(ssl.cert_time_to_seconds(shown["notAfter"])) if shown else None

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except BaseException:
            self._drop_unshaken()
            raise
        self._know_tls()

    def _know_tls(self) -> None:
        """The library makes another reader for a connection over TLS, and does not tell it what it reads from: it could
        not hold a server back, and warned of each end."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        if writer is not None and writer.get_extra_info("ssl_object") is not None:
            writer.transport.get_protocol().connection_made(writer.transport)

    def _drop_unshaken(self) -> None:
        """Forget a connection whose TLS handshake was broken off. Nobody tells asyncio's writer of its end, for which
        the library waits before it tries again."""
        transport = self._transport
        if not isinstance(transport, TcpTransport) or not self.options["tls_handshake_first"]:
            return
        writer = transport._io_writer
        if writer is not None and writer.get_extra_info("ssl_object") is None:
            writer.transport.abort()
            transport._io_writer = None

    async def _process_err(self, err_msg: str) -> None:
        """A connection whose credentials are no longer valid is made again with those in the files, if they are in
        files; else the client closes for good."""
        replaced = any(words in err_msg.lower() for words in _NO_LONGER_VALID)
        if replaced and self._access.at_start.in_files and self.is_connected:
            _log.warning("the NATS server ended the connection (%s): the files are read again", err_msg.strip("'"))
            await self.force_reconnect()
        else:
            await super()._process_err(err_msg)
