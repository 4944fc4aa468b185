"""A short run of the chaos benchmark: members of a stack under load are killed, and nothing is lost or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.run import run
from bench.chaos.setting import Setting
from compose.demo_model import ensure_demo_model

pytestmark = [pytest.mark.stack, pytest.mark.ucx]


async def test_no_request_is_lost_or_changed_while_members_are_killed(tmp_path: Path) -> None:
    kinds = ("worker", "planner", "pool", "nats")
    setting = Setting(seconds=12, every_s=2.8, seed=0, kinds=kinds, workers=3, clients=6, questions=10)
    result = await run(setting, ensure_demo_model(tmp_path / "models"), tmp_path / "state")
    document = result.document()
    assert document["kills"] == dict.fromkeys(sorted(kinds), 1), "the plan of this seed"
    assert document["failed"] == 0, document["examples"]
    assert document["different"] == 0, document["examples"]
    assert document["lost_with_gateway"] == document["refused_without_gateway"] == 0, "no gateway was killed"
    assert document["right"] == document["requests"] >= 10
    assert result.problems == []
