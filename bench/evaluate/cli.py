"""``blitzscale bench evaluate``: systems on windows of a trace, in the lab."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
import uvloop

from bench import machine
from bench.command_line import GiveBack, JsonFile, one_line, say, show, until_signal, usage, write
from bench.evaluate import order
from bench.evaluate.measure import Evaluation, Outcome, Setting
from bench.evaluate.models import MODELS, Model, find_model
from bench.evaluate.result import Summary
from bench.evaluate.run import CONTEXT_TOKENS, LEAD_IN_S, Bench, nic_rate
from bench.evaluate.saved_run import Runs
from bench.evaluate.simulated import SimulatedLab
from bench.evaluate.windows import Window, Windows, beside, choose, count
from bench.lab import system as lab_system
from bench.lab.network import Network
from bench.lab.played import PAPER_NIC_GBPS, Played, make_played
from bench.replay.options import HtmlFile, Outputs
from bench.sim.choices import chosen_trace
from bench.sim.cluster import Cluster, known_cluster
from bench.systems import ABLATION, GIVE_BACK_S, SYSTEMS, System, check_give_back, give_back_s, named
from bench.traces.request import Trace
from bench.traces.scaling import scale_rate, spread_seconds
from bench.traces.synthetic import FIGURES
from shared.errors import BadRequest

DEFAULT = "blitz,sllm,static-full"


def command(
    *,
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="In one of the formats of `blitzscale replay`.")
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of a trace: a look-alike of {', '.join(FIGURES)}.")
    ] = None,
    duration: Annotated[float, typer.Option(metavar="S", help="Of the look-alike.")] = 300.0,
    systems: Annotated[
        str, typer.Option(metavar="NAME,NAME", help=f"Of {', '.join(SYSTEMS)}; also sllm-60s, sllm-never.")
    ] = DEFAULT,
    ablation: Annotated[bool, typer.Option("--ablation", help=f"Also {', '.join(ABLATION)}.")] = False,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}: whose profile the mock engine plays.")
    ] = "llama3-8b",
    workers: Annotated[int, typer.Option(min=2, max=8, help="Hosts of one worker each.")] = 8,
    windows: Annotated[
        int, typer.Option(metavar="N", help="Windows of 90 s around bursts, spread over the trace.")
    ] = 1,
    window: Annotated[str | None, typer.Option(metavar="START:SECONDS", help="This one instead.")] = None,
    scale: Annotated[
        str,
        typer.Option(
            "--scale-rate", metavar="X|half", help="X times as many requests; half: of what static-full can carry."
        ),
    ] = "1",
    search: Annotated[
        Literal["simulated", "lab"],
        typer.Option(help="Where `half` and the best splits are searched: in the simulator, or by runs in the lab."),
    ] = "simulated",
    give_back: GiveBack = GIVE_BACK_S,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each run; medians are reported.")] = 1,
    seed: Annotated[int, typer.Option(help="Of all that is drawn: prompts, scaled traces, the order of systems.")] = 0,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Finished runs are kept there, and not measured again.")
    ] = Path("evaluation"),
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record there what the services decide, for `bench recording`.")
    ] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """The systems of an evaluation, one after the other, on windows of a trace, each with services of its own.

    Hosts are network namespaces of this machine with rated links; workers have the mock engine, which takes the times
    of the model's profile. All bytes and links are smaller by one factor. Needs root and iproute2. Interrupted, it goes
    on where it was when it is started again.
    """
    with usage():
        outputs = Outputs.checked(json_file, None, html_file)
        cluster = known_cluster("lab")
        setting = _setting(
            chosen_trace(trace, synthetic, seed, duration),
            systems=_systems(systems, ablation=ablation),
            model=model,
            workers=workers,
            windows=windows,
            window=window,
            scale=_scale(scale),
            give_back=give_back,
            repetitions=repetitions,
            seed=seed,
            cluster=cluster,
            search=search,
        )
        for option, path in (("dir", folder), ("record", record)):
            if path is not None and path.exists() and not path.is_dir():
                raise BadRequest(f"{path} is no directory", param=option)
    if setting.trace.skipped_rows:
        say(f"{setting.trace.name}: {setting.trace.skipped_rows} rows without tokens are left out")
    say(f"tuning window {setting.windows.tuning}, measured {', '.join(map(str, setting.windows.measured))}")
    profile = setting.model.profile()
    played = Played.of(
        profile,
        hidden_size=setting.model.hidden_size,
        num_gpus=setting.model.num_gpus,
        nic_gbps=cluster.nic_gbps,
    )

    async def measure(temporary: Path) -> Outcome:
        made = await asyncio.to_thread(make_played, played, profile, temporary, context_tokens=CONTEXT_TOKENS)
        with Network(setting.workers, nic_rate(cluster)) as network:
            state = temporary / "state"
            bench = Bench(network, cluster, made, played.kv_pool_bytes, setting.model.slo, state, say, record)
            simulated = SimulatedLab.of(setting.model, cluster, workers=setting.workers, seed=setting.seed)
            return await Evaluation(setting, bench.run, simulated.document, Runs(folder), say).run()

    with one_line("evaluate", OSError):
        lab_system.require()
        folder.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(until_signal("evaluate", measure))
    summary = Summary(setting, outcome, played)
    given = f"--synthetic {synthetic} --duration {duration:g}" if trace is None else trace.name
    asked = f"blitzscale bench evaluate {given} --systems {','.join(s.name for s in setting.systems)} " + (
        f"--model {model} --workers {workers} "
        + (f"--windows {windows}" if window is None else f"--window {window}")
        + f" --scale-rate {scale} --search {search} --give-back {give_back:g} --repetitions {repetitions} --seed {seed}"
    )
    with one_line("evaluate"):
        show(summary.table())
        write(json_file, msgspec.to_builtins(summary.document()) | {"machine": machine.describe(), "command": asked})
        outputs.draw(summary.replays())


def _systems(names: str, *, ablation: bool) -> tuple[System, ...]:
    """Raises ``BadRequest``: none, unknown ones, one twice, those that are simulated only, and what another needs."""
    found = named(names, ablation=ablation)
    for system in found:
        system.environ()
    order.check(found)
    return found


def _scale(text: str) -> float | Literal["half"]:
    if text == "half":
        return "half"
    try:
        return float(text)
    except ValueError:
        raise BadRequest(f"the rate is scaled by a number or to half, not {text!r}", param="scale-rate") from None


def _setting(
    source: Trace,
    *,
    systems: tuple[System, ...],
    model: str,
    workers: int,
    windows: int,
    window: str | None,
    scale: float | Literal["half"],
    give_back: float,
    repetitions: int,
    seed: int,
    cluster: Cluster,
    search: Literal["simulated", "lab"],
) -> Setting:
    known = find_model(model)
    check_give_back(give_back)
    if source.unsorted_rows:
        raise BadRequest(
            f"{source.name}: {source.unsorted_rows} rows arrive before the row above them: sort it", param="trace"
        )
    spread = spread_seconds(source, seed=seed)
    chosen = choose(spread, windows) if window is None else beside(spread, Window.parse(window))
    if scale != "half":
        _check_windows(scale_rate(spread, scale, seed=seed), chosen)
    for system in systems:
        system.num_instances(workers, mean=0.0)
    return Setting(
        trace=spread,
        spread_seconds=source.whole_seconds,
        model=known,
        systems=systems,
        windows=chosen,
        scale=scale,
        repetitions=repetitions,
        seed=seed,
        workers=workers,
        nic_gbps=cluster.nic_gbps,
        lead_in_s=LEAD_IN_S,
        give_back_s=give_back_s(give_back, load_s(known)),
        search=search,
    )


def load_s(model: Model) -> float:
    """Of the model over an idle link of its size."""
    return model.profile().weights_bytes * 8 / (PAPER_NIC_GBPS * model.num_gpus * 1e9)


def _check_windows(scaled: Trace, windows: Windows) -> None:
    """Raises ``BadRequest``: nothing would be sent in one of them."""
    for one in (windows.tuning, *windows.measured):
        if not count(scaled, one.start_s, one.end_s):
            raise BadRequest(f"{scaled.name}: the window {one} has no request at that rate", param="scale-rate")
