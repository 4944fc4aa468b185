"""Workers that serve with the engines of others alone, where PyTorch cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from compose.config import StackConfig
from compose.stack import Stack
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S

pytestmark = [pytest.mark.stack, pytest.mark.ucx]

ROOT = Path(__file__).parents[2]
NO_TORCH = """
import sys
from importlib.abc import MetaPathFinder

class NoTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, NoTorch())
"""


async def test_workers_with_vllm_alone_register_and_keep_models_without_torch(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_TORCH)
    config = StackConfig(
        models=(),
        state_dir=tmp_path / "stack",
        workers=2,
        port=0,
        engine="none",
        env=FAST
        | NO_DEMAND
        # This interpreter has no vLLM, which is found out when an instance is to start.
        | {
            "PYTHONPATH": f"{site}:{ROOT}",
            "BLITZ_WORKER_ENGINES": "vllm",
            "BLITZ_VLLM_PYTHON": sys.executable,
        },
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        status = await stack.admin.status()
        assert [(w.engine, w.engines, w.state) for w in status.workers] == [("none", ("vllm",), "spare")] * 2
        await stack.admin.add_model(str(tiny_checkpoint("llama")), name=MODEL)
        await until(
            stack,
            lambda status: bool(status.unplanned) and all(model.copies == "memory" for model in status.models),
            60.0,
        )
        (refused,) = (await stack.admin.status()).unplanned
        assert "no worker offers the system's own engine (BLITZ_WORKER_ENGINE)" in refused.why
