"""The feed's entities for a terminal: what the page ``/ui`` shows, from the same feed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from compose.cli.history import operations_table
from compose.cli.status import state_text
from compose.cli.tables import fitting, shown_limit, shown_mib
from compose.feed import ShownLoad, ShownModel, ShownState, ShownWorker
from shared.messages.operations import ScaleRecord, TargetRecord

MAX_RUNNING = 4
"""Operations that are shown at once."""
NUM_PAST = 5
MAX_TEXT = 300
"""Of what others say, in characters: `history` has all of it."""
_BAR = 20
_WHAT = {"out": "more instances", "in": "fewer instances", "mutate": "other roles", "none": "nothing to do"}
_TARGET = ("worker", "state", "layers", "progress", "rate", "serves after")
_MODEL = ("name", "instances", "min", "max", "waiting", "running", "TTFT ms", "TBT ms", "tok/s", "MiB")
"""Latencies: the median, and what one in a hundred exceeds."""
_MOVE = ("model", "from", "to", "requests")
_WORKER = ("id", "state", "model", "role", "layers", "running", "waiting", "KV", "host copies")


def parts(feed: ShownState, console: Console, num_rows: int | None = None) -> Iterator[RenderableType]:
    """Operations that run, models, what is lacking, workers, what moved, and operations before. ``num_rows``: of each
    table, that are shown; None: all. A row takes milliseconds to lay out."""
    operations = feed.operations
    running = [operation for operation in operations if operation.status == "running"]
    for operation in running[:MAX_RUNNING] or [o for o in operations if o.direction == "out"][:1]:
        yield from _operation(operation, feed, console, num_rows)
    if len(running) > MAX_RUNNING:
        yield Text(f"and {len(running) - MAX_RUNNING} more operations that run")
    yield from _models(feed, console, num_rows)
    yield from _workers(feed, console, num_rows)
    if feed.moves:
        rows = [(move.model, move.source, move.target, str(move.requests)) for move in feed.moves[:num_rows]]
        yield fitting(console, "Requests that moved in the last minute of looking", _MOVE, rows, spared=())
        yield from _more(feed.moves, num_rows, "ways")
    if operations:
        yield operations_table(operations[:NUM_PAST], console, brief=True)
    if feed.is_cut:
        yield Text("the gateway knows more than fits its feed: something is missing here", style="red")


def summary(feed: ShownState) -> str:
    """Workers by state, and who does not answer."""
    cluster = feed.cluster
    states = ", ".join(f"{number} {state}" for state, number in sorted(cluster.states.items()))
    silent = f"; silent: {', '.join(cluster.silent)}" if cluster.silent else ""
    return f"{cluster.workers} workers{f': {states}' if states else ''}{silent}"


def _more(found: Sequence[object], num_rows: int | None, what: str) -> Iterator[Text]:
    if num_rows is not None and len(found) > num_rows:
        yield Text(f"and {len(found) - num_rows} more {what}", style="dim")


def _operation(
    operation: ScaleRecord, feed: ShownState, console: Console, num_rows: int | None
) -> Iterator[RenderableType]:
    is_running = operation.status == "running"
    style = "bold cyan" if is_running else "bold"
    yield Text(f"{operation.model}, {_WHAT[operation.direction]}: {operation.status} ({operation.plan_id})", style)
    yield Text(f"because {_brief(operation.reason)}", style="dim")
    model = next((model for model in feed.models if model.name == operation.model), None)
    of_targets = max((len(target.layer_ready_ms) for target in operation.targets), default=0)
    num_layers = model.layers if model is not None else max(1, of_targets)
    loads = feed.loads(operation.plan_id)
    rows = [
        _target(target, loads.get(target.worker_id), num_layers, loads=operation.direction == "out")
        for target in operation.targets[:num_rows]
    ]
    if rows:
        yield fitting(console, "", _TARGET, rows, spared=("progress", "rate"))
    yield from _more(operation.targets, num_rows, "targets")


def _target(target: TargetRecord, load: ShownLoad | None, num_layers: int, *, loads: bool) -> tuple[str | Text, ...]:
    layers = max(len(target.layer_ready_ms), load.layers if load is not None else 0)
    if target.serving_ms is not None:
        layers = num_layers
    layers = max(0, min(layers, num_layers))
    if target.failure:
        state = Text(f"failed: {_brief(target.failure)}", style="red")
    elif target.serving_ms is not None:
        state = Text("serves", style="green")
    elif target.spare_ms is not None:
        state = Text("spare")
    elif target.live_ms is not None:
        state = Text("computes while it loads", style="bold magenta")
    else:
        state = Text("loads" if layers else "waits", style="cyan")
    filled = _BAR * layers // max(1, num_layers)
    gbps = load.gbps if load is not None and load.gbps is not None else target.gbps or None
    ended_ms = target.serving_ms if target.serving_ms is not None else target.spare_ms
    return (
        target.worker_id,
        state,
        f"{layers}/{num_layers}" if loads else "-",
        f"{'#' * filled}{'.' * (_BAR - filled)}" if loads else "-",
        _rate(gbps) if loads else "-",
        "-" if ended_ms is None else f"{ended_ms:.0f} ms",
    )


def _brief(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def _rate(gbps: float | None) -> str:
    if gbps is None:
        return "-"
    return f"{gbps:.2f} Gbit/s" if gbps >= 0.1 else f"{gbps * 1000:.1f} Mbit/s"


def _models(feed: ShownState, console: Console, num_rows: int | None) -> Iterator[RenderableType]:
    if not feed.models:
        silent = "pool" in feed.cluster.silent
        yield Text("the pool does not answer: what is registered is not known" if silent else "no model is registered")
        return
    rows = [_model(model) for model in feed.models[:num_rows]]
    yield fitting(console, "Models", _MODEL, rows, spared=("MiB", "tok/s", "min", "max", "TBT ms", "TTFT ms"))
    yield from _more(feed.models, num_rows, "models")
    for lack in feed.lacks[:num_rows]:
        wanted = f"{lack.wanted} {lack.role} wanted, and not possible now"
        yield Text(f"{lack.model}: {wanted}: {_brief(lack.why)}", style="yellow")
    yield from _more(feed.lacks, num_rows, "that are not possible now")


def _model(model: ShownModel) -> tuple[str | Text, ...]:
    limits = str(model.min), shown_limit(model.max)
    latencies = _times(model.ttft_p50_ms, model.ttft_p99_ms), _times(model.tbt_p50_ms, model.tbt_p99_ms)
    load = str(model.waiting), str(model.running), *latencies, f"{model.tokens_per_s:.0f}"
    return model.name, _instances(model.states), *limits, *load, shown_mib(model.bytes)


def _times(median_ms: float | None, late_ms: float | None) -> str:
    return "-" if median_ms is None or late_ms is None else f"{median_ms:.1f}/{late_ms:.1f}"


def _instances(states: Mapping[str, int]) -> Text:
    shown = Text()
    for name, number in states.items():
        role, _, state = name.partition(" ")
        shown.append(f"{', ' if shown else ''}{number} {'' if role == 'colocated' else f'{role} '}")
        shown.append_text(state_text(state))
    return shown or Text("none")


def _workers(feed: ShownState, console: Console, num_rows: int | None) -> Iterator[RenderableType]:
    num_layers = {model.name: model.layers for model in feed.models}
    names = {model.hash: model.name for model in feed.models}
    rows = [_worker(worker, num_layers.get(worker.model), names) for worker in feed.workers[:num_rows]]
    title = "Workers of these operations" if feed.cluster.summarised else "Workers"
    if rows or not feed.cluster.summarised:
        spared = ("host copies", "KV", "role", "layers", "waiting", "running")
        yield fitting(console, title, _WORKER, rows, spared=spared)
    yield from _more(feed.workers, num_rows, "workers")


def _worker(worker: ShownWorker, num_layers: int | None, names: Mapping[str, str]) -> Sequence[str | Text]:
    state = state_text(worker.state)
    if worker.cordoned:
        state.append(" (drained)")
    layers = str(worker.layers) if num_layers is None else f"{worker.layers}/{num_layers}"
    load = ("-",) * 3
    if worker.running is not None:
        used = f"{100 * worker.kv_used // worker.kv_total} %" if worker.kv_total > 0 else "-"
        load = (str(worker.running), str(worker.queued), used)
    copies = ", ".join(f"{names.get(copy.hash, copy.hash)} {copy.state}" for copy in worker.copies)
    model = worker.model or "-"
    return (worker.id, state, model, worker.role or "-", layers if worker.model else "-", *load, copies or "-")
