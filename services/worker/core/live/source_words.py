"""What the source of a pair is told, and what it wants done."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from services.worker.core.live.batch import Batch, Key, Request
from services.worker.core.live.machine import Action, PairEvent
from services.worker.core.scheduling.reservations import Reservations
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.codec import Message
from shared.messages.common import ErrorInfo
from shared.messages.live import SplitBatch, Taken

# --- what it is told ---------------------------------------------------------------------------


class RequestArrived(PairEvent, frozen=True):
    """A request was accepted: it goes the way of the others."""


class EngineFree(PairEvent, frozen=True):
    """``SourceMachine.is_idle``, no prefill is unfinished here, and ``expected_lengths`` fit."""


class RestOver(PairEvent, frozen=True):
    """The requests of a batch whose KV left from both members are decoded elsewhere, have ended, or are to be decoded
    here."""

    batch_id: str


class TargetAsks(PairEvent, frozen=True):
    """The target finished batches: their requests are its own. An answer follows."""

    question: int
    message: Taken


class TargetEnded(PairEvent, frozen=True):
    """The target says that the pair is over, and which batches it owns."""

    reason: str
    finished: tuple[str, ...]


# --- what it wants done ------------------------------------------------------------------------


class AskOffer(Action, frozen=True):
    """It lands once the target takes part, and tensors can go there and back."""

    lands = True


class Lent(msgspec.Struct, frozen=True):
    """What waited in the scheduler is the pair's. ``token_s``: of a prompt token through all layers; 0: unknown."""

    requests: tuple[Request, ...]
    token_s: float


class Lend(Action, frozen=True):
    """Take what waits in the scheduler and has not begun; the first time ``begins`` the lending. Lands with ``Lent``,
    or with None if the engine is in another pair."""

    on_engine = lands = True
    begins: bool


class Lending(Action, frozen=True):
    """The queue is two instances' from now on, or no more."""

    begun: bool


class HandOverAnswer(msgspec.Struct, frozen=True):
    """Whether the target took a batch, or has no capacity for it now; ``asked`` not, since nobody wants it any more.
    ``ended``: requests of it that have ended by now."""

    taken: bool
    asked: bool = True
    ended: tuple[Key, ...] = ()


class AskHandOver(Action, frozen=True):
    """Lands with ``HandOverAnswer``."""

    lands = True
    batch: Batch
    serial: int
    behind_seal: bool


class AskTarget(Action, frozen=True):
    """Of the target. Lands with its answer, and whether new requests may come here."""

    lands = True
    message: Message


class AskSplit(Action, frozen=True):
    """Of the planner. It lands once that knows, or cannot be told."""

    lands = True
    batches: tuple[SplitBatch, ...]
    source_free_s: float
    pull_s: float


class KeepAlive(Action, frozen=True):
    """Signs of life to the target, and claims that are settled."""

    on: bool


class Look(Action, frozen=True):
    """``EngineFree`` follows, if it is."""

    on_engine = True


class ReceiveHidden(Action, frozen=True):
    """Of a pulled batch. Lands with whether they are here."""

    lands = True
    batch_id: str
    serial: int


class SendRest(Action, frozen=True):
    """KV of the other layers leaves from here, until ``RestOver``."""

    batch_id: str
    first_layer: int


class BeginBatch(Action, frozen=True):
    """Slots and blocks for a batch that is run from this layer on; then its KV may be written. Lands with whether there
    are any now."""

    on_engine = lands = True
    batch_id: str
    first_layer: int


class Ran(Enum):
    """What came of a part of a layer, or of sampling first tokens."""

    WELL = "well"
    FAILED = "failed"
    """The engine cannot do it."""
    NOT = "not"
    """All requests of the batch have ended."""


class Done(Action, frozen=True):
    """A batch is run here no more, whatever became of it."""

    batch_id: str
    first_layer: int
    at_s: float
    forget: bool
    """It is computed from the beginning: nothing of its KV leaves."""


class How(Enum):
    """A batch's requests go on, its layers and its KV being over."""

    DECODED = "decoded"
    """Those that have ended are released; the others decode already."""
    KV_ARRIVED = "kv_arrived"
    """All KV is here: what has not ended decodes."""
    KV_LOST = "kv_lost"
    """It never will be: what has not ended is computed again, in steps."""
    COMPUTE_HERE = "compute_here"
    """The layers could not be run: they are computed in steps."""

    def apply(self, reservations: Reservations, sequences: Sequence[ActiveSequence]) -> None:
        """To the requests of a batch, where the engine is."""
        match self:
            case How.DECODED:
                reservations.release([s for s in sequences if s.finished])
            case How.KV_ARRIVED:
                reservations.kv_arrived(sequences)
            case How.KV_LOST:
                reservations.kv_lost(sequences)
            case How.COMPUTE_HERE:
                reservations.compute_here(sequences)


class Conclude(Action, frozen=True):
    """Nothing of a batch is written or run for the pair any more."""

    on_engine = True
    batch_id: str
    how: How


class FetchKv(Action, frozen=True):
    """Of the layers that the target ran. Lands with whether it is here: it is not written any more."""

    lands = True
    batch_id: str
    serial: int
    first_layer: int


class LookAtRest(Action, frozen=True):
    """Lands with whether all requests of the batch have ended here, or left."""

    on_engine = lands = True
    batch_id: str


class WithholdKv(Action, frozen=True):
    """Nothing of a batch's KV leaves from here."""

    batch_id: str


class SettleSoon(Action, frozen=True):
    """Tell the target of a claim, with the next sign of life or ``Settle``."""

    claim_id: str


class TellCancelled(Action, frozen=True):
    """To the target."""

    keys: tuple[Key, ...]


class Moved(Action, frozen=True):
    """The requests of these batches are the target's: gateways find them there."""

    batch_ids: tuple[str, ...]
    at_s: float


class ReleaseToTarget(Action, frozen=True):
    """The same, for the scheduler."""

    on_engine = True
    batch_ids: tuple[str, ...]


class Restore(Action, frozen=True):
    """Nothing is lent any more: what is the source's waits in the scheduler again, at its old places; what is in doubt
    ends with an error."""

    on_engine = lands = True
    batch_ids: tuple[str, ...]
    keys: tuple[Key, ...]
    """Requests in no batch."""
    in_doubt: tuple[str, ...]
    doubt: ErrorInfo | None
