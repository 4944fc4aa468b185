"""``blitzscale bench cold``: what the first requests of a new instance wait for, beside those that come later.

An instance gets ten bursts, one after the other. Every prompt has a length that none before it had, so that what is
paid for a length is paid by all bursts alike; what only the first one pays is a fault of the system.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, until_signal, usage, write
from bench.openai_events import CompletionRequest
from bench.replay.plan import prompt_of
from bench.stats import Summary
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import Streamed, ask
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from shared.errors import BadRequest, Internal
from shared.messages.admin import SetModelBody, Status
from shared.messages.common import LiveChoice, Role

Say = Callable[[str], None]
STACKS = (("fresh", "scaled"), ("woken",), ("paired",), ("mutated",))
"""Situations, by the stacks in which they are brought about one after the other."""
SITUATIONS = tuple(name for together in STACKS for name in together)
BURSTS = 10
WORKERS = 2
SHORTEST_TOKENS = 17
OUTPUT_TOKENS = 16
QUEUE = 12
"""Prompts under way while a pair loads."""
READY_S = 120.0
PATIENCE_S = 120.0
HOLD_S = 3.0
LOOK_S = 0.02
_TOKEN_IDS = range(10, 250)
ENV = {
    # What is measured is what is computed.
    "BLITZ_GATEWAY_PREFIX_CACHE": "0",
    "BLITZ_WORKER_ARENA_MIB": "64",
    # Nothing is loaded or drained but by the benchmark.
    "BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9",
    "BLITZ_MONITOR_DOWN_WINDOW_S": "600",
}


def lengths(burst: int, size: int) -> tuple[int, ...]:
    """Of the prompts of one burst, in tokens: no two bursts share one, and the last burst has few more than the
    first."""
    return tuple(SHORTEST_TOKENS + BURSTS * number + burst for number in range(size))


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that were sent together; seconds."""

    ttft_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    """Between each token and the one before, of all streams."""

    @classmethod
    def of(cls, streams: Iterable[Streamed], *, since_s: float = 0.0) -> Burst:
        """``since_s``: when there was an instance (``time.perf_counter()``); waiting for it is not counted."""
        found = list(streams)
        ttft_s = (s.sent_s + s.tokens_s[0] - max(s.sent_s, since_s) for s in found if s.tokens_s)
        return cls(tuple(max(0.0, seconds) for seconds in ttft_s), tuple(gap for s in found for gap in s.gaps_s))


@dataclass(frozen=True, slots=True)
class Row:
    """One instance."""

    situation: str
    size: int
    bursts: tuple[Burst, ...]
    errors: tuple[str, ...] = ()

    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        ttft = [_ms(burst.ttft_s) for burst in self.bursts]
        gaps = [_ms(burst.gaps_s) for burst in self.bursts]
        return {
            "situation": self.situation,
            "size": self.size,
            "failed": len(self.errors),
            "errors": sorted(set(self.errors))[:5],
            "ttft_mean_of_tenth": _ratio(ttft[0].mean, ttft[-1].mean),
            "ttft_max_of_tenth": _ratio(ttft[0].max, ttft[-1].max),
            "ttft_mean_of_later": _ratio(ttft[0].mean, median(each.mean for each in ttft[1:])),
            "gap_mean_of_later": _ratio(gaps[0].mean, median(each.mean for each in gaps[1:])),
            "ttft_mean_ms": [round(each.mean, 1) for each in ttft],
            "ttft_max_ms": [round(each.max, 1) for each in ttft],
            "gap_mean_ms": [round(each.mean, 1) for each in gaps],
            "gap_max_ms": [round(each.max, 1) for each in gaps],
        }


def _ms(seconds: Iterable[float]) -> Summary:
    return Summary.of(each * 1000 for each in seconds) or Summary(0, 0.0, 0.0, 0.0, 0.0)


def _ratio(first: float, later: float) -> float | None:
    """None where nothing was measured."""
    return round(first / later, 2) if later else None


async def measure(situations: tuple[str, ...], sizes: tuple[int, ...], folder: Path, *, say: Say) -> list[Row]:
    """On the demo model. Raises ``StackError`` and ``BlitzError``; nothing is left behind."""
    model = await asyncio.to_thread(ensure_demo_model, folder / "demo")
    rows: list[Row] = []
    stacks = [tuple(name for name in together if name in situations) for together in STACKS]
    for size in sizes:
        for names in filter(None, stacks):
            async with _running(model, folder / f"{names[0]}-{size}") as run:
                for name in names:
                    row = await run.stack.unless_given_up(run.measured(name, size))
                    say(f"{name}, bursts of {size}: first / tenth {row.document()['ttft_mean_of_tenth']}")
                    rows.append(row)
    return rows


@asynccontextmanager
async def _running(model: Path, folder: Path) -> AsyncIterator[_Run]:
    config = StackConfig(models=(), state_dir=folder, workers=WORKERS, port=0, env=ENV, log_level="warning")
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        client = StreamClient(Endpoint.of(stack.url))
        try:
            yield _Run(stack, client, model)
        finally:
            client.close()


class _Run:
    """One stack."""

    def __init__(self, stack: Stack, client: StreamClient, model: Path) -> None:
        self.stack = stack
        self._client = client
        self._path = model
        self._name = model.name

    async def measured(self, situation: str, size: int) -> Row:
        """Bring the situation about, and send the bursts."""
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "fresh": self._fresh,
            "scaled": self._scaled,
            "woken": self._woken,
            "paired": self._paired,
            "mutated": self._mutated,
        }
        await ways[situation]()
        bursts: list[Burst] = []
        errors: list[str] = []
        for number in range(BURSTS):
            asked_at_s = time.time()
            streams = await asyncio.gather(*(self._ask(length) for length in lengths(number, size)))
            woken = situation == "woken" and number == 0
            since_s = await self._served_at_s(asked_at_s) if woken else 0.0
            bursts.append(Burst.of(streams, since_s=since_s))
            errors += [stream.error for stream in streams if stream.error]
        return Row(situation, size, tuple(bursts), tuple(errors))

    async def _ask(self, num_tokens: int, output_tokens: int = OUTPUT_TOKENS) -> Streamed:
        prompt = prompt_of(0, num_tokens, num_tokens, token_ids=_TOKEN_IDS)
        request = CompletionRequest.exactly(self._name, prompt, output_tokens)
        return await ask(self._client, num_tokens, request, timeout_s=PATIENCE_S)

    async def _fresh(self, instances: int = 1) -> None:
        """The first instance of all."""
        await self._add(instances, instances)
        await self._until(lambda status: status.serving(self._name) == instances)

    async def _add(self, least: int, most: int) -> None:
        """No load brings another one."""
        path = str(self._path)
        await self.stack.admin.add_model(path, name=self._name, min_instances=least, max_instances=most)

    async def _scaled(self, live: LiveChoice = "never") -> None:
        """A second one, and the first one goes."""
        admin = self.stack.admin
        if not (await admin.status()).instances:
            await self._fresh()
        (first,) = (await admin.status()).instances
        await admin.set_model(self._name, SetModelBody(max_instances=2))
        await admin.scale(self._name, 2, hold_s=HOLD_S, live=live)
        # Only then need the first one not be replaced.
        await self._until(lambda status: status.serving(self._name) == 2 and not status.floors)
        await admin.drain_worker(first.workers[0])
        await self._until(lambda status: first.id not in [i.id for i in status.instances])

    async def _woken(self) -> None:
        """None at all: the first burst asks for it."""
        await self._add(0, 1)
        async with asyncio.timeout(READY_S):
            while any(model.host_copy != "ready" for model in (await self.stack.admin.pool()).models):
                await asyncio.sleep(LOOK_S)

    async def _paired(self) -> None:
        """As scaled, and the new one computes for the first one while it loads."""
        await self._fresh()
        queue = [asyncio.create_task(self._ask(1000 + number, 1)) for number in range(QUEUE)]
        await self._scaled("always")
        await asyncio.gather(*queue)

    async def _mutated(self) -> None:
        """Two that have done nothing yet: one becomes the other's decode instance."""
        await self._fresh(2)
        changes = SetModelBody(served_as="disaggregated", min_instances=1)
        await self.stack.admin.set_model(self._name, changes)
        roles: tuple[Role, ...] = ("prefill", "decode")
        await self._until(lambda status: all(status.serving(self._name, role) == 1 for role in roles))

    async def _served_at_s(self, since_s: float) -> float:
        """When the instance served that was asked for since then (unix time), on ``time.perf_counter()``."""
        records = await self.stack.admin.scale_records(limit=10)
        found = [r for r in records if r.direction == "out" and r.triggered_at_s >= since_s and r.trigger_to_serving_ms]
        if not found:
            raise Internal("no record of the instance that was woken")
        served_at_s = found[-1].triggered_at_s + (found[-1].trigger_to_serving_ms or 0.0) / 1000
        return time.perf_counter() - (time.time() - served_at_s)

    async def _until(self, condition: Callable[[Status], bool]) -> None:
        try:
            async with asyncio.timeout(READY_S):
                while not condition(await self.stack.admin.status()):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise Internal("the stack did not come to what is to be measured") from error


def command(
    *,
    situations: Annotated[str, typer.Option(metavar="NAME,NAME", help="How the instance came.")] = ",".join(SITUATIONS),
    sizes: Annotated[str, typer.Option(metavar="N,N", help="Prompts of a burst.")] = "1,2,10",
    json_file: JsonFile = None,
) -> None:
    """Ten bursts on a new instance of the torch engine: the first against the tenth. Exit status 1 if a request
    failed."""
    with usage():
        chosen = tuple(name for name in SITUATIONS if name in [given.strip() for given in situations.split(",")])
        if not chosen or len(chosen) != len(situations.split(",")):
            raise BadRequest(f"situations must be of {', '.join(SITUATIONS)}, not {situations!r}", param="situations")
        counts = tuple(int(size) for size in sizes.split(",") if size.strip().isdecimal())
        if not counts or not all(1 <= count <= 64 for count in counts):
            raise BadRequest(f"sizes are numbers from 1 to 64, with commas between them, not {sizes!r}", param="sizes")
        check_folder(json_file)
    with one_line("cold", TimeoutError):
        rows = asyncio.run(until_signal("cold", lambda folder: measure(chosen, counts, folder, say=say)))
    documents = [row.document() for row in rows]
    asked = f"blitzscale bench cold --situations {','.join(chosen)} --sizes {sizes}"
    write(json_file, {"cold": documents, "machine": machine.describe(), "command": asked})
    table = Table(title="first burst of a new instance, over later ones", title_justify="left")
    keys = ("situation", "size", "failed", "ttft_mean_of_tenth", "ttft_max_of_tenth", "ttft_mean_of_later")
    for key in (*keys, "gap_mean_of_later"):
        table.add_column(key.replace("_", " "), justify="left" if key == "situation" else "right")
    for document in documents:
        table.add_row(*(str(document[key]) for key in (*keys, "gap_mean_of_later")))
    Console().print(table)
    if any(document["failed"] for document in documents):
        raise typer.Exit(1)
