"""Seeds of requests: the caller's, or one of the gateway's own."""

from __future__ import annotations

from typing import Any

from services.gateway.service import Gateway
from tests.services.gateway.conftest import CONFIG, Stack


async def seeds(stack: Stack, *bodies: dict[str, Any]) -> list[int]:
    for body in bodies:
        response = await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", **body})
        assert response.status_code == 200
    return [submit.sampling.seed for submit in stack.workers[0].submits]


async def test_requests_without_a_seed_get_different_ones(stack: Stack) -> None:
    drawn = await seeds(stack, *[{}] * 4, {"prompt": ["a", "b"]})
    assert len(set(drawn)) == 6
    assert all(0 <= seed < 2**63 for seed in drawn)


async def test_a_callers_seed_is_used_as_it_is(stack: Stack) -> None:
    assert await seeds(stack, {"seed": 5}, {"seed": 0}, {"seed": -1}) == [5, 0, 2**63 - 1]


async def test_gateways_do_not_repeat_each_others_seeds(stack: Stack) -> None:
    twin = Gateway(stack.broker.bus("twin"), CONFIG)
    assert stack.gateway.seeds.getrandbits(63) != twin.seeds.getrandbits(63)
