"""The result for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bench.live.modes import ZIGZAG
from bench.live.result import FIGURES, RATIOS, EngineResult, Figure

# What the mock engine's figures should reach. The torch engine shares the machine's cores with what it measures.
AIMED_LAYERS_PER_S = 1.8
"""Of both instances together while half of the batches wait, in units of one instance alone; at least."""
AIMED_DEVIATION = 0.10
"""Of a measured time from its playback; at most."""


_NAMES: dict[Figure, str] = {"mean_s": "mean", "p99_s": "p99", "worst_s": "worst"}


def show(result: EngineResult, console: Console) -> None:
    """Measured times beside the playback's, with the aims."""
    workload = result.workload
    console.print(
        f"{workload.engine} engine: {workload.num_prompts} prompts of {workload.prompt_tokens} tokens, "
        f"{workload.num_layers} layers of {workload.layer_s * 1000:.2f} ms, {result.layer_load_s * 1000:.1f} ms to "
        f"load one ({result.layer_load_s / workload.layer_s:.1f} layer-times, {result.rate_gbps * 1000:.0f} Mbit/s)",
        highlight=False,
    )
    is_aimed = workload.engine == "mock"
    table = Table("mode", "", "measured s", "playback s", "off by", "recorded s", "off by")
    for mode in result.modes:
        for figure in FIGURES:
            table.add_row(
                mode.name,
                _NAMES[figure],
                f"{result.seconds(mode, figure):.3f}",
                f"{result.seconds(mode, figure, 'planned'):.3f}",
                _percent(result.deviation(mode, figure, "planned")),
                f"{result.seconds(mode, figure, 'recorded'):.3f}",
                _percent(result.deviation(mode, figure, "recorded")),
                end_section=figure == FIGURES[-1],
            )
    console.print(table)
    console.print("times to first token; playback: with the planned times of layers, recorded: with the recorded ones")
    if is_aimed:
        console.print(f"aim: within {AIMED_DEVIATION:.0%} of the playback")
    for mode, to in RATIOS:
        if result.of(mode) and result.of(to):
            each = [
                f"{_NAMES[figure]} {result.ratio(mode, to, figure):.3f} "
                f"(playback {result.ratio(mode, to, figure, 'planned'):.3f})"
                for figure in FIGURES
            ]
            console.print(f"{mode.name} over {to.name}: {', '.join(each)}", highlight=False)
    for mode in result.modes:
        measured, played = result.layers_per_s(mode), result.layers_per_s(mode, "planned")
        if measured is not None:
            aim = f"; aim: at least {AIMED_LAYERS_PER_S:g}" if is_aimed and mode == ZIGZAG else ""
            console.print(
                f"{mode.name}: {measured:.2f} times one instance's layers per second while half of the prompts wait "
                f"(playback {played:.2f}{aim})",
                highlight=False,
            )
    same = sum(sum(run.identical) for run in result.runs)
    console.print(f"outputs as of an idle instance: {same} of {sum(len(run.identical) for run in result.runs)}")


def _percent(share: float) -> str:
    return f"{share:+.1%}"
