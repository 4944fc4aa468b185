"""The ASGI application: access, errors in the shape of their routes, the hot routes first, FastAPI for the rest.

Access takes keys for the API, and keys or the loopback interface for administration. Without admin keys, being
local is all that a client proves, and a browser on this machine is local for every page that it has open. So requests
that a page of another site can make it send are refused: those that name another origin, and those to a host name
other than this machine's own (a name whose owner made it point here).
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import MutableMapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from services.gateway.admin_keys import AdminKeys
from services.gateway.api_keys import ApiKeys
from services.gateway.errors import Forbidden, MethodNotAllowed, error_body, error_headers
from services.gateway.http.admin import admin_router
from services.gateway.http.asgi import (
    KEY,
    ClientDisconnected,
    api_key,
    bearer,
    head_alone,
    header,
    in_pieces,
    key_of,
    send_body,
    send_error,
)
from services.gateway.http.cors import Cors
from services.gateway.http.endpoints.chat import ChatEndpoint
from services.gateway.http.endpoints.completions import CompletionEndpoint
from services.gateway.http.endpoints.endpoint import Endpoint
from services.gateway.http.endpoints.messages import CountTokensEndpoint, MessagesEndpoint
from services.gateway.http.endpoints.responses import ResponsesEndpoint
from services.gateway.http.error_forms import ErrorForm, OpenAIErrors
from services.gateway.http.events import events_router
from services.gateway.http.generation import Generation
from services.gateway.http.models import models_router
from services.gateway.http.operations import operations_router
from services.gateway.http.request_log import REQUEST, RequestLog
from services.gateway.http.token_count import TokenCount
from services.gateway.http.tokenization import Detokenize, Tokenize
from services.gateway.service import Gateway
from shared.errors import BadRequest, BlitzError, Internal, NotFound, Unauthorized

log = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""nginx's status for it."""
_OPEN = frozenset(("/", "/health", "/live", "/metrics", "/ready", "/ui"))
"""Without a key."""
_ERRORS = OpenAIErrors()
"""Of all routes that have none of their own."""
_FAULT = "internal error; see the gateway's log"


class HotRoute(Protocol):
    """Beside FastAPI: POST alone, and errors of its own form."""

    @property
    def errors(self) -> ErrorForm: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Access:
    """Checks one request's right to its path. Health, metrics and the page's files are open; the rest is the API's,
    whether there is such a route or not."""

    def __init__(self, api_keys: ApiKeys, admin_keys: AdminKeys) -> None:
        self._api_keys = api_keys
        self._admin_keys = admin_keys

    def check(self, scope: Scope) -> None:
        """Record the name of the caller's API key for ``key_of``. Raises ``Unauthorized`` or ``Forbidden``."""
        path: str = scope["path"]
        if path in _OPEN or path.startswith("/ui/"):
            return
        if path == "/admin" or path.startswith("/admin/"):
            if not self._admin_keys.required:
                _check_local(scope)
            elif not self._admin_keys.accept(bearer(scope, "an admin key")):
                raise Unauthorized("an admin key is needed; the one that was sent is not valid")
        elif self._api_keys.required:
            key = self._api_keys.find(api_key(scope))
            if key is None:
                raise Unauthorized("an API key is needed; the one that was sent is not valid")
            scope[KEY] = key.name


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


class GatewayApp:
    """The outermost ASGI application. Every failure inside ends as a typed error."""

    def __init__(self, gateway: Gateway) -> None:
        self._access = Access(gateway.api_keys, gateway.admin_keys)
        self._api_keys = gateway.api_keys
        self._metrics = gateway.metrics
        endpoints: tuple[Endpoint, ...] = (
            ChatEndpoint(),
            CompletionEndpoint(),
            ResponsesEndpoint(),
            MessagesEndpoint(),
        )
        self._hot: dict[str, HotRoute] = {e.path: Generation(gateway, e) for e in endpoints}
        counting = CountTokensEndpoint()
        self._hot[counting.path] = TokenCount(gateway, counting)
        self._hot |= {route.path: route for route in (Tokenize(gateway), Detokenize(gateway))}
        self._cors = Cors(gateway.config.cors_origins, self._hot)
        self._rest = _rest(gateway)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no websocket routes"})
        else:
            await self._rest(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"
        request = scope[REQUEST] = RequestLog.of(scope)
        # As the routes see it: whoever asks for the head gets that of GET.
        routed = scope
        if scope["method"] == "HEAD":
            routed, send = {**scope, "method": "GET"}, head_alone(send)

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                key = key_of(scope) if hot is not None else ""
                if key:
                    message["headers"] = [*message["headers"], *self._api_keys.headers(key)]
                # Clients show it with their errors.
                named = [(name, request.request_id.encode()) for name in errors.request_id_headers]
                message["headers"] = [*message["headers"], *named, *self._cors.of_any(scope)]
            await send(message)

        hot = self._hot.get(scope["path"])
        errors = hot.errors if hot is not None else _ERRORS
        try:
            preflight = self._cors.is_preflight(scope)
            if not preflight:
                self._access.check(scope)
            if preflight:
                await send_body(counting_send, 200, b"", headers=self._cors.allowed(scope))
            elif hot is None:
                await self._rest(routed, receive, in_pieces(counting_send))
            elif scope["method"] == "POST":
                await hot(scope, receive, counting_send)
            else:
                raise MethodNotAllowed(f"{scope['method']} {scope['path']}: use POST")
        except ClientDisconnected:
            pass
        except BlitzError as error:
            request.error = error.code
            await self._answer(error, errors, status, counting_send)
            status = status or error.http_status
        except Exception as error:
            request.error = Internal.code
            log.error("%s %r failed (request %s)", scope["method"], scope["path"], request.request_id, exc_info=error)
            # FastAPI has answered, and raised it again.
            if hot is not None or not status:
                await self._answer(Internal(_FAULT), errors, status, counting_send)
            status = status or 500
        route = scope["path"] if hot is not None else getattr(routed.get("route"), "path", "unmatched")
        # A client that left before its answer began has none.
        status = status or CLIENT_LEFT
        self._metrics.responses[route, status] += 1
        request.say(scope, route, status)

    @staticmethod
    async def _answer(error: BlitzError, errors: ErrorForm, status: int, send: Send) -> None:
        if not status:
            await send_error(send, error, errors.body(error))
        else:
            await send({"type": "http.response.body", "body": errors.events(error)})


def _only_looks(scope: MutableMapping[str, Any]) -> bool:
    """Probes, scrapes and listings: nothing is done that a trace could be of."""
    return scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS")


_TELEMETRY: TelemetryConfig = {
    "tracing": True,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "exclude": _only_looks,
}


def _rest(gateway: Gateway) -> FastAPI:
    app = FastAPI(
        title="BlitzScale gateway", docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_TELEMETRY
    )
    app.include_router(models_router(gateway))
    app.include_router(operations_router(gateway))
    app.include_router(admin_router(gateway))
    app.include_router(events_router(gateway))
    app.add_exception_handler(BlitzError, _on_blitz_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_fault)
    return app


def _response(error: BlitzError, extra: dict[str, str] | None = None) -> Response:
    headers = {key.decode(): value.decode() for key, value in error_headers(error)}
    return Response(
        error_body(error),
        status_code=error.http_status,
        headers={**headers, **(extra or {})},
        media_type="application/json",
    )


async def _on_blitz_error(request: Request, error: Any) -> Response:  # noqa: ARG001 - the framework's signature
    return _response(error)


async def _on_http_exception(request: Request, error: Any) -> Response:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return _response(NotFound(f"{where}: there is no such route"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return _response(MethodNotAllowed(f"{where}: use {allowed}"), {"Allow": allowed})
    return _response(BadRequest(f"{where}: {error.detail}"))


async def _on_validation_error(request: Request, error: Any) -> Response:  # noqa: ARG001 - the framework's signature
    first = error.errors()[0]
    param = ".".join(str(piece) for piece in first["loc"][1:]) or None
    return _response(BadRequest(f"{param or 'request'}: {first['msg']}", param=param))


async def _on_fault(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the framework's signature
    return _response(Internal(_FAULT))
