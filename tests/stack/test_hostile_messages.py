"""Whatever a service's credentials let somebody send, on whatever subject: no process ends, hangs or grows, clients get
their right tokens all the while, and scaling works afterwards.

A few messages per subject and user by default; with ``BLITZ_TEST_HOSTILE_CASES=10000`` 200 for each, some 14,000 in all
(a fiftieth of the number).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from compose.stack import Stack
from shared import subjects
from shared.messages.admin import MAX_INSTANCES, SetModelBody
from shared.messages.generation import GatewayHeartbeat
from shared.registry import read_registry
from shared.subjects import Process
from tests.stack.client import PATIENCE_S, bus, scale, until
from tests.stack.conftest import MODEL, READY_S, mock_config
from tests.stack.hostile.attack import Attack, Probe, connections, held_bytes, services, tracebacks
from tests.stack.hostile.drawn import Facts, Shot, shots
from tests.stack.hostile.excluded import takes_away
from tests.stack.hostile.targets import TAKES, targets

pytestmark = [pytest.mark.stack, pytest.mark.ucx]

log = logging.getLogger(__name__)

CASES = int(os.environ.get("BLITZ_TEST_HOSTILE_CASES", "0"))
SHORT_CASES_PER_TARGET = 4
MAX_ANSWER_S = 1.0 if CASES else 20.0
"""The short form also runs where other tests take the machine's time."""
MAX_GROWTH_BYTES = 64 * 1024 * 1024
HEAL_S = 10.0
AS_BEFORE = SetModelBody(
    min_instances=1,
    max_instances=MAX_INSTANCES,
    slo_ttft_s=0.0,
    slo_tbt_s=0.0,
    keep_alive_s=0.0,
    served_as="",
    weight=1.0,
    advise=False,
    no_room_timeout_s="default",
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    config = mock_config(tmp_path_factory.mktemp("hostile"), workers=2)
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        yield running


async def facts_of(stack: Stack) -> Facts:
    """True names and values."""
    heard: asyncio.Queue[GatewayHeartbeat] = asyncio.Queue()
    async with bus(stack, "gateway") as gateway:
        await gateway.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, heard.put_nowait)
        view = await read_registry(gateway, timeout_s=60)
        async with asyncio.timeout(PATIENCE_S):
            beat = await heard.get()
    workers = tuple(w.worker for w in view.workers)
    instance = next(w.instance for w in view.workers if w.instance is not None)
    serving = next(w.worker for w in view.workers if w.instance is instance)
    ids = tuple(w.worker_id for w in workers)
    model = view.models[MODEL]
    names = {
        "worker_id": ids, "worker_ids": ids, "source": ids, "target": ids, "targets": ids,
        "gateway_id": (beat.gateway_id, "gw-9"), "instance_id": (instance.instance_id, ""),
        "incarnation": (serving.incarnation, "", "0"), "gateway_incarnation": (beat.incarnation, "0"),
        "host": (serving.host,),
        "transport_address": tuple(w.transport_address for w in workers),
        "model": (MODEL, "other"), "name": (MODEL, "other"), "path": (model.path, "/nowhere"),
        "model_hash": (model.model_hash,), "layout_hash": (model.layout_hash,), "plan_id": (instance.plan_id, "other"),
        "epoch": (instance.epoch,), "publisher": (view.publisher,),
        "sequence": (view.routes_sequence + 1,), "version": (f"{view.publisher}/1",), "pieces": (b"\xff",),
    }  # fmt: skip
    gateways = (Process(beat.gateway_id, beat.incarnation),)
    return Facts(tuple(w.process for w in workers), gateways, model, serving, instance, names)


def cases(facts: Facts) -> list[Shot]:
    """For all targets, in an order of their own."""
    found = targets()
    count = CASES // 50 or SHORT_CASES_PER_TARGET
    drawn = [shot for target in found for shot in shots(target, count, facts, without=takes_away)]
    random.Random(0).shuffle(drawn)
    return drawn


def test_every_subject_that_somebody_may_send_on_is_attacked() -> None:
    found = {target.subject.removeprefix("blitz.v1.") for target in targets()}
    assert found >= TAKES.keys()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(3600 if CASES else 600)
async def test_no_message_ends_holds_up_or_grows_anything(stack: Stack) -> None:
    facts = await facts_of(stack)
    drawn = cases(facts)
    before = services(stack)
    began_s = time.monotonic()
    async with connections(stack) as clients, Probe(stack, MODEL) as probe:
        attack = Attack(clients, answer_s=MAX_ANSWER_S)
        warm_up = len(drawn) // 10
        await attack.send_all(drawn[:warm_up])
        held_before = held_bytes(stack)
        await attack.send_all(drawn[warm_up:])
        took_s = time.monotonic() - began_s
        await asyncio.sleep(HEAL_S if CASES else 2.0)
        held_after = held_bytes(stack)
    grown = {name: held_after[name] - size for name, size in held_before.items()}
    out = attack.outcome
    log.info(
        "%d messages in %.0f s, %d targets, at least %d each; slowest answer %.2f s; %d probes, slowest %.2f s; MiB %s",
        out.sent.total(),
        took_s,
        len(out.sent),
        min(out.sent.values()),
        out.slowest_s,
        len(probe.took_s),
        max(probe.took_s),
        {name: round(size / 2**20, 1) for name, size in grown.items()},
    )
    log.info("answers: %s", dict(sorted(out.answers.items())))
    assert out.faults == []
    assert tracebacks(stack.state_dir.logs) == []
    assert services(stack) == before
    assert probe.wrong == []
    assert max(grown.values()) <= MAX_GROWTH_BYTES
    for model in (await stack.admin.status()).models:
        if model.name != MODEL:
            await stack.admin.remove_model(model.name)
    for worker in await stack.admin.workers():  # which somebody may have had freed
        await stack.admin.undrain_worker(worker.id)
    # The model's settings may be others, too.
    await stack.admin.set_model(MODEL, AS_BEFORE)
    for role in ("prefill", "decode"):  # which somebody may have asked for
        await stack.admin.scale(MODEL, 0, hold_s=0.0, role=role)
    await until(stack, lambda s: len(s.workers) == 2 and s.serving(MODEL) >= 1)
    await scales(stack)
    # What was kept of it, in JetStream and Redis, is no obstacle to whoever begins anew.
    for name in ("planner", "pool", "monitor", "gateway"):
        stack.kill(name)
    await until(stack, lambda s: len(s.workers) == 2 and s.serving(MODEL) >= 1)
    await scales(stack)


async def scales(stack: Stack) -> None:
    """Out and in again."""
    for instances in (2, 1):
        record = await scale(stack, MODEL, instances)
        assert record.status == "done", record
        await until(stack, lambda s, n=instances: s.serving(MODEL) == n)  # type: ignore[misc]
