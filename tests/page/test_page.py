"""The page in a browser, beside a stack that scales: what is seen is what the records say.

Needs Chromium, and playwright: ``make test-page``.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page

from compose.config import StackConfig
from compose.stack import Stack
from shared import subjects
from shared.messages.load import LatencyReport, MovedRequests
from shared.messages.operations import ScaleRecord
from tests.page.browser import browser, page_of
from tests.plain_http import http_client
from tests.stack.client import PATIENCE_S, bus, complete, openai_client, scale
from tests.stack.conftest import MODEL, NO_DEMAND, READY_S, mock_config
from tests.wait_until import WAIT_S, eventually

KEY = "an-admin-key"
MOVE = """(at) => {
  const slider = document.getElementById("moment");
  slider.value = at;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}"""
AXE = Path(__file__).parents[2] / "build/page/package/axe.min.js"
"""Put there by ``make test-page``."""
HOUR_COST = 2.5
EDGES = """() => [...document.querySelectorAll(".scrolls")]
  .filter((box) => (box.dataset.more || "") !== (box.scrollWidth > box.clientWidth + 1 ? "right" : ""))
  .map((box) => box.getAttribute("aria-label"))"""
"""Tables and pictures, not scrolled yet, whose edge does not say whether they go on beyond it."""
SIZES = [(1280, "light"), (1280, "dark"), (320, "light"), (320, "dark")]


def config(state_dir: Path, **env: str) -> StackConfig:
    return mock_config(state_dir, workers=4, **(NO_DEMAND | env))


def priced(state_dir: Path, **env: str) -> StackConfig:
    return replace(config(state_dir, **env), service_env={"pool": {"BLITZ_POOL_GPU_HOUR_COST": str(HOUR_COST)}})


async def entities(stack: Stack, kind: str) -> dict[str, Any]:
    """What the feed has now of a kind, by name."""
    async with (
        http_client(timeout=PATIENCE_S) as http,
        http.stream("GET", f"{stack.url}/admin/events") as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found = json.loads(line.removeprefix("data: "))["entities"]
                return {name: value for name, value in found.items() if name.startswith(f"{kind}/")}
    raise AssertionError("the feed ended before it began")


async def drawn(page: Page, where: str) -> list[list[str]]:
    """The cells of a table's body."""
    rows = await page.locator(f"{where} tbody tr").all_inner_texts()
    return [row.replace("\N{NO-BREAK SPACE}", " ").split("\t") for row in rows]


def share(part: float) -> str:
    return "< 1 %" if 0 < part < 0.005 else f"{100 * part:.0f} %"


async def violations(page: Page) -> list[str]:
    """Of the rules of accessibility, the serious and the critical ones."""
    await page.evaluate(AXE.read_text())
    found = (await page.evaluate("axe.run()"))["violations"]
    return [f"{v['id']}: {v['help']}" for v in found if v["impact"] in ("serious", "critical")]


async def records(stack: Stack) -> tuple[ScaleRecord, ...]:
    return await stack.admin.scale_records(limit=20)


async def test_a_scale_operation_is_seen_as_its_record_says(tmp_path: Path) -> None:
    async with Stack(config(tmp_path)) as stack, browser() as launched, openai_client(stack) as client:
        await stack.wait_ready(READY_S)
        async with page_of(launched, stack.url) as page:
            await page.wait_for_selector("#models tbody tr")
            assert await page.inner_text("#models tbody th") == MODEL
            await page.wait_for_selector("#cost:has-text('No cost without a price')")
            assert await page.locator("#cost thead th").all_inner_texts() == ["model", "GPU hours", "share", "by state"]
            burst = asyncio.gather(*(complete(client, MODEL, prompt=[7] * 400, max_tokens=4) for _ in range(24)))
            asked = await stack.admin.scale(MODEL, 4, hold_s=600.0, live="always")
            await page.wait_for_selector(f"text=Targets of {asked.plan_id}")

            async def ended() -> ScaleRecord | None:
                (record,) = [r for r in await records(stack) if r.plan_id == asked.plan_id]
                return record if record.status == "done" else None

            await eventually(ended)
            record = await ended()
            assert record is not None
            await page.wait_for_selector("#operation h3:has-text('done')")
            await burst
            # The chain: a box for each of its members, and a line for each hop.
            boxes = await page.locator("#operation svg .name").all_text_contents()
            assert set(boxes) == {h.source or "disk" for h in record.hops} | {h.target for h in record.hops}
            assert await page.locator("#operation svg line").count() == len(record.hops)
            assert len(record.hops) == 3
            rows = await page.locator("#operation tbody").first.locator("tr").all_inner_texts()
            for target in record.targets:
                (row,) = [row for row in rows if row.startswith(target.worker_id)]
                assert target.serving_ms is not None
                assert target.gbps is not None
                shown = f"{target.gbps:.2f} Gbit/s" if target.gbps >= 0.1 else f"{1000 * target.gbps:.1f} Mbit/s"
                assert shown in row
                assert "serves\t4 of 4\t" in row
                assert row.endswith(f"{target.serving_ms:.0f} ms")
            first = [p.first_cooperative_token_ms for p in record.live if p.first_cooperative_token_ms is not None]
            shown = await page.locator(".first").all_inner_texts()
            assert shown == (
                [f"first token computed by both members of a pair after {min(first):.0f} ms"] if first else []
            )
            await page.wait_for_selector("#models :text('4 serving')")
            assert await page.locator(".worker").count() == 4
            past = await page.locator("#past tbody tr").count()
            assert past == len(await records(stack))


async def test_requests_that_moved_and_whose_the_gpus_were_are_drawn_as_the_feed_has_them(tmp_path: Path) -> None:
    slow = priced(tmp_path, BLITZ_MOCK_LAYER_BASE_MS="3.0")
    async with Stack(slow) as stack, browser() as launched, openai_client(stack) as client:
        await stack.wait_ready(READY_S)
        await scale(stack, MODEL, 3)
        async with page_of(launched, stack.url) as page:
            await page.wait_for_selector("#moves:has-text('none in the last minute')")
            long = asyncio.gather(*(complete(client, MODEL, max_tokens=750) for _ in range(9)))
            await page.wait_for_selector("#models td:nth-child(5):text-is('9')", timeout=1000 * WAIT_S)
            await scale(stack, MODEL, 1)
            await page.wait_for_selector("#moves tbody tr", timeout=1000 * WAIT_S)
            await long
            assert await page.locator("#moves thead th").all_inner_texts() == ["model", "requests", "from", "to"]
            assert await page.locator("#cost thead th").all_inner_texts() == [
                "model", "GPU hours", "cost", "share", "by state",
            ]  # fmt: skip
            [stays] = {each.workers[0] for each in (await stack.admin.status()).instances}
            assert {row[3] for row in await drawn(page, "#moves")} == {stays}

            async def are_moves() -> bool:
                moves = await entities(stack, "move")
                rows = [[m["model"], str(m["requests"]), m["from"], m["to"]] for _, m in sorted(moves.items())]
                return bool(rows) and await drawn(page, "#moves") == rows

            async def is_gpu_time() -> bool:
                uses = await entities(stack, "gpu_time")
                shown = await drawn(page, "#cost")
                assert [row[0] for row in shown] == [MODEL, "(no model)"]
                for name, hours, cost, part, states in shown:
                    use = uses[f"gpu_time/{'' if name == '(no model)' else name}"]
                    total_s = sum(use["seconds"].values())
                    of: defaultdict[str, str] = defaultdict(str, (s.split(" ", 1) for s in states.split(", ")))
                    right = (
                        hours == f"{total_s / 3600:.3f} h"
                        and cost == (f"{use['cost']:.2f}" if use["cost"] >= 0.01 else "< 0.01")
                        and use["cost"] == pytest.approx(total_s / 3600 * HOUR_COST, abs=1e-3)
                        and part == share(use["share"])
                        and of == {state: share(s / total_s) for state, s in use["seconds"].items() if s}
                    )
                    if not right:
                        return False
                return True

            await eventually(are_moves)
            await eventually(is_gpu_time)


async def test_a_gateway_that_dies_is_told_of_and_its_successor_is_followed(tmp_path: Path) -> None:
    async with Stack(config(tmp_path)) as stack, browser() as launched:
        await stack.wait_ready(READY_S)
        async with page_of(launched, stack.url) as page:
            await page.wait_for_selector("#models tbody tr")
            stack.kill("gateway")
            await page.wait_for_selector("#connection.stale")
            assert await page.locator("#models tbody tr").count() == 1, "what was known stays"
            await page.wait_for_selector("#connection.live", timeout=1000 * WAIT_S)


async def test_where_a_key_is_set_the_page_is_empty_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLITZ_ADMIN_KEY", KEY)
    async with Stack(config(tmp_path)) as stack, browser() as launched:
        await stack.wait_ready(READY_S)
        async with page_of(launched, stack.url) as page:
            await page.wait_for_selector("#login:not([hidden])")
            assert MODEL not in await page.content()
            await page.fill("#key", "wrong")
            await page.press("#key", "Enter")
            await page.wait_for_selector("#refused:has-text('not valid')")
            await page.fill("#key", KEY)
            await page.press("#key", "Enter")
            await page.wait_for_selector("#models tbody tr")
            assert KEY not in page.url
            assert KEY not in await page.content()
            assert await page.context.cookies() == []
            await page.reload()
            await page.wait_for_selector("#models tbody tr")
        async with page_of(launched, stack.url) as another:
            await another.wait_for_selector("#login:not([hidden])")


async def test_every_view_fits_its_window_and_can_be_read_by_everybody(tmp_path: Path) -> None:
    ways = (("worker-0", "worker-1", 12), ("worker-2", "worker-1", 3))
    moves = tuple(MovedRequests(model=MODEL, source=a, target=b, requests=number) for a, b, number in ways)
    async with Stack(priced(tmp_path)) as stack, browser() as launched, bus(stack, "gateway") as told:
        await stack.wait_ready(READY_S)
        asked = await stack.admin.scale(MODEL, 3, hold_s=600.0, live="always")
        for width, scheme in SIZES:
            async with page_of(launched, stack.url, width, scheme) as page:
                await page.wait_for_selector(f"#operation >> text=Targets of {asked.plan_id}")
                rows = page.locator("#moves tbody tr")

                async def moved(rows: Locator = rows) -> bool:
                    # Again: the gateway may hear of them a moment after the page has what is there.
                    await told.publish(
                        subjects.latencies(), LatencyReport(gateway_id="another", models=(), moves=moves)
                    )
                    await asyncio.sleep(0.2)
                    return await rows.count() == len(moves)

                await eventually(moved)
                await page.wait_for_selector("#cost tbody tr")
                await page.click(f"#past button[data-plan='{asked.plan_id}']")
                await page.wait_for_selector("#moment")
                assert await page.evaluate("document.documentElement.scrollWidth") <= width
                assert await page.evaluate(EDGES) == [], (width, scheme)
                assert await violations(page) == [], (width, scheme)
                if width == 320:  # what is scrolled to its end goes on at the other edge
                    await page.evaluate("document.querySelector('#past .scrolls').scrollLeft = 10000")
                    await page.wait_for_selector("#past .scrolls[data-more='left']")


async def test_the_past_is_looked_at_moment_by_moment(tmp_path: Path) -> None:
    async with Stack(config(tmp_path)) as stack, browser() as launched:
        await stack.wait_ready(READY_S)
        asked = await stack.admin.scale(MODEL, 2, hold_s=600.0, live="never")
        async with page_of(launched, stack.url) as page:
            await page.wait_for_selector(f"#op-{asked.plan_id} h3:has-text('done')")
            record = await stack.admin.scale_record(asked.plan_id)
            (target,) = record.targets
            await page.click(f"#past button[data-plan='{asked.plan_id}']")
            after = f"#past-{asked.plan_id} tbody tr"
            assert "serves\t4 of 4" in await page.inner_text(after)
            for number, at_ms in enumerate(target.layer_ready_ms):
                if at_ms < (target.serving_ms or 0.0):
                    await page.evaluate(MOVE, at_ms)
                    await page.wait_for_selector(f"{after}:has-text('{number + 1} of 4')")
            await page.evaluate(MOVE, 0)
            await page.wait_for_selector(f"{after}:has-text('0 of 4')")
