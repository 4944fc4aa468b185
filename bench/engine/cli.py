"""``blitzscale bench engine``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.command_line import say
from bench.engine.host import HostBenchSettings, run_host_bench
from bench.engine.measure import run_engine_bench
from bench.engine.run import EngineBenchSettings


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"float32 Llama, {report['num_parameters'] / 1e6:.0f} M parameters; output tokens per second")
    for heading in ("batch", "prompt tokens", "blitzscale", "transformers", "ratio", "same tokens"):
        table.add_column(heading, justify="right")
    for batch in report["batches"]:
        table.add_row(
            str(batch["batch_size"]),
            str(batch["prompt_tokens"]),
            f"{batch['engine_tokens_per_s']:.1f}",
            f"{batch['transformers_tokens_per_s']:.1f}",
            f"{batch['ratio']:.2f}",
            f"{batch['same_tokens']:.0%}",
        )
    console.print(table)
    _print_sampling(report, console)
    for row in report["guided"]:
        others = report["settings"]["sampling_batch_size"] - 1
        console.print(
            f"one request with a schema beside {others} others, vocabulary of {row['vocab_size']}: their steps "
            f"{row['with_one']:.3f} of {row['step_ms']:.1f} ms without; the slowest mask {row['slowest_mask_ms']:.1f} "
            f"ms of a core; {row['guided_tokens']:.2f} tokens for each of theirs"
        )
    prefill = report["layer_by_layer"]
    low, high = prefill["ratio_quartiles"]
    console.print(
        f"prompts layer by layer take {prefill['ratio']:.3f} times as long as in one call (quartiles {low:.3f} to "
        f"{high:.3f}; {prefill['prompt_tokens']} tokens in {prefill['layer_by_layer_s']:.3f} s)"
    )


def _print_sampling(report: dict[str, Any], console: Console) -> None:
    batch_size = report["settings"]["sampling_batch_size"]
    table = Table(title=f"how tokens are chosen, batch {batch_size}; ratio to greedy in the same run")
    for heading in ("vocabulary", "logits", "chosen by", "tokens/s", "ratio", "sampler ms per step"):
        table.add_column(heading, justify="right")
    for row in report["sampling"]:
        ratio = "" if row["kind"] == "greedy" else f"{row['over_greedy']:.2f}"
        table.add_row(
            str(row["vocab_size"]),
            row["logits"],
            row["kind"],
            f"{row['tokens_per_s']:.1f}",
            ratio,
            f"{row['sample_ms']:.2f}",
        )
    console.print(table)


def _print_host(report: dict[str, Any], console: Console) -> None:
    settings = report["settings"]
    context = f"contexts of about {settings['context_tokens']} tokens, {settings['num_layers']} layers"
    table = Table(title=f"the host's part of a step, µs of a core; {context}")
    headings = ("sequences", "device", "decodes per step", "a step", "of decodes alone", "with prompts", "event loop")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in report["host"]:
        table.add_row(
            str(row["sequences"]),
            "behind" if row["ahead"] else "at once",
            f"{row['decodes_per_step']:.1f}",
            f"{row['us_per_step']:.0f}",
            f"{row['decode_us']:.0f}" if row["decode_us"] else "",
            f"{row['prompt_us']:.0f}" if row["prompt_us"] else "",
            f"{row['event_loop_us_per_step']:.0f}",
        )
    console.print(table)


def command(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Measure what the host does per step alone: the device costs nothing.")
    ] = False,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each, or of each side in turn (medians).")] = 3,
    output_tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads of both sides.")] = os.cpu_count() or 1,
) -> None:
    """Compare the engine's tokens per second with transformers', and drawn tokens with greedy ones, on this machine.

    With --host: microseconds that the host takes per step where the device costs nothing. Of the other options it has
    --json and --repetitions.
    """
    console = Console()
    if host:
        _print_host(run_host_bench(json_path, HostBenchSettings(repetitions=repetitions), progress=say), console)
        return
    settings = EngineBenchSettings(repetitions=repetitions, output_tokens=output_tokens, threads=threads)
    report = run_engine_bench(json_path, settings, progress=say)
    _print(report, console)
