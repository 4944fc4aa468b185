"""A burst, seen in a browser while weights come over links on which they take 5 s: what is seen is what was told.

Needs root, for the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from playwright.async_api import Page
from typer.testing import CliRunner

from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.live.burst import BurstClient
from bench.live.checkpoint import make_checkpoint
from bench.live.measure import NO_DEMAND
from bench.replay.plan import prompt_of
from compose.cli.app import app
from shared import subjects
from shared.checkpoint import inspect_checkpoint
from shared.messages.operations import ScaleRecord
from shared.messages.progress import ScaleProgress
from tests.bench.lab.live_lab import WORKER_ENV
from tests.page.browser import browser, page_of
from tests.wait_until import eventually

RATE = Rate.parse("60mbit")
"""The model's 34 MB take 4.6 s."""
NUM_LAYERS = 8
ENDS_WITHIN_S = 120.0
LOOK_EVERY_S = 0.1
LOOK = """() => ({
  boxes: Object.fromEntries([...document.querySelectorAll('#operation svg g')].filter((g) => g.querySelector('.name'))
    .map((g) => [g.querySelector('.name').textContent, g.querySelector('.what').textContent])),
  hops: document.querySelectorAll('#operation svg line').length,
  states: [...document.querySelectorAll('#models .chip')].map((chip) => chip.textContent.trim()),
  first: document.querySelector('.first')?.textContent ?? '',
  split: [...document.querySelectorAll('#operation figure svg g')].filter(
    (g) => [...g.querySelectorAll('rect')].every((rect) => Number(rect.getAttribute('height')))).length,
  waiting: Number(document.querySelectorAll('#models td')[2].textContent),
  title: document.querySelector('#operation h3')?.textContent ?? '',
})"""


@dataclass
class Seen:
    """What the page showed, look by look."""

    layers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    rates: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    hops: int = 0
    states: set[str] = field(default_factory=set)
    first: str = ""
    split: int = 0
    waiting: int = 0
    """Requests, at the last look."""

    def take(self, looked: dict[str, Any]) -> None:
        """One look."""
        for name, what in looked["boxes"].items():
            if " layers, " in what:
                layers, _, rate = what.partition(" layers, ")
                self.layers[name].append(int(layers.partition(" of ")[0]))
                if "running" in looked["title"]:
                    self.rates[name].append(rate)
        self.waiting = looked["waiting"]
        self.hops = max(self.hops, looked["hops"])
        self.states |= set(looked["states"])
        self.first = looked["first"] or self.first
        self.split = max(self.split, looked["split"])


def mbits(shown: str) -> float:
    number, _, unit = shown.partition(" ")
    return float(number) * {"Gbit/s": 1000.0, "Mbit/s": 1.0}[unit]


@contextlib.asynccontextmanager
async def watching(page: Page) -> AsyncIterator[Seen]:
    seen = Seen()

    async def look() -> None:
        while True:
            seen.take(await page.evaluate(LOOK))
            await asyncio.sleep(LOOK_EVERY_S)

    task = asyncio.create_task(look())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_burst_is_seen_as_it_was_told(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "models", NUM_LAYERS)
    weights_bytes = inspect_checkpoint(checkpoint, with_hash=False).layout.num_bytes
    prompts = [prompt_of(7, number, 160, token_ids=range(10, 250)) for number in range(16)]
    told: dict[str, list[ScaleProgress]] = defaultdict(list)
    with Network(4, RATE) as network:
        stack = LabStack(
            network,
            tmp_path / "state",
            checkpoint,
            weights_bytes=weights_bytes,
            worker_env=WORKER_ENV,
            service_env={"monitor": NO_DEMAND},
            copies_on=(),
        )
        async with stack, browser() as launched, page_of(launched, stack.url) as page:
            bus = await stack.bus_as("planner")
            await bus.subscribe(subjects.progress(), ScaleProgress, lambda event: told[event.worker_id].append(event))
            await page.wait_for_selector("#models tbody tr")
            client = BurstClient(stack.url, stack.model, output_tokens=16)
            burst = client.burst(prompts)
            async with watching(page) as seen:
                await eventually(lambda: seen.waiting >= 8, ENDS_WITHIN_S)
                asked = await stack.admin.scale(stack.model, 4, hold_s=600.0, live="always")
                record = await ended(stack, asked.plan_id)
                await page.wait_for_selector("#operation h3:has-text('done')")
            await asyncio.gather(*burst)
            client.close()
            targets = {target.worker_id for target in record.targets}
            assert len(targets) == 3
            assert seen.hops == len(record.hops) == 3
            assert {hop.source for hop in record.hops} & targets, "no chain: nobody passed weights on"
            for target in targets:
                filled = seen.layers[target]
                assert filled == sorted(filled)
                assert len(set(filled)) > NUM_LAYERS // 2, "layers filled one by one"
                last = [event for event in told[target] if event.event in ("layer_ready", "loaded")][-1]
                expected = 8e-6 * last.received_bytes / last.after_s
                assert abs(mbits([r for r in seen.rates[target] if r != "–"][-1]) / expected - 1) < 0.1
            assert any(state.endswith(("loading", "live")) for state in seen.states), seen.states
            assert seen.split, "batches that both members of a pair computed"
            first = min(p.first_cooperative_token_ms for p in record.live if p.first_cooperative_token_ms is not None)
            assert seen.first, "the first token of both members of a pair, while it happened"
            told_first = f"first token computed by both members of a pair after {first:.0f} ms"
            assert await page.inner_text("#operation .first") == told_first
            # Another planner, which has it from the stream, says the same by another gateway.
            before = await history(stack, record.plan_id)
            assert before is not None
            for service in ("planner", "gateway"):
                await stack.restart(service)

            async def known() -> bool:
                return await history(stack, record.plan_id) is not None

            await eventually(known, ENDS_WITHIN_S)
            assert await history(stack, record.plan_id) == before
            assert (before["hops"], before["bytes"]) == (list(msgspec.to_builtins(record.hops)), record.bytes)


async def history(stack: LabStack, plan_id: str) -> dict[str, Any] | None:
    """One operation as the command shows it; None: it does not."""
    asked = ["history", "--json", "--url", stack.url]
    shown = await asyncio.to_thread(CliRunner().invoke, app, asked)
    if shown.exit_code:
        return None
    found: list[dict[str, Any]] = json.loads(shown.stdout)["records"]
    return next((each for each in found if each["plan_id"] == plan_id), None)


async def ended(stack: LabStack, plan_id: str) -> ScaleRecord:
    async def over() -> bool:
        record = await stack.admin.scale_record(plan_id)
        return record.status != "running" and all(pair.outcome != "running" for pair in record.live)

    await eventually(over, ENDS_WITHIN_S)
    record = await stack.admin.scale_record(plan_id)
    assert record.status == "done", record
    return record
