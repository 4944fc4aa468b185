"""What the target of a pair is told, and what it wants done."""

from __future__ import annotations

from services.worker.core.live.batch import Batch, Key
from services.worker.core.live.machine import Action, PairEvent
from shared.messages.common import ErrorInfo
from shared.messages.live import (
    Dissolve,
    Gate,
    Pull,
    PullKv,
    Seal,
    Settle,
)

# --- what it is told ---------------------------------------------------------------------------


class HandedOver(PairEvent, frozen=True):
    """The source asks that a batch be taken."""

    question: int
    batch: Batch
    serial: int
    behind_seal: bool


class SourceAsks(PairEvent, frozen=True):
    """Any other question of the source's. An answer follows."""

    question: int
    message: Seal | Pull | PullKv | Settle | Dissolve


class LayersReady(PairEvent, frozen=True):
    """So many are loaded here. ``complete``: head and all."""

    layers_ready: int
    complete: bool = False


class GatesCame(PairEvent, frozen=True):
    """A split was computed: both sides are held to it."""

    gates: tuple[Gate, ...]


class EngineStops(PairEvent, frozen=True):
    """It is about to. What the target kept of a pair that is dissolved it will not finish."""

    reason: str


# --- what it wants done ------------------------------------------------------------------------


class Reserve(Action, frozen=True):
    """Slots and blocks for a batch. Lands with whether there are any."""

    on_engine = lands = True
    batch_id: str


class Free(Action, frozen=True):
    """What these have."""

    on_engine = lands = True
    batch_ids: tuple[str, ...]
    question: int = -1


class HostBatch(Action, frozen=True):
    """Requests of a batch may become this instance's. Lands with whether its hidden states are here: else they will not
    come."""

    lands = True
    batch_id: str
    serial: int


class Embed(Action, frozen=True):
    """A batch, whose hidden states did not come."""

    on_engine = lands = True
    batch_id: str


class SendKv(Action, frozen=True):
    """Of layers that were run, to the source."""

    batch_id: str
    serial: int
    first_layer: int
    last_layer: int


class Forget(Action, frozen=True):
    """Nothing is to be done for these batches any more. ``theirs``: the requests are the source's alone."""

    batch_ids: tuple[str, ...]
    theirs: bool = True


class EndRequests(Action, frozen=True):
    """Nobody wants these any more."""

    on_engine = lands = True
    keys: tuple[Key, ...]


class Wake(Action, frozen=True):
    """The engine may have a layer to run."""

    on_engine = True


class AwaitStepEnd(Action, frozen=True):
    """It lands where the engine is, with nothing in flight."""

    lands = True


class Announce(Action, frozen=True):
    """To gateways: the requests of these are this instance's, unless their first tokens have said so."""

    on_engine = True
    batch_ids: tuple[str, ...]


class TellTaken(Action, frozen=True):
    """To the source: these batches are the target's, or ``loaded``, it has everything. Lands with whether the source
    knows: not if the pair has ended before."""

    lands = True
    batch_ids: tuple[str, ...]
    loaded: bool


class Abandon(Action, frozen=True):
    """The engine failed on batches that are the target's own. Without an ``error`` they are computed in steps."""

    on_engine = True
    batch_ids: tuple[str, ...]
    error: ErrorInfo | None


class Note(Action, frozen=True):
    """For whoever reads along."""

    text: str
    warns: bool = False
