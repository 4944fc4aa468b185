"""How a service identifies itself to NATS, and how it knows the server: from the environment."""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shared.settings import Settings, SettingsError, read_secret

_CREDS_PARTS = ("NATS USER JWT", "USER NKEY SEED")
_READINGS = 3


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """Credentials and certificates. All empty: a server that takes any client, without TLS."""

    user: str = ""
    password: str = field(default="", repr=False)
    creds_file: Path | None = None
    """Credentials as ``nsc`` writes them, instead of user and password."""
    ca_file: Path | None = None
    """Who signed the server's certificate. None: whom this system trusts."""
    cert_file: Path | None = None
    key_file: Path | None = None
    user_file: Path | None = None
    """Where the user was read, and is read again. None: not in a file."""
    password_file: Path | None = None
    """The same of the password."""

    @property
    def in_files(self) -> bool:
        """Whether credentials stand in files, where others may stand any moment."""
        return any((self.user_file, self.password_file, self.creds_file))

    @classmethod
    def from_env(cls, env: Settings) -> NatsAccess:
        """Raises ``SettingsError`` naming the variable and, unless it is a secret, its value."""
        user = env.secret(
            "BLITZ_NATS_USER",
            "User of this service on NATS: its kind, with the configuration that `blitzscale credentials` makes. "
            "Without it the service logs a warning.",
        )
        password = env.secret(
            "BLITZ_NATS_PASSWORD",
            "Its password. A service whose credentials NATS refuses ends with exit code 1: at its start at once, or "
            "after 90 s if they are in files; after an outage after 5 s. It reads the files, those of certificates "
            "too, whenever it connects.",
        )
        creds_file = env.file(
            "BLITZ_NATS_CREDS_FILE", "Credentials of `nsc` instead of user and password (`pip install nkeys`)."
        )
        if (user is None) != (password is None):
            missing = "BLITZ_NATS_PASSWORD or BLITZ_NATS_PASSWORD_FILE" if user else "BLITZ_NATS_USER"
            raise SettingsError(f"{missing} is not set: a user and a password belong together", param=missing)
        if user is not None and creds_file is not None:
            raise SettingsError(
                "BLITZ_NATS_USER and BLITZ_NATS_CREDS_FILE are both set: unset one", param="BLITZ_NATS_CREDS_FILE"
            )
        cert_file = env.file("BLITZ_NATS_CERT_FILE", "Certificate of the service, for servers that require one.")
        key_file = env.file("BLITZ_NATS_KEY_FILE", "Its key.")
        if (cert_file is None) != (key_file is None):
            missing = "BLITZ_NATS_CERT_FILE" if cert_file is None else "BLITZ_NATS_KEY_FILE"
            raise SettingsError(f"{missing} is not set: a certificate and its key belong together", param=missing)
        ca_file = env.file(
            "BLITZ_NATS_CA_FILE", "Certificate of the authority that signed NATS's certificate.", shown="the system's"
        )
        access = cls(
            user or "",
            password or "",
            creds_file,
            ca_file,
            cert_file,
            key_file,
            env.secret_file("BLITZ_NATS_USER"),
            env.secret_file("BLITZ_NATS_PASSWORD"),
        )
        access.tls()
        access.creds()
        return access

    def login(self) -> tuple[str, str]:
        """User and password as they are now. Raises ``SettingsError``.

        Two files of one Secret are replaced in one moment, which may lie between reading the one and the other. So both
        are read until they twice are the same; a pair of two versions that gets through is refused, and read again.
        """
        found = self._login()
        if self.user_file is not None and self.password_file is not None:
            for _ in range(_READINGS):
                before, found = found, self._login()
                if before == found:
                    break
        return found

    def _login(self) -> tuple[str, str]:
        user = self.user if self.user_file is None else read_secret("BLITZ_NATS_USER_FILE", self.user_file)
        if self.password_file is None:
            return user, self.password
        return user, read_secret("BLITZ_NATS_PASSWORD_FILE", self.password_file)

    def creds(self) -> str:
        """The text of the credentials file as it is now; empty where there is none. Raises ``SettingsError``."""
        if self.creds_file is None:
            return ""
        key = "BLITZ_NATS_CREDS_FILE"
        text = read_secret(key, self.creds_file)
        for part in _CREDS_PARTS:
            # The client library looks for these lines, and never ends where one is missing.
            if not re.search(rf"-BEGIN {part}-+\r?\n\S+\r?\n-+END {part}-", text):
                raise SettingsError(f"{key}={str(self.creds_file)!r}: holds no whole {part}", param=key)
        return text

    def certificates(self) -> bytes:
        """Other bytes when the files of ``tls`` have changed. Raises ``SettingsError``."""
        contents = hashlib.sha256()
        for name, path in (("CA", self.ca_file), ("CERT", self.cert_file), ("KEY", self.key_file)):
            if path is not None:
                try:
                    contents.update(hashlib.sha256(path.read_bytes()).digest())
                except OSError as error:
                    raise _unusable(f"BLITZ_NATS_{name}_FILE", path, error) from error
        return contents.digest()

    def tls(self) -> ssl.SSLContext | None:
        """How to check the server and to be checked; None where nothing is set. Raises ``SettingsError``."""
        if self.ca_file is None and self.cert_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise _unusable("BLITZ_NATS_CA_FILE", self.ca_file, error) from error
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except (OSError, ssl.SSLError) as error:
                raise _unusable("BLITZ_NATS_CERT_FILE", self.cert_file, error) from error
        return context


def _unusable(key: str, path: Path | None, error: Exception) -> SettingsError:
    return SettingsError(f"{key}={str(path)!r}: cannot be used: {error}", param=key)


ANYBODY = NatsAccess()
