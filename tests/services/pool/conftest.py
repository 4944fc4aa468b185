"""What the pool's own patience is not to decide."""

from __future__ import annotations

import pytest

from services.pool import service, store

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that stands still for some seconds, as all processes of a busy machine do, leads on, and gets its
    connections to Redis."""
    monkeypatch.setattr(service, "MIN_LEAD_S", LONG_S)
    monkeypatch.setattr(store, "CONNECTION_WAIT_S", LONG_S)
    monkeypatch.setattr(store, "CONNECT_TIMEOUT_S", LONG_S)
