"""Weights in and out of one worker: fills its copies as plans say, and serves the feeds that others ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from services.worker.core.upstreams import PlanPart, StripeSources
from services.worker.instance.instance import Instance
from services.worker.instance.progress import ProgressReporter
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.copies import Copies, Offer
from services.worker.weights.feed_client import FeedClient
from services.worker.weights.pace import Paces
from services.worker.weights.peers import PeerChannels
from services.worker.weights.receiving import Fill
from services.worker.weights.sending import Sender
from shared import subjects
from shared.bus.base import Bus
from shared.messages.feeds import FeedEnded
from shared.messages.plans import ScalePlan
from shared.messages.registry import ModelRecord, WorkerInfo
from shared.subjects import Process
from shared.transport.base import TensorTransport

OnReady = Callable[[int], Awaitable[None]]


class WeightMover:
    """Nothing here changes an instance's state."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        me: WorkerInfo,
        peers: PeerChannels,
        progress: ProgressReporter,
        *,
        stall_s: float,
        paces: Paces | None = None,
    ) -> None:
        """``stall_s``: a link that moves no byte for this long has failed. ``paces``: of reads; none by default."""
        self._bus = bus
        self._transport = transport
        self._me = me
        self._peers = peers
        self._progress = progress
        self._stall_s = stall_s
        self._paces = paces or Paces()
        self.copies = Copies()
        self.sender = Sender(self.copies, peers.channel, self._tell_receiver, stall_s=stall_s)
        self._fills: set[Fill] = set()

    def offer(self, instance: Instance) -> None:
        """Others may read the instance's copy, as far as it is there."""
        offer = Offer("gpu", instance.record.model_hash, instance.copy, instance.pinned, instance.instance_id)
        self.copies.offer(offer)

    def withdraw(self, instance: Instance) -> None:
        """No new reader gets the instance's copy."""
        self.copies.withdraw("gpu", instance.copy)

    def give_up(self, instance: Instance) -> None:
        """The instance has no copy any more, and will not have one again."""
        self.withdraw(instance)
        self.copies.given_up = instance.instance_id

    async def end_feeds(self, instance: Instance) -> None:
        """The instance failed: the readers of its copy are told to go elsewhere."""
        self.withdraw(instance)
        await self.sender.end_feeds_of(instance.copy)

    async def fill(self, plan: ScalePlan, part: PlanPart, instance: Instance) -> None:
        """Load an instance's copy, as the plan says. Raises what ``Fill.run`` raises."""
        plan_id, instance_id = plan.plan_id, instance.instance_id

        async def first_byte() -> None:
            await self._progress.tell(plan_id, instance_id, "first_byte")

        told = 0

        async def ready(unit: int) -> None:
            nonlocal told
            instance.received_bytes += instance.layout.units[unit].num_bytes
            # A layer is of use once all before it are there; messages may overtake each other.
            while told < instance.copy.layers_ready:
                told += 1
                instance.on_layer_ready()
                await self._progress.tell(
                    plan_id, instance_id, "layer_ready", layer=told - 1, received_bytes=instance.received_bytes
                )

        await self._fill(
            plan_id,
            plan.model,
            instance.copy,
            part.member.epoch,
            part.chain.chunk_bytes,
            part.stripes,
            first_byte,
            ready,
        )

    async def fill_host(
        self, model: ModelRecord, copy: WeightCopy, epoch: int, chunk_bytes: int, sources: StripeSources
    ) -> None:
        """Load a host copy. Raises what ``Fill.run`` raises."""

        await self._fill(
            f"host-copy-{epoch}", model, copy, epoch, chunk_bytes, (sources,), _nobody_waits, _nobody_waits
        )

    async def _fill(
        self,
        plan_id: str,
        model: ModelRecord,
        copy: WeightCopy,
        epoch: int,
        chunk_bytes: int,
        stripes: Sequence[StripeSources],
        first_byte: Callable[[], Awaitable[None]],
        ready: OnReady,
    ) -> None:
        client = FeedClient(self._bus, self._me, self._peers, self.copies, plan_id, model, epoch, chunk_bytes)
        fill = Fill(
            copy,
            model.path,
            model.files,
            self._transport,
            client,
            epoch,
            chunk_bytes,
            stripes,
            first_byte,
            ready,
            stall_s=self._stall_s,
            paces=self._paces,
        )
        self._fills.add(fill)
        try:
            await fill.run()
        finally:
            self._fills.discard(fill)

    def on_feed_ended(self, notice: FeedEnded) -> None:
        """A sender gave up a feed to this worker."""
        for fill in self._fills:
            fill.on_feed_ended(notice)

    async def _tell_receiver(self, worker: Process, notice: FeedEnded) -> None:
        await self._bus.publish(subjects.worker_feed_ended(worker), notice)


async def _nobody_waits(*_: int) -> None:
    """Progress of a host copy: it counts when it is whole."""
