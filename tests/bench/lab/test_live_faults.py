"""Live scaling when processes are killed and links fail: every request ends once, whole, and nothing is left of it.

``cooperating`` is the situation. Its end checks what is promised in every case: each request is answered with exactly
the tokens that an idle instance gives, and the pair ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import pytest
import pytest_asyncio

from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.live.burst import BurstClient
from bench.live.checkpoint import make_checkpoint
from bench.live.measure import NO_DEMAND
from shared.checkpoint import inspect_checkpoint
from tests.bench.lab.labs import MARKS, lab_network
from tests.bench.lab.live_lab import BURST, FAST, OUTPUT_TOKENS, RATE, STREAM_TOKENS, UNEVEN, WORKER_ENV, LiveLab

pytestmark = MARKS

NUM_HOSTS = 3
NUM_LAYERS = 8
SLOW = Rate.parse("12mbit")
CUT_S = 2.0
MAX_CASES = 10
"""In which, once, the gates come to the target before the source has pulled, or lapse."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveLab]:
    with lab_network(NUM_HOSTS, RATE) as network, contextlib.ExitStack() as entered:
        folder = tmp_path_factory.mktemp("live-faults")
        checkpoint = make_checkpoint(folder / "models", NUM_LAYERS)
        stack = LabStack(
            network,
            folder / "state",
            checkpoint,
            weights_bytes=inspect_checkpoint(checkpoint, with_hash=False).layout.num_bytes,
            worker_env=WORKER_ENV,
            service_env={"monitor": NO_DEMAND},
            # A target with a copy on its own host would need no network.
            copies_on=(),
        )
        async with stack:
            short = BurstClient(stack.url, stack.model, output_tokens=OUTPUT_TOKENS)
            long = BurstClient(stack.url, stack.model, output_tokens=STREAM_TOKENS)
            for client in (short, long):
                entered.callback(client.close)
            lab = LiveLab(network, stack, short, long)
            await lab.prepare()
            yield lab


@pytest_asyncio.fixture(loop_scope="module")
async def lab(running: LiveLab) -> AsyncIterator[LiveLab]:
    running.set_rates(RATE)
    async with running.case():
        yield running


async def test_a_target_that_is_killed_loses_no_request(lab: LiveLab) -> None:
    async with lab.cooperating() as pair:
        await lab.kill(pair.live.target)
    assert pair.live.outcome == "failed"
    # The floor of two holds: another worker takes its place.
    await lab.recovers(2)


async def test_a_source_that_is_killed_leaves_its_requests_to_the_gateway(lab: LiveLab) -> None:
    async with lab.cooperating() as pair:
        await lab.kill(pair.live.source)
    # The target goes on loading, from its own disk.
    assert pair.record.status == "done", pair.record
    # Nobody is left to report what the two did.
    assert pair.live.outcome in ("failed", "unknown")
    await lab.recovers(2)


@pytest.mark.parametrize("member", ["target", "source"])
async def test_a_link_that_is_cut_for_a_moment_loses_no_request(
    lab: LiveLab, member: Literal["target", "source"]
) -> None:
    async with lab.cooperating() as pair:
        await lab.cut(getattr(pair.live, member), CUT_S)
    assert pair.record.status == "done", pair.record
    await lab.recovers(2)


async def test_layers_that_come_at_a_tenth_of_the_speed_delay_no_request(lab: LiveLab) -> None:
    lab.set_rates(SLOW)
    # The first layer may take longer than the burst.
    async with lab.cooperating(BURST * 2, busy_s=0.0) as pair:
        await pair.burst.answered_as_alone()
        assert await lab.loads(pair), "the requests waited for the layers"
    assert pair.record.status == "done", pair.record
    await lab.recovers(2)


async def test_a_load_that_is_cancelled_loses_no_request(lab: LiveLab) -> None:
    admin, model = lab.stack.admin, lab.stack.model
    path = (await admin.status()).models[0].path
    async with lab.cooperating() as pair:
        await admin.remove_model(model)
    # The target's load is cancelled and the source drains: whichever is heard of first ends the pair.
    assert pair.live.outcome in ("failed", "dissolved")
    await lab.settled(0)
    await admin.add_model(path, name=model)
    await lab.recovers(1)


async def test_a_load_whose_plan_is_superseded_loses_no_request(lab: LiveLab) -> None:
    async with lab.cooperating() as pair:
        newer = await lab.supersede(pair)
    assert pair.live.outcome == "failed"
    assert f"superseded by {newer.plan_id}" in pair.live.reason
    assert f"superseded by {newer.plan_id}" in pair.record.targets[0].failure
    await lab.settled(2)
    serving = {w.worker.worker_id: w.instance.instance_id for w in await lab.stack.workers() if w.instance is not None}
    assert serving[pair.live.target] == newer.targets[0].instance_id
    await lab.recovers(2)


async def test_gates_hold_both_sides_unless_layers_are_late(running: LiveLab) -> None:
    for _ in range(MAX_CASES):
        running.set_rates(RATE)
        async with running.case():
            async with running.cooperating(UNEVEN) as pair:
                gates = await running.gates(pair)
                # Not one layer is late from now on, if the machine has time for them.
                running.set_rates(FAST)
            # The long prompts are the target's own, and the source passed them by for short ones behind them.
            assert {0, NUM_LAYERS} <= set(gates.values())
            assert pair.live.outcome == "dissolved"
            await running.settled(2)
        kept = gates.items() & pair.target_layers.items()
        # One may have been pulled before the gates came.
        if len(kept) >= len(gates) - 1 or running.gates_lapsed(pair):
            return
    pytest.fail(f"in none of {MAX_CASES} cases: {gates}, {pair.live}")


async def test_gates_lapse_when_layers_are_late(lab: LiveLab) -> None:
    async with lab.cooperating(UNEVEN) as pair:
        gates = await lab.gates(pair)
        lab.set_rates(SLOW)
        await pair.burst.answered_as_alone()
        assert await lab.loads(pair), "the source waited for the target's layers"
    own = [i for i, num_layers in gates.items() if num_layers == NUM_LAYERS]
    assert own
    assert all(pair.target_layers[i] < NUM_LAYERS for i in own), (gates, pair.live)
    assert pair.live.outcome == "dissolved"
    await lab.settled(2)
