"""Row ``tokens``, on the CPU: an engine that is right is said to be, and one that is not is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu import tokens
from bench.gpu.checkpoints import ModelSize, loaded_arena
from bench.gpu.engines import EnginePlace
from bench.gpu.tokens import TokenSettings, measure_on
from services.worker.engine.decode_graphs import FIRST_SIZES, DecodeStep
from services.worker.engine.placement import TokenPlaces
from services.worker.engine.torch_engine import REHEARSED_PROMPTS
from services.worker.memory.arena import Arena
from shared.layout import ArenaLayout
from tests.bench.gpu.places import Found, cpu, played_gpu, twin_gpu

SMALL = TokenSettings(
    size=ModelSize(64, 96, 2, 128, 16, 24), kinds=("mistral",), prompt_tokens=(1, 20, 70), output_tokens=6, chunks=(16,)
)
WHAT = (
    "whole prompts",
    "prompts in chunks of 16",
    "whole prompts together",
    "decodes beside prompts",
    "blocks backwards",
    "greedily, in the loop",
    "resumed elsewhere after layer 1",
    "decoded elsewhere",
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("place", [cpu, played_gpu])
def test_an_engine_that_is_right(tmp_path: Path, place: object) -> None:
    found = Found("tokens", tmp_path)
    assert callable(place)
    measure_on(found.report, place(), SMALL)
    assert found.failed == found.off == []
    for dtype in SMALL.dtypes:
        for what in WHAT:
            assert "aim" in found[f"mistral, {dtype}: {what}"].note
    assert "18 are as transformers writes" in found["mistral, float32: greedily, in the loop"].note


def test_graphs_are_compared_where_they_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SMALL, kinds=("llama",), dtypes=("float32",))
    found = Found("tokens", tmp_path)
    measure_on(found.report, twin_gpu(monkeypatch), settings)
    assert found.failed == found.off == []
    assert found["llama, float32: rehearsals"].value == len(FIRST_SIZES) + len(REHEARSED_PROMPTS)
    replayed = [what for what in found.names if what.endswith(", graphs")]
    assert len(replayed) == 3

    def other_places(self: DecodeStep, places: TokenPlaces, hidden: torch.Tensor) -> torch.Tensor:
        return run(self, replace(places, positions=places.positions + 1), hidden)

    run = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", other_places)
    found = Found("tokens", tmp_path / "again")
    found.report.folder.mkdir()
    measure_on(found.report, twin_gpu(monkeypatch), settings)
    assert found.off == replayed


def test_weights_that_are_not_the_checkpoints_are_off_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(path: Path, place: EnginePlace) -> tuple[ArenaLayout, Arena]:
        layout, arena = loaded_arena(path, place)
        arena.tensor(layout.units[1].slot("down"), layout.spec.dtype).neg_()
        return layout, arena

    monkeypatch.setattr(tokens, "loaded_arena", spoilt)
    found = Found("tokens", tmp_path)
    measure_on(found.report, cpu(), SMALL)
    assert found.failed == []
    assert found.off == [f"mistral, {dtype}: {what}" for dtype in SMALL.dtypes for what in WHAT]


def test_a_comparison_that_cannot_be_made_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> float:
        raise RuntimeError("no memory")

    monkeypatch.setattr("bench.gpu.forced.ForcedEngine.alone", fail)
    found = Found("tokens", tmp_path)
    measure_on(found.report, cpu(), replace(SMALL, dtypes=("float32",)))
    assert [name.partition(": RuntimeError")[0] for name in found.failed] == [
        f"mistral, float32: {what}" for what in WHAT[:2]
    ]
    assert found.off == []
