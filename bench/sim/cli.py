"""``blitzscale simulate``: a trace on a cluster of GPUs on paper, by the services' own decisions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, red_line, say, write
from bench.replay.document import About
from bench.replay.objectives import Slo
from bench.replay.options import HtmlFile, Outputs, PngFile
from bench.replay.plan import Shape
from bench.sim.cluster import Cluster, known_cluster, known_clusters, read_cluster
from bench.sim.evaluation import Evaluation, Evaluator
from bench.sim.models import MODELS, known_model
from bench.sim.run import Setup
from bench.systems import ABLATION, SYSTEMS, System, find
from bench.traces.reader import read_trace
from bench.traces.request import Trace
from bench.traces.scaling import spread_seconds
from bench.traces.synthetic import FIGURES, synthesise
from shared.errors import BadRequest

HALF = "half"
DEFAULT = ("blitz", "sllm", "allcache", "static-full", "static-half")

app = typer.Typer(help="Simulate a trace on a cluster of GPUs.", add_completion=False)


def chosen_systems(names: str, *, ablation: bool) -> tuple[System, ...]:
    """Each once, in the order given. Raises ``BadRequest``."""
    asked = [name.strip() for name in names.split(",") if name.strip()] if names else []
    asked += ABLATION if ablation else ()
    return tuple([find(name) for name in dict.fromkeys(asked or DEFAULT)])


def chosen_cluster(name: str) -> Cluster:
    """One that is known, or a file. Raises ``BadRequest``."""
    if name in known_clusters():
        return known_cluster(name)
    file = Path(name)
    if file.suffix == ".toml" or os.sep in name:
        try:
            return read_cluster(file)
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror}", param="cluster") from error
    return known_cluster(name)


def chosen_rate(value: str) -> float | None:
    """A factor; None for ``half``. Raises ``BadRequest``."""
    if value == HALF:
        return None
    try:
        return float(value)
    except ValueError:
        raise BadRequest(f"--scale-rate is a number or {HALF!r}, not {value!r}", param="scale-rate") from None


def _source(trace: Path | None, synthetic: str | None, seed: int, duration_s: float) -> Trace:
    if (trace is None) == (synthetic is None):
        raise BadRequest("give a trace file or --synthetic, not both and not neither", param="trace")
    if trace is not None:
        return read_trace(trace)
    assert synthetic is not None
    return synthesise(synthetic, seed=seed, duration_s=duration_s)


def table(evaluation: Evaluation) -> Table:
    """A row for each system. Times in milliseconds."""
    shown = Table(title="systems; times in ms", title_justify="left")
    for column in ("", "TTFT", "p99", "TBT", "p99", "SLO 5x", "abs.", "GPU s", "copies", "failed"):
        shown.add_column(column, justify="right" if column else "left", no_wrap=True)

    def ms(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value * 1000:.{digits}f}"

    for name, row in evaluation.systems.items():
        shown.add_row(
            name,
            ms(row.ttft_mean_s),
            ms(row.ttft_p99_s),
            ms(row.tbt_mean_s, 1),
            ms(row.tbt_p99_s, 1),
            f"{row.slo_attainment:.1%}",
            f"{row.slo_attainment_absolute:.1%}",
            f"{row.gpu_seconds:.0f}",
            f"{row.host_cache_bytes_max / evaluation.weights_bytes:.0f}",
            f"{row.failed + row.unfinished}",
        )
    return shown


@app.callback(invoke_without_command=True, subcommand_metavar="", context_settings={"allow_interspersed_args": True})
def simulate(
    *,
    trace: Annotated[Path | None, typer.Argument(metavar="TRACE", help="As for `blitzscale replay`.")] = None,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=f"{', '.join(known_clusters())}, or a TOML file.")
    ] = "a",
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "llama3-8b",
    degree: Annotated[int | None, typer.Option(metavar="N", help="GPUs of an instance (tensor parallelism).")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A profile to compute by, instead of the one of the GPU.")
    ] = None,
    systems: Annotated[str, typer.Option(metavar="A,B,...", help=f"Of {', '.join(SYSTEMS)}.")] = "",
    ablation: Annotated[
        bool, typer.Option("--ablation", help=f"Those of the ablation: {', '.join(ABLATION)}.")
    ] = False,
    scale_rate_by: Annotated[
        str,
        typer.Option(
            "--scale-rate",
            metavar="X|half",
            help="X times as many requests, with the same pattern; half: half of what static-full serves within the "
            "absolute objectives for 99 %.",
        ),
    ] = "1",
    compute: Annotated[float, typer.Option(metavar="X", help="Steps take X times as long as the profile says.")] = 1.0,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of a file, a look-alike: {', '.join(FIGURES)}.")
    ] = None,
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds of synthetic trace.")] = 300.0,
    start_at: Annotated[float, typer.Option(metavar="S", help="Skip this much of the trace.")] = 0.0,
    window: Annotated[float | None, typer.Option(metavar="S", help="Only this much trace time.")] = None,
    max_requests: Annotated[int | None, typer.Option(metavar="N", help="Stop after N requests.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn.")] = 0,
    json_file: JsonFile = None,
    png_file: PngFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Simulate a trace on a cluster of GPUs on paper: systems side by side, by the services' own decisions.

    Every system gets the same arrivals. The same command gives the same bytes.
    """
    with red_line():
        outputs = Outputs.checked(json_file, png_file, html_file)
        chosen = chosen_systems(systems, ablation=ablation)
        found = chosen_cluster(cluster)
        sim_model = known_model(model, found.gpu, degree=degree, profile=profile)
        source = spread_seconds(_source(trace, synthetic, seed, duration), seed=seed)
        shape = Shape(
            start_at_s=start_at,
            window_s=window,
            max_requests=max_requests,
            context_tokens=sim_model.record.spec.max_position,
        )
        setup = Setup(cluster=found, model=sim_model, compute_scale=compute, seed=seed)
        evaluator = Evaluator(setup, source, shape, say=say)
        factor = chosen_rate(scale_rate_by)
        evaluation, outcomes = evaluator.evaluate(chosen, evaluator.half() if factor is None else factor)
        Console().print(table(evaluation))
        write(json_file, evaluation)
        if png_file is not None or html_file is not None:
            about = About(
                trace=source.name,
                url=f"simulated: {model} on {found.name}",
                model=model,
                seed=seed,
                speed=1.0,
                scale_rate=evaluation.scale_rate,
                spread_seconds=source.whole_seconds,
                skipped_rows=source.skipped_rows,
                unsorted_rows=source.unsorted_rows,
                started_at_s=0.0,
            )
            slo = Slo(evaluation.slo_ttft_s, evaluation.slo_tbt_s)
            outputs.draw([outcome.document(about, slo) for outcome in outcomes])
