"""``blitzscale report`` of an operation that a real stack carried out: the page says what the record does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.replay.compare import app
from compose.stack import Stack
from tests.stack.client import complete, openai_client
from tests.stack.conftest import MODEL, NO_DEMAND, READY_S, mock_config
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx]


async def _report(stack: Stack, *arguments: str) -> str:
    found = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--url", stack.url])
    assert found.exit_code == 0, found.output
    return found.stdout


async def test_what_a_stack_did_is_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    config = mock_config(tmp_path / "state", workers=4, **NO_DEMAND)
    async with Stack(config) as stack, openai_client(stack) as client:
        await stack.wait_ready(READY_S)
        burst = asyncio.gather(*(complete(client, MODEL, prompt=[7] * 400, max_tokens=4) for _ in range(24)))
        asked = await stack.admin.scale(MODEL, 4, hold_s=600.0, live="always")
        await burst

        async def has_ended() -> bool:
            return (await stack.admin.scale_record(asked.plan_id)).status == "done"

        await eventually(has_ended)
        report = json.loads(await _report(stack, asked.plan_id, "--json"))
        record = await stack.admin.scale_record(asked.plan_id)
        assert report["sentence"].startswith(f"{MODEL} was scaled out to 4 instances: 3 of 3 serving, the last after ")
        assert report["is_its_decision"]
        assert report["decision"]["asked_by"] == "hand"
        assert [hop["target"] for hop in report["hops"]] == [hop.target for hop in record.hops]
        assert sum(hop["bytes"] for hop in report["hops"]) == pytest.approx(record.bytes)
        # So few bytes may be there before anyone can tell how fast they came.
        rates = [hop["gbps"] for hop in report["hops"] if hop["gbps"] is not None]
        assert min(rates, default=0.0) == pytest.approx(record.gbps)
        phases = {phase["name"]: phase["after_ms"] for phase in report["phases"]}
        assert None not in (phases[name] for name in ("plan", "first byte", "first layer", "loaded"))
        assert phases["serving"] == record.trigger_to_serving_ms

        file = tmp_path / "report.html"
        for name in (MODEL, "latest"):
            assert (await _report(stack, name, "-o", str(file))).startswith(report["sentence"][:60])
            page = file.read_text(encoding="utf-8")
            texts = [asked.plan_id, report["decision"]["otherwise"], *(target.worker_id for target in record.targets)]
            texts += [f"{at_ms:,.1f}" for target in record.targets for at_ms in target.layer_ready_ms]
            assert [text for text in texts if text not in page] == []
            file.unlink()
