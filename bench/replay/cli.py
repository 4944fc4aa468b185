"""``blitzscale replay``: a trace against a running endpoint."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.command_line import INTERRUPTED, JsonFile, red_line, show, write
from bench.replay.document import About
from bench.replay.measure import Measured, Measurement, Replay
from bench.replay.objectives import FACTOR, Slo
from bench.replay.options import HtmlFile, MeanTbt, MeanTtft, Outputs, PngFile, SloFactor, SloTbt, SloTtft
from bench.replay.plan import Shape
from bench.replay.report import latency_table, totals_table
from bench.stream_client import Endpoint
from bench.traces.reader import read_trace
from bench.traces.request import Trace
from bench.traces.scaling import scale_rate, spread_seconds
from bench.traces.synthetic import FIGURES, synthesise
from shared.errors import BadRequest

app = typer.Typer(help="Replay a request trace against a running endpoint and measure it.", add_completion=False)


async def _measure(settings: Replay, found: list[Measured], progress: Progress) -> None:
    """Appends to ``found`` as soon as there is something that an interruption should not lose."""

    def warn(text: str) -> None:
        progress.console.print(text, style="yellow", soft_wrap=True)

    measurement = await Measurement.prepare(settings, warn=warn)
    try:
        num_requests = len(measurement.requests)
        bar = progress.add_task(f"{settings.trace.name} → {measurement.model}", total=num_requests, failed=0)

        def on_progress() -> None:
            collector = found[0].collector
            progress.update(bar, completed=len(collector.records), failed=collector.failed)

        await measurement.run(on_begin=found.append, on_progress=on_progress)
    finally:
        measurement.close()


def _source(trace: Path | None, synthetic: str | None, seed: int, duration_s: float) -> Trace:
    if (trace is None) == (synthetic is None):
        raise BadRequest("give a trace file or --synthetic, not both and not neither", param="trace")
    if trace is not None:
        return read_trace(trace)
    assert synthetic is not None
    return synthesise(synthetic, seed=seed, duration_s=duration_s)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _run(settings: Replay, outputs: Outputs) -> int:
    """Replay, print, write; returns the exit status."""
    errors = Console(stderr=True)
    found: list[Measured] = []
    status = 0
    try:
        with _progress(errors) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(settings, found, progress))
    except KeyboardInterrupt:
        so_far = "these are the figures so far" if found else "nothing was sent"
        errors.print(f"interrupted: {so_far}", style="yellow")
        status = INTERRUPTED
    if not found:
        return status
    document = found[0].document(settings.slo)
    show(totals_table(document), latency_table(document))
    for reason in document.void:
        errors.print(f"void: {reason}", style="red", markup=False, soft_wrap=True)
    for kind, detail in document.result.failure_examples.items():
        errors.print(f"{kind}: for example: {detail}", style="yellow", markup=False, soft_wrap=True)
    write(outputs.json_file, document.flat())
    outputs.draw([document])
    if status == 0 and document.result.completed == 0:
        errors.print("no request completed", style="red")
        status = 1
    return status


@app.callback(invoke_without_command=True, subcommand_metavar="", context_settings={"allow_interspersed_args": True})
def replay(
    *,
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="CSV in Azure's or BurstGPT's published columns, or arrival_s,input_tokens,output_tokens[,model]; "
            "or Mooncake's JSON lines. May be gzipped.",
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="The endpoint.", envvar="BLITZ_URL")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask for; by default the first that is served.")] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of a file, a look-alike: {', '.join(FIGURES)}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn: prompts, synthetic and scaled traces.")] = 0,
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds of synthetic trace.")] = 300.0,
    scale_rate_by: Annotated[
        float,
        typer.Option("--scale-rate", metavar="X", help="X times as many requests, with the same pattern over time."),
    ] = 1.0,
    speed: Annotated[float, typer.Option(metavar="X", help="Replay X times as fast.")] = 1.0,
    start_at: Annotated[float, typer.Option(metavar="S", help="Skip this much of the trace.")] = 0.0,
    window: Annotated[float | None, typer.Option(metavar="S", help="Replay only this much trace time.")] = None,
    max_requests: Annotated[int | None, typer.Option(metavar="N", help="Stop after N requests.")] = None,
    input_scale: Annotated[float, typer.Option(metavar="X", help="Multiply prompt lengths.")] = 1.0,
    output_scale: Annotated[float, typer.Option(metavar="X", help="Multiply output lengths.")] = 1.0,
    max_input_tokens: Annotated[int | None, typer.Option(metavar="N", help="Cap prompt lengths.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(metavar="N", help="Cap output lengths.")] = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Give a request up after this long without a sign of life.")
    ] = 30.0,
    concurrency_limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most N requests at once; by default no limit.")
    ] = None,
    sample_outputs: Annotated[
        int, typer.Option(metavar="K", min=0, help="Keep prompt and output of the first K requests in the JSON file.")
    ] = 0,
    slo_ttft: SloTtft = None,
    slo_tbt: SloTbt = None,
    mean_ttft: MeanTtft = None,
    mean_tbt: MeanTbt = None,
    slo_factor: SloFactor = FACTOR,
    until: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Count GPU seconds up to S seconds after the first arrival; by default, the last arrival.",
        ),
    ] = None,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    html_file: HtmlFile = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["BLITZ_API_KEY", "OPENAI_API_KEY"], help="Sent as bearer token.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="BLITZ_ADMIN_KEY", help="For /admin, where that is ours; else the API key.")
    ] = None,
) -> None:
    """Replay a request trace against a running endpoint and measure it.

    Open loop: a request is sent when the trace says, however late the answers are. Prompts are
    random token ids, outputs have exactly the trace's length, and temperature is 0.
    """
    with red_line():
        outputs = Outputs.checked(json_file, png_file, html_file)
        if not timeout > 0:
            raise BadRequest(f"--timeout must be positive, not {timeout!r}", param="timeout")
        if until is not None and not 0 < until < math.inf:
            raise BadRequest(f"--until must be positive, not {until!r}", param="until")
        slo = Slo.of(ttft_ms=slo_ttft, tbt_ms=slo_tbt, mean_ttft_ms=mean_ttft, mean_tbt_ms=mean_tbt, factor=slo_factor)
        source = _source(trace, synthetic, seed, duration)
        settings = Replay(
            trace=scale_rate(spread_seconds(source, seed=seed), scale_rate_by, seed=seed),
            about=About(
                trace=source.name,
                url=url,
                model="",
                seed=seed,
                speed=speed,
                scale_rate=scale_rate_by,
                spread_seconds=source.whole_seconds,
                skipped_rows=source.skipped_rows,
                unsorted_rows=source.unsorted_rows,
                started_at_s=0.0,
                concurrency_limit=concurrency_limit,
            ),
            endpoint=Endpoint.of(url),
            api_key=api_key,
            admin_key=admin_key,
            model=model,
            shape=Shape(
                speed=speed,
                start_at_s=start_at,
                window_s=window,
                max_requests=max_requests,
                input_scale=input_scale,
                output_scale=output_scale,
                max_input_tokens=max_input_tokens,
                max_output_tokens=max_output_tokens,
            ),
            slo=slo,
            until_s=until,
            timeout_s=timeout,
            sample_outputs=sample_outputs,
        )
        status = _run(settings, outputs)
    raise typer.Exit(status)
