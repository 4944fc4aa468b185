"""The warm-up computes all that a step may need, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from services.worker.device.cuda.device import CudaDevice
from services.worker.engine import sampler, warm_up
from services.worker.engine.attention import torch_cpu
from services.worker.engine.categorical import DrawRow
from shared.layout import CHECK_BYTES
from tests.services.worker.device.cuda.drivers import PlayedDriver


def test_every_dtype_runs_prompts_with_and_without_a_prefix_decodes_and_every_way_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attended: set[tuple[torch.dtype, str]] = set()
    run, draw, drawn = torch_cpu.TorchAttention.run, sampler.draw, list[DrawRow]()

    def noted(self: torch_cpu.TorchAttention, plan: torch_cpu.TorchPlan, q: torch.Tensor, *caches: torch.Tensor):  # type: ignore[no-untyped-def]
        for single in plan.singles:
            many = single.end - single.begin > 1
            attended.add((q.dtype, "one" if not many else "prefix" if single.tiles else "prompt"))
        if plan.padded:
            attended.add((q.dtype, "together"))
        return run(self, plan, q, *caches)

    monkeypatch.setattr(torch_cpu.TorchAttention, "run", noted)
    monkeypatch.setattr(sampler, "draw", lambda scores, best, rows: drawn.extend(rows) or draw(scores, best, rows))
    prompts, written = sum(warm_up.PROMPTS), len(warm_up.PROMPTS) * warm_up.NUM_TOKENS
    # The last token of each is not computed.
    assert warm_up.warm_up() == len(warm_up.DTYPES) * (prompts + written - len(warm_up.PROMPTS))
    for dtype in (torch.float32, torch.bfloat16):
        assert {kind for of, kind in attended if of == dtype} == {"one", "together", "prompt", "prefix"}
    assert {row.keeps_all(warm_up.VOCAB_SIZE) for row in drawn} == {True, False}


def test_a_gpu_also_checks_memory_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def hashes(memory: torch.Tensor) -> torch.Tensor:
        checked.append(len(memory))
        return torch.zeros(-(-len(memory) // CHECK_BYTES), dtype=torch.int64)

    device = CudaDevice(PlayedDriver(), hashes, share_bytes=1 << 20)
    kept: list[object] = []
    monkeypatch.setattr(device.graphs, "forget", lambda: kept.append("forgotten"))
    on_cpu = warm_up.warm_up()
    assert warm_up.warm_up(device) == on_cpu * len(warm_up.GPU_HEAD_DIMS)
    assert checked == [blocks * CHECK_BYTES for blocks in warm_up.CHECKED_BLOCKS]
    assert kept == ["forgotten"]
