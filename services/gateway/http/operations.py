"""``/health``, ``/live`` and ``/metrics``: for probes and scrapers, without a key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.gateway.metrics import GatewayMetrics, ModelGauges
from services.gateway.service import Gateway
from shared.errors import Unavailable
from shared.exposition import OPENMETRICS_TYPE, accepts_openmetrics, openmetrics_text

OPENMETRICS_END = b"# EOF\n"


class _Sample(Collector):
    """All metrics with the gauges of one moment."""

    def __init__(self, metrics: GatewayMetrics, gauges: tuple[ModelGauges, ...]) -> None:
        self._metrics = metrics
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families(self._gauges)


class Scrapes:
    """Renders the metrics in a thread, one rendering at a time; callers that ask during one share the next."""

    def __init__(self, gateway: Gateway, render: Callable[[GatewayMetrics, tuple[ModelGauges, ...]], bytes]) -> None:
        self._gateway = gateway
        self._render_text = render
        self._current: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Prometheus text, of a moment after the call."""
        if self._current is None or self._current.done():
            self._current = asyncio.create_task(self._render(None))
            return await asyncio.shield(self._current)
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._render(self._current))
        return await asyncio.shield(self._next)

    async def _render(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
            self._current, self._next = self._next, None
        metrics = self._gateway.metrics
        return await self._gateway.offload.run(self._render_text, metrics, self._gateway.gauges())


def _text(metrics: GatewayMetrics, gauges: tuple[ModelGauges, ...]) -> bytes:
    histograms = metrics.histograms_text(with_exemplars=False)
    return generate_latest(_registry(metrics, gauges)) + histograms.encode() + generate_latest(REGISTRY)


def _openmetrics(metrics: GatewayMetrics, gauges: tuple[ModelGauges, ...]) -> bytes:
    own = openmetrics_text(_registry(metrics, gauges)).removesuffix(OPENMETRICS_END)
    return own + metrics.histograms_text(with_exemplars=True).encode() + openmetrics_text(REGISTRY)


def _registry(metrics: GatewayMetrics, gauges: tuple[ModelGauges, ...]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sample(metrics, gauges))
    return registry


def operations_router(gateway: Gateway) -> APIRouter:
    """The routes, bound to one gateway."""
    router = APIRouter(tags=["operations"])
    text, with_exemplars = Scrapes(gateway, _text), Scrapes(gateway, _openmetrics)

    @router.get("/ready", include_in_schema=False)
    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 while this gateway answers requests, whatever models there are: all gateways know the same ones."""
        if gateway.draining:
            raise Unavailable("the gateway is shutting down")
        if gateway.bus.connected_since_s is None:
            raise Unavailable("the gateway is not connected to the bus")
        if not gateway.routes.ready:
            raise Unavailable("the gateway does not know the models yet")
        return {"status": "ok"}

    @router.get("/live")
    async def live() -> dict[str, str]:
        """200 while the process is running."""
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus text: the gateway's own, then the process's. OpenMetrics, with exemplars, if the caller accepts
        it."""
        if accepts_openmetrics(request.headers.get("accept", "")):
            return Response(await with_exemplars.text(), media_type=OPENMETRICS_TYPE)
        return Response(await text.text(), media_type=CONTENT_TYPE_LATEST)

    return router
