"""The queue of a pair in live scaling: the target's batches, which the source pulls (paper, section 5.2, Figure 16).

The target owns the queue. Rules:

1. *First come, first served*: batches handed over by the source, in its order, then those that arrived behind the seal.
2. *Target*, whenever free: one layer of the earliest batch whose next layer is loaded; then it looks again, so a newly
   loaded layer brings it back to earlier batches. A device is given the next layer before the one in hand has ended.
3. *Source*, whenever free: pulls the earliest batch and runs the rest of it. It never overtakes: if the earliest batch
   is inside a layer, it waits for the end of what is begun, and no further layer of it is begun meanwhile. Before the
   first layer is loaded it thus pulls whole batches.
4. *Once the target has all layers* it finishes the batch that it has in hand, and the source pulls the next one:
   waiting for a layer's end would gain nothing, and moving that batch would cost a transfer.
5. *A gate* of T layers splits a batch as computed beforehand: the source may not pull it before T layers are done,
   and the target does not go beyond T while any batch is short of its gate: what is begun has to end first. So the
   target's schedule does not depend on the source's, which is what makes predictions hold. A batch whose gate is all
   its layers is the target's own: the source passes it by, and each side still serves its batches in first-come order.
   Gates lapse when reality is late; without gates rules 2 and 3 stand alone.
6. *A pull is a compare-and-swap* on (batch, generation) and idempotent by claim id. The target keeps its copy until the
   claim is confirmed.
7. *Dissolving* seals the queue: claims in flight can still be confirmed, begun batches stay at the target, where their
   KV is, and those that nobody has begun are shared evenly.

Three baselines change rules 2 and 3 only. *Best effort*: the target stays with a batch as long as its next layer is
there, up to half of the layers, then releases it for good and never comes back; the source waits for the earliest to
be released. *Overlap* (PipeSwitch, OSDI'20): no batch is shared. The target takes the earliest untouched one and runs
its layers as they are loaded, to the end; the source takes whole ones only and passes by what the target has begun.
*Stop the world*: the target runs nothing until it has everything.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shared.errors import BadRequest, Conflict
from shared.zigzag.batch import ENDED, BatchEvent, IllegalBatchEvent, QueuedBatch, Side, State
from shared.zigzag.sharing import share_evenly


class Policy(StrEnum):
    """Which rules the two sides follow while the target loads."""

    ZIGZAG = "zigzag"
    BEST_EFFORT = "best_effort"
    OVERLAP = "overlap"
    STOP_THE_WORLD = "stop_the_world"


@dataclass(frozen=True, slots=True)
class Layer:
    """What the target shall run now."""

    batch_id: str
    layer: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch that the source has pulled, until it is confirmed."""

    claim_id: str
    batch_id: str
    generation: int
    """The generation that was swapped out."""
    first_layer: int
    """First layer that the source runs; all before it were run at the target."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The earliest batch cannot be pulled now. Ask again after the next layer's end, or when gates lapse."""

    batch_id: str
    reason: Literal["in_layer", "gate", "in_hand"]


@dataclass(frozen=True, slots=True)
class Shares:
    """What became of the queue: ``kept`` by the target, claims ``given`` to the source, each in first-come order."""

    kept: tuple[str, ...]
    given: tuple[Claim, ...]


class Queue:
    """The queue and its rules. It knows ids and costs; the caller runs layers, moves tensors and reports."""

    def __init__(self, num_layers: int, policy: Policy = Policy.ZIGZAG) -> None:
        if num_layers < 1:
            raise BadRequest(f"a model of {num_layers} layers cannot be split", param="num_layers")
        self.num_layers = num_layers
        self.policy = policy
        self._layers_ready = 0
        self._batches: dict[str, QueuedBatch] = {}
        self._order: list[QueuedBatch] = []
        self._claims: dict[str, Claim] = {}
        self._open: dict[str, QueuedBatch] = {}
        self._in_hand: QueuedBatch | None = None
        self._shares: Shares | None = None
        self._gated = False

    # what there is

    @property
    def layers_ready(self) -> int:
        """Layers 0 .. n-1 are loaded at the target."""
        return self._layers_ready

    @property
    def loaded(self) -> bool:
        """The target has all layers."""
        return self._layers_ready == self.num_layers

    @property
    def dissolved(self) -> bool:
        """Nothing can be added or pulled any more."""
        return self._shares is not None

    def batches(self) -> tuple[QueuedBatch, ...]:
        """All that have not ended, in first-come order. To be read only."""
        return tuple(self._order)

    def batch(self, batch_id: str) -> QueuedBatch:
        """One batch, ended or not. To be read only. Raises ``IllegalBatchEvent`` for an unknown one."""
        found = self._batches.get(batch_id)
        if found is None:
            raise IllegalBatchEvent(f"batch {batch_id!r} is not in this queue")
        return found

    @property
    def can_share(self) -> bool:
        """The target is inside no layer of a batch that goes to the source when the cooperation ends."""
        return not any(batch.in_layer and (batch.released or not self.loaded) for batch in self._order)

    def open_claims(self) -> tuple[Claim, ...]:
        """Claims that are not confirmed, in the order of pulling."""
        return tuple([self._claims[claim_id] for claim_id in self._open])

    @property
    def can_dissolve(self) -> bool:
        """Cooperation has nothing left to gain.

        All layers are loaded, no gate is in force, no pull is in flight, and only the batch in hand is begun. Earlier,
        begun batches would stay at the target while the source ran dry.
        """
        return (
            self.loaded
            and not self._open
            and not any((b.num_begun and b is not self._in_hand) or b.gate is not None for b in self._order)
        )

    # how it fills

    def add(self, batch_id: str, cost: float, *, behind_seal: bool = False, absent: bool = False) -> None:
        """A batch, untouched, at the end of those handed over, or of those that arrived behind the seal.

        ``cost``: time of one of its layers. ``absent``: the target cannot begin it before ``arrived``; the source may
        have it back. Raises ``Conflict`` for a known id or after dissolving.
        """
        if self.dissolved:
            raise Conflict(f"the queue is dissolved; batch {batch_id!r} belongs to an instance")
        if batch_id in self._batches:
            raise Conflict(f"batch {batch_id!r} is already in this queue")
        if not cost > 0:
            raise BadRequest(f"a layer of batch {batch_id!r} cannot cost {cost!r}", param="cost")
        batch = QueuedBatch(batch_id, cost, (behind_seal, len(self._batches)), absent=absent)
        self._batches[batch_id] = batch
        bisect.insort(self._order, batch, key=lambda b: b.place)

    def arrived(self, batch_id: str) -> None:
        """An absent batch is here: the target may begin it."""
        self.batch(batch_id).absent = False

    def set_gate(self, batch_id: str, num_layers: int) -> None:
        """Split a batch: the target runs ``num_layers`` of it, then the source the rest. 0: whole at the source."""
        if self.policy is not Policy.ZIGZAG:
            raise IllegalBatchEvent(f"gates have no meaning under {self.policy}")
        if not 0 <= num_layers <= self.num_layers:
            raise BadRequest(f"a gate of {num_layers} in {self.num_layers} layers", param="gate")
        batch = self.batch(batch_id)
        # A plan may come late: a batch that is beyond its gate, or gone, needs none.
        if batch.state not in ENDED:
            batch.gate = num_layers
            self._gated = True

    def lapse(self, batch_id: str | None = None) -> None:
        """Gates are off: of one batch, or of all."""
        for batch in self._order if batch_id is None else [self.batch(batch_id)]:
            batch.gate = None
        self._gated = any(batch.gate is not None for batch in self._order)

    # the target

    def set_layers_ready(self, layers_ready: int) -> None:
        """The first ``layers_ready`` layers are loaded. Late and repeated reports change nothing."""
        if layers_ready > self.num_layers:
            raise IllegalBatchEvent(f"{layers_ready} layers ready of {self.num_layers}")
        self._layers_ready = max(self._layers_ready, layers_ready)

    def next_for_target(self, layers_ready: int | None = None) -> Layer | None:
        """Begin the layer that the target shall run now, or behind those that it is inside of: they end in the order in
        which they are begun. None: nothing until the next event."""
        if layers_ready is not None:
            self.set_layers_ready(layers_ready)
        batch = self._choose()
        if batch is None:
            return None
        batch.apply(BatchEvent.BEGIN)
        self._in_hand = batch
        batch.num_begun += 1
        return Layer(batch.batch_id, batch.num_begun - 1)

    def layer_done(self, batch_id: str) -> bool:
        """The earliest of its layers that are begun has ended. True: it was the batch's last one, and the batch is
        finished."""
        batch = self.batch(batch_id)
        if batch.next_layer == batch.num_begun:
            raise IllegalBatchEvent(f"no layer of batch {batch_id!r} is begun")
        batch.next_layer += 1
        if batch.next_layer == self.num_layers:
            batch.apply(BatchEvent.FINISH)
        elif batch.next_layer == batch.num_begun:
            self._end(batch)
        self._settle(batch)
        return batch.state is State.FINISHED

    def stopped(self, batch_id: str) -> None:
        """Of a cancelled batch nothing is run any more: the layers that were begun need not end."""
        batch = self.batch(batch_id)
        batch.num_begun = batch.next_layer
        self._end(batch)
        self._settle(batch)

    # the source

    def pull(self, claim_id: str, batch_id: str | None = None, generation: int | None = None) -> Claim | Wait | None:
        """Claim the earliest batch for the source; None: there is nothing to pull.

        With ``batch_id`` and ``generation`` the claim is for exactly that batch. Raises ``Conflict`` when it is no
        longer the earliest or has changed holder, or when ``claim_id`` was used for another batch.
        """
        if (claim := self._claims.get(claim_id)) is not None:
            if batch_id not in {None, claim.batch_id} or generation not in {None, claim.generation}:
                raise Conflict(f"claim {claim_id!r} is for batch {claim.batch_id!r}, generation {claim.generation}")
            return claim
        head = self._head()
        if batch_id is not None and (head is None or head.batch_id != batch_id):
            raise Conflict(f"batch {batch_id!r} is not the earliest to pull")
        if head is None:
            return None
        if generation is not None and head.generation != generation:
            raise Conflict(f"batch {head.batch_id!r} is at generation {head.generation}, not {generation}")
        if head.gate is not None and head.next_layer < head.gate:
            return Wait(head.batch_id, "gate")
        if self.policy is Policy.BEST_EFFORT and head.num_begun and not head.released:
            return Wait(head.batch_id, "in_hand")
        if head.in_layer:
            head.awaited = True
            return Wait(head.batch_id, "in_layer")
        return self._claim(claim_id, head)

    def confirm(self, claim_id: str) -> None:
        """The source has everything; the target may free its copy. Repeating changes nothing."""
        batch = self._resolve(claim_id)
        if batch is not None:
            batch.apply(BatchEvent.CONFIRM)
            self._settle(batch)

    # both

    def cancel(self, batch_id: str) -> Side | None:
        """The client has gone. Returns who held the batch and must free it; None: it has ended at the target.

        A cancel goes to both members: of a batch that has moved, only the source knows more.
        """
        batch = self.batch(batch_id)
        holder = batch.holder
        if batch.state in ENDED:
            return Side.SOURCE if batch.state is State.MOVED else None
        batch.apply(BatchEvent.CANCEL)
        for claim_id in [c for c, claimed in self._open.items() if claimed is batch]:
            del self._open[claim_id]
        self._settle(batch)
        return holder

    def dissolve(self, claim_id: str, source_busy: float = 0.0) -> Shares:
        """End the cooperation. Begun batches stay at the target, untouched ones are shared evenly in first-come order.

        ``source_busy``: time that the source still needs for what it has. Each batch given is a claim of its own
        (``claim_id/batch``), to be confirmed. Repeating returns the same shares. A target without all layers shares
        nothing: everything that waits goes to the source, with what was run of it. Raises ``IllegalBatchEvent`` unless
        ``can_share``.
        """
        if self._shares is not None:
            return self._shares
        if not self.can_share:
            raise IllegalBatchEvent("the target is inside a layer")
        self.lapse()
        waiting = [b for b in self._order if b.state in {State.WAITING, State.RUNNING}]
        if self.loaded:
            own = [b for b in waiting if b.next_layer or b.in_layer]
            released = [b for b in own if b.released]
            own = [b for b in own if not b.released]
            busy = sum([b.cost * (self.num_layers - b.next_layer) for b in own])
            source_busy += sum([b.cost * (self.num_layers - b.next_layer) for b in released])
            untouched = [(b.batch_id, b.cost * self.num_layers) for b in waiting if not b.next_layer and not b.in_layer]
            shares = share_evenly(untouched, source_busy=source_busy, target_busy=busy)
            to_source = {b.batch_id for b in released} | {i for i, side in shares if side is Side.SOURCE}
        else:
            to_source = {b.batch_id for b in waiting}
        given = [self._claim(f"{claim_id}/{b.batch_id}", b) for b in waiting if b.batch_id in to_source]
        kept = [b.batch_id for b in waiting if b.batch_id not in to_source]
        self._shares = Shares(tuple(kept), tuple(given))
        return self._shares

    # inside

    def _choose(self) -> QueuedBatch | None:
        ready = self._layers_ready
        if self.dissolved:
            return next((b for b in self._order if b.can_begin and b.num_begun < ready), None)
        if self.policy is Policy.STOP_THE_WORLD:
            return None
        if self.policy is Policy.BEST_EFFORT:
            return self._choose_best_effort()
        if self.policy is Policy.OVERLAP:
            return self._choose_overlap()
        if not self._gated:
            return next((b for b in self._order if b.num_begun < ready and b.can_begin), None)
        return self._choose_gated(ready)

    def _choose_gated(self, ready: int) -> QueuedBatch | None:
        """The earliest that is short of its gate, or has none. What is beyond its gate only once none is short."""
        short, due, beyond = False, None, None
        for batch in self._order:
            gate = batch.gate
            if gate is not None and batch.next_layer < gate and batch.holder is Side.TARGET:
                short = True
            if not batch.can_begin or batch.num_begun >= ready:
                continue
            if gate is None or batch.num_begun < gate:
                due = due or batch
            beyond = beyond or batch
            if due is not None and short:
                break
        return due if short else beyond

    def _choose_best_effort(self) -> QueuedBatch | None:
        limit = min(self._layers_ready, self.num_layers // 2)
        held = self._in_hand
        if held is not None and held.can_begin and not held.released:
            if held.num_begun < limit:
                return held
            if held.in_layer and held.num_begun < self.num_layers // 2:
                return None  # its next layer may be there by the end of what is begun
            held.released = True
        return self._first_untouched(limit)

    def _choose_overlap(self) -> QueuedBatch | None:
        held = self._in_hand
        if held is not None and held.num_begun < self.num_layers:
            return held if held.can_begin and held.num_begun < self._layers_ready else None
        return self._first_untouched(self._layers_ready)

    def _first_untouched(self, limit: int) -> QueuedBatch | None:
        return next((b for b in self._order if b.can_begin and not b.num_begun), None) if limit else None

    def _head(self) -> QueuedBatch | None:
        """The batch that the source must take next, whether or not it can now."""
        if self.dissolved:
            return None
        for batch in self._order:
            if batch.state not in {State.WAITING, State.RUNNING}:
                continue
            if batch.gate is not None:
                if batch.gate == self.num_layers:
                    continue
            elif (batch is self._in_hand or batch.in_layer) and self._target_finishes_it:
                continue
            return batch
        return None

    @property
    def _target_finishes_it(self) -> bool:
        """What the target has in hand is no use to the source."""
        return self.policy is Policy.OVERLAP or (self.policy is Policy.ZIGZAG and self.loaded)

    def _claim(self, claim_id: str, batch: QueuedBatch) -> Claim:
        claim = Claim(claim_id, batch.batch_id, batch.generation, batch.next_layer)
        batch.apply(BatchEvent.CLAIM)
        self._claims[claim_id] = claim
        self._open[claim_id] = batch
        return claim

    def _resolve(self, claim_id: str) -> QueuedBatch | None:
        if claim_id not in self._claims:
            raise IllegalBatchEvent(f"claim {claim_id!r} was never granted")
        return self._open.pop(claim_id, None)

    @staticmethod
    def _end(batch: QueuedBatch) -> None:
        batch.apply(BatchEvent.END)
        batch.awaited = False

    def _settle(self, batch: QueuedBatch) -> None:
        if batch.state in ENDED:
            self._order.remove(batch)
            if self._in_hand is batch:
                self._in_hand = None
