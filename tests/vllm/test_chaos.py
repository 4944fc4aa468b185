"""A short run of the chaos benchmark: vLLM's processes are killed under load, and nothing is lost or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.plan import Kind
from bench.chaos.run import run
from bench.chaos.setting import Setting
from compose.demo_model import ensure_demo_model
from tests.vllm.conftest import PYTHON

pytestmark = [pytest.mark.stack, pytest.mark.ucx]


async def test_no_request_is_lost_or_changed_while_processes_of_vllm_are_killed(tmp_path: Path) -> None:
    kinds: tuple[Kind, ...] = ("vllm_front", "vllm_core", "vllm_worker")
    setting = Setting(
        seconds=36, every_s=10, seed=0, kinds=kinds, workers=3, clients=4, questions=12, engine="vllm", python=PYTHON
    )
    result = await run(setting, ensure_demo_model(tmp_path / "models"), tmp_path / "state")
    document = result.document()
    assert document["num_kills"] >= 2, document["kills_skipped"]
    assert document["failed"] == 0, document["examples"]
    assert document["different"] == 0, document["examples"]
    assert document["right"] == document["requests"] >= 10
    assert result.problems == []
