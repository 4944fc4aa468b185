"""The pairs of one worker: at most one as source, one as target. Whatever concerns them comes in here.

What the worker does as either is in ``source_side`` and ``target_side``.
"""

from __future__ import annotations

from collections.abc import Callable

from services.worker.instance.instance import Instance
from services.worker.instance.progress import ProgressReporter
from services.worker.live.source import LiveSource
from services.worker.live.source_side import SourceSide
from services.worker.live.target import LiveTarget
from services.worker.live.target_side import TargetSide
from services.worker.live.tensors import Tensors
from services.worker.requests.inbox import Serving
from services.worker.scheduling.gateways import Gone
from services.worker.weights.peers import TENSOR_LANE, Peers
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.messages.common import Ack
from shared.messages.live import (
    Dissolve,
    HandOver,
    LiveOffer,
    PairEnded,
    Pull,
    PullKv,
    Seal,
    Settle,
    Taken,
    ZigzagAssignment,
)
from shared.messages.scaling import ChainMember
from shared.transport.base import TensorTransport


class PairRoles:
    """Event loop only."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        worker_id: str,
        peers: Peers,
        serving: Serving,
        progress: ProgressReporter,
        instance: Callable[[], Instance | None],
        changed: Callable[[], None],
        *,
        silence_s: float,
    ) -> None:
        """``instance()``: this worker's; ``changed()``: its state did. ``silence_s``: a member that says nothing for so
        long is gone."""
        self._bus = bus
        self._transport = transport
        self._worker_id = worker_id
        self._peers = peers
        self._silence_s = silence_s
        self._as_source = SourceSide(bus, worker_id, serving, instance, changed, self._tensors, silence_s=silence_s)
        self._as_target = TargetSide(
            bus, worker_id, serving, progress, instance, changed, self._tensors, silence_s=silence_s
        )

    @property
    def source(self) -> LiveSource | None:
        """The pair whose source this worker is."""
        return self._as_source.source

    @property
    def target(self) -> LiveTarget | None:
        """The pair whose target this worker is."""
        return self._as_target.target

    async def subscribe(self) -> list[Subscription]:
        """Listen; the caller closes what is returned."""
        bus, me, as_source, as_target = self._bus, self._worker_id, self._as_source, self._as_target

        def live(operation: str) -> str:
            return subjects.worker_live(me, operation)

        return [
            await bus.respond(live("offer"), LiveOffer, self.on_offer),
            await bus.respond(live("hand_over"), HandOver, as_target.on_hand_over),
            await bus.respond(live("seal"), Seal, as_target.on_seal),
            await bus.respond(live("pull"), Pull, as_target.on_pull),
            await bus.respond(live("pull_kv"), PullKv, as_target.on_pull_kv),
            await bus.respond(live("settle"), Settle, as_target.on_settle),
            await bus.respond(live("dissolve"), Dissolve, as_target.on_dissolve),
            await bus.respond(live("taken"), Taken, as_source.on_taken),
            await bus.subscribe(subjects.worker_pair_ended(me), PairEnded, self._on_pair_ended),
        ]

    async def on_assignment(self, assignment: ZigzagAssignment) -> None:
        """Begin a pair as its source; as its target only take the gates. Others' are ignored."""
        if assignment.target.worker_id == self._worker_id:
            self._as_target.on_assignment(assignment)
        elif assignment.source.worker_id == self._worker_id and not assignment.revision:
            finishing = "" if self.target is None else self.target.assignment.pair_id
            await self._as_source.on_assignment(assignment, finishing)

    async def on_offer(self, offer: LiveOffer) -> Ack:
        """Accept a pair as its target. Raises what ``TargetSide.on_offer`` raises."""
        return await self._as_target.on_offer(offer)

    def _on_pair_ended(self, message: PairEnded) -> None:
        self._as_source.on_pair_ended(message)
        self._as_target.on_pair_ended(message)

    def loaded(self, instance: Instance) -> None:
        """The instance has everything."""
        self._as_target.loaded(instance)

    async def instance_gone(self, instance: Instance, reason: str) -> None:
        """The instance's engine is about to stop: its pairs end before."""
        await self._as_target.instance_gone(instance, reason)
        await self._as_source.instance_gone(instance, reason)

    def arrived(self) -> None:
        """A request was accepted here."""
        self._as_source.arrived()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more; the other member has to know as well."""
        self._as_target.cancel(request_id, attempt)
        self._as_source.cancel(request_id, attempt)

    def cancel_gateway(self, gone: Gone) -> None:
        """Gateways are gone. The other member notices by itself."""
        self._as_target.cancel_gateway(gone)

    async def close(self) -> None:
        """Leave both pairs and wait for what runs."""
        await self._as_source.close()
        await self._as_target.close()

    async def _tensors(self, other: ChainMember, epoch: int) -> Tensors:
        channel = await self._peers.channel(other.transport_address, other.host, lane=TENSOR_LANE)
        return Tensors(self._transport, channel, epoch, timeout_s=self._silence_s)
