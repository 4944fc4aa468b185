"""The benchmark of prompt tokens per step end to end, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from bench.chunk import ChunkBenchSettings, command, run_chunk_bench


def test_both_ways_compute_the_same_prompts() -> None:
    found = run_chunk_bench(
        ChunkBenchSettings(decodes=2, prompts=1, prompt_tokens=256, repetitions=1, slo_tbt_s=10.0, chunk_tokens=64)
    )
    assert set(found) == {"constant", "objective"}
    for way in found.values():
        assert way.tbt_ms.count >= 2 * 256 // 64
        assert way.over_objective == 0.0
        assert way.prompt_tokens_per_s > 0


def test_the_result_is_written(tmp_path: Path) -> None:
    file = tmp_path / "chunk.json"
    command(slo_tbt_ms=1000.0, chunk_tokens=64, decodes=1, prompts=1, prompt_tokens=128, repetitions=1, json_file=file)
    written = json.loads(file.read_bytes())
    assert written["settings"]["prompt_tokens"] == 128
    assert written["objective"]["tbt_ms"]["count"] > 0


def test_a_folder_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit):
        command(json_file=tmp_path / "none" / "x.json")
