"""Rows that time an engine, with a tiny model on the CPU: what they report, and what they say of what is off."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from bench.gpu.engines import place_of, random_arena
from bench.gpu.first import FirstSettings
from bench.gpu.first import measure_on as measure_first
from bench.gpu.kernels import measure_on as measure_kernels
from bench.gpu.served import WAYS
from bench.gpu.steps import SAMPLED, StepSettings, step_bytes
from bench.gpu.steps import measure_on as measure_steps
from bench.gpu.waits import Mode, WaitSettings
from bench.gpu.waits import measure_on as measure_waits
from services.worker.engine.decode_graphs import FIRST_SIZES
from services.worker.engine.sampler import HostSampler
from services.worker.engine.sampling import Drawn
from services.worker.engine.torch_engine import REHEARSED_PROMPTS
from shared.layout import layout_of
from tests.bench.gpu.places import TINY, Found, cpu, played_gpu, twin_gpu

STEPS = StepSettings(
    TINY,
    batches=(1, 3),
    context_tokens=20,
    num_steps=6,
    prompt_tokens=64,
    prompt_chunks=(64, 16),
    prompt_rounds=1,
    plan_batches=(1, 4),
)
NUM_REHEARSALS = len(FIRST_SIZES) + len(REHEARSED_PROMPTS)
WAITS = WaitSettings(TINY, num_requests=2, prompt_tokens=70, num_steps=10)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_steps_beside_what_the_device_could_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found("steps", tmp_path)
    measure_steps(found.report, twin_gpu(monkeypatch), STEPS, 1e-9, lambda *_: 1e9)
    assert found.failed == []
    assert found["decode, batch 1, greedy"].note.startswith(f"a step; {NUM_REHEARSALS} rehearsals")
    assert {f"plan for a graph, batch {batch}" for batch in STEPS.plan_batches} <= set(found.names)
    for batch in STEPS.batches:
        for way in SAMPLED:
            assert (found[f"decode, batch {batch}, {way}"].value or 0) > 0
            share = found[f"decode, batch {batch}, {way}: the sampler's share"].value
            assert share is not None
            assert 0 < share < 1
        idle = found[f"decode, batch {batch}, greedy: idle"].value
        assert idle is not None
        assert idle < 1
    # A copy that takes for ever, and products that do: nothing is slower.
    assert [name for name in found.off if "idle" not in name and not name.startswith("plan")] == []


def test_steps_that_are_slower_than_they_should_be_are_off(tmp_path: Path) -> None:
    found = Found("steps", tmp_path)
    measure_steps(found.report, cpu(), STEPS, 1e9, lambda *_: 1e-9)
    assert found.failed == []
    assert [name for name in found.off if not name.startswith("plan")] == [
        "decode, batch 1, greedy: of the copy's rate",
        "decode, batch 3, greedy: of the copy's rate",
        "prompt of 64 tokens, in chunks of 64: of its products' rate",
    ]
    assert "row decode" in found["decode, batch 1, greedy: of the copy's rate"].note


def test_a_step_reads_all_but_the_embedding_and_the_kv_of_its_requests() -> None:
    layout = layout_of(TINY)
    assert step_bytes(layout, 0) == layout.num_bytes - layout.embed.num_bytes
    assert step_bytes(layout, 10) - step_bytes(layout, 0) == 10 * TINY.kv_bytes_per_token


def test_what_waits_is_counted_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that waits for the device, and a mode that has PyTorch see it."""
    mode: list[Mode] = ["default"]
    sample = HostSampler.sample

    def waiting(self: HostSampler, logits: torch.Tensor, batch: object) -> Drawn:
        if mode[0] == "error" and any(row.params.temperature for row in batch.rows):  # type: ignore[attr-defined]
            raise RuntimeError("called a synchronizing CUDA operation")
        return sample(self, logits, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(HostSampler, "sample", waiting)

    def set_mode(given: Mode) -> None:
        mode[0] = given

    found = Found("waits", tmp_path)
    measure_waits(found.report, played_gpu(), WAITS, set_mode, lambda: time.sleep(0.05))
    assert found.failed == []
    waits = [way for way in WAYS if WAYS[way].temperature]
    name = "requests that fail where nothing may wait"
    assert [found[f"{name}, {way}"].value for way in WAYS] == [2 if way in waits else 0 for way in WAYS]
    assert "synchronizing" in found[f"{name}, {waits[0]}"].note
    assert [one.value for one in found.figures if one.name.startswith("waits, ")] == [0] * len(waits)
    assert mode == ["default"]


def test_a_device_that_has_ended_when_the_call_returns_was_waited_for(tmp_path: Path) -> None:
    found = Found("waits", tmp_path)
    measure_waits(found.report, cpu(), WAITS, lambda _: None, lambda: None)
    assert found.failed == []
    assert all(
        found[f"{what} behind a busy device, {way}: waited"].value for way in WAYS for what in ("prompts", "decodes")
    )
    assert all("behind a busy device" in name for name in found.off)


def test_the_first_request_beside_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found("first", tmp_path)
    free = iter((5 << 20, 2 << 20))
    place = twin_gpu(monkeypatch)
    measure_first(found.report, place, FirstSettings(TINY, prompt_tokens=20, num_together=2), lambda: next(free))
    assert found.failed == []
    assert [name for name in found.names if "rehearsal" in name] == [
        f"rehearsal {number + 1}" for number in range(NUM_REHEARSALS)
    ]
    assert found["memory of graphs and workspaces"].value == 3
    for way in WAYS:
        for together in (1, 2):
            for what in ("prompt", "decode"):
                assert (found[f"first {what}, {together} together, {way}"].value or 0) > 0


def test_what_is_compiled_is_used_once_in_every_way(tmp_path: Path) -> None:
    found = Found("kernels", tmp_path)
    measure_kernels(found.report, cpu(), {"tiny": TINY})
    assert found.failed == []
    assert [one.name for one in found.figures] == [
        "checksums", *(f"tiny: a request, {way}" for way in WAYS), "tiny: rehearsals"
    ]  # fmt: skip


def test_random_weights_are_those_of_the_seed() -> None:
    place = place_of("cpu", Path())
    (layout, one), (_, same), (_, other) = (random_arena(TINY, place, seed=seed) for seed in (1, 1, 2))
    for unit in layout.units:
        assert one.unit_checksums(unit) == same.unit_checksums(unit)
    assert one.unit_checksums(layout.units[0]) != other.unit_checksums(layout.units[0])
    assert one.unit_checksums(layout.units[0]) != one.unit_checksums(layout.units[1])


def test_what_is_no_number_is_off(tmp_path: Path) -> None:
    found = Found("row", tmp_path)
    found.report.at_most("error", math.nan, "", 1, "there")
    found.report.at_least("rate", math.nan, "GB/s", 1, "there", "of it")
    found.report.at_least("good", 1.0, "GB/s", 1, "there")
    assert found.off == ["error", "rate"]
    assert found["rate"].note == "of it; aim: at least 1; OFF: look at there"
    assert found["good"].note == "aim: at least 1"
