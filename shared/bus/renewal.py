"""What a process shows a NATS server, read anew for each attempt to connect: whoever replaces passwords or certificates
in their files need not restart the services."""

from __future__ import annotations

import logging
import ssl

from nats.aio.client import Client, RawCredentials

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
        self.user = access.user
        """Of the newest attempt."""
        self._password = access.password
        self._login = LastGood(access.login, (access.user, access.password))
        self._creds = LastGood(access.creds, access.creds())
        self._certificates = access.certificates()
        self._context = access.tls()
        self._tls = LastGood(self._read_tls, self._context)

    def next_user(self) -> str:
        """The user for another attempt; the client asks for it first."""
        self.user, self._password = self._login.now()
        return self.user

    def password(self) -> str:
        """That was read together with the user."""
        return self._password

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

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return self._access.tls() or super().ssl_context

    async def _process_err(self, err_msg: str) -> None:
        """A connection whose credentials are no longer valid is made again with those in the files, if they are in
        files; else the client closes for good."""
        replaced = any(words in err_msg.lower() for words in _NO_LONGER_VALID)
        if replaced and self._access.at_start.in_files and self.is_connected:
            _log.warning("the NATS server ended the connection (%s): the files are read again", err_msg.strip("'"))
            await self.force_reconnect()
        else:
            await super()._process_err(err_msg)
