"""``blitzscale pool``: which memory holds which model, and whether every model has a copy."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from compose.admin import AdminClient
from compose.cli.options import URL_DEFAULT, Json, Url, show
from compose.cli.status import state_text
from compose.cli.tables import shown_mib, titled_table
from shared.messages.admin import HostCopyStatus, PoolModel, PoolStatus

_STYLES = {"ok": "green", "disk": "yellow"}


def pool(url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """Show which GPU and host memory holds which model, and whether every model has a copy."""
    show(url, as_json, AdminClient.pool, _shown)


def _shown(found: PoolStatus, _: Console) -> Iterator[RenderableType]:
    yield from tables(found)
    totals = found.totals
    complete = totals.models - totals.models_without_copy - totals.models_on_disk
    on_disk = f", {totals.models_on_disk} are on disk only" if totals.models_on_disk else ""
    yield (
        f"{complete} of {totals.models} models have a complete copy, "
        f"{totals.models - totals.models_without_host_copy} a host copy{on_disk}; "
        f"{shown_mib(totals.host_bytes)} of {shown_mib(totals.host_capacity_bytes)} MiB of host memory used"
    )


def tables(found: PoolStatus) -> tuple[Table, ...]:
    """Models, copies and hosts as tables."""
    models = titled_table("Models", "name", "MiB", "invariant", "host copy", "on hosts MiB", "why")
    copies = titled_table("Copies", "model", "in", "worker", "host", "state", "MiB")
    for model in found.models:
        invariant = Text(model.invariant, style=_STYLES.get(model.invariant, "red"))
        size = shown_mib(model.weights_bytes)
        models.add_row(model.name, size, invariant, model.host_copy, shown_mib(model.host_bytes), model.reason)
        _add_copies(copies, model)
    for stray in found.strays:
        copies.add_row(*_row(f"{stray.model} (not registered)", stray))
    hosts = titled_table("Hosts", "host", "workers", "used MiB", "placed MiB", "cached MiB", "capacity MiB")
    for host in found.hosts:
        sizes = (host.used_bytes, host.placed_bytes, host.cached_bytes, host.capacity_bytes)
        hosts.add_row(host.host, ", ".join(host.workers), *map(shown_mib, sizes))
    return models, copies, hosts


def _add_copies(table: Table, model: PoolModel) -> None:
    for instance in model.instances:
        size = shown_mib(model.weights_bytes) if instance.complete else "partly"
        where = "GPU" if instance.role == "colocated" else f"GPU ({instance.role})"
        table.add_row(model.name, where, instance.worker, instance.host, state_text(instance.state), size)
    for copy in model.host_copies:
        table.add_row(*_row(model.name, copy))


def _row(model: str, copy: HostCopyStatus) -> tuple[str, str, str, str, Text, str]:
    where = "host (cached)" if copy.cached else "host"
    return model, where, copy.worker, copy.host, state_text(copy.state), shown_mib(copy.bytes)
