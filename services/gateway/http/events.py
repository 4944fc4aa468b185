"""``/admin/events``: the feed as server-sent events. ``/ui``: the page that shows it, which only reads.

The page is made to be read with ``fetch``, whose request carries the key in a header: a key never stands in a URL or a
cookie.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from importlib import resources

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from services.gateway.feed import ClusterFeed
from services.gateway.http.asgi import bearer, header
from services.gateway.service import Gateway
from shared.errors import NotFound, Unavailable

_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_PAGE = resources.files("services.gateway") / "ui"


def events_router(gateway: Gateway) -> APIRouter:
    """The routes, bound to one gateway."""
    router = APIRouter(tags=["page"])
    feed = ClusterFeed(gateway)

    @router.get("/admin/events")
    async def events(request: Request) -> Response:
        """The state of the cluster, and its changes as they happen. ``Last-Event-ID``: go on from there."""
        keys, shown = gateway.admin_keys, bearer(request.scope, "an admin key") if gateway.admin_keys.required else b""
        stream = feed.read(header(request.scope, b"last-event-id"), lambda: not keys.required or keys.accept(shown))
        # Before the answer begins: a refusal is a status.
        first = await anext(stream, None)
        if first is None:
            raise Unavailable("the gateway is shutting down", retry_after_s=1.0)
        return _Events(first, stream)

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        """For those who open the address that they were told."""
        return RedirectResponse("/ui")

    @router.get("/ui")
    async def page() -> Response:
        """The page. It holds nothing of the cluster; what it shows it asks for with the reader's key."""
        return _file("index.html")

    @router.get("/ui/{name}")
    async def file(name: str) -> Response:
        """Its scripts and styles."""
        return _file(name)

    return router


class _Events(Response):
    """Sends events for as long as the client reads."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        # Watched beside, and not asked for before each event.
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._rest:
                if leaving.done():
                    return
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            leaving.cancel()
            await self._rest.aclose()


async def _until_left(receive: Receive) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _file(name: str) -> Response:
    known = {each.name: each for each in _PAGE.iterdir() if each.name.rpartition(".")[2] in _TYPES}
    if name not in known:
        raise NotFound("the page has no such file")
    return Response(known[name].read_bytes(), media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)
