"""``blitzscale bench autoscale``: a trace against a stack that starts with one instance.

The monitor alone takes the model up under the trace's bursts and back down. Afterwards, sampled
requests are asked again of the idle instance: every token must be the same.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, write
from bench.scale_records import taken_twice
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from shared.messages.operations import ScaleRecord

READY_S = 120.0
ENV = {"BLITZ_MONITOR_DOWN_WINDOW_S": "0", "BLITZ_GATEWAY_PREFIX_CACHE": "0"}
"""Instances go as soon as that pays."""
SETTLE_S = 60.0
"""How long the stack may take to return to one instance after the last request."""
SAMPLING_INTERVAL_S = 0.1
MOCK = {
    # Of the demo model's eight layers: 16 ms for a decode step, 5,000 prompt tokens per second.
    "BLITZ_MOCK_LAYER_BASE_MS": "2.0",
    "BLITZ_MOCK_LAYER_PER_TOKEN_US": "25",
}


@dataclass(frozen=True, slots=True)
class Timeline:
    """(seconds since the replay started, serving instances), at every change."""

    points: tuple[tuple[float, int], ...]

    @property
    def peak(self) -> int:
        return max(count for _, count in self.points)


async def _watch(
    stack: Stack,
    model: str,
    points: list[tuple[float, int]],
    records: dict[str, ScaleRecord],
    started_s: float,
) -> None:
    while True:
        for record in await stack.admin.scale_records(limit=20):
            records[record.plan_id] = record
        count = (await stack.admin.status()).serving(model)
        if not points or points[-1][1] != count:
            points.append((round(time.monotonic() - started_s, 2), count))
        await asyncio.sleep(SAMPLING_INTERVAL_S)


async def _replay(stack: Stack, arguments: list[str], json_file: Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "compose", "replay", *arguments, "--url", stack.url, "--json", str(json_file)
    )
    status = await process.wait()
    if status != 0:
        raise typer.Exit(status)
    result: dict[str, Any] = msgspec.json.decode(await asyncio.to_thread(json_file.read_bytes))
    return result


async def _same_again(stack: Stack, model: str, sample: dict[str, Any]) -> bool:
    """Whether an idle instance gives the sample's text."""
    body = {
        "model": model,
        "prompt": sample["prompt_token_ids"],
        "max_tokens": sample["max_tokens"],
        "min_tokens": sample["max_tokens"],
        "ignore_eos": True,
        "temperature": 0.0,
    }
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        answer = await http.post(f"{stack.url}/v1/completions", json=body)
    answer.raise_for_status()
    return bool(answer.json()["choices"][0]["text"] == sample["text"])


async def measure(
    model_dir: Path | None,
    workers: int,
    arguments: list[str],
    *,
    num_samples: int,
    engine: Literal["torch", "mock"] = "torch",
) -> dict[str, Any]:
    """Run it all; the document that ``--json`` writes."""
    with tempfile.TemporaryDirectory(prefix="blitzscale-autoscale-") as folder:
        path = model_dir or ensure_demo_model(Path(folder) / "models")
        config = StackConfig(
            models=(path,),
            state_dir=Path(folder) / "state",
            workers=workers,
            port=0,
            engine=engine,
            env=ENV | MOCK if engine == "mock" else ENV,
        )
        async with Stack(config) as stack:
            await stack.wait_ready(READY_S)
            points: list[tuple[float, int]] = []
            records: dict[str, ScaleRecord] = {}
            started_s = time.monotonic()
            watching = asyncio.create_task(_watch(stack, path.name, points, records, started_s))
            try:
                replayed = await _replay(
                    stack, [*arguments, "--sample-outputs", str(num_samples)], Path(folder) / "replay.json"
                )
                ended_s = time.monotonic()
                async with asyncio.timeout(SETTLE_S):
                    while points[-1][1] != 1:
                        await asyncio.sleep(SAMPLING_INTERVAL_S)
                back_s = time.monotonic() - ended_s
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            samples = replayed.pop("samples")
            replayed.pop("records", None)
            same = [await _same_again(stack, path.name, sample) for sample in samples]
    timeline = Timeline(tuple(points))
    return {
        "peak_instances": timeline.peak,
        "back_to_one_s": round(back_s, 2),
        "instances": timeline.points,
        "operations": len(records),
        "taken_twice_within_1s": len(taken_twice(records.values())),
        "samples": len(same),
        "samples_identical": sum(same),
        "replay": replayed,
    }


def command(
    context: typer.Context,
    *,
    workers: Annotated[int, typer.Option(help="Workers of the stack.")] = 3,
    model_dir: Annotated[Path | None, typer.Option(help="Checkpoint; by default the demo model.")] = None,
    engine: Annotated[
        Literal["torch", "mock"], typer.Option(help="mock: instances do not share this machine's cores.")
    ] = "torch",
    samples: Annotated[int, typer.Option(help="Requests whose output is compared with the idle instance's.")] = 40,
    json_file: JsonFile = None,
) -> None:
    """Replay a trace against a stack of one instance and let the monitor scale it. Other arguments go to ``replay``."""
    document = asyncio.run(measure(model_dir, workers, context.args, num_samples=samples, engine=engine))
    console = Console()
    table = Table(title="autoscaling under a trace", show_header=False)
    replayed = document["replay"]
    for label, value in (
        ("requests", replayed["completed"] + replayed["failed"]),
        ("failed", replayed["failed"]),
        ("peak instances", document["peak_instances"]),
        ("seconds back to one", document["back_to_one_s"]),
        ("scale operations", document["operations"]),
        ("workers taken and given back twice within a second", document["taken_twice_within_1s"]),
        ("samples identical", f"{document['samples_identical']} of {document['samples']}"),
        ("instances over time", " ".join(f"{at:g}s:{count}" for at, count in document["instances"])),
    ):
        table.add_row(label, str(value))
    console.print(table)
    write(json_file, document)
    if replayed["failed"] or document["samples_identical"] != document["samples"]:
        raise typer.Exit(1)
