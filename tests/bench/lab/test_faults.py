"""Weight transfers between hosts when processes are killed and links fail: every target ends whole, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.lab import system
from bench.lab.checkpoint import make_checkpoint
from bench.lab.errors import LabUnavailable
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from shared.checkpoint import inspect_checkpoint
from shared.errors import Conflict, Unavailable
from shared.messages.registry import WorkerRecord
from shared.messages.scaling import ScaleRecord

pytestmark = [
    pytest.mark.root,
    pytest.mark.stack,
    pytest.mark.ucx,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(system.missing()), reason=system.missing() or "a lab can be made"),
]

NUM_HOSTS = 5
RATE = Rate.parse("100mbit")
SLOW = Rate.parse("10mbit")
MODEL_MIB, OTHER_MIB = 24, 16
OTHER = "other"
HOLD_S = 600.0
ENDS_WITHIN_S = 20.0
"""Of every operation; undisturbed, one takes about 2.5 s."""
SETTLES_WITHIN_S = 30.0
"""A killed process starts again, and gets its instance back."""
CUT_S = 1.5
WHOLE_AT_MOST = 1.3
"""What a model may cost its receiver's link, in models: what arrived is kept, what was on its way may come twice."""
_POLL_S = 0.05


class Lab:
    """The stack under test, and what is asked of it in every case."""

    def __init__(self, network: Network, stack: LabStack, num_bytes: int, other: Path) -> None:
        self.network = network
        self.stack = stack
        self.num_bytes = num_bytes
        """Of the model's weights."""
        self.other = other
        """Another model's checkpoint."""

    async def scale(self, instances: int, *, model: str = "") -> ScaleRecord:
        """Begin to scale. Asks again while the workers were leased to another model's plan just now."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while True:
                with contextlib.suppress(Conflict):
                    return await self.stack.admin.scale(model or self.stack.model, instances, hold_s=HOLD_S)

    async def layers_are_ready(self, record: ScaleRecord, layers: int) -> None:
        """Until every target has this many of its layers, and none has all of them: the middle of the transfer."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while min(len(t.layer_ready_ms) for t in record.targets) < layers:
                await asyncio.sleep(_POLL_S)
                record = await self.stack.admin.scale_record(record.plan_id)
        assert record.status == "running", record
        assert all(t.loaded_ms is None for t in record.targets), f"too late to disturb anything: {record}"

    async def served(self, record: ScaleRecord, worker_ids: set[str]) -> None:
        """Until these targets serve, in time."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while not worker_ids <= {t.worker_id for t in record.targets if t.serving_ms is not None}:
                assert not any(t.failure for t in record.targets if t.worker_id in worker_ids), record
                await asyncio.sleep(_POLL_S)
                record = await self.stack.admin.scale_record(record.plan_id)

    async def ended(self, record: ScaleRecord) -> ScaleRecord:
        """The operation's end, in time; whoever failed says why."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while record.status == "running":
                record = await self.stack.admin.scale_record(record.plan_id, wait_s=2.0)
        assert all((t.serving_ms is None) != (t.failure == "") for t in record.targets), record
        return record

    async def settled(self, instances: int, *, model: str = "", others: int = 0) -> None:
        """Until so many instances of the model serve, with equal weights, and every other worker is spare.

        ``others``: instances of other models, beside them.
        """
        name = model or self.stack.model

        def well(workers: tuple[WorkerRecord, ...]) -> bool:
            mine = [w for w in workers if w.instance is not None and w.instance.model == name]
            return (
                len(workers) == NUM_HOSTS
                and len(mine) == instances
                and sum(w.state == "serving" for w in workers) == instances + others
                and sum(w.state == "spare" for w in workers) == NUM_HOSTS - instances - others
                and not any(w.lease_plan_id for w in workers)
            )

        workers = await self._until(well, f"{instances} instances of {name} serve and all others are spare")
        digests = {w.instance.weights_digest for w in workers if w.instance and w.instance.model == name}
        assert len(digests) == 1, digests
        assert "" not in digests

    async def kill(self, worker_id: str) -> None:
        """Kill its process, and wait until the registry knows: what it ran counts as there until its lease ends."""
        before = {w.worker.worker_id: w.worker.incarnation for w in await self.stack.workers()}[worker_id]
        self.stack.kill(worker_id)

        def gone(workers: tuple[WorkerRecord, ...]) -> bool:
            return all(w.worker.incarnation != before for w in workers)

        self._dying = asyncio.create_task(self._until(gone, f"the killed {worker_id} is forgotten"))

    async def forgotten(self) -> None:
        """Until the registry knows of the last kill."""
        await self._dying

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

    async def _until(
        self, condition: Callable[[tuple[WorkerRecord, ...]], bool], what: str
    ) -> tuple[WorkerRecord, ...]:
        deadline_s = time.monotonic() + SETTLES_WITHIN_S
        workers: tuple[WorkerRecord, ...] = ()
        while True:
            with contextlib.suppress(Unavailable):
                workers = await self.stack.workers()
                if condition(workers):
                    return workers
            states = [(w.worker.worker_id, w.state, w.lease_plan_id, w.instance) for w in workers]
            assert time.monotonic() < deadline_s, f"waited in vain until {what}: {states}"
            await asyncio.sleep(_POLL_S)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    with contextlib.ExitStack() as entered:
        try:
            network = entered.enter_context(Network(NUM_HOSTS, RATE))
        except LabUnavailable as error:
            if "another lab" not in error.message:
                raise
            pytest.skip(error.message)
        folder = tmp_path_factory.mktemp("lab-faults")
        checkpoint = make_checkpoint(folder / "models", MODEL_MIB)
        other = make_checkpoint(folder / "others", OTHER_MIB)
        num_bytes = inspect_checkpoint(checkpoint, with_hash=False).layout.num_bytes
        # Without copies in host memory the planner has the one source that a case is about.
        async with LabStack(network, folder / "state", checkpoint, weights_bytes=num_bytes, copies_on=()) as stack:
            yield Lab(network, stack, num_bytes, other)


@pytest_asyncio.fixture(loop_scope="module")
async def lab(running: Lab) -> Lab:
    """One instance serves, four workers are spare, and the links are quiet."""
    await running.scale(1)
    await running.settled(1)
    await running.stack.wait_quiet()
    return running


@contextlib.contextmanager
def only_these_die(lab: Lab, *killed: str) -> Iterator[None]:
    """No other worker's process ends within the block."""
    before = lab.stack.deaths()
    yield
    after = lab.stack.deaths()
    assert {w: after[w] - before[w] for w in before if after[w] != before[w]} == dict.fromkeys(killed, 1)


async def test_who_lost_its_predecessor_continues_from_the_one_before_it(lab: Lab) -> None:
    before = lab.network.received_bytes()
    (source,) = await lab.serving()
    record = await lab.scale(4)
    first, middle, last = (t.worker_id for t in record.targets)
    with only_these_die(lab, middle):
        await lab.layers_are_ready(record, 2)
        await lab.kill(middle)
        await lab.served(record, {first, last})
        # Thrown away and begun anew it would be five thirds.
        assert 0.98 < lab.received_models(before, last) < WHOLE_AT_MOST
        assert await lab.digest(last) == await lab.digest(first) == await lab.digest(source)
        record = await lab.ended(record)
        assert {t.worker_id for t in record.targets if t.failure} == {middle}
        await lab.forgotten()
        await lab.settled(4)


async def test_who_lost_its_source_continues_from_another_serving_copy(lab: Lab) -> None:
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
    with only_these_die(lab, killed):
        await lab.kill(killed)
        record = await lab.ended(record)
        assert record.status == "done", record
        # All of it came over the network: nobody fell back to a disk, and nobody began anew.
        assert all(0.98 < lab.received_models(before, target) < WHOLE_AT_MOST for target in targets)
        assert {await lab.digest(w) for w in targets} == {await lab.digest(survivor)}
        await lab.forgotten()
        await lab.settled(4)


async def test_the_only_copy_is_lost_and_its_targets_read_the_rest_from_disk(lab: Lab) -> None:
    before = lab.network.received_bytes()
    (source,) = await lab.serving()
    digest = await lab.digest(source)
    record = await lab.scale(3)
    targets = [t.worker_id for t in record.targets]
    with only_these_die(lab, source):
        await lab.layers_are_ready(record, 1)
        await lab.kill(source)
        record = await lab.ended(record)
        assert record.status == "done", record
        # The first of the chain read what was missing; the one behind it still got everything from the first.
        assert 0.3 < lab.received_models(before, targets[0]) < 0.9
        assert 0.98 < lab.received_models(before, targets[1]) < WHOLE_AT_MOST
        assert {await lab.digest(w) for w in targets} == {digest}
        await lab.forgotten()
        await lab.settled(3)


async def test_half_a_chunk_from_a_source_that_died_harms_nobody(lab: Lab) -> None:
    # One hop has the largest chunks, several segments each: some of one are there, the rest never comes.
    (source,) = await lab.serving()
    digest = await lab.digest(source)
    record = await lab.scale(2)
    (target,) = record.targets
    with only_these_die(lab, source):
        await lab.layers_are_ready(record, 1)
        await lab.kill(source)
        record = await lab.ended(record)
        assert record.status == "done", record
        assert await lab.digest(target.worker_id) == digest
        await lab.forgotten()
        await lab.settled(2)


async def test_a_slow_link_in_the_middle_delays_and_fails_nobody(lab: Lab) -> None:
    before = lab.network.received_bytes()
    record = await lab.scale(4)
    middle = record.targets[1].worker_id
    with only_these_die(lab):
        await lab.layers_are_ready(record, 2)
        lab.network.set_rate(lab.stack.host_of(middle), SLOW)
        try:
            record = await lab.ended(record)
        finally:
            lab.network.set_rate(lab.stack.host_of(middle), RATE)
        # Slow is not lost: seconds of bytes are on their way when the sender is done with them.
        lab.done_once(record, before, at_most=1.04)
        await lab.settled(4)


async def test_plans_of_one_model_that_overlap_both_end_well(lab: Lab) -> None:
    before = lab.network.received_bytes()
    with only_these_die(lab):
        first = await lab.scale(2)
        await lab.layers_are_ready(first, 1)
        second = await lab.scale(4)
        assert {t.worker_id for t in first.targets}.isdisjoint(t.worker_id for t in second.targets)
        assert len(second.targets) == 2
        for record in (first, second):
            lab.done_once(await lab.ended(record), before)
        await lab.settled(4)


async def test_two_models_scale_at_once_to_workers_of_their_own(lab: Lab) -> None:
    admin = lab.stack.admin
    await admin.add_model(str(lab.other), name=OTHER)
    try:
        await lab.settled(1, model=OTHER, others=1)
        with only_these_die(lab):
            begun = await asyncio.gather(lab.scale(2), lab.scale(3, model=OTHER))
            taken = [t.worker_id for r in begun for t in r.targets]
            assert len(taken) == len(set(taken)) == 3
            records = await asyncio.gather(*map(lab.ended, begun))
            assert [r.status for r in records] == ["done", "done"], records
            await lab.settled(2, others=3)
            await lab.settled(3, model=OTHER, others=2)
    finally:
        await admin.remove_model(OTHER)


async def test_a_link_that_is_cut_for_a_moment_fails_nobody(lab: Lab) -> None:
    before = lab.network.received_bytes()
    record = await lab.scale(4)
    middle = lab.stack.host_of(record.targets[1].worker_id)
    with only_these_die(lab):
        await lab.layers_are_ready(record, 1)
        lab.network.set_link(middle, up=False)
        try:
            await asyncio.sleep(CUT_S)
        finally:
            lab.network.set_link(middle, up=True)
        lab.done_once(await lab.ended(record), before)
        await lab.settled(4)
