from __future__ import annotations

import json

import pytest

from bench.loaders.result import Reading, Result

GB = 10**9
READINGS = (
    Reading("safetensors", "cold", 4.0, GB),
    Reading("safetensors", "cold", 2.0, GB),
    Reading("safetensors", "cold", 2.2, GB),
    Reading("safetensors", "warm", 1.0, GB),
    Reading("disk", "cold", 1.1, GB),
    Reading("network", "unused", 0.1, GB),
)


def result(readings: tuple[Reading, ...]) -> Result:
    return Result(
        model_bytes=GB,
        num_files=4,
        repetitions=3,
        dropped_by="drop_caches",
        readings=readings,
        skipped={"runai_streamer": "not installed"},
    )


def test_ratios_are_to_safetensors_with_the_page_cache_in_the_same_state() -> None:
    document = json.loads(json.dumps(result(READINGS).document()))
    methods = document["methods"]
    assert methods["safetensors"]["cold"]["seconds"] == 2.2
    assert methods["safetensors"]["cold"]["of_safetensors_cold"] == 1.0
    assert methods["disk"]["cold"]["of_safetensors_cold"] == pytest.approx(2.0)
    assert "of_safetensors_warm" not in methods["disk"]["cold"]
    assert methods["disk"]["cold"]["gbytes_per_s"] == pytest.approx(1 / 1.1, abs=1e-3)
    assert document["skipped"] == {"runai_streamer": "not installed"}


def test_what_needs_no_page_cache_is_compared_with_both_states() -> None:
    row = result(READINGS).document()["methods"]["network"]["unused"]
    assert (row["of_safetensors_cold"], row["of_safetensors_warm"]) == (pytest.approx(22.0), pytest.approx(10.0))


def test_without_a_baseline_there_is_no_ratio() -> None:
    row = result(READINGS[3:]).document()["methods"]["network"]["unused"]
    assert "of_safetensors_cold" not in row
    assert row["of_safetensors_warm"] == pytest.approx(10.0)
