"""What ``blitzscale simulate --scale-out`` shows and draws, and the command itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from rich.table import Table

from bench.command_line import say, show
from bench.replay.document import About, Document
from bench.replay.figures import COLOURS, Beside, Curve, Panel
from bench.replay.objectives import Slo
from bench.sim.fabric import LinkKind
from bench.sim.scale_out import BIN_S, DEFAULT, LEAD_S, Row, ScaleOut, Timeline, Way, run, timeline
from bench.sim.setup import Setup
from bench.sim.tables import in_ms, table_of_systems
from bench.systems import Split, System
from shared.errors import BadRequest

_LINKS: Mapping[LinkKind, str] = {"scale_up": "NVL", "nic": "NIC", "host_link": "host", "ssd": "SSD"}


def asked_for(num_more: int, there: str | None, *, packed: bool, window_s: float | None) -> ScaleOut:
    """What the options say. Raises ``BadRequest``."""
    if there is None:
        return ScaleOut(num_more, packed=packed, window_s=window_s)
    counts = there.split(",")
    if len(counts) != 2 or not all(count.strip().isdecimal() and len(count) < 10 for count in counts):
        raise BadRequest(f"--from is prefill and decode instances, as 1,2, not {there!r}", param="from")
    return ScaleOut(num_more, Split(*map(int, counts)), packed, window_s)


def check_alone(given: Mapping[str, bool]) -> None:
    """Raises ``BadRequest`` for options, by their names, that would mean nothing beside a scale-out."""
    others = [name for name, is_given in given.items() if is_given]
    if others:
        raise BadRequest(f"--scale-out makes its own prompts, and goes without {', '.join(others)}", param="scale-out")


def named_systems(systems: str | None, *, ablation: bool) -> str | None:
    """Those that are asked for, or the usual ones."""
    return ",".join(DEFAULT) if systems is None and not ablation else systems


def simulated(
    setup: Setup, systems: Sequence[System], asked: ScaleOut, *, draws: bool
) -> tuple[Timeline, list[Document]]:
    """All of them; with documents for figures, if it ``draws``. After Ctrl-C: those that have finished by then; raises
    ``KeyboardInterrupt`` if none has."""
    rows: dict[str, Row] = {}
    documents: list[Document] = []
    interrupted = False
    try:
        for system in systems:
            row, result = run(setup, system, asked)
            if draws:
                slo = Slo(setup.model.slo_ttft_s, setup.model.slo_tbt_s)
                documents.append(result.document(_about(setup, asked), slo))
            rows[system.name] = row
            say(f"{system.name}: {len(result.records)} requests, {result.num_events} events")
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    return timeline(setup, asked, rows, interrupted=interrupted), documents[: len(rows)]


def _about(setup: Setup, asked: ScaleOut) -> About:
    name = setup.model.name
    return About(
        trace=f"{asked.num_more} prefill instances of {name}",
        url=f"simulated: {name} on {setup.cluster.name}",
        model=name,
        seed=setup.seed,
        speed=1.0,
        scale_rate=1.0,
        spread_seconds=False,
        skipped_rows=0,
        unsorted_rows=0,
        started_at_s=0.0,
    )


# --- the table ---------------------------------------------------------------------------------


def tell(found: Timeline) -> None:
    """On stdout."""
    show(scale_out_table(found), *[f"{name}: {in_words(row)}" for name, row in found.systems.items()])


def scale_out_table(found: Timeline) -> Table:
    """Milliseconds from the trigger, and gigabytes of weights by the links that they left through."""
    shown = table_of_systems(
        f"{found.scale_out} more prefill instances of {found.model} on cluster {found.cluster}, beside "
        f"{found.prefill_before} and {found.decode_before} that decode; ms from the trigger, GB of weights by link",
        ("layer", "token", "first", "last", "full", "live", "begun", *_LINKS.values()),
    )
    for name, row in found.systems.items():
        shown.add_row(
            name,
            in_ms(row.first_layer_s),
            in_ms(row.first_token_s),
            in_ms(row.first_serving_s),
            in_ms(row.last_serving_s),
            in_ms(row.full_s),
            f"{row.live_pairs}",
            f"{row.first_tokens}",
            *[f"{row.weights_bytes[kind] / 1e9:.0f}" if row.weights_bytes.get(kind) else "" for kind in _LINKS],
        )
    return shown


def in_words(row: Row) -> str:
    """The chains of a row: who sends, and how many load at each hop."""
    if row.loaded and not row.chains:
        return "in blocks"
    count: dict[str, int] = {}
    for chain in map(_chain, row.chains):
        count[chain] = count.get(chain, 0) + 1
    said = [f"{number} x {chain}" if number > 1 else chain for chain, number in count.items()]
    if row.mutated:
        said.append(f"{row.mutated} changed their role")
    return "; ".join(said) or "nothing was loaded"


def _chain(way: Way) -> str:
    sources = way.sources[0] if len(way.sources) == 1 else f"{len(way.sources)} sources ({', '.join(way.sources[:2])}"
    if len(way.sources) > 1:
        sources += ", ...)" if len(way.sources) > 2 else ")"
    return " > ".join([sources, *[f"{len(hop)}" for hop in way.hops]])


# --- figures -----------------------------------------------------------------------------------


def beside(found: Timeline) -> Beside:
    """Throughput, instances and first tokens over time."""
    about = (
        f"Simulated, not measured: {found.model} on cluster {found.cluster}, {found.num_gpus:,} GPUs. The planner is "
        f"asked for {found.scale_out} more prefill instances {LEAD_S * 1000:g} ms after the first prompt."
    )
    return Beside("Scale-out", (panels(found),), (about,))


def panels(found: Timeline) -> tuple[Panel, ...]:
    """Colours are those of the systems in their order."""
    return (
        _panel(found, "Prompt tokens computed", "tokens/s", lambda row: _by_bin(row.tokens_per_s)),
        _panel(found, "New prefill instances that serve", "instances", _serving, whole=True),
        _panel(found, "First tokens", "requests", lambda row: _by_bin([*accumulate(_counts(row))])),
    )


Points = tuple[Sequence[float], Sequence[float]]


def _panel(found: Timeline, title: str, y_label: str, points: Callable[[Row], Points], *, whole: bool = False) -> Panel:
    curves = []
    for place, (name, row) in enumerate(found.systems.items()):
        x, y = points(row)
        curves.append(Curve(name, tuple(x), tuple(y), COLOURS[place % len(COLOURS)], step=True))
    return Panel(title, y_label, "ms after the trigger", curves=tuple(curves), axis="plain", whole=whole)


def _by_bin(values: Sequence[float]) -> Points:
    return [round((i * BIN_S - LEAD_S) * 1000) for i in range(len(values))], values


def _counts(row: Row) -> list[float]:
    return [value * BIN_S for value in row.first_tokens_per_s]


def _serving(row: Row) -> Points:
    end_s = len(row.tokens_per_s) * BIN_S - LEAD_S
    until = [at_s for at_s in row.serving_s if at_s <= end_s]
    x_s = [-LEAD_S, *until, end_s]
    return [at_s * 1000 for at_s in x_s], [0.0, *[float(i + 1) for i in range(len(until))], float(len(until))]
