"""Pages of other sites that may use the API from a browser (CORS), by setting: ``/v1``, and the tokenizers' routes.
``/admin`` is never open to them."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from services.gateway.errors import Forbidden
from services.gateway.http.asgi import header

Headers = list[tuple[bytes, bytes]]

ANY = "*"
METHODS = b"GET, POST, OPTIONS"
EXPOSED = b"retry-after, x-request-id, x-should-retry, " + b", ".join(
    b"x-ratelimit-%s-%s" % (what, of) for what in (b"limit", b"remaining", b"reset") for of in (b"requests", b"tokens")
)
MAX_AGE_S = 600
"""How long a browser need not ask again."""
MAX_NAMES_CHARACTERS = 2000
"""Of the headers that a page asks to send."""


class Cors:
    """What browsers are told. Requests without ``Origin`` do not come from a page of another site."""

    def __init__(self, origins: tuple[str, ...], routes: Collection[str] = ()) -> None:
        """``origins``: such as ``https://app.example``, or ``*``; none: no page of another site. ``routes``: those that
        they may use beside ``/v1``."""
        self._routes = frozenset(routes)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    def is_preflight(self, scope: Scope) -> bool:
        """Whether a browser asks, before it sends the request of a page."""
        asked = scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method")
        return bool(asked and self._origins and self._is_open(scope["path"]))

    def allowed(self, scope: Scope) -> Headers:
        """For a preflight's answer, beside those of any answer. Raises ``Forbidden``."""
        if not self.of_any(scope):
            raise Forbidden(
                f"pages of {header(scope, b'origin')[:80]!r} may not use this API: see BLITZ_GATEWAY_CORS_ORIGINS"
            )
        names = header(scope, b"access-control-request-headers")[:MAX_NAMES_CHARACTERS].encode("latin-1")
        return [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", names or b"authorization, content-type"),
            (b"access-control-max-age", str(MAX_AGE_S).encode()),
        ]

    def of_any(self, scope: Scope) -> Headers:
        """For every answer of the API, errors included: whether the page may read it."""
        origin = header(scope, b"origin")
        if not origin or not self._origins or not self._is_open(scope["path"]):
            return []
        if ANY not in self._origins and origin.lower() not in self._origins:
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"vary", b"Origin"),
            (b"access-control-expose-headers", EXPOSED),
        ]

    def _is_open(self, path: str) -> bool:
        return path.startswith("/v1/") or path in self._routes
