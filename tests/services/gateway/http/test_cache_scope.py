"""Which requests are told to be of one scope: those that may use each other's KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_rate_limits import key, keys_file


async def scope(stack: Stack, name: str = "", **given: Any) -> str:
    """Of a request with this key."""
    headers = {"Authorization": f"Bearer {name}"} if name else {}
    worker = stack.workers[0]
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 1, **given}
    answer = await stack.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return worker.submits[-1].cache_scope


async def test_a_key_has_a_scope_and_keys_that_say_so_share_one(make_stack: StackFactory, tmp_path: Path) -> None:
    shared = [key(name, shares_prefixes=True) for name in ("c", "d")]
    stack = await make_stack(1, keys_file=keys_file(tmp_path, key("a"), key("b"), *shared))
    scopes = {name: await scope(stack, f"sk-{name}") for name in "abcd"}
    assert scopes["c"] == scopes["d"]
    assert len(set(scopes.values())) == 3
    assert "" not in scopes.values()
    assert await scope(stack, "sk-a") == scopes["a"]
    salted = {name: await scope(stack, f"sk-{name}", cache_salt="s") for name in "ac"}
    assert len({*salted.values(), *scopes.values()}) == 5


async def test_without_keys_all_are_of_one(make_stack: StackFactory) -> None:
    stack = await make_stack(1)
    one = await scope(stack)
    assert one
    assert await scope(stack) == one
    assert await scope(stack, cache_salt="x") != one


async def test_a_gateway_without_a_prefix_cache_says_none(make_stack: StackFactory) -> None:
    stack = await make_stack(1, prefix_cache=False)
    assert await scope(stack) == ""


@pytest.mark.parametrize("salt", ["", "x" * 257, 1, ["a"], {}, True])
async def test_a_salt_is_a_short_text(make_stack: StackFactory, salt: object) -> None:
    stack = await make_stack(1)
    answer = await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "abc", "cache_salt": salt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
