"""What the source of a pair runs between its steps: the rest of the layers of the batches that it pulled, one layer at
a time, of a long prompt in parts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.scheduling.scheduler import Scheduler
from shared.messages.common import LivePolicy

PULL_WAIT_S = 0.25
"""How long one pull waits at the target for a batch."""
LOOK_S = 0.05
"""How often a batch that lacks room here is tried again, whatever the engine says."""
MAX_LEAD_LAYERS = 1.0
"""A batch is asked for at most so long before the one in hand is done."""
_SMOOTHING = 0.5


class Kv(Enum):
    """Of the layers of a batch that ran at the target."""

    HERE = "here"
    COMING = "coming"
    """Its blocks are written."""
    LOST = "lost"


@dataclass(slots=True, eq=False)
class SourceRun:
    """A batch whose sequences have blocks here, and how far it is."""

    batch: PromptBatch
    first_layer: int = 0
    kv_direct: bool = False
    """KV of the layers before leaves the target for the decode instances; that of the others leaves from here."""
    kv: Kv = field(init=False)
    next_layer: int = field(init=False)
    next_token: int = field(init=False, default=0)
    """Of the next layer: those before it have run."""
    busy_s: float = field(init=False, default=0.0)
    has_failed: bool = field(init=False, default=False)
    """The engine cannot run it: its requests are computed in ordinary steps."""

    def __post_init__(self) -> None:
        self.kv = Kv.COMING if self.first_layer else Kv.HERE
        self.next_layer = self.first_layer


R = TypeVar("R", bound=SourceRun)


class SourceWork(Generic[R]):
    """The batches of one pair that are run here, first come, first served."""

    def __init__(self, num_layers: int, part_tokens: int) -> None:
        """``part_tokens``: most of a part of a layer."""
        self.num_layers = num_layers
        self._part_tokens = part_tokens
        self._runs: deque[R] = deque()

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def first(self) -> R | None:
        """The batch in hand."""
        return self._runs[0] if self._runs else None

    @property
    def remaining_s(self) -> float:
        """Expected seconds until the batches here are done. From any thread."""
        return sum(run.batch.layer_s * (self.num_layers - run.next_layer) for run in list(self._runs))

    def is_free(self, scheduler: Scheduler, lead_s: float) -> bool:
        """No prefill is unfinished here, or none for longer than ``lead_s``: the next batch may be asked for, if there
        is room."""
        return not scheduler.has_prefill and not (self._runs and self.remaining_s > lead_s)

    def begin(self, run: R, now_s: float) -> None:
        """Run it after those that are here already."""
        for sequence in run.batch.sequences:
            sequence.first_scheduled_s = sequence.first_scheduled_s or now_s
        self._runs.append(run)

    def next_part(self, run: R) -> tuple[int, int]:
        """Tokens ``begin .. end`` of ``run.next_layer``, which are run next."""
        return run.next_token, run.batch.part_from(run.next_token, self._part_tokens)

    def ran(self, run: R, end: int) -> bool:
        """The part up to ``end`` has run. Whether that was the end of its layer."""
        run.next_token = end
        if end < run.batch.num_tokens:
            return False
        run.next_token = 0
        run.next_layer += 1
        return True

    def is_through(self, run: R) -> bool:
        """All layers of it have run."""
        return run.next_layer == self.num_layers

    def done(self, run: R, scheduler: Scheduler) -> None:
        """The first one has run all its layers, failed or ended."""
        self._runs.popleft()
        if run.kv is Kv.HERE and not run.has_failed:
            scheduler.reservations.release([s for s in run.batch.sequences if s.finished])
        elif run.kv is not Kv.COMING:
            _join(run, scheduler)

    def kv_over(self, run: R, scheduler: Scheduler, *, is_here: bool) -> None:
        """The KV of a batch is whole, or will not come. Its blocks are not written any more."""
        run.kv = Kv.HERE if is_here else Kv.LOST
        if run not in self._runs:
            _join(run, scheduler)


def _join(run: SourceRun, scheduler: Scheduler) -> None:
    """Both are over, its layers here and its KV."""
    sequences = run.batch.sequences
    if run.has_failed:
        scheduler.reservations.compute_here(sequences)
    elif run.kv is Kv.HERE:
        scheduler.reservations.kv_arrived(sequences)
    else:
        scheduler.reservations.kv_lost(sequences)


class PullTime:
    """What pulls take, and so how long before it is free the source asks for the next batch."""

    def __init__(self, pull_s: float = 0.0) -> None:
        """``pull_s``: as measured in the pair before."""
        self.pull_s = pull_s
        self.lead_s = 0.0

    def took(self, seconds: float, layer_s: float) -> None:
        """A pull took so long. ``layer_s``: the longest layer of a batch at the target."""
        self.pull_s += _SMOOTHING * (seconds - self.pull_s)
        self.lead_s = min(self.pull_s, MAX_LEAD_LAYERS * layer_s)


class AfterPull(Enum):
    """What the source does after a pull."""

    HAND_OVER = auto()
    """A batch came: the target has capacity now for what waits here."""
    RUN_BACKLOG = auto()
    """Begin a batch that never went to the target."""
    DISSOLVE = auto()
    ASK_AGAIN = auto()


def parts(policy: LivePolicy, *, target_loaded: bool) -> bool:
    """Whether the source parts from the target now, busy or not: the baselines do once everything is loaded."""
    return target_loaded and policy != "zigzag"


def after_pull(*, pulled: bool, can_dissolve: bool, gets_prompts: bool, has_backlog: bool) -> AfterPull:
    """``pulled``: it brought a batch. ``can_dissolve``: the target says that cooperation has nothing left to gain.
    ``gets_prompts``: new requests may come; a pair that gets none shares what is there, and no more."""
    if pulled:
        return AfterPull.HAND_OVER if has_backlog else AfterPull.ASK_AGAIN
    if can_dissolve or not gets_prompts:
        return AfterPull.DISSOLVE
    return AfterPull.RUN_BACKLOG if has_backlog else AfterPull.ASK_AGAIN
