"""Probes, while things are not as they should be."""

from __future__ import annotations

from tests.services.gateway.conftest import Stack


async def test_health_follows_the_bus_and_live_does_not(stack: Stack) -> None:
    assert (await stack.http.get("/health")).json() == {"status": "ok"}
    stack.broker.disconnect()
    gone = await stack.http.get("/health")
    assert gone.status_code == 503
    assert gone.json()["error"]["code"] == "unavailable"
    assert "bus" in gone.json()["error"]["message"]
    assert (await stack.http.get("/live")).status_code == 200
    stack.broker.reconnect()
    assert (await stack.http.get("/health")).status_code == 200


async def test_a_gateway_that_knows_no_models_yet_is_live_but_not_healthy(stack: Stack) -> None:
    stack.gateway.routes.ready = False
    unknowing = await stack.http.get("/health")
    assert unknowing.status_code == 503
    assert "models" in unknowing.json()["error"]["message"]
    assert (await stack.http.get("/live")).status_code == 200
