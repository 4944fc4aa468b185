"""``blitzscale status``: what is running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compose.admin import AdminClient
from compose.cli.options import URL_DEFAULT, Json, Url, show
from compose.cli.tables import fitting, shown_limit, titled_table
from shared.messages.admin import InstanceStatus, Status, WorkerStatus

_STATE_STYLES = {
    "serving": "green",
    "ready": "green",
    "live": "bold magenta",
    "loading": "cyan",
    "draining": "yellow",
    "retired": "yellow",
    "stopping": "yellow",
    "failed": "red",
}
_INSTANCE = ("id", "model", "state", "role", "layers", "running", "queued", "queued tokens", "workers")
_SPARED = ("workers", "queued tokens", "role")
"""Columns of instances that narrow terminals do without, the least important first. An id names its worker."""


def status(url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """Show models, instances and workers."""
    show(url, as_json, AdminClient.status, tables)


def tables(found: Status, console: Console) -> tuple[Table, ...]:
    """Models, instances and workers as tables for ``console``; and what is unusual, if there is any: numbers that were
    set by hand, instances that are wanted but not available, workers that are not asked because they failed."""
    models = titled_table("Models", "name", "serving", "as", "waiting", "min", "max", "copies", "path")
    for model in found.models:
        serving, waiting, least = found.serving(model.name), model.queued_requests, model.min_instances
        most = shown_limit(model.max_instances)
        counts = (str(serving), model.served_as or "-", str(waiting), str(least), most)
        models.add_row(model.name, *counts, model.copies or "-", model.path)
    num_layers = {model.name: model.num_layers for model in found.models}
    instances = instances_table(found.instances, num_layers, console)
    return models, instances, workers_table(found.workers), *_exceptions(found)


def instances_table(
    instances: Sequence[InstanceStatus], num_layers: Mapping[str, int | None], console: Console
) -> Table:
    """Instances, and what they have to do. ``num_layers``: by model."""
    rows = [_instance_row(instance, num_layers.get(instance.model)) for instance in instances]
    return fitting(console, "Instances", _INSTANCE, rows, spared=_SPARED)


def workers_table(workers: Sequence[WorkerStatus]) -> Table:
    """Workers, with their GPUs and the engines that wait on them if there are any, and how far those are that were
    drained by hand."""
    num_more = 2 if any(worker.drain_why for worker in workers) else int(any(worker.drain for worker in workers))
    gpus = ("gpu",) if any(worker.gpu_name for worker in workers) else ()
    waits = ("waits",) if any(worker.warm_for is not None for worker in workers) else ()
    more = ("drain", "why")[:num_more]
    table = titled_table("Workers", "id", "host", "device", *gpus, "engine", "state", *waits, *more)
    for worker in workers:
        state = "stopping" if worker.stopping else worker.state
        gpu = (worker.gpu_name or "-",) if gpus else ()
        engines = " ".join((worker.engine, *worker.engines))
        waiting = (_waiting(worker),) if waits else ()
        row = (worker.id, worker.host, worker.device, *gpu, engines, state_text(state), *waiting)
        table.add_row(*row, *(worker.drain, worker.drain_why)[:num_more])
    return table


def _waiting(worker: WorkerStatus) -> str:
    """What has started there and waits for its next instance, and for which models, if it is for any."""
    if worker.warm_for is None:
        return "-"
    engine = " or ".join(worker.engines)
    return f"{engine} for {', '.join(worker.warm_for)}" if worker.warm_for else engine


def _exceptions(found: Status) -> Iterator[Table]:
    if skewed := [worker for worker in found.workers if worker.clock_ahead_s]:
        clocks = titled_table("Clocks that differ from the pool's", "worker", "host", "ahead")
        for one in skewed:
            clocks.add_row(one.id, one.host, f"{one.clock_ahead_s:+.1f} s")
        yield clocks
    asked = [floor for floor in found.floors if floor.instances]
    if asked:
        floors = titled_table("Asked for by hand", "model", "role", "at least", "for")
        for floor in asked:
            floors.add_row(floor.model, floor.role, str(floor.instances), f"{floor.left_s:.0f} s")
        yield floors
    if found.unplanned:
        unplanned = titled_table("Wanted, but not possible now", "model", "role", "wanted", "since", "why")
        for entry in found.unplanned:
            unplanned.add_row(entry.model, entry.role, str(entry.wanted), f"{entry.for_s:.0f} s", entry.why)
        yield unplanned
    if found.advice:
        advice = titled_table("Asked for by the load, and only said", "model", "role", "now", "wanted", "since", "why")
        for advised in found.advice:
            now, wanted, since = str(advised.now), str(advised.wanted), f"{advised.for_s:.0f} s"
            advice.add_row(advised.model, advised.role, now, wanted, since, advised.why)
        yield advice
    if found.refused:
        refused = titled_table("Left alone, because they failed", "worker", "model", "for", "why")
        for worker in found.refused:
            refused.add_row(worker.worker, worker.model, f"{worker.for_s:.0f} s", worker.why)
        yield refused


def _instance_row(instance: InstanceStatus, num_layers: int | None) -> tuple[str | Text, ...]:
    layers = str(instance.layers_ready) if num_layers is None else f"{instance.layers_ready}/{num_layers}"
    load = instance.load
    loads = (load.running_requests, load.queued_requests, load.queued_tokens) if load is not None else ("-",) * 3
    state, workers = state_text(instance.state), ", ".join(instance.workers)
    return (instance.id, instance.model, state, instance.role, layers, *map(str, loads), workers)


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, ""))
