from __future__ import annotations

from pathlib import Path

from bench.chaos.setting import Setting
from compose.demo_model import ensure_demo_model


def test_workers_have_memory_for_the_model_that_is_asked_for(tmp_path: Path) -> None:
    def arena_mib(model: Path) -> int:
        return int(Setting().config(model, tmp_path / "state").env["BLITZ_WORKER_ARENA_MIB"])

    assert arena_mib(ensure_demo_model(tmp_path)) == 64
    # 3 MiB a layer and 0.5 MiB besides; of two models each may have its copy and an instance of the other.
    assert arena_mib(ensure_demo_model(tmp_path, "deep", num_layers=64)) == 481
