"""``blitzscale bench vllm``: the first token of a model that vLLM serves and that has no instance.

The weights come from another host's memory over a link with a rate. Beside it, vLLM by itself: a process that loads the
checkpoint from disk, as it would be started by whoever scales it otherwise.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import machine, page_cache
from bench.command_line import (
    JsonFile,
    VllmPython,
    check_folder,
    check_vllm,
    chosen_of,
    one_line,
    say,
    sizes_of,
    until_signal,
    usage,
    write,
)
from bench.lab.checkpoint import make_checkpoint
from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.stream_client import StreamFailed
from bench.vllm.server import settle
from bench.vllm.targets import Group, kept_warm, scale_to
from bench.zero import bandwidth
from bench.zero.wake import Sleeper, Wake
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.messages.admin import SetModelBody

Say = Callable[[str], None]
STAGES = ("none", "imported", "warm", "started")
"""How far a process of vLLM that waits is: ``BLITZ_VLLM_WARM``, and ``warm``, where it has started for a model that is
kept warm, on a worker that has not served it."""
WARM = "warm"
MAX_PROCESSES = 3
LIMIT_S = 300.0
AIM_STARTED = 1.25
"""Of the ideal, from 400 MB on."""
_ARGUMENTS = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_gib": 1}
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Row:
    """Wakes of one model, with one kind of process that waits."""

    stage: str
    mb: int
    model_bytes: int
    bytes_per_s: tuple[float, ...]
    """Of the link alone, measured in between."""
    wakes: tuple[Wake, ...]

    @property
    def ideal_s(self) -> float:
        """The bytes at what the link gives, and one answer of an instance that is there."""
        return self.model_bytes / median(self.bytes_per_s) + median(w.warm_ttft_s for w in self.wakes)

    def document(self) -> dict[str, Any]:
        """As JSON shows it; seconds, medians but for the worst."""
        times_s = [w.ttft_s for w in self.wakes]
        return {
            "waits": self.stage,
            "mb": self.mb,
            "bytes": self.model_bytes,
            "wakes": len(times_s),
            "first_token_s": round(median(times_s), 3),
            "first_token_worst_s": round(max(times_s), 3),
            "ideal_s": round(self.ideal_s, 3),
            "over_ideal": round(median(times_s) / self.ideal_s, 3),
            "weights_s": round(median(w.parts_ms["loaded"] for w in self.wakes) / 1000, 3),
            "after_weights_s": round(
                median(w.parts_ms["served"] + w.parts_ms["answered"] for w in self.wakes) / 1000, 3
            ),
            "start_s": round(median(w.parts_ms["served"] for w in self.wakes) / 1000, 3),
            "answer_s": round(median(w.warm_ttft_s for w in self.wakes), 4),
        }


@dataclass(frozen=True, slots=True)
class Alone:
    """vLLM's own process; seconds from its start to its first token."""

    mb: int
    cold_s: tuple[float, ...]
    warm_s: tuple[float, ...]

    def document(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "mb": self.mb,
            "cold_s": round(median(self.cold_s), 3),
            "cold_worst_s": round(max(self.cold_s), 3),
            "warm_s": round(median(self.warm_s), 3),
            "warm_worst_s": round(max(self.warm_s), 3),
        }


async def measure(
    python: str,
    sizes_mb: Sequence[int],
    stages: Sequence[str],
    rate: Rate,
    folder: Path,
    *,
    repetitions: int,
    alone: bool,
    targets: int,
    say: Say,
) -> tuple[list[Row], list[Alone], list[dict[str, Any]]]:
    """Wakes, vLLM by itself, and how one worker and ``targets`` of them scale (nothing, if that is 0). Raises
    ``LabUnavailable``, ``LabFailed``, ``StackError``, ``BlitzError`` and ``StreamFailed``; nothing is left behind."""
    rows: list[Row] = []
    processes: list[Alone] = []
    groups: list[dict[str, Any]] = []
    for mb in sizes_mb:
        path = await asyncio.to_thread(make_checkpoint, folder / f"models-{mb}", round(mb * 1e6 / _MIB))
        checkpoint = inspect_checkpoint(path, with_hash=False, generic=True)
        for stage in stages:
            measured = _first_wakes if stage == WARM else _wakes
            rows.append(await measured(python, mb, checkpoint, stage, rate, folder / f"{stage}-{mb}", repetitions))
            found = rows[-1].document()
            say(f"{mb} MB, {stage} waits: {found['first_token_s']} s, {found['over_ideal']} of the ideal")
        if alone:
            processes.append(await asyncio.to_thread(_alone, python, mb, checkpoint, min(repetitions, MAX_PROCESSES)))
            took = processes[-1].document()
            say(f"{mb} MB, vLLM alone: {took['cold_s']} s, {took['warm_s']} s when cached")
        one_s = 0.0
        for number in (1, targets) if targets else ():
            group = await _scaled(python, mb, checkpoint, number, rate, folder / f"{number}-of-{mb}", repetitions)
            one_s = one_s or median(group.serving_s)
            groups.append(group.document(one_s))
            say(f"{mb} MB, {number} at once: {groups[-1]['serving_s']} s, {groups[-1]['copies_after']} copies stay")
    return rows, processes, groups


async def _wakes(
    python: str, mb: int, checkpoint: Checkpoint, stage: str, rate: Rate, folder: Path, repetitions: int
) -> Row:
    wakes: list[Wake] = []
    rates: list[float] = []
    async with _sleeping(python, checkpoint, stage, rate, folder) as (network, stack, sleeper):
        for number in range(repetitions + 1):
            per_s, wake = await _wake(network, stack, sleeper, checkpoint.layout.num_bytes)
            if number:  # connections and memory are there from the second on, and what waits has been there
                rates.append(per_s)
                wakes.append(wake)
    return Row(stage, mb, checkpoint.layout.num_bytes, tuple(rates), tuple(wakes))


async def _first_wakes(
    python: str, mb: int, checkpoint: Checkpoint, stage: str, rate: Rate, folder: Path, repetitions: int
) -> Row:
    """Each of a worker that has not served before."""
    found = []
    for number in range(repetitions):
        async with _sleeping(python, checkpoint, "started", rate, folder / str(number)) as (network, stack, sleeper):
            await stack.admin.set_model(stack.model, SetModelBody(warm=True))
            await kept_warm(stack, 1)
            found.append(await _wake(network, stack, sleeper, checkpoint.layout.num_bytes))
    return Row(
        stage, mb, checkpoint.layout.num_bytes, tuple(per_s for per_s, _ in found), tuple(wake for _, wake in found)
    )


async def _scaled(
    python: str, mb: int, checkpoint: Checkpoint, num_targets: int, rate: Rate, folder: Path, repetitions: int
) -> Group:
    """Each of workers that have not served before."""
    num_bytes = checkpoint.layout.num_bytes
    found = []
    for number in range(repetitions):
        part = folder / str(number)
        async with _sleeping(python, checkpoint, "started", rate, part, num_targets) as (network, stack, _):
            await stack.admin.set_model(stack.model, SetModelBody(warm=True))
            await kept_warm(stack, num_targets)
            found.append(await scale_to(network, stack, num_bytes, num_targets))
    return Group(mb, num_targets, num_bytes, *zip(*found, strict=True))


async def _wake(network: Network, stack: LabStack, sleeper: Sleeper, num_bytes: int) -> tuple[float, Wake]:
    """Bytes per second of the link alone, and the wake."""
    await sleeper.asleep()
    await asyncio.to_thread(settle)
    per_s = await asyncio.to_thread(bandwidth.link, network, num_bytes)
    await stack.wait_quiet()  # what goes over the link now, a plan keeps away from
    received = network.received_bytes()
    wake = await sleeper.wake()
    network.require_received(received, {1: num_bytes})
    return per_s, wake


@asynccontextmanager
async def _sleeping(
    python: str, checkpoint: Checkpoint, waits: str, rate: Rate, folder: Path, num_targets: int = 1
) -> AsyncIterator[tuple[Network, LabStack, Sleeper]]:
    async with AsyncExitStack() as running:
        network = running.enter_context(Network(1 + num_targets, rate))
        # The first host holds the copy and has no room for an instance, the others are the other way round.
        stack = await running.enter_async_context(
            LabStack(
                network,
                folder,
                checkpoint.path,
                weights_bytes=checkpoint.layout.num_bytes,
                instance_env={
                    "BLITZ_WORKER_ENGINES": "vllm",
                    "BLITZ_VLLM_PYTHON": python,
                    "BLITZ_VLLM_WARM": waits,
                },
                service_env={"monitor": {"BLITZ_MONITOR_DOWN_WINDOW_S": "0"}},
                copies_on=(0,),
                arenas_on=range(1, 1 + num_targets),
                min_instances=0,
                model_engine="vllm",
                model_engine_args=_ARGUMENTS,
            )
        )
        sleeper = Sleeper(stack, stack.model)
        running.callback(sleeper.close)
        await stack.host_copies()
        yield network, stack, sleeper


def _alone(python: str, mb: int, checkpoint: Checkpoint, repetitions: int) -> Alone:
    cold, warm = [], []
    for _ in range(repetitions):
        page_cache.drop(checkpoint.weight_files)
        cold.append(_process_s(python, checkpoint.path))
        page_cache.warm(checkpoint.weight_files)
        warm.append(_process_s(python, checkpoint.path))
    return Alone(mb, tuple(cold), tuple(warm))


def _process_s(python: str, path: Path) -> float:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BLITZ_"))}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    began_s = time.perf_counter()
    script = Path(__file__).with_name("process.py")
    with subprocess.Popen(
        [python, "-I", str(script), str(path)],
        env=environment | {"VLLM_PLUGINS": "none"},
        cwd=path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [line for line in process.stdout if line.strip().isdecimal()]
        took_s = time.perf_counter() - began_s
        if process.wait(LIMIT_S) != 0 or not lines:
            raise LabFailed(f"vLLM alone ended with {process.returncode}, and said no token")
    return took_s


def command(
    *,
    python: VllmPython = "",
    mb: Annotated[str, typer.Option(metavar="N,N", help="Sizes of the models, in 10^6 bytes.")] = "400",
    stages: Annotated[str, typer.Option(metavar="NAME,NAME", help="What waits; empty: nothing is woken.")] = ",".join(
        STAGES
    ),
    rate: Annotated[str, typer.Option(help="Of the link to the other host, per direction.")] = "1gbit",
    repetitions: Annotated[int, typer.Option(min=1, max=100, help="Medians are reported.")] = 3,
    alone: Annotated[bool, typer.Option(help="Measure vLLM by itself, too.")] = True,
    targets: Annotated[int, typer.Option(min=0, max=8, help="So many workers at once, too, beside one; 0: no.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """The first token of a model of vLLM that sleeps, against the time that moving its weights takes at the least, by
    what waits on the worker: no process, one that has imported vLLM, one that has started and gets the model's weights
    for the first time, or the one of the instance before, which has them. Needs root."""
    with usage():
        check_vllm(python)
        chosen, sizes = chosen_of("stages", stages, STAGES) if stages else (), sizes_of(mb)
        parsed = Rate.parse(rate)
        check_folder(json_file)
    with one_line("vllm", StreamFailed, OSError, TimeoutError):
        rows, processes, groups = asyncio.run(
            until_signal(
                "vllm",
                lambda folder: measure(
                    *(python, sizes, chosen, parsed, folder),
                    repetitions=repetitions,
                    alone=alone,
                    targets=targets,
                    say=say,
                ),
            )
        )
    asked = f"blitzscale bench vllm --mb {mb} --stages {','.join(chosen)} --rate {rate} --repetitions {repetitions}"
    documents = [row.document() for row in rows]
    took = [one.document() for one in processes]
    if targets:
        asked += f" --targets {targets}"
    document = {
        "vllm": documents,
        "vllm_alone": took,
        "vllm_targets": groups,
        "rate": rate,
        "machine": machine.describe(),
        "command": asked,
    }
    write(json_file, document)
    table = Table(title="a model of vLLM that sleeps", title_justify="left")
    keys = (
        "waits", "mb", "first_token_s", "first_token_worst_s", "ideal_s", "over_ideal", "weights_s", "after_weights_s",
        "answer_s",
    )  # fmt: skip
    for key in keys:
        table.add_column(key.replace("_", " "), justify="left" if key == "waits" else "right")
    for row in documents:
        table.add_row(*(str(row[key]) for key in keys))
    console = Console()
    console.print(table)
    for group in groups:
        console.print(
            f"{group['targets']} at once, {group['mb']} MB: {group['serving_s']} s (worst {group['serving_worst_s']}), "
            f"{group['over_one']} of one; cores busy {group['busy_share']}, vLLM's part "
            f"{group['vllm_cpu_s']} core s; copies in their memory {group['copies_before']}, then "
            f"{group['copies_after']}"
        )
    for one in took:
        console.print(f"vLLM alone, {one['mb']} MB: {one['cold_s']} s, {one['warm_s']} s from the page cache")
    for row in documents:
        if row["waits"] in (WARM, "started") and row["mb"] >= 400:
            met = "met" if row["over_ideal"] <= AIM_STARTED else "missed"
            console.print(
                f"{row['waits']}, {row['mb']} MB: {row['over_ideal']} of the ideal, aim <= {AIM_STARTED}: {met}"
            )
