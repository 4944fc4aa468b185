from __future__ import annotations

from typing import Any

import pytest

from services.gateway.admin_keys import AdminKeys
from services.gateway.api_keys import ApiKeys
from services.gateway.errors import Forbidden
from services.gateway.http.app import Access
from shared.errors import Unauthorized

NO_KEYS = ApiKeys((), "", gateway_id="gw", incarnation="1")


def scope(client: str | None, host: str = "127.0.0.1:8000", origin: str = "") -> dict[str, Any]:
    headers = [(b"host", host.encode("latin-1")), (b"origin", origin.encode("latin-1"))]
    return {
        "path": "/admin/status",
        "headers": [pair for pair in headers if pair[1]],
        "client": (client, 1) if client else None,
    }


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_without_admin_keys_the_loopback_interface_is_admitted(client: str) -> None:
    Access(NO_KEYS, AdminKeys((), "")).check(scope(client))


@pytest.mark.parametrize("client", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "testclient", None])
def test_without_admin_keys_everybody_else_is_not(client: str | None) -> None:
    with pytest.raises(Forbidden):
        Access(NO_KEYS, AdminKeys((), "")).check(scope(client))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]", "[::1]:8000"])
def test_without_admin_keys_this_machines_own_names_are_admitted(host: str) -> None:
    Access(NO_KEYS, AdminKeys((), "")).check(scope("127.0.0.1", host))
    Access(NO_KEYS, AdminKeys((), "")).check(scope("127.0.0.1", host, origin=f"http://{host}"))


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
        "127.0.0.1@evil.example", "evil.example@127.0.0.1", "127.0.0.1/evil.example", "127.0.0.1:port", "[::1", "[::2]",
        "localhost#evil.example", "0.0.0.0",
    ],
)  # fmt: skip
def test_without_admin_keys_other_host_names_are_not(host: str) -> None:
    with pytest.raises(Forbidden, match="BLITZ_ADMIN_KEYS"):
        Access(NO_KEYS, AdminKeys((), "")).check(scope("127.0.0.1", host))


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost:8000", "http://127.0.0.1:3000", "http://127.0.0.1:8000.evil"],
)
def test_without_admin_keys_pages_of_other_sites_are_not(origin: str) -> None:
    with pytest.raises(Forbidden, match="BLITZ_ADMIN_KEYS"):
        Access(NO_KEYS, AdminKeys((), "")).check(scope("127.0.0.1", "127.0.0.1:8000", origin))


def test_with_an_admin_key_the_key_alone_decides() -> None:
    given = scope("10.0.0.1", "gateway.example", "https://console.example")
    given["headers"].append((b"authorization", b"Bearer root"))
    Access(NO_KEYS, AdminKeys(("root",), "")).check(given)


WITH_KEY = ApiKeys(("secret",), "", gateway_id="gw", incarnation="1")
OPEN = ["/", "/health", "/live", "/ready", "/metrics", "/ui", "/ui/app.js"]
CLOSED = [
    "/v1/models",
    "/v1",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
    "/metrics/x",
    "/uix",
    "/v2/x",
    "",
    "/health/../v1/models",
]


@pytest.mark.parametrize("path", OPEN)
def test_probes_scrapes_and_the_page_need_no_key(path: str) -> None:
    Access(WITH_KEY, AdminKeys(("root",), "")).check({**scope("10.0.0.1"), "path": path})


@pytest.mark.parametrize("path", CLOSED)
def test_whatever_else_there_may_be_needs_one(path: str) -> None:
    access = Access(WITH_KEY, AdminKeys(("root",), ""))
    given = {**scope("10.0.0.1"), "path": path}
    with pytest.raises(Unauthorized):
        access.check(given)
    given["headers"].append((b"authorization", b"Bearer secret"))
    access.check(given)
    Access(NO_KEYS, AdminKeys((), "")).check({**scope("10.0.0.1"), "path": path})


def test_an_api_key_may_come_in_its_own_header_and_an_admin_key_may_not() -> None:
    access = Access(WITH_KEY, AdminKeys(("root",), ""))

    def given(path: str, **headers: str) -> dict[str, Any]:
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return {**scope("10.0.0.1"), "path": path, "headers": pairs}

    access.check(given("/v1/models", x_api_key="secret"))
    access.check(given("/v1/models", x_api_key="other", authorization="Bearer secret"))
    for refused in (
        given("/v1/models", x_api_key="other"),
        given("/v1/models", x_api_key="secret", authorization="Bearer other"),
        given("/admin/status", x_api_key="root"),
    ):
        with pytest.raises(Unauthorized):
            access.check(refused)
