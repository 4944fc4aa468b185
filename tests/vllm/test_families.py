"""Models that our engine does not know: as vLLM alone serves them, with weights that came unit by unit, and when other
weights take their place."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.worker.vllm.warm import WarmFronts
from tests.vllm.conftest import ARGUMENTS, PYTHON, Serving
from tests.vllm.families import FAMILIES, write_family

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [[1 + (11 * i + 5 * j) % 255 for j in range(2 + 5 * i % 97)] for i in range(50)]
MAX_TOKENS = 16
STARTED_ANEW = ("moe", "int8")
"""Of which no waiting vLLM takes other weights: this version's reload brings others than its start."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One of each family, and another one of the same shape."""
    folder = tmp_path_factory.mktemp("families")
    of_family = {family: write_family(folder / family, family) for family in FAMILIES}
    return of_family | {
        f"{family}-other": write_family(folder / f"{family}-other", family, seed=8) for family in FAMILIES
    }


@pytest.fixture(scope="module")
def expected(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[list[int]]]:
    """What vLLM alone says, which reads the directories itself."""
    file = tmp_path_factory.mktemp("plain") / "asked.json"
    asked = {
        "models": {str(path): ARGUMENTS for path in models.values()},
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
    }
    file.write_text(json.dumps(asked))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_PLUGINS": "none",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: each would import for as long as ten models take
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    script = Path(__file__).parent / "plain.py"
    done = subprocess.run([PYTHON, script, file], env=env, cwd=file.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: said[str(path)] for name, path in models.items()}


async def answers(serving: Serving) -> list[list[int]]:
    return list(
        await asyncio.gather(
            *(serving.run(f"{number}", prompt, max_tokens=MAX_TOKENS) for number, prompt in enumerate(PROMPTS))
        )
    )


@pytest.mark.parametrize("family", FAMILIES)
async def test_it_says_what_vllm_says_alone_also_with_other_weights_and_back(
    family: str, models: Mapping[str, Path], expected: Mapping[str, list[list[int]]], warm: WarmFronts
) -> None:
    pids, others = [], False
    for name in (family, f"{family}-other", family):
        await warm.prepare()
        serving = Serving(models[name], warm)
        await serving.start(pause_s=0.1)
        pids.append(serving.engine.pid)
        try:
            assert await answers(serving) == expected[name]
        finally:
            await serving.close()
        assert warm.engine is not None
        others = warm.engine.takes_others
    assert others is (family not in STARTED_ANEW)
    assert len(set(pids)) == (1 if others else 3)
    warm.drop_started()
