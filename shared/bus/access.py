"""How a service identifies itself to NATS, and how it knows the server: from the environment."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shared.settings import Settings, SettingsError


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

    @classmethod
    def from_env(cls, env: Settings) -> NatsAccess:
        """Raises ``SettingsError`` naming the variable and, unless it is a secret, its value."""
        user = env.text(
            "BLITZ_NATS_USER",
            "User of this service on NATS: its kind, with the configuration that `blitzscale credentials` makes. "
            "Without it the service logs a warning.",
            default="",
        )
        password = env.secret(
            "BLITZ_NATS_PASSWORD", "Its password. A service whose credentials NATS refuses ends with exit code 1."
        )
        creds_file = env.file(
            "BLITZ_NATS_CREDS_FILE", "Credentials of `nsc` instead of user and password (`pip install nkeys`)."
        )
        if bool(user) != (password is not None):
            missing = "BLITZ_NATS_PASSWORD or BLITZ_NATS_PASSWORD_FILE" if user else "BLITZ_NATS_USER"
            raise SettingsError(f"{missing} is not set: a user and a password belong together", param=missing)
        if user and creds_file is not None:
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
        access = cls(user, password or "", creds_file, ca_file, cert_file, key_file)
        access.tls()
        return access

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
