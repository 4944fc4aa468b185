"""All measurements of the engine in one report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.engine.guided import measure_guided
from bench.engine.layers import measure_layer_by_layer
from bench.engine.reference import load_engine, measure_batch, write_checkpoint
from bench.engine.run import EngineBenchSettings
from bench.engine.sampling import measure_sampling, sampled_over_greedy
from shared.checkpoint import inspect_checkpoint


def run_engine_bench(
    json_path: Path | None,
    settings: EngineBenchSettings | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Measure, write the result to ``json_path`` if given, and return it.

    ``vs_transformers`` has the ratio of tokens per second by batch size, ``sampled_over_greedy`` that of drawn to
    greedy tokens by vocabulary. Sets torch's threads for the time of the run.
    """
    from transformers import AutoModelForCausalLM

    settings = settings or EngineBenchSettings()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="engine-bench-") as folder:
            progress("writing a random checkpoint")
            num_parameters = write_checkpoint(Path(folder), settings)
            checkpoint = inspect_checkpoint(Path(folder), with_hash=False)
            engine = load_engine(checkpoint, max(settings.batch_sizes) * settings.blocks_per_request)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            model.eval()
        results = []
        for batch_size in settings.batch_sizes:
            progress(f"measuring batch {batch_size}")
            results.append(measure_batch(engine, model, settings, batch_size))
        progress("measuring layer by layer")
        layer_by_layer = measure_layer_by_layer(engine, settings)
        del engine, model
        sampling = measure_sampling(settings, progress)
        guided = measure_guided(settings, progress)
    finally:
        torch.set_num_threads(threads_before)
    report: dict[str, Any] = {
        "vs_transformers": {str(result.batch_size): round(result.ratio, 3) for result in results},
        "sampled_over_greedy": sampled_over_greedy(sampling),
        "batches": [asdict(result) for result in results],
        "layer_by_layer": asdict(layer_by_layer),
        "sampling": [asdict(result) for result in sampling],
        "guided": [asdict(result) for result in guided],
        "settings": asdict(settings),
        "num_parameters": num_parameters,
        "dtype": "float32",
        "torch": torch.__version__,
    }
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report
