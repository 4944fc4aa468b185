"""``blitzscale pool``: which memory holds which model, and whether every model has a copy."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compose.cli.connection import URL_DEFAULT, Json, Url, ask, print_json
from compose.cli.status import state_text
from compose.cli.tables import titled_table
from shared.messages.admin import HostCopyStatus, PoolModel, PoolStatus

_MIB = 1 << 20


def pool(url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """Show which GPU and host memory holds which model, and whether every model has a copy."""
    found = ask(url, lambda client: client.pool())
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    for table in tables(found):
        console.print(table)
    totals = found.totals
    console.print(
        f"{totals.models - totals.models_without_copy} of {totals.models} models have a complete copy, "
        f"{totals.models - totals.models_without_host_copy} a host copy; "
        f"{_mib(totals.host_bytes)} of {_mib(totals.host_capacity_bytes)} MiB of host memory used"
    )


def tables(found: PoolStatus) -> tuple[Table, ...]:
    """Models, copies and hosts as tables."""
    models = titled_table("Models", "name", "MiB", "invariant", "host copy", "on hosts MiB", "why")
    copies = titled_table("Copies", "model", "in", "worker", "host", "state", "MiB")
    for model in found.models:
        invariant = Text(model.invariant, style="green" if model.invariant == "ok" else "red")
        size = _mib(model.weights_bytes)
        models.add_row(model.name, size, invariant, model.host_copy, _mib(model.host_bytes), model.reason)
        _add_copies(copies, model)
    for stray in found.strays:
        copies.add_row(*_row(f"{stray.model} (not registered)", stray))
    hosts = titled_table("Hosts", "host", "workers", "used MiB", "placed MiB", "cached MiB", "capacity MiB")
    for host in found.hosts:
        sizes = (host.used_bytes, host.placed_bytes, host.cached_bytes, host.capacity_bytes)
        hosts.add_row(host.host, ", ".join(host.workers), *map(_mib, sizes))
    return models, copies, hosts


def _add_copies(table: Table, model: PoolModel) -> None:
    for instance in model.instances:
        size = _mib(model.weights_bytes) if instance.complete else "partly"
        where = "GPU" if instance.role == "colocated" else f"GPU ({instance.role})"
        table.add_row(model.name, where, instance.worker, instance.host, state_text(instance.state), size)
    for copy in model.host_copies:
        table.add_row(*_row(model.name, copy))


def _row(model: str, copy: HostCopyStatus) -> tuple[str, str, str, str, Text, str]:
    where = "host (cached)" if copy.cached else "host"
    return model, where, copy.worker, copy.host, state_text(copy.state), _mib(copy.bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f}"
