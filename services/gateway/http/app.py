"""The ASGI application: access, errors in OpenAI's shape, the hot routes first, FastAPI for the rest."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from services.gateway.errors import MethodNotAllowed, error_body, error_headers
from services.gateway.http.admin import admin_router
from services.gateway.http.asgi import REQUEST_ID, ClientDisconnected, error_events, in_pieces, send_error
from services.gateway.http.auth import Access, key_of
from services.gateway.http.generation import Generation
from services.gateway.http.models import models_router
from services.gateway.http.operations import operations_router
from services.gateway.service import Gateway
from shared.errors import BadRequest, BlitzError, Internal, NotFound

log = logging.getLogger(__name__)


class GatewayApp:
    """The outermost ASGI application. Every failure inside ends as a typed error."""

    def __init__(self, gateway: Gateway) -> None:
        self._access = Access(gateway.api_keys, gateway.config.admin_keys)
        self._api_keys = gateway.api_keys
        self._metrics = gateway.metrics
        self._hot = {
            "/v1/chat/completions": Generation(gateway, "chat"),
            "/v1/completions": Generation(gateway, "completion"),
        }
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

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                key = key_of(scope) if hot is not None else ""
                if key:
                    message["headers"] = [*message["headers"], *self._api_keys.headers(key)]
                if request_id := scope.get(REQUEST_ID):
                    # OpenAI's clients show it with their errors.
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        hot = self._hot.get(scope["path"])
        route = scope["path"] if hot is not None else ""
        try:
            self._access.check(scope)
            if hot is None:
                await self._rest(scope, receive, in_pieces(counting_send))
                matched = scope.get("route")
                route = getattr(matched, "path", "unmatched")
            elif scope["method"] == "POST":
                await hot(scope, receive, counting_send)
            else:
                raise MethodNotAllowed(f"{scope['method']} {scope['path']}: use POST")
        except ClientDisconnected:
            status = 499
        except BlitzError as error:
            await self._answer(error, status, counting_send)
            status = status or error.http_status
        except Exception as error:
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await self._answer(Internal("internal error; see the gateway's log"), status, send)
            status = status or 500
        self._metrics.count_response(route or "unmatched", status)

    @staticmethod
    async def _answer(error: BlitzError, status: int, send: Send) -> None:
        if not status:
            await send_error(send, error)
        else:
            await send({"type": "http.response.body", "body": error_events(error)})


def _rest(gateway: Gateway) -> FastAPI:
    app = FastAPI(title="BlitzScale gateway", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(models_router(gateway))
    app.include_router(operations_router(gateway))
    app.include_router(admin_router(gateway))
    app.add_exception_handler(BlitzError, _on_blitz_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
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
