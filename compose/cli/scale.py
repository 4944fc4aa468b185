"""``blitzscale scale``: this many instances now, and how long it took."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from compose.admin import AdminClient
from compose.cli.connection import URL_DEFAULT, Json, Url, ask, print_json
from compose.cli.live_record import pair_lines, shown_ms
from compose.errors import StackError
from shared.messages.common import LiveChoice, Role
from shared.messages.scaling import ScaleRecord

_WAIT_S = 5.0
"""One long poll; short, so that a gateway that dies is noticed."""


class ScaleFailed(StackError):
    """The operation ended without having done what was asked for."""


def scale(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    instances: Annotated[int, typer.Argument(help="How many instances.", min=0, metavar="N")],
    role: Annotated[
        Role, typer.Option(help="What they do: whole requests, only prompts, or only decoding.")
    ] = "colocated",
    hold_s: Annotated[
        float, typer.Option("--hold", min=0, help="Seconds for which there are not fewer than N.", metavar="S")
    ] = 300.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the end.", metavar="S")
    ] = 120.0,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Whether new instances compute for busy ones while they load.",
            show_default="where loading first would break the objective",
        ),
    ] = None,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Ask for N instances of a model now, wait, and print the scale operation's record."""
    choice: LiveChoice = "auto" if live is None else "always" if live else "never"
    record, there = ask(url, lambda client: _scale(client, model, instances, role, hold_s, timeout_s, choice))
    if as_json:
        print_json(record)
    else:
        _print(record)
    wanted = str(instances) if role == "colocated" else f"{instances} {role} instances"
    if record.status == "failed":
        reasons = [f"{target.worker_id}: {target.failure}" for target in record.targets if target.failure]
        why = "; ".join([*reasons, *record.left_out]) or record.reason or "no reason was recorded"
        raise ScaleFailed(f"scaling {model} to {wanted} failed: {why}")
    if record.status == "running":
        raise ScaleFailed(f"scaling {model} to {wanted} did not end within {timeout_s:g} s (plan {record.plan_id})")
    if there is not None and there < instances:
        raise ScaleFailed(f"{model} has {there} of {wanted}: {'; '.join(record.left_out)}")


async def _scale(
    client: AdminClient, model: str, instances: int, role: Role, hold_s: float, timeout_s: float, live: LiveChoice
) -> tuple[ScaleRecord, int | None]:
    """The record, and the number of instances if something was left out."""
    deadline_s = time.monotonic() + timeout_s
    record = await client.scale(model, instances, hold_s=hold_s, live=live, role=role)
    while record.status == "running" and (left_s := deadline_s - time.monotonic()) > 0:
        record = await client.scale_record(record.plan_id, wait_s=min(_WAIT_S, left_s))
    if record.status != "done" or record.direction != "out" or not record.left_out:
        return record, None
    found = (await client.status()).instances
    states = ("loading", "live", "serving")
    return record, sum(i.model == model and i.role == role and i.state in states for i in found)


def _print(record: ScaleRecord) -> None:
    if record.direction == "out":
        times = [
            ("trigger_to_first_byte_ms", shown_ms(record.trigger_to_first_byte_ms)),
            ("layer_ready_ms", "[" + ", ".join(f"{at_ms:.1f}" for at_ms in record.layer_ready_ms) + "]"),
            ("trigger_to_loaded_ms", shown_ms(record.trigger_to_loaded_ms)),
            ("trigger_to_serving_ms", shown_ms(record.trigger_to_serving_ms)),
            ("bytes", str(record.bytes)),
            ("gbps", f"{record.gbps:.3f}"),
        ]
    elif record.direction == "in":
        times = [("trigger_to_spare_ms", shown_ms(record.trigger_to_spare_ms))]
    else:
        times = [("reason", record.reason)]
    rows = [
        ("model", record.model),
        *([("role", record.role)] if record.role != "colocated" else []),
        ("plan_id", record.plan_id),
        ("status", record.status),
        ("direction", record.direction),
        ("desired", str(record.desired)),
        *times,
        *(("explain", line) for line in record.explain),
        *(("left_out", line) for line in record.left_out),
    ]
    for name, value in rows:
        typer.echo(f"{name:<24}  {value}")
    for line in pair_lines(record.live, encoding=sys.stdout.encoding or "ascii"):
        typer.echo(line)
