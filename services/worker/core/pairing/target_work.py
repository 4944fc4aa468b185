"""What the target of a pair runs: layers of the batches in its queue, as the queue says; of a long prompt in parts. And
what it tells the source: which batch is the source's, and at the end which are whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.gates import Gates
from shared.messages.live import Gate, ZigzagAssignment
from shared.zigzag.batch import ENDED, State
from shared.zigzag.queue import Claim, Layer, Policy, Queue, Shares, Wait


@dataclass(slots=True)
class TargetRun:
    """A batch at the target. Its sequences hold blocks here."""

    batch: PromptBatch
    next_token: int = 0
    """Of the layer that it is inside of: those before it have run."""


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """What the end of a layer was for its batch."""

    ended: bool
    """It is here no more."""
    finished: bool
    """It was the last one: the batch is the target's."""


R = TypeVar("R", bound=TargetRun)


class TargetWork(Generic[R]):
    """Of one pair."""

    def __init__(self, num_layers: int, part_tokens: int, assignment: ZigzagAssignment) -> None:
        """``part_tokens``: most of a part of a layer."""
        self.queue = Queue(num_layers, Policy(assignment.policy))
        self.gates = Gates(assignment)
        self.batches: dict[str, R] = {}
        self.finished: list[str] = []
        """Batches that ended here, in order, and of which the source may not know."""
        self.wanted = ""
        """The claim id of a pull that waits: the batch is its as soon as a layer ends, before another one is begun."""
        self.inside: Layer | None = None
        """Begun, with parts that are left."""
        self.closed = False
        self._part_tokens = part_tokens

    # --- batches come ------------------------------------------------------------------------

    def add(self, run: R, *, behind_seal: bool) -> None:
        """A batch was handed over, and has blocks here. ``arrived`` must follow. Raises what ``Queue.add`` raises."""
        batch = run.batch
        self.queue.add(batch.batch_id, batch.layer_s, behind_seal=behind_seal, absent=True)
        self.batches[batch.batch_id] = run
        self.gates.added(self.queue, batch.batch_id)

    def set_layers_ready(self, layers_ready: int, *, complete: bool) -> None:
        """So many are loaded. ``complete``: head and all, and the source knows: the last layer counts only then, so
        that no batch is finished here which the source may compute as well."""
        num_layers = self.queue.num_layers
        self.queue.set_layers_ready(num_layers if complete else min(layers_ready, num_layers - 1))

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split was computed: both sides are held to it. Too late once everything is loaded."""
        if not self.queue.dissolved and not self.queue.loaded:
            self.gates.set(self.queue, gates)

    # --- layers ------------------------------------------------------------------------------

    def next(self) -> R | None:
        """The batch of which a part of a layer is run now; ``ran`` or ``give_up`` must follow. None: there is nothing
        until something changes."""
        layer = None if self.closed else self.inside or self.queue.next_for_target()
        self.inside = layer
        return None if layer is None else self.batches[layer.batch_id]

    @property
    def is_wanted(self) -> bool:
        """Somebody still waits for the batch that is inside a layer."""
        return self.inside is not None and self.queue.batch(self.inside.batch_id).state is not State.STOPPING

    def next_part(self, run: R) -> tuple[int, int]:
        """Tokens ``begin .. end`` of the layer that it is inside of, which are run next."""
        return run.next_token, run.batch.part_from(run.next_token, self._part_tokens)

    def ran(self, run: R, end: int) -> bool:
        """The part up to ``end`` has run. Whether that was the end of its layer: ``end_layer`` must follow."""
        run.next_token = end if end < run.batch.num_tokens else 0
        return not run.next_token

    def end_layer(self, run: R) -> LayerEnd:
        """The layer was run, or is given up because nobody waits for the batch. What ended is taken out."""
        batch_id = run.batch.batch_id
        self.inside, run.next_token = None, 0
        finished = self.queue.layer_done(batch_id)
        ended = self.queue.batch(batch_id).state in ENDED
        if ended:
            self.batches.pop(batch_id, None)
        if finished:
            self.finished.append(batch_id)
        if self.wanted and isinstance(self.queue.pull(self.wanted), Claim):
            self.wanted = ""  # the source asks again, and gets the same answer
        return LayerEnd(ended, finished)

    def source_knows(self, batch_id: str) -> None:
        """That this batch ended here."""
        if batch_id in self.finished:
            self.finished.remove(batch_id)

    # --- the source pulls --------------------------------------------------------------------

    @property
    def can_dissolve(self) -> bool:
        """Cooperation has nothing left to gain. The baselines have none once everything is loaded."""
        return self.queue.can_dissolve if self.queue.policy is Policy.ZIGZAG else self.queue.loaded

    @property
    def is_over(self) -> bool:
        """Nothing is to be pulled any more."""
        return self.queue.dissolved or self.can_dissolve

    def pull(self, claim_id: str, *, waits: bool) -> Claim | None:
        """The earliest batch, if the source may have it. ``waits``: if it may not yet, the next end of a layer gives it
        to this claim, before another layer is begun."""
        found = None if self.is_over else self.queue.pull(claim_id)
        # Once no pull waits, a claim must not be granted any more: the source would not take it.
        self.wanted = claim_id if isinstance(found, Wait) and waits else ""
        return found if isinstance(found, Claim) else None

    def claim_of(self, batch_id: str) -> Claim | None:
        """The claim of a batch that was pulled and is not settled."""
        return next((c for c in self.queue.open_claims() if c.batch_id == batch_id), None)

    def settle(self, claim_ids: set[str]) -> list[str]:
        """The source has these; unknown and settled ones are ignored. Returns the batches, which are free here now."""
        settled = [c for c in self.queue.open_claims() if c.claim_id in claim_ids]
        for claim in settled:
            self.queue.confirm(claim.claim_id)
        return [claim.batch_id for claim in settled]

    # --- batches go --------------------------------------------------------------------------

    def drop(self, batch_ids: tuple[str, ...]) -> list[PromptBatch]:
        """They are the source's, or have ended: their blocks are to be freed. Those that were here."""
        return [self.batches.pop(i).batch for i in batch_ids if i in self.batches]

    def cancel(self, batch_id: str) -> bool:
        """Nobody waits for any of its requests. Whether it can be dropped now: else its layer's end, or the source's
        settling, drops it."""
        if batch_id not in self.batches or self.claim_of(batch_id) is not None:
            return False
        self.queue.cancel(batch_id)
        return not self.queue.batch(batch_id).in_layer

    def share(self, claim_id: str, source_busy_s: float) -> Shares | None:
        """End the cooperation; None while a batch is inside a layer that only the source could go on from.

        ``source_busy_s``: what the source still has to do. The source settles what it gets with layers that were
        run; of all other batches it has everything.
        """
        if self.inside is not None and not self.queue.loaded:
            return None
        # The source has what it pulled before it asks for this.
        for claim in self.queue.open_claims():
            self.queue.confirm(claim.claim_id)
        shares = self.queue.dissolve(claim_id, source_busy=source_busy_s)
        for claim in shares.given:
            if not claim.first_layer:
                self.queue.confirm(claim.claim_id)
        return shares

    def halt(self) -> None:
        """Run nothing more: the engine cannot, or the pair is over."""
        self.closed, self.inside = True, None

    def close(self) -> list[PromptBatch]:
        """Run nothing more. Returns what was here, whose blocks are to be freed."""
        self.halt()
        batches = [run.batch for run in self.batches.values()]
        self.batches.clear()
        return batches
