"""``blitzscale bench live``: live scaling under a burst, over links with a rate, against the playback of its rules."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from bench import machine
from bench.command_line import JsonFile, say, write
from bench.lab import system
from bench.lab.plan import Rate
from bench.live import table
from bench.live.measure import measure
from bench.live.result import EngineResult, document
from bench.live.workload import EngineKind, Workload
from compose.errors import StackError
from shared.errors import BadRequest, BlitzError

Save = Callable[[Sequence[EngineResult], Path], None]


def _plotter() -> Save:
    """Raises ``BadRequest`` without matplotlib, before anything is measured."""
    try:
        from bench.live import plot
    except ImportError as error:
        raise BadRequest(f"--png needs matplotlib ({error}): pip install 'blitzscale[bench]'", param="png") from error
    return plot.save


def command(
    *,
    engine: Annotated[Literal["mock", "torch", "both"], typer.Option(help="Engines of the workers, in turn.")] = "both",
    prompts: Annotated[int, typer.Option(help="Equal prompts that arrive at once.")] = 12,
    layers: Annotated[int, typer.Option(help="Decoder layers of the model.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer; the playback models no decoding.")] = 4,
    ratio: Annotated[float, typer.Option(help="Layer-times that the link takes to bring a layer.")] = 6.0,
    layer_ms: Annotated[float, typer.Option(help="A layer-time of the mock engine; torch's is measured.")] = 10.0,
    rate: Annotated[str | None, typer.Option(help="Rate of the links (500mbit), instead of --ratio.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each mode; medians are reported.")] = 3,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="--no-live: load first, without help for waiting prompts.")
    ] = True,
    json_file: JsonFile = None,
    png_file: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the timelines there.")] = None,
) -> None:
    """Live scaling under a burst: two hosts on this machine, as network namespaces. Needs root and iproute2.

    Without them it says so and exits with status 0: there is nothing to measure here.
    """
    if reason := system.missing():
        say(f"skipped: {reason}")
        return
    # As Ctrl-C: what was made is taken away on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kinds: tuple[EngineKind, ...] = ("mock", "torch") if engine == "both" else (engine,)
    results: list[EngineResult] = []
    problem = ""
    try:
        save = _plotter() if png_file is not None else None
        link = Rate.parse(rate) if rate is not None else None
        workloads = [
            Workload(kind, prompts, layers, prompt_tokens, output_tokens, layer_s=layer_ms / 1000, ratio=ratio)
            for kind in kinds
        ]
        for workload in workloads:
            measured = asyncio.run(measure(workload, rate=link, repetitions=repetitions, live=live, say=say))
            results.append(measured)
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    except (BlitzError, StackError) as error:
        # What was measured before is written all the same.
        problem = str(error)
    asked = (
        f"blitzscale bench live --engine {engine} --prompts {prompts} --layers {layers} "
        f"--prompt-tokens {prompt_tokens} --output-tokens {output_tokens} --ratio {ratio:g} "
        f"--layer-ms {layer_ms:g} --repetitions {repetitions}"
        + (f" --rate {rate}" if rate is not None else "")
        + ("" if live else " --no-live")
    )
    if json_file is not None and results:
        written = document(results, machine=machine.describe(), command=asked)
        write(json_file, written)
    if save is not None and png_file is not None and results:
        save(results, png_file)
    console = Console()
    for result in results:
        table.show(result, console)
    if not problem and not all(result.tokens_identical for result in results):
        problem = "some outputs differ from those of an idle instance"
    if problem:
        say(f"live: {problem}")
        raise typer.Exit(1)
