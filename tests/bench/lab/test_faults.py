"""Weight transfers between hosts when processes are killed and links fail: every target ends whole, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.lab.checkpoint import make_checkpoint
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from shared.checkpoint import inspect_checkpoint
from shared.messages.operations import ScaleRecord
from tests.bench.lab.labs import MARKS, Lab, lab_network

pytestmark = MARKS

NUM_HOSTS = 5
RATE = Rate.parse("100mbit")
"""Undisturbed, an operation takes about 4.5 s: it is disturbed in its middle, also by a test that a busy machine does
not run for a second."""
SLOW = Rate.parse("10mbit")
MODEL_MIB, OTHER_MIB = 48, 16
OTHER = "other"
CUT_S = 1.5
WHOLE_AT_MOST = 1.3
"""What a model may cost its receiver's link, in models: what arrived is kept, what was on its way may come twice."""


class WeightsLab(Lab):
    """What is asked of weights and of the links that they take."""

    def __init__(self, network: Network, stack: LabStack, num_bytes: int, other: Path) -> None:
        super().__init__(network, stack)
        self.num_bytes = num_bytes
        """Of the model's weights."""
        self.other = other
        """Another model's checkpoint."""

    async def layers_are_ready(self, record: ScaleRecord, layers: int) -> None:
        """Until every target has this many of its layers, and none has all of them: the middle of the transfer."""

        async def ready() -> bool:
            nonlocal record
            record = await self.stack.admin.scale_record(record.plan_id)
            return min(len(t.layer_ready_ms) for t in record.targets) >= layers

        await self.until(ready, f"every target has {layers} layers")
        assert record.status == "running", record
        assert all(t.loaded_ms is None for t in record.targets), f"too late to disturb anything: {record}"

    async def served(self, record: ScaleRecord, worker_ids: set[str]) -> None:
        """Until these targets serve."""

        async def serve() -> bool:
            targets = (await self.stack.admin.scale_record(record.plan_id)).targets
            assert not any(t.failure for t in targets if t.worker_id in worker_ids), targets
            return worker_ids <= {t.worker_id for t in targets if t.serving_ms is not None}

        await self.until(serve, f"{', '.join(sorted(worker_ids))} serve")

    async def serving(self) -> list[str]:
        """Workers with an instance that serves."""
        return [w.worker.worker_id for w in await self.stack.workers() if w.state == "serving"]

    async def digest(self, worker_id: str) -> str:
        """Of the weights that a worker serves."""
        found = next(w for w in await self.stack.workers() if w.worker.worker_id == worker_id)
        assert found.instance is not None
        assert found.instance.state == "serving"
        return found.instance.weights_digest

    def received_models(self, before: tuple[int, ...], worker_id: str) -> float:
        """Over its NIC since ``before``, as a multiple of the model's size."""
        host = self.stack.host_of(worker_id)
        return (self.network.received_bytes()[host] - before[host]) / self.num_bytes

    def done_once(self, record: ScaleRecord, before: tuple[int, ...], *, at_most: float = WHOLE_AT_MOST) -> None:
        """Every target serves, and none received the model twice: nobody left a sender that lives."""
        assert record.status == "done", record
        received = {t.worker_id: self.received_models(before, t.worker_id) for t in record.targets}
        assert all(0.98 < models < at_most for models in received.values()), received


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WeightsLab]:
    with lab_network(NUM_HOSTS, RATE) as network:
        folder = tmp_path_factory.mktemp("lab-faults")
        checkpoint = make_checkpoint(folder / "models", MODEL_MIB)
        other = make_checkpoint(folder / "others", OTHER_MIB)
        num_bytes = inspect_checkpoint(checkpoint, with_hash=False).layout.num_bytes
        # Without copies in host memory the planner has the one source that a case is about.
        async with LabStack(network, folder / "state", checkpoint, weights_bytes=num_bytes, copies_on=()) as stack:
            yield WeightsLab(network, stack, num_bytes, other)


@pytest_asyncio.fixture(loop_scope="module")
async def lab(running: WeightsLab) -> AsyncIterator[WeightsLab]:
    async with running.case():
        yield running


async def test_who_lost_its_predecessor_continues_from_the_one_before_it(lab: WeightsLab) -> None:
    before = lab.network.received_bytes()
    (source,) = await lab.serving()
    record = await lab.scale(4)
    first, middle, last = (t.worker_id for t in record.targets)
    await lab.layers_are_ready(record, 3)
    await lab.kill(middle)
    await lab.served(record, {first, last})
    # Thrown away and begun anew it would be three halves.
    assert 0.98 < lab.received_models(before, last) < WHOLE_AT_MOST
    assert await lab.digest(last) == await lab.digest(first) == await lab.digest(source)
    record = await lab.ended(record)
    assert {t.worker_id for t in record.targets if t.failure} == {middle}
    await lab.settled(4)


async def test_who_lost_its_source_continues_from_another_serving_copy(lab: WeightsLab) -> None:
    await lab.ended(await lab.scale(2))
    await lab.settled(2)
    await lab.stack.wait_quiet()
    before = lab.network.received_bytes()
    sent_before = lab.network.sent_bytes()
    serving = await lab.serving()
    record = await lab.scale(4)
    targets = [t.worker_id for t in record.targets]
    await lab.layers_are_ready(record, 1)
    sent = lab.network.sent_bytes()
    killed = max(serving, key=lambda w: sent[lab.stack.host_of(w)] - sent_before[lab.stack.host_of(w)])
    (survivor,) = {*serving} - {killed}
    await lab.kill(killed)
    record = await lab.ended(record)
    assert record.status == "done", record
    # All of it came over the network: nobody fell back to a disk, and nobody began anew.
    assert all(0.98 < lab.received_models(before, target) < WHOLE_AT_MOST for target in targets)
    assert {await lab.digest(w) for w in targets} == {await lab.digest(survivor)}
    await lab.settled(4)


async def test_the_only_copy_is_lost_and_its_targets_read_the_rest_from_disk(lab: WeightsLab) -> None:
    before = lab.network.received_bytes()
    (source,) = await lab.serving()
    digest = await lab.digest(source)
    record = await lab.scale(3)
    targets = [t.worker_id for t in record.targets]
    await lab.layers_are_ready(record, 2)
    await lab.kill(source)
    record = await lab.ended(record)
    assert record.status == "done", record
    # The first of the chain read what was missing; the one behind it still got everything from the first.
    assert 0.3 < lab.received_models(before, targets[0]) < 0.9
    assert 0.98 < lab.received_models(before, targets[1]) < WHOLE_AT_MOST
    assert {await lab.digest(w) for w in targets} == {digest}
    await lab.settled(3)


async def test_half_a_chunk_from_a_source_that_died_harms_nobody(lab: WeightsLab) -> None:
    # One hop has the largest chunks, several segments each: some of one are there, the rest never comes.
    (source,) = await lab.serving()
    digest = await lab.digest(source)
    record = await lab.scale(2)
    (target,) = record.targets
    await lab.layers_are_ready(record, 1)
    await lab.kill(source)
    record = await lab.ended(record)
    assert record.status == "done", record
    assert await lab.digest(target.worker_id) == digest
    await lab.settled(2)


async def test_a_slow_link_in_the_middle_delays_and_fails_nobody(lab: WeightsLab) -> None:
    before = lab.network.received_bytes()
    record = await lab.scale(4)
    middle = record.targets[1].worker_id
    await lab.layers_are_ready(record, 3)
    lab.network.set_rate(lab.stack.host_of(middle), SLOW)
    try:
        record = await lab.ended(record)
    finally:
        lab.network.set_rate(lab.stack.host_of(middle), RATE)
    # Slow is not lost: seconds of bytes are on their way when the sender is done with them.
    lab.done_once(record, before, at_most=1.04)
    await lab.settled(4)


async def test_plans_of_one_model_that_overlap_both_end_well(lab: WeightsLab) -> None:
    before = lab.network.received_bytes()
    first = await lab.scale(2)
    await lab.layers_are_ready(first, 1)
    second = await lab.scale(4)
    assert {t.worker_id for t in first.targets}.isdisjoint(t.worker_id for t in second.targets)
    assert len(second.targets) == 2
    for record in (first, second):
        lab.done_once(await lab.ended(record), before)
    await lab.settled(4)


async def test_two_models_scale_at_once_to_workers_of_their_own(lab: WeightsLab) -> None:
    admin = lab.stack.admin
    await admin.add_model(str(lab.other), name=OTHER)
    try:
        await lab.settled(1, model=OTHER, others=1)
        begun = await asyncio.gather(lab.scale(2), lab.scale(3, model=OTHER))
        taken = [t.worker_id for r in begun for t in r.targets]
        assert len(taken) == len(set(taken)) == 3
        records = await asyncio.gather(*map(lab.ended, begun))
        assert [r.status for r in records] == ["done", "done"], records
        await lab.settled(2, others=3)
        await lab.settled(3, model=OTHER, others=2)
    finally:
        await admin.remove_model(OTHER)


async def test_a_link_that_is_cut_for_a_moment_fails_nobody(lab: WeightsLab) -> None:
    before = lab.network.received_bytes()
    record = await lab.scale(4)
    await lab.layers_are_ready(record, 1)
    await lab.cut(record.targets[1].worker_id, CUT_S)
    lab.done_once(await lab.ended(record), before)
    await lab.settled(4)
