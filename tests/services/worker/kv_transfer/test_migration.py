"""Requests that run move from one worker to another, and the stream goes on."""

from __future__ import annotations

import pytest

from services.worker.core.kv_admission import move_history
from tests.services.worker.kv_transfer.moving import PROMPT, moving
from tests.services.worker.late_workers import also_late
from tests.wait_until import eventually


async def test_a_drain_moves_what_runs_and_does_not_wait_for_its_end(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        await fleet.hold("r")
        await fleet.submit("r")
        await fleet.decoding("r")
        await fleet.drain(*fleet.others)
        await fleet.spare()
        await eventually(lambda: fleet.outcomes() == {"moved": 1})
        said = len(fleet.gateway.tokens("r", repeats=True))
        assert said < 150, "it was not decoded to its end before"
        await fleet.ends("r")
        assert fleet.said_by("r") == ["w0", "w1"]


@also_late("drawn")
async def test_many_spread_over_those_that_take_them(redis_url: str) -> None:
    async with moving(redis_url, 3) as fleet:
        names = [f"r{i}" for i in range(8)]
        await fleet.hold(*names)
        for i, name in enumerate(names):
            await fleet.submit(name, prompt=PROMPT[: 10 + 11 * i], max_tokens=300)
        await fleet.decoding(*names)
        await fleet.drain(*fleet.others)
        await fleet.spare()
        await eventually(lambda: fleet.outcomes() == {"moved": 8})
        await fleet.ends(*names)
        assert sorted(fleet.said_by(name)[1] for name in names) == ["w1"] * 4 + ["w2"] * 4


async def test_what_has_not_begun_goes_back_to_its_gateway(redis_url: str) -> None:
    async with moving(redis_url, max_running_requests=1) as fleet:
        await fleet.hold("runs")
        await fleet.submit("runs")
        await fleet.decoding("runs")
        await fleet.submit("waits")
        await fleet.drain(*fleet.others, send_back="waiting")
        end = await fleet.gateway.end_of("waits")
        assert end.error is not None
        assert end.error.code == "sent_back"
        await fleet.spare()
        await fleet.ends("runs")


async def test_for_another_model_all_goes_back_with_what_it_has(redis_url: str) -> None:
    async with moving(redis_url, max_running_requests=1) as fleet:
        await fleet.hold("runs")
        await fleet.submit("runs")
        await fleet.decoding("runs")
        await fleet.submit("waits")
        await fleet.drain(send_back="all")
        for name in ("runs", "waits"):
            end = await fleet.gateway.end_of(name)
            assert end.error is not None
            assert end.error.code == "sent_back"
        assert len(fleet.gateway.tokens("runs")) >= 3
        await fleet.spare()


async def test_without_a_word_on_that_requests_end_where_they_are(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        await fleet.submit("r", max_tokens=30)
        await fleet.decoding("r")
        await fleet.drain()
        await fleet.ends("r")
        assert fleet.said_by("r") == ["w0"]
        await fleet.spare()


async def test_a_full_destination_takes_nothing_and_the_request_is_decoded_on(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_history, "AGAIN_S", 3600.0)
    async with moving(redis_url, each=lambda name: {"max_running_requests": 1} if name == "w1" else {}) as fleet:
        (full,) = fleet.others
        await fleet.gateway.submit("w1", full.serving.instance_id, "other", max_tokens=5000)
        await fleet.hold("r")
        await fleet.submit("r", max_tokens=60)
        await fleet.decoding("r")
        await fleet.drain(full)
        await eventually(lambda: fleet.outcomes() == {"kept": 1})
        await fleet.go_on()
        await fleet.ends("r")
        assert fleet.said_by("r") == ["w0"]
        await fleet.gateway.cancel("w1", "other")


async def test_a_revived_instance_keeps_what_has_not_left(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        await fleet.hold("a", "b")
        for name in ("a", "b"):
            await fleet.submit(name, max_tokens=60)
        await fleet.decoding("a", "b")
        await fleet.drain()
        await eventually(lambda: fleet.here.serving.state == "draining")
        await fleet.drain(plan_id="revive", revive=True)
        await eventually(lambda: fleet.here.serving.state == "serving")
        await fleet.go_on()
        await fleet.ends("a", "b")
        assert fleet.here.instance is not None


@also_late("drawn")
async def test_an_order_moves_some_and_the_instance_serves_on(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        # Two of them have less than 150 tokens of KV, and three have more.
        await fleet.hold("a", "b", "c")
        for name in ("a", "b", "c"):
            await fleet.submit(name, prompt=PROMPT[:50], max_tokens=250)
        await fleet.decoding("a", "b", "c")
        await fleet.migrate(fleet.others[0], kv_tokens=150)
        await eventually(lambda: fleet.outcomes() == {"moved": 2})
        await fleet.go_on()
        await fleet.ends("a", "b", "c")
        assert sorted(len(fleet.said_by(name)) for name in ("a", "b", "c")) == [1, 2, 2]
        assert fleet.here.serving.state == "serving"


async def test_an_order_that_comes_too_late_or_for_another_instance_moves_nothing(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        await fleet.submit("r", max_tokens=60)
        await fleet.decoding("r")
        await fleet.migrate(fleet.others[0], plan_id="late", expires_in_s=-1.0)
        await fleet.migrate(fleet.others[0], plan_id="other", instance_id="i-other")
        await fleet.ends("r")
        assert fleet.said_by("r") == ["w0"]
        assert fleet.outcomes() == {}
