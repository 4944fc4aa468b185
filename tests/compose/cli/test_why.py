from __future__ import annotations

from datetime import UTC, datetime

import pytest
import typer

from compose.cli import run
from compose.cli.why import moment
from tests.compose.fake_gateway import FakeGateway

ANSWER = {
    "model": "demo",
    "roles": [
        {"role": "colocated", "desired": 2, "needed": 5.25, "there": 1, "seen": "prefill 5.25 (9 tokens/s)",
         "bound": "6 would be needed, and max_instances is 2"},
    ],
    "queued_requests": 4,
    "unplanned": [
        {"model": "demo", "role": "colocated", "wanted": 2, "why": "no worker is spare", "for_s": 3.0},
    ],
    "decisions": [
        {"at_s": 1_800_000_000.0, "model": "demo", "role": "colocated", "asked_by": "hand", "seen": "asked for 1",
         "asked": 1, "there": 0, "wanted": 1, "bound": "", "outcome": "load", "chosen": "1 instance loads on [w-1]",
         "cost": "2 GB to load", "otherwise": "0 instances would stay", "plan_id": "plan-1"},
        {"at_s": 1_700_000_000.0, "model": "demo", "role": "prefill", "asked_by": "load", "seen": "prefill 0",
         "asked": 0, "there": 2, "wanted": 1, "bound": "min_instances 1", "outcome": "drain", "chosen": "w-2",
         "otherwise": "2 would stay"},
    ],
    "silent": [],
}  # fmt: skip


def test_why_shows_need_bound_and_decisions(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/why/demo"] = (200, ANSWER)
    assert run(["why", "demo"]) == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "demo: 2 instances wanted, 1 there; the load fills 5.25",
        "  load       prefill 5.25 (9 tokens/s)",
        "  bound      6 would be needed, and max_instances is 2",
        "  waiting    4 requests in gateways",
        "  not now    2 instances wanted: no worker is spare",
        "2027-01-15T08:00:00Z  loads: 0 to 1 instance, by hand",
        "  seen       asked for 1",
        "  chosen     1 instance loads on [w-1]",
        "  cost       2 GB to load",
        "  otherwise  0 instances would stay",
        "  operation  plan-1",
        "2023-11-14T22:13:20Z  gives back: 2 to 1 prefill instance, 0 asked for, min_instances 1",
        "  seen       prefill 0",
        "  bound      min_instances 1",
        "  chosen     w-2",
        "  otherwise  2 would stay",
    ]
    assert gateway.requests[-1][0] == "GET /admin/why/demo?limit=5"


def test_at_a_time_only_decisions_are_asked_for(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/why/demo"] = (200, {"model": "demo"})
    assert run(["why", "demo", "--at", "2026-01-31T14:05Z"]) == 0
    assert "nothing was decided by then" in capsys.readouterr().out
    assert (
        gateway.requests[-1][0]
        == f"GET /admin/why/demo?limit=5&at={datetime(2026, 1, 31, 14, 6, tzinfo=UTC).timestamp()!r}"
    )
    assert run(["why", "demo", "--at", "noonish"]) == 2
    assert "'noonish' is no time" in capsys.readouterr().err


def test_who_is_silent_is_said(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/why/demo"] = (200, {"model": "demo", "silent": ["monitor", "planner"]})
    assert run(["why", "demo"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no monitor answers: its part is missing",
        "no planner answers: its part is missing",
    ]


@pytest.mark.parametrize(("text", "ago_s"), [("90s", 90.0), ("15m", 900.0), ("1.5h", 5400.0), ("2d", 172_800.0)])
def test_times_may_be_relative(text: str, ago_s: float) -> None:
    assert moment(text, 1_000_000.0) == 1_000_000.0 - ago_s


def test_a_time_of_day_is_of_today_and_of_all_of_its_minute() -> None:
    now = datetime.now().astimezone()
    noon = now.replace(hour=12, minute=0, second=0, microsecond=0)
    assert moment("12:00", now.timestamp()) == noon.timestamp() + 60
    assert moment("12:00:30", now.timestamp()) == noon.timestamp() + 31
    assert moment(noon.isoformat(), now.timestamp()) == noon.timestamp() + 1
    assert moment("2026-01-31T14:05Z", now.timestamp()) == datetime(2026, 1, 31, 14, 6, tzinfo=UTC).timestamp()
    with_its_second = "2026-11-26T22:33:32Z"  # as decisions are shown: that of 22:33:32.9 is one of them
    assert moment(with_its_second, 0.0) > datetime(2026, 11, 26, 22, 33, 32, 900_000, tzinfo=UTC).timestamp()
    for wrong in ("25:00", "12:61", "", "yesterday"):
        with pytest.raises(typer.BadParameter):
            moment(wrong, now.timestamp())
