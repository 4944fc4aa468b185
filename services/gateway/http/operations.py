"""``/health``, ``/live`` and ``/metrics``: for probes and scrapers, without a key."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from services.gateway.service import Gateway
from shared.errors import Unavailable


def operations_router(gateway: Gateway) -> APIRouter:
    """The routes, bound to one gateway."""
    router = APIRouter(tags=["operations"])
    registry = CollectorRegistry()
    registry.register(gateway.metrics)

    @router.get("/ready", include_in_schema=False)
    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 while requests can be served."""
        if gateway.draining:
            raise Unavailable("the gateway is shutting down")
        if gateway.bus.connected_since_s is None:
            raise Unavailable("the gateway is not connected to the bus")
        if not gateway.book.ready:
            raise Unavailable("the gateway does not know the models yet")
        return {"status": "ok"}

    @router.get("/live")
    async def live() -> dict[str, str]:
        """200 while the process runs."""
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text: the gateway's own, then the process's."""
        return Response(generate_latest(registry) + generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return router
