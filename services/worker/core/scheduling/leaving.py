"""Which requests of an instance leave it before they end, how (with their KV, or back to their gateways), and to whom.
Pure.

- A request that is decoded moves with its KV, if what it has left to say takes longer than its KV would. How much that
  is, nobody knows: ``max_tokens`` is an upper bound, mostly far away. So it counts up to ``EXPECTED_TOKENS``.
- A request that has not begun has nothing to move: another instance can begin it as well.
- A prompt that is being computed stays if it soon has its first token, and moves with its KV then; otherwise it is
  begun again elsewhere.
- Left alone are requests that are computed alone (another instance might die of them), and those that have a slot
  without being in a step: they are on their way elsewhere already, or belong to a pair's batches.
- Where an instance only makes room for its first waiting request, those move that hold just enough KV for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.speed import Speed
from shared.messages.common import ErrorInfo
from shared.messages.destinations import Destination, SendBack

EXPECTED_TOKENS = 256
"""Of an answer's rest, at most: the same as gateways assume."""
QUESTIONS_S = 0.02
"""What moving costs whatever the size: a few questions and answers."""
PREFILL_PATIENCE_S = 1.0
"""How long a prompt that is being computed may take until it is moved rather than begun again."""
REFUSED_S = 1.0
"""How long an instance that has refused a request is not asked again."""


@dataclass(frozen=True, slots=True)
class KvPath:
    """What moving KV takes."""

    bytes_per_token: int
    """In all layers."""
    bytes_per_s: float

    def seconds(self, num_tokens: int) -> float:
        """For the KV of so many tokens."""
        return QUESTIONS_S + num_tokens * self.bytes_per_token / self.bytes_per_s


def to_move(scheduler: Scheduler, speed: Speed, path: KvPath) -> list[ActiveSequence]:
    """Requests that are worth moving with their KV, in order of arrival."""
    step_s = speed.decode_base_s + len(scheduler.table.running) * speed.decode_request_s
    decoding = [s for s in scheduler.table.running if s.decodes and not s.alone]
    return [s for s in decoding if _left_s(s, step_s) > path.seconds(s.num_computed)]


@dataclass(frozen=True, slots=True)
class Moving:
    """A request as it is when it begins to move."""

    sequence: ActiveSequence
    num_tokens: int
    """That have KV."""
    block_table: Sequence[int]
    frees: int
    """Blocks that are free when it has left: others may share the rest."""


def to_make_room(movable: Iterable[Moving], lacking: int, takers: Takers) -> list[Moving]:
    """Few requests that free ``lacking`` blocks together, and little more: the smallest that suffices alone, or else
    the largest and what is lacking beside it. None if what ``takers`` take is not enough. Uses ``takers`` up."""
    chosen: list[Moving] = []
    left = sorted(movable, key=lambda moving: moving.frees)
    while left and lacking > 0:
        suffices = (place for place, moving in enumerate(left) if moving.frees >= lacking)
        moving = left.pop(next(suffices, -1))
        if takers.take(moving.num_tokens, 0.0, at_most=True) is not None:
            chosen.append(moving)
            lacking -= moving.frees
    return chosen if lacking <= 0 else []


def to_send_back(scheduler: Scheduler, speed: Speed) -> list[ActiveSequence]:
    """Requests that another instance may as well begin, in order of arrival."""
    table = scheduler.table
    if table.lending:  # a pair shares what waits
        return []
    prompts = [s for s in table.running if not s.finished and not s.decodes and not s.alone]
    return [*(s for s in prompts if _prefill_s(s, speed) > PREFILL_PATIENCE_S), *table.waiting]


def to_hand_back(scheduler: Scheduler) -> list[ActiveSequence]:
    """All that can be: for an instance that goes at once, and has nobody to move anything to."""
    waiting = [] if scheduler.table.lending else scheduler.table.waiting
    return [*(s for s in scheduler.table.running if not s.finished), *waiting]


def see_off(scheduler: Scheduler, path: KvPath, send_back: SendBack, goes: ErrorInfo) -> list[Moving]:
    """Send back what is to go that way, with ``goes``; what is worth moving with its KV. Not to be called while a batch
    is in flight."""
    speed = scheduler.budgets.speed.speed
    if send_back != "none":
        back = to_send_back(scheduler, speed) if send_back == "waiting" else to_hand_back(scheduler)
        scheduler.abort(back, goes)
    num_alone = scheduler.pool.num_alone
    return [Moving(s, s.num_computed, s.block_table, num_alone(s.block_table)) for s in to_move(scheduler, speed, path)]


def _left_s(sequence: ActiveSequence, step_s: float) -> float:
    """Until it will have ended here; infinite while no step was measured."""
    left = min(sequence.params.max_tokens - len(sequence.output), EXPECTED_TOKENS)
    return left * step_s if step_s else float("inf")


def _prefill_s(sequence: ActiveSequence, speed: Speed) -> float:
    """Until its first token; infinite while no speed was measured."""
    left = sequence.num_tokens - sequence.num_computed
    return left / speed.prefill_tokens_per_s if speed.prefill_tokens_per_s else float("inf")


class Takers:
    """Instances that take requests over. The one that can still be given the most gets the next; one that has refused
    gets none for ``REFUSED_S``. Times are of any one clock, in seconds."""

    def __init__(self, destinations: Iterable[Destination]) -> None:
        self._left = {destination: destination.kv_tokens for destination in destinations}
        self._paused_until_s: dict[Destination, float] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, num_tokens: int, now_s: float, *, at_most: bool = False) -> Destination | None:
        """Who gets a request of so many tokens of KV; it counts as given. None: nobody now. ``at_most``: nobody gets
        more than was planned."""
        ready = [d for d in self._left if self._paused_until_s.get(d, now_s) <= now_s]
        taker = max(ready, key=lambda d: (self._left[d], d.instance_id), default=None)
        if taker is None or (at_most and self._left[taker] < num_tokens):
            return None
        self._left[taker] -= num_tokens
        return taker

    def kept(self, taker: Destination, num_tokens: int) -> None:
        """The request did not go there after all."""
        self._left[taker] += num_tokens

    def refused(self, taker: Destination, now_s: float) -> None:
        """It does not take requests now."""
        self._paused_until_s[taker] = now_s + REFUSED_S
