"""``blitzscale simulate``: a trace on a cluster of GPUs on paper, by the services' own decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.command_line import INTERRUPTED, GiveBack, JsonFile, red_line, say, show, unfinished, write
from bench.replay.document import About, Document
from bench.replay.figures import Beside
from bench.replay.objectives import Slo
from bench.replay.options import HtmlFile, Outputs, PngFile, SloTbt, SloTtft
from bench.replay.plan import Shape
from bench.sim.choices import DEFAULT, check, chosen_cluster, chosen_rate, chosen_systems, chosen_trace
from bench.sim.cluster import known_clusters
from bench.sim.evaluation import Evaluation, Evaluator
from bench.sim.frontier_panels import frontier_panels
from bench.sim.models import MODELS, SimModel, known_model
from bench.sim.run_result import RunResult
from bench.sim.scale_out_report import asked_for, beside, check_alone, named_systems, simulated, tell
from bench.sim.search import ATTAINED
from bench.sim.setup import Setup
from bench.sim.sweep import PayFor, Terms, WhatIf, sweep
from bench.sim.tables import needed_table, points_table, systems_table
from bench.sim.what_if import Grid
from bench.systems import ABLATION, GIVE_BACK_S, SYSTEMS
from bench.traces.scaling import spread_seconds
from bench.traces.synthetic import FIGURES
from shared.errors import BadRequest

app = typer.Typer(help="Simulate a trace on a cluster of GPUs.", add_completion=False)


def _with_objectives(model: SimModel, ttft_ms: float | None, tbt_ms: float | None) -> SimModel:
    """With those that are given. Raises ``BadRequest``."""
    slo = Slo.of(ttft_ms=ttft_ms, tbt_ms=tbt_ms, mean_ttft_ms=None, mean_tbt_ms=None, factor=1.0)
    if slo is None:
        return model
    return replace(model, slo_ttft_s=slo.ttft_s or model.slo_ttft_s, slo_tbt_s=slo.tbt_s or model.slo_tbt_s)


def _beside(evaluation: Evaluation, swept: WhatIf | None) -> Beside:
    about = (
        f"Simulated, not measured: {evaluation.model} on cluster {evaluation.cluster}, {evaluation.num_gpus:,} GPUs. "
        f"Objectives are five times the means of {evaluation.slo_of}."
    )
    if swept is None:
        return Beside("Simulation", lines=(about,))
    return Beside("Simulation", frontier_panels(swept.what_if, list(evaluation.systems)), (about, *swept.lines))


@app.callback(invoke_without_command=True, subcommand_metavar="", context_settings={"allow_interspersed_args": True})
def simulate(
    *,
    trace: Annotated[Path | None, typer.Argument(metavar="TRACE", help="As for `blitzscale replay`.")] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"{', '.join(known_clusters())}, or a TOML file. a and b: the paper's; large: 1,000 hosts.",
        ),
    ] = "a",
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "llama3-8b",
    degree: Annotated[int | None, typer.Option(metavar="N", help="GPUs of an instance (tensor parallelism).")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A profile to compute by, instead of the one of the GPU.")
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help=f"Of {', '.join(SYSTEMS)}; also sllm-60s, sllm-never.",
            show_default=",".join(DEFAULT),
        ),
    ] = None,
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
    slo_ttft: SloTtft = None,
    slo_tbt: SloTbt = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT[=A,B,...]",
            help="Also with other hosts (hosts=1,2,4), NICs (nic-gbps=25,100,400) and times that copies are kept "
            "(keep-copies=60,300,never); all three: all. Or other times for --give-back (give-back=0,15,60). May be "
            "given again.",
        ),
    ] = None,
    slo_attainment: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the requests, that --what-if is to keep the objectives for.")
    ] = ATTAINED,
    pay_for: Annotated[
        PayFor, typer.Option(help="What --what-if counts as cost: GPUs that hold instances, or all of the cluster.")
    ] = "used",
    gpu_hour_price: Annotated[float | None, typer.Option(metavar="PRICE", help="Of a GPU, for --what-if.")] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of a file, a look-alike: {', '.join(FIGURES)}.")
    ] = None,
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds of synthetic trace.")] = 300.0,
    start_at: Annotated[float, typer.Option(metavar="S", help="Skip this much of the trace.")] = 0.0,
    window: Annotated[float | None, typer.Option(metavar="S", help="Only this much trace time.")] = None,
    max_requests: Annotated[int | None, typer.Option(metavar="N", help="Stop after N requests.")] = None,
    kill_every: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="A worker with an instance dies every S seconds on average, by the seed; not with lambdascale.",
        ),
    ] = None,
    give_back: GiveBack = GIVE_BACK_S,
    scale_out: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Instead of a trace: N more prefill instances at once, while more prompts wait than fit."
        ),
    ] = None,
    there: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="P,D", help="Prefill and decode instances before --scale-out.", show_default="1,2"
        ),
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="These fill one host after the other; else one of each in turn.")
    ] = False,
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
        if scale_out is not None:
            systems = named_systems(systems, ablation=ablation)
        chosen = chosen_systems(systems, ablation=ablation)
        found = chosen_cluster(cluster)
        sim_model = _with_objectives(known_model(model, found.gpu, degree=degree, profile=profile), slo_ttft, slo_tbt)
        setup = Setup(
            cluster=found,
            model=sim_model,
            compute_scale=compute,
            seed=seed,
            kill_every_s=kill_every,
            give_back_s=give_back,
        )
        check(setup, chosen)
        if scale_out is not None:
            check_alone(
                {
                    "TRACE": trace is not None,
                    "--synthetic": synthetic is not None,
                    "--scale-rate": scale_rate_by != "1",
                    "--what-if": bool(what_if),
                    "--start-at": start_at != 0,
                    "--max-requests": max_requests is not None,
                    "--kill-every": kill_every is not None,
                }
            )
            asked = asked_for(scale_out, there, packed=packed, window_s=window)
            asked.check(setup, chosen)
            with unfinished():
                timeline, drawn = simulated(setup, chosen, asked, draws=bool(png_file or html_file))
            tell(timeline)
            write(json_file, timeline)
            outputs.draw(drawn, beside(timeline))
            if timeline.interrupted:
                say("interrupted: what had finished is there")
                raise typer.Exit(INTERRUPTED)
            return
        if there is not None or packed:
            raise BadRequest("--from and --packed are of --scale-out", param="from")
        terms = Terms(slo_attainment, pay_for, gpu_hour_price)
        settings = Grid.of(what_if, found).settings(found, chosen, sim_model.degree) if what_if else ()
        for setting in settings:
            check(replace(setup, cluster=setting.cluster), (setting.system,))
        factor = chosen_rate(scale_rate_by)
        with unfinished():
            source = chosen_trace(trace, synthetic, seed, duration)
            shape = Shape(
                start_at_s=start_at,
                window_s=window,
                max_requests=max_requests,
                context_tokens=sim_model.record.basics.max_position,
            )
            evaluator = Evaluator(setup, spread_seconds(source, seed=seed), shape, say=say)
            evaluator.requests(1.0 if factor is None else factor)  # before anything is said
            for count, what in ((source.skipped_rows, "without tokens"), (source.unsorted_rows, "out of order")):
                if count:
                    say(f"{source.name}: {count} rows {what}")
            factor = evaluator.half() if factor is None else factor
            about = About(
                trace=source.name,
                url=f"simulated: {model} on {found.name}",
                model=model,
                seed=seed,
                speed=1.0,
                scale_rate=factor,
                spread_seconds=source.whole_seconds,
                skipped_rows=source.skipped_rows,
                unsorted_rows=source.unsorted_rows,
                started_at_s=0.0,
            )
            documents: dict[str, Document] = {}

            def finished(result: RunResult, relative: Slo) -> None:
                if png_file is not None or html_file is not None:
                    documents[result.system] = result.document(about, relative)

            evaluation = evaluator.evaluate(chosen, factor, finished)
        show(systems_table(evaluation))
        swept: WhatIf | None = None
        if settings and not evaluation.interrupted:
            swept = sweep(evaluator, settings, terms, evaluation, chosen)
            show(points_table(swept.what_if), needed_table(swept.what_if_needed), *swept.lines)
        write(json_file, msgspec.to_builtins(evaluation) | (msgspec.to_builtins(swept) if swept is not None else {}))
        if documents:
            outputs.draw([documents[name] for name in evaluation.systems], _beside(evaluation, swept))
    if evaluation.interrupted or (swept is not None and swept.what_if_left_out):
        say("interrupted: what had finished is there")
        raise typer.Exit(INTERRUPTED)
