"""Access: bearer keys for the API, and keys or the loopback interface for administration.

Without admin keys, being local is all that a client proves, and a browser on this machine is local for every page
that it has open. So requests that a page of another site can make it send are refused: those that name another
origin, and those to a host name other than this machine's own (a name whose owner made it point here).
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.types import Scope

from services.gateway.api_keys import ApiKeys
from services.gateway.errors import Forbidden
from services.gateway.http.asgi import header
from shared.errors import Unauthorized

_KEY = "blitz.key"


class Access:
    """Checks one request's right to its path. Health and metrics are open."""

    def __init__(self, api_keys: ApiKeys, admin_keys: tuple[str, ...]) -> None:
        self._api_keys = api_keys
        self._admin_keys = tuple(key.encode() for key in admin_keys)

    def check(self, scope: Scope) -> None:
        """Record the name of the caller's API key for ``key_of``. Raises ``Unauthorized`` or ``Forbidden``."""
        path: str = scope["path"]
        if path == "/v1" or path.startswith("/v1/"):
            if self._api_keys.required:
                key = self._api_keys.find(_bearer(scope, "an API key"))
                if key is None:
                    raise Unauthorized("an API key is needed; the one that was sent is not valid")
                scope[_KEY] = key.name
        elif path == "/admin" or path.startswith("/admin/"):
            if self._admin_keys:
                self._check_admin(scope)
            else:
                _check_local(scope)

    def _check_admin(self, scope: Scope) -> None:
        given = _bearer(scope, "an admin key")
        if not any(hmac.compare_digest(given, key) for key in self._admin_keys):
            raise Unauthorized("an admin key is needed; the one that was sent is not valid")


def key_of(scope: Scope) -> str:
    """The name of the caller's key; empty where none is needed."""
    name: str = scope.get(_KEY, "")
    return name


def _bearer(scope: Scope, what: str) -> bytes:
    scheme, _, shown = header(scope, b"authorization").partition(" ")
    if scheme.lower() != "bearer" or not shown.strip():
        raise Unauthorized(f"{what} is needed: Authorization: Bearer <key>")
    return shown.strip().encode("latin-1")


def _check_local(scope: Scope) -> None:
    client = scope.get("client")
    if client is None or not _is_loopback(client[0]):
        raise Forbidden("admin routes are open to the loopback interface only; set BLITZ_ADMIN_KEYS for others")
    host = header(scope, b"host")
    if not _names_loopback(host):
        raise Forbidden(
            f"admin routes without a key are open under 127.0.0.1, localhost and [::1] only, not under Host "
            f"{host[:80]!r}; set BLITZ_ADMIN_KEYS for others"
        )
    origin = header(scope, b"origin")
    if origin and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise Forbidden(
            f"admin routes without a key are closed to pages of other sites, such as Origin {origin[:80]!r}; "
            "set BLITZ_ADMIN_KEYS for them"
        )


def _names_loopback(host: str) -> bool:
    """Whether a Host header is this machine's own name or loopback address, with any port."""
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    # Nothing but a host and a port: no user, path or query that would hide another host.
    if parts.netloc != host or "@" in host:
        return False
    return name == "localhost" or _is_loopback(name)


def _is_loopback(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
