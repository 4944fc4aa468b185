"""Who may call what: bearer keys for the API, and keys or the loopback interface for administration."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.types import Scope

from services.gateway.http.asgi import header
from services.gateway.http.errors import Forbidden
from shared.errors import Unauthorized


class Access:
    """Checks one request's right to its path. Health and metrics are open."""

    def __init__(self, api_keys: tuple[str, ...], admin_keys: tuple[str, ...]) -> None:
        self._api_keys = tuple(key.encode() for key in api_keys)
        self._admin_keys = tuple(key.encode() for key in admin_keys)

    def check(self, scope: Scope) -> None:
        """Raises ``Unauthorized`` or ``Forbidden``."""
        path: str = scope["path"]
        if path == "/v1" or path.startswith("/v1/"):
            if self._api_keys:
                self._check_key(scope, self._api_keys, "an API key")
        elif path == "/admin" or path.startswith("/admin/"):
            if self._admin_keys:
                self._check_key(scope, self._admin_keys, "an admin key")
            elif not _is_loopback(scope):
                raise Forbidden("admin routes are open to the loopback interface only; set BLITZ_ADMIN_KEYS for others")

    @staticmethod
    def _check_key(scope: Scope, keys: tuple[bytes, ...], what: str) -> None:
        scheme, _, shown = header(scope, b"authorization").partition(" ")
        if scheme.lower() != "bearer" or not shown.strip():
            raise Unauthorized(f"{what} is needed: Authorization: Bearer <key>")
        given = shown.strip().encode("latin-1")
        if not any(hmac.compare_digest(given, key) for key in keys):
            raise Unauthorized(f"{what} is needed; the one that was sent is not valid")


def _is_loopback(scope: Scope) -> bool:
    client = scope.get("client")
    if client is None:
        return False
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
