"""A prompt that waits for KV begins, because what runs beside it moves."""

from __future__ import annotations

import pytest

from services.planner import service as planner
from tests.services.worker.kv_transfer.moving import PROMPT, moving
from tests.wait_until import eventually

KV_BYTES = 5 << 18
"""About 80 blocks of 16 tokens."""


async def test_a_prompt_that_waits_for_kv_begins_once_another_request_has_moved(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(planner, "CHECK_INTERVAL_S", 0.1)
    async with moving(redis_url, kv_bytes=KV_BYTES) as fleet:
        await fleet.hold("a", "b")
        for name in ("a", "b"):
            await fleet.submit(name, prompt=PROMPT * 4, max_tokens=350)
        await fleet.decoding("a", "b")
        await fleet.submit("long", prompt=PROMPT * 6, max_tokens=30)
        await eventually(lambda: any(len(fleet.said_by(name)) == 2 for name in "ab"))
        await fleet.go_on()
        await fleet.decoding("long")
        moved, stayed = sorted("ab", key=lambda name: -len(fleet.said_by(name)))
        assert fleet.said_by(stayed) == ["w0"]
        assert len(fleet.gateway.tokens(stayed)) < 350, "it did not wait for an end"
        # Beside a whole answer it would not find blocks to the end.
        await fleet.gateway.cancel("w0", stayed)
        await fleet.ends(moved, "long")
        assert fleet.said_by(moved) == ["w0", "w1"]
        assert fleet.said_by("long") == ["w0"]
        await eventually(lambda: fleet.outcomes() == {"moved": 1})


async def test_an_order_for_the_head_moves_nothing_where_none_waits_for_kv(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        await fleet.submit("r", max_tokens=60)
        await fleet.decoding("r")
        await fleet.migrate(fleet.others[0], for_head=True)
        await fleet.ends("r")
        assert fleet.said_by("r") == ["w0"]
        assert fleet.outcomes() == {}
