"""What clients of other kinds than OpenAI's send: browsers, proxies, forms, packed bodies."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pytest

from services.gateway.http.asgi import client_of
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_rate_limits import key, keys_file
from tests.services.gateway.http.test_refusals import TEXT, check

BODY = b'{"model": "tiny", "prompt": "a"}'
PAGE = "https://app.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "x-a, x-b"}


async def test_gzip_is_read(stack: Stack) -> None:
    headers = {"content-encoding": "gzip"}
    assert (await stack.http.post(TEXT, content=gzip.compress(BODY), headers=headers)).status_code == 200
    for broken in (BODY, gzip.compress(BODY)[:-1], gzip.compress(BODY) * 2):
        response = await stack.http.post(TEXT, content=broken, headers=headers)
        assert "gzip" in check(response, 400, "invalid_request_error", "bad_request")
    assert stack.gateway.request_memory.used_bytes == 0


async def test_a_decompression_bomb_is_refused(make_stack: StackFactory) -> None:
    stack = await make_stack(max_body_bytes=100_000)
    packer = zlib.compressobj(9, wbits=31)
    bomb = packer.compress(BODY[:-1] + b" " * 50_000_000) + packer.flush()
    assert len(bomb) < 100_000
    response = await stack.http.post(TEXT, content=bomb, headers={"content-encoding": "gzip"})
    message = check(response, 413, "invalid_request_error", "payload_too_large")
    assert "more than 100000 bytes when it is decompressed" in message


@pytest.mark.parametrize(
    ("headers", "content", "named"),
    [
        ({"content-encoding": "br"}, BODY, "Content-Encoding: br"),
        ({"content-type": "application/x-www-form-urlencoded"}, b"model=tiny&prompt=a", "a form"),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x\r\n", "multipart/form-data"),
    ],
)
async def test_bodies_of_other_kinds_are_refused_by_name(
    stack: Stack, headers: dict[str, str], content: bytes, named: str
) -> None:
    response = await stack.http.post(TEXT, content=content, headers=headers)
    assert named in check(response, 415, "invalid_request_error", "unsupported_media_type")


async def test_json_that_curl_calls_a_form_is_taken(stack: Stack) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert (await stack.http.post(TEXT, content=BODY, headers=headers)).status_code == 200


async def test_a_slash_at_the_end_of_a_path_changes_nothing(make_stack: StackFactory) -> None:
    stack = await make_stack(api_keys=("a",))
    headers = {"authorization": "Bearer a"}
    assert (await stack.http.post(TEXT + "/", content=BODY, headers=headers)).status_code == 200
    assert (await stack.http.get("/v1/models/", headers=headers)).json()["data"]
    assert (await stack.http.get("/health/")).status_code == 200
    check(await stack.http.get("/v1/models/"), 401, "authentication_error", "unauthorized")


GETS = ["/", "/ui", "/ui/app.js", "/health", "/ready", "/live", "/metrics", "/v1/models", "/v1/models/tiny"]
GETS += ["/admin/status", "/admin/models", "/admin/workers", "/v1/models/none", "/nowhere", "/admin/scale/x?wait_s=y"]


@pytest.mark.parametrize("path", GETS)
async def test_the_head_of_whatever_can_be_got_is_that_of_its_answer(stack: Stack, path: str) -> None:
    got, head = await stack.http.get(path), await stack.http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers.keys() == got.headers.keys()
    changing = {"date", "x-request-id"} | ({"content-length"} if path in ("/metrics", "/admin/status") else set())
    assert {k: v for k, v in head.headers.items() if k not in changing} == {
        k: v for k, v in got.headers.items() if k not in changing
    }
    assert (await stack.http.get("/live")).status_code == 200, "the connection goes on"


async def test_the_head_of_a_stream_is_all_there_is(stack: Stack) -> None:
    head = await stack.http.head("/admin/events")
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert (await stack.http.get("/live")).status_code == 200
    await stack.until(lambda: stack.gateway.metrics.responses["/admin/events", 200] == 1)


async def test_what_can_only_be_posted_has_no_head_and_what_is_closed_has_none(make_stack: StackFactory) -> None:
    stack = await make_stack(api_keys=("a",), admin_keys=("b",))
    key = {"authorization": "Bearer a"}
    for path, headers, status in (
        (TEXT, key, 405),
        ("/tokenize", key, 405),
        (TEXT, {}, 401),
        ("/v1/models", {}, 401),
        ("/admin/status", key, 401),
        ("/admin/models/tiny/scale", {"authorization": "Bearer b"}, 405),
    ):
        head = await stack.http.head(path, headers=headers)
        assert (head.status_code, head.content) == (status, b""), path


async def test_pages_of_named_origins_may_use_the_api(make_stack: StackFactory) -> None:
    stack = await make_stack(cors_origins=(PAGE,), api_keys=("a",))
    asked = await stack.http.options(TEXT, headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-allow-headers"] == "x-a, x-b"
    assert "POST" in asked.headers["access-control-allow-methods"]
    for shown, status in (("a", 200), ("b", 401)):
        headers = {"origin": PAGE, "authorization": f"Bearer {shown}"}
        answer = await stack.http.post(TEXT, content=BODY, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_the_tokenizers_routes_are_the_apis_to_a_page(make_stack: StackFactory, path: str) -> None:
    stack = await make_stack(cors_origins=(PAGE,), api_keys=("a",))
    assert (await stack.http.options(path, headers=PREFLIGHT)).status_code == 200
    answer = await stack.http.post(path, content=b"{}", headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, PAGE)


async def test_a_page_may_read_a_stream_and_what_its_head_says(make_stack: StackFactory, tmp_path: Path) -> None:
    limits = key("a", requests_per_minute=9, tokens_per_minute=999)
    stack = await make_stack(cors_origins=(PAGE,), keys_file=keys_file(tmp_path, limits))
    headers = {"origin": PAGE.upper(), "authorization": "Bearer sk-a"}
    answer = await stack.http.post(TEXT, content=BODY[:-1] + b', "stream": true}', headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["access-control-allow-origin"] == PAGE.upper()
    assert answer.headers["vary"] == "Origin"
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= exposed
    assert {name for name in answer.headers if name.startswith("x-ratelimit")} <= exposed
    assert "access-control-allow-credentials" not in answer.headers, "keys are no cookies"


async def test_pages_of_other_origins_and_administration_stay_closed(make_stack: StackFactory) -> None:
    stack = await make_stack(cors_origins=(PAGE,))
    other = {**PREFLIGHT, "origin": "https://other.example"}
    check(await stack.http.options(TEXT, headers=other), 403, "permission_error", "forbidden")
    answer = await stack.http.post(TEXT, content=BODY, headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers
    admin = await stack.http.options("/admin/status", headers=PREFLIGHT)
    assert admin.status_code != 200
    assert "access-control-allow-origin" not in admin.headers


@pytest.mark.parametrize(("origins", "status"), [((), 405), (("*",), 200)])
async def test_by_default_no_page_and_with_a_star_every_page(
    make_stack: StackFactory, origins: tuple[str, ...], status: int
) -> None:
    stack = await make_stack(cors_origins=origins)
    assert (await stack.http.options(TEXT, headers=PREFLIGHT)).status_code == status
    # Nothing but the API is open, whatever the origin.
    for path in ("/admin/status", "/admin/models/tiny", "/v1/../admin/status", "/metrics", "/ui"):
        asked = await stack.http.options(path, headers=PREFLIGHT)
        got = await stack.http.get(path, headers={"origin": PAGE})
        named = "access-control-allow-origin"
        assert (asked.status_code != 200, named in asked.headers, named in got.headers) == (True, False, False), path


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "address 10.0.0.1"),
        ("::ffff:10.0.0.1", "address 10.0.0.1"),
        ("2001:db8::1:2", "address 2001:db8::/64"),
        ("fe80::1%eth0", "address fe80::/64"),
    ],
)
def test_addresses_of_one_network_are_one_client(address: str, client: str) -> None:
    assert client_of({"client": (address, 1)}) == client
