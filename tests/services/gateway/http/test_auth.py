from __future__ import annotations

from typing import Any

import pytest

from services.gateway.http.auth import Access
from services.gateway.http.errors import Forbidden


def scope(client: str | None) -> dict[str, Any]:
    return {"path": "/admin/status", "headers": [], "client": (client, 1) if client else None}


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_without_admin_keys_the_loopback_interface_is_admitted(client: str) -> None:
    Access((), ()).check(scope(client))


@pytest.mark.parametrize("client", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "testclient", None])
def test_without_admin_keys_everybody_else_is_not(client: str | None) -> None:
    with pytest.raises(Forbidden):
        Access((), ()).check(scope(client))
