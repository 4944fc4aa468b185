"""Probes, while things are not as they should be."""

from __future__ import annotations

import pytest

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


async def test_a_gateway_is_ready_also_while_there_is_no_model(stack: Stack) -> None:
    stack.pool.models.clear()
    await stack.gateway.refresh()
    assert (await stack.http.get("/v1/models")).json()["data"] == []
    assert [(await stack.http.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]


@pytest.mark.parametrize("path", ["/health", "/ready", "/live"])
async def test_probes_may_ask_for_the_head_alone(stack: Stack, path: str) -> None:
    answer = await stack.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    stack.broker.disconnect()
    assert (await stack.http.head(path)).status_code == (200 if path == "/live" else 503)


async def test_a_gateway_that_knows_no_models_yet_is_live_but_not_healthy(stack: Stack) -> None:
    stack.gateway.routes.ready = False
    unknowing = await stack.http.get("/health")
    assert unknowing.status_code == 503
    assert "models" in unknowing.json()["error"]["message"]
    assert (await stack.http.get("/live")).status_code == 200


@pytest.mark.parametrize("path", ["/admin/status", "/v1/completions"])
async def test_a_fault_of_the_gateways_own_is_a_typed_error_and_keeps_the_connection(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(stack.gateway, "registry", broken)
    monkeypatch.setattr(stack.gateway, "find_model", broken)
    body = {"model": "tiny", "prompt": "a"} if path.startswith("/v1") else None
    failed = await stack.http.request("POST" if body else "GET", path, json=body)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal")
    assert stack.gateway.metrics.responses[path, 500] == 1
    connections = set(stack.server.server_state.connections)
    assert (await stack.http.get("/live")).status_code == 200
    assert set(stack.server.server_state.connections) == connections
