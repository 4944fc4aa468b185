"""The engine benchmark end to end, on a model small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from bench.engine.measure import run_engine_bench
from bench.engine.run import EngineBenchSettings
from bench.engine.sampling import KINDS, SamplingResult, sampled_over_greedy

SMALL = EngineBenchSettings(
    batch_sizes=(1, 3),
    min_prompt_tokens=4,
    max_prompt_tokens=40,
    output_tokens=8,
    repetitions=1,
    threads=1,
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    sampling_vocab_sizes=(300, 600),
    sampling_batch_size=3,
)


def test_both_sides_write_the_same_tokens_and_the_report_is_written(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    report = run_engine_bench(tmp_path / "engine.json", SMALL)
    assert json.loads((tmp_path / "engine.json").read_text()).keys() == report.keys()
    assert set(report["vs_transformers"]) == {"1", "3"}
    for batch in report["batches"]:
        assert batch["same_tokens"] == 1.0
        assert batch["ratio"] == batch["engine_tokens_per_s"] / batch["transformers_tokens_per_s"] > 0
    assert torch.get_num_threads() == threads
    assert set(report["sampled_over_greedy"]) == {"300", "600"}
    measured = [(row["vocab_size"], row["logits"], row["kind"]) for row in report["sampling"]]
    assert measured == [
        (vocab, logits, kind) for vocab in (300, 600) for logits in ("flat", "peaked") for kind in KINDS
    ]
    assert [row["vocab_size"] for row in report["guided"]] == [300, 600]
    for row in report["guided"]:
        assert row["step_ms"] > 0
        assert row["with_one"] > 0
        assert row["slowest_mask_ms"] > 0
        assert 0 < row["guided_tokens"] <= 1
    for row in report["sampling"]:
        assert row["tokens_per_s"] > 0
        assert row["sample_ms"] > 0
        assert row["over_greedy"] == 1.0 or row["kind"] != "greedy"


def test_the_ratio_of_a_vocabulary_is_the_worse_of_flat_and_peaked() -> None:
    results = [
        SamplingResult(vocab_size, logits, kind, 1.0, ratio, 1.0)
        for vocab_size, logits, kind, ratio in [
            (32, "flat", "greedy", 1.0),
            (32, "flat", "temperature 1", 0.9),
            (32, "peaked", "temperature 1", 0.8),
            (32, "peaked", "top-p 0.95", 0.1),
            (64, "flat", "temperature 1", 0.7),
            (64, "peaked", "temperature 1", 0.95),
        ]
    ]
    assert sampled_over_greedy(results) == {"32": 0.8, "64": 0.7}


def test_the_standard_model_has_over_100_million_parameters() -> None:
    s = EngineBenchSettings()
    head_dim = s.hidden_size // s.num_heads
    attention = s.hidden_size * head_dim * 2 * (s.num_heads + s.num_kv_heads)
    layer = attention + 3 * s.hidden_size * s.intermediate_size
    assert s.num_layers * layer + 2 * s.vocab_size * s.hidden_size >= 100_000_000
