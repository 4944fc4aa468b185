"""A profile of the mock engine, whose times are known, and one of the torch engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.profiling import measure as measuring
from services.worker.profiling.measure import Effort, measure
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadRequest
from shared.profile import Profile, read_profile, write_profile
from tests.checkpoints import tiny_checkpoint
from tests.records import profile as some_profile
from tests.services.workers import worker_config

EFFORT = Effort(repetitions=2, loads=1, max_prompt_tokens=500, max_requests=8)


class Clock:
    """Runs while the engine sleeps; and a little with each look, for what the engine has no part in."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-7
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def profiled(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Clock], MockEngine],
    say: Callable[[str], None] = lambda _: None,
    **changes: object,
) -> Profile:
    clock = Clock()
    monkeypatch.setattr(measuring, "make_engine", lambda *_: make(clock))
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"))
    return measure(checkpoint, "tiny", worker_config("w", prefill_chunk_tokens=64, **changes), EFFORT, say, clock)


def test_a_profile_names_the_gpu_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = MockTiming(layer_base_s=0.002)
    found = profiled(monkeypatch, lambda clock: MockEngine(timing=timing, sleep=clock.sleep))
    assert found.gpu_name == ""
    named = profiled(
        monkeypatch,
        lambda clock: MockEngine(timing=timing, sleep=clock.sleep),
        device="cuda",
        mock_gpu="NVIDIA H100 80GB HBM3",
    )
    assert (named.device, named.gpu_name) == ("cuda", "NVIDIA H100 80GB HBM3")


def test_what_is_measured_on_a_gpu_without_a_name_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.profiling.measure.gpu_of", lambda config: None)
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"))
    config = worker_config("w", device="cuda", engine="torch")
    with pytest.raises(BadRequest, match="NVML does not tell which GPU this is"):
        measure(checkpoint, "tiny", config, EFFORT, lambda _: None)


def test_the_fit_finds_what_the_engine_was_told_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = MockTiming(layer_base_s=0.002, layer_per_token_s=0.0005)
    said: list[str] = []
    found = profiled(monkeypatch, lambda clock: MockEngine(timing=timing, sleep=clock.sleep, verify=True), said.append)
    assert [point.prompt_tokens for point in found.prefill] == [32, 128, 500]
    assert found.prefill[1].seconds == pytest.approx(4 * (2 * 0.002 + 128 * 0.0005), rel=1e-3)
    assert {(p.num_requests, p.context_tokens) for p in found.decode} == {
        (n, c) for n in (1, 4) for c in (32, 128, 500)
    }
    assert (found.decode_fit.base_s, found.decode_fit.request_s) == pytest.approx((0.008, 0.002), rel=1e-3)
    assert (found.prefill_fit.base_s, found.prefill_fit.token_s) == pytest.approx((0.008, 0.002), rel=1e-3)
    assert max(found.decode_fit.error, found.prefill_fit.error) < 0.001
    assert {point.source for point in found.load} == {"disk", "host"}
    assert "decodes of 4 requests with 128 tokens each" in said


def test_the_mock_that_plays_a_profile_has_that_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = some_profile()
    found = profiled(monkeypatch, lambda clock: MockEngine(profile=original, sleep=clock.sleep))
    for ours, theirs in ((found.decode_fit, original.decode_fit), (found.prefill_fit, original.prefill_fit)):
        assert _figures(ours) == pytest.approx(_figures(theirs), rel=0.05)
    write_profile(tmp_path / "again.json", found)
    assert read_profile(tmp_path / "again.json") == found


def _figures(fit: Any) -> list[float]:
    return [getattr(fit, name) for name in fit.__struct_fields__ if name != "error"]


def test_a_point_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = MockTiming(layer_per_token_s=0.02)
    found = profiled(monkeypatch, lambda clock: MockEngine(timing=timing, sleep=clock.sleep))
    # 128 tokens take 10 s, three times over: more than the 20 s that a point may take.
    assert [point.prompt_tokens for point in found.prefill] == [32]


def test_a_cache_that_holds_no_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="BLITZ_WORKER_KV_MIB"):
        profiled(monkeypatch, lambda _: MockEngine(num_blocks=1))


def test_the_torch_engine_is_measured_the_same_way() -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"))
    effort = Effort(repetitions=1, loads=1, max_prompt_tokens=64, max_requests=4)
    found = measure(checkpoint, "tiny", worker_config("w", engine="torch"), effort, lambda _: None)
    assert (found.model_hash, found.layout_hash) == (checkpoint.model_hash, checkpoint.layout.hash)
    assert (found.engine, found.device, found.kv_bytes_per_token) == (
        "torch",
        "cpu",
        checkpoint.spec.kv_bytes_per_token,
    )
    assert [point.prompt_tokens for point in found.prefill] == [32, 64]
    assert found.prefill_tokens_per_s(50) > 0
    assert all(point.seconds > 0 for point in (*found.prefill, *found.decode, *found.load))
