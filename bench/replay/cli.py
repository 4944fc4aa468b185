"""``blitzscale replay``: a trace against a running endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.command_line import INTERRUPTED, JsonFile, check_folder, red_line, write
from bench.replay.plan import Shape, plan_requests
from bench.replay.record import Collector, Result, as_json
from bench.replay.report import latency_table, totals_table
from bench.replay.runner import SendOptions, choose_model, send_all
from bench.stream_client import Endpoint, StreamClient
from bench.traces.reader import read_trace
from bench.traces.request import Trace
from bench.traces.synthetic import FIGURES, synthesise
from shared.errors import BadRequest

app = typer.Typer(help="Replay a request trace against a running endpoint and measure it.", add_completion=False)


@dataclass(frozen=True, slots=True)
class _Replay:
    """Everything the command line says."""

    trace: Trace
    endpoint: Endpoint
    api_key: str | None
    model: str | None
    shape: Shape
    timeout_s: float
    concurrency_limit: int | None
    sample_outputs: int
    seed: int


async def _measure(settings: _Replay, collectors: list[Collector], models: list[str], progress: Progress) -> None:
    client = StreamClient(settings.endpoint, api_key=settings.api_key)
    try:
        card = await choose_model(client, settings.model, timeout_s=min(settings.timeout_s, 10.0))
        shape = replace(settings.shape, context_tokens=card.max_model_len)
        requests = plan_requests(settings.trace, shape)
        collector = Collector(planned=len(requests), shortened=sum(request.shortened for request in requests))
        collectors.append(collector)
        models.append(card.id)
        options = SendOptions(
            model=card.id,
            timeout_s=settings.timeout_s,
            concurrency_limit=settings.concurrency_limit,
            sample_outputs=settings.sample_outputs,
            prompt_seed=settings.seed,
        )
        bar = progress.add_task(f"{settings.trace.name} → {card.id}", total=len(requests), failed=0)

        def on_progress() -> None:
            progress.update(bar, completed=len(collector.records), failed=collector.failed)

        await send_all(client, requests, options, collector, on_progress=on_progress)
    finally:
        client.close()


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


def _run(settings: _Replay, json_file: Path | None, about: dict[str, object]) -> int:
    """Replay, print, write; returns the exit status."""
    console, errors = Console(), Console(stderr=True)
    collectors: list[Collector] = []
    models: list[str] = []
    status = 0
    try:
        with _progress(errors) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(settings, collectors, models, progress))
    except KeyboardInterrupt:
        errors.print("interrupted: these are the figures so far", style="yellow")
        status = INTERRUPTED
    if not collectors:
        return status
    result = Result.of(collectors[0])
    console.print(totals_table(result))
    console.print(latency_table(result))
    for kind, detail in result.failure_examples.items():
        errors.print(f"{kind}: for example: {detail}", style="yellow", markup=False, soft_wrap=True)
    document = as_json(result, collectors[0], model=models[0], skipped_rows=settings.trace.skipped_rows, **about)
    write(json_file, document)
    if status == 0 and result.completed == 0:
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
            help="CSV or CSV.gz in Azure's or BurstGPT's published columns, "
            "or arrival_s,input_tokens,output_tokens[,model].",
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="The endpoint.", envvar="BLITZ_URL")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask for; by default the first that is served.")] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of a file, a look-alike: {', '.join(FIGURES)}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic trace and the prompts.")] = 0,
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds of synthetic trace.")] = 300.0,
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
    json_file: JsonFile = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["BLITZ_API_KEY", "OPENAI_API_KEY"], help="Sent as bearer token.")
    ] = None,
) -> None:
    """Replay a request trace against a running endpoint and measure it.

    Open loop: a request is sent when the trace says, however late the answers are. Prompts are
    random token ids, outputs have exactly the trace's length, and temperature is 0.
    """
    with red_line():
        if not timeout > 0:
            raise BadRequest(f"--timeout must be positive, not {timeout!r}", param="timeout")
        settings = _Replay(
            trace=_source(trace, synthetic, seed, duration),
            endpoint=Endpoint.of(url),
            api_key=api_key,
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
            timeout_s=timeout,
            concurrency_limit=concurrency_limit,
            sample_outputs=sample_outputs,
            seed=seed,
        )
        check_folder(json_file)
        about: dict[str, object] = {"trace": settings.trace.name, "url": url, "speed": speed, "seed": seed}
        status = _run(settings, json_file, about)
    raise typer.Exit(status)
