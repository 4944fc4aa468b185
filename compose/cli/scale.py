"""``blitzscale scale``: this many instances now, and how long it took."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from compose.admin import AdminClient
from compose.cli.options import URL_DEFAULT, Json, Url, ask, print_json
from compose.errors import StackError
from shared.messages.admin import MAX_HOLD_S
from shared.messages.common import LiveChoice, Role
from shared.messages.operations import LiveBatchRecord, LiveRecord, ScaleRecord

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
        float,
        typer.Option(
            "--hold",
            min=0,
            max=MAX_HOLD_S,
            help="Seconds for which there are not fewer than N; 0 lifts an earlier floor.",
            metavar="S",
        ),
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
    if record.status != "done" or record.direction not in ("out", "mutate") or not record.left_out:
        return record, None
    found = (await client.status()).instances
    states = ("loading", "live", "serving")
    return record, sum(i.model == model and i.role == role and i.state in states for i in found)


def _print(record: ScaleRecord) -> None:
    if record.direction == "out":
        times = [
            ("trigger_to_first_byte_ms", _ms(record.trigger_to_first_byte_ms)),
            ("layer_ready_ms", "[" + ", ".join(f"{at_ms:.1f}" for at_ms in record.layer_ready_ms) + "]"),
            ("trigger_to_loaded_ms", _ms(record.trigger_to_loaded_ms)),
            ("predicted_loaded_ms", _ms(record.predicted_loaded_ms)),
            ("trigger_to_serving_ms", _ms(record.trigger_to_serving_ms)),
            ("bytes", str(record.bytes)),
            ("gbps", f"{record.gbps:.3f}"),
        ]
    elif record.direction == "in":
        times = [("trigger_to_spare_ms", _ms(record.trigger_to_spare_ms))]
    elif record.direction == "mutate":
        times = [
            ("trigger_to_plan_ms", _ms(record.trigger_to_plan_ms)),
            ("trigger_to_serving_ms", _ms(record.trigger_to_serving_ms)),
            ("trigger_to_working_ms", _ms(record.trigger_to_working_ms)),
        ]
    else:
        times = [("reason", record.reason)]
    rows = [
        ("model", record.model),
        *([("role", record.role)] if record.role != "colocated" else []),
        ("plan_id", record.plan_id),
        ("status", "advised" if record.advice else record.status),
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


COLUMNS = 100
MAX_BATCHES = 12
"""Of a pair, that are shown."""
MAX_BARS = 50
_NAME = 26
_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*%@"


def pair_lines(pairs: Sequence[LiveRecord], *, encoding: str = "utf-8") -> Iterator[str]:
    """Who worked with whom and why, what each side did, and when. ``encoding`` is the terminal's."""
    bars = _BARS if _can(encoding) else _ASCII_BARS
    for number, pair in enumerate(pairs, 1):
        yield ""
        yield f"live {number} of {len(pairs)}: {pair.source} (source) with {pair.target} (target)"
        yield from _row("policy", pair.policy)
        yield from _row("why", pair.why)
        yield from _row("outcome", f"{pair.outcome}: {pair.reason}" if pair.reason else pair.outcome)
        yield from _row("started_ms", _ms(pair.started_ms))
        yield from _row("first_cooperative_token_ms", _ms(pair.first_cooperative_token_ms))
        yield from _row("ended_ms", _ms(pair.ended_ms))
        yield from _batches(pair.batches)
        yield from _timelines(pair, bars)


def _row(name: str, value: str) -> Iterator[str]:
    lines = textwrap.wrap(value, COLUMNS - _NAME - 4) or ["-"]
    for index, line in enumerate(lines):
        yield f"  {'' if index else name:<{_NAME}}  {line}"


def _batches(batches: Sequence[LiveBatchRecord]) -> Iterator[str]:
    yield from _row("batches", str(len(batches)))
    if not batches:
        return
    yield "    batch  requests    tokens  target layers  source layers  first token ms"
    for number, batch in enumerate(batches[:MAX_BATCHES], 1):
        # A batch that ended without a token has none since before the beginning.
        first = _ms(batch.first_token_ms if batch.first_token_ms >= 0 else None)
        yield (
            f"    {number:>5}  {batch.num_requests:>8}  {batch.num_tokens:>8}  {batch.target_layers:>13}  "
            f"{batch.source_layers:>13}  {first:>14}"
        )
    if len(batches) > MAX_BATCHES:
        yield f"    and {len(batches) - MAX_BATCHES} more; --json has all"


def _timelines(pair: LiveRecord, bars: str) -> Iterator[str]:
    lanes = {"target layers": pair.target_layers, "source layers": pair.source_layers, "source tokens": pair.tokens}
    if not any(any(lane) for lane in lanes.values()):
        return
    # As many buckets per bar as it takes to stay on the line.
    num_buckets = max(map(len, lanes.values()))
    merged = -(-num_buckets // MAX_BARS)
    sums = {name: _merged(lane + (0,) * (num_buckets - len(lane)), merged) for name, lane in lanes.items()}
    bar_ms = f"{pair.bucket_ms * merged:g} ms"
    layers = max(*sums["target layers"], *sums["source layers"])
    for name, lane in sums.items():
        # Both sides' layers have one scale: what counts is who runs more.
        most = layers if name.endswith("layers") else max(lane)
        yield f"  {name + ' per ' + bar_ms:<{_NAME}}  |{sparkline(lane, most, bars)}| max {most}"


def _merged(counts: Sequence[int], width: int) -> list[int]:
    """Sums of ``width`` neighbours each."""
    return [sum(counts[start : start + width]) for start in range(0, len(counts), width)]


def sparkline(counts: Sequence[int], most: int, bars: str = _BARS) -> str:
    """A character per count, the last of ``bars`` for ``most``; every count above 0 is visible."""
    steps = len(bars) - 1
    return "".join(bars[min(steps, -(-count * steps // most))] if count > 0 else bars[0] for count in counts)


def _can(encoding: str) -> bool:
    try:
        _BARS.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _ms(value: float | None) -> str:
    """A time; ``-`` for one that is not known."""
    return "-" if value is None else f"{value:.1f}"
