"""A request in virtual time that moves with its KV to another instance while it is decoded. As
``services.worker.kv_transfer.migration`` does it: room, the KV of its context, then it is held, and what came meanwhile
follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.sim.arrivals import Reservation
from bench.sim.clock import Clock
from bench.sim.flows import Flow
from bench.sim.kv import KvPaths, Member
from bench.sim.processes import Process, Signal, Steps
from services.worker.core.kv_admission.move_history import MORE_TOKENS, MoveHistory
from services.worker.core.scheduling.leaving import Moving
from shared.errors import BlitzError

LOOK_S = 0.25
"""As ``services.worker.kv_transfer.transfer``: that a request has ended is seen at the latest by then."""


class _Ended(Exception):
    """Nobody waits for the request any more."""


class _Refused(Exception):
    """It is decoded where it is."""


class Move:
    """Of one request, from when it is made."""

    def __init__(
        self,
        clock: Clock,
        instance: Member,
        paths: KvPaths,
        moving: Moving,
        decoder: Member,
        history: MoveHistory,
        on_over: Callable[[Move], object],
    ) -> None:
        """``on_over``: called once; the request is the other instance's, is decoded here (``kept``), or has ended."""
        self.sequence = moving.sequence
        self.num_tokens = moving.num_tokens
        self.chunk_tokens = moving.num_tokens + MORE_TOKENS
        limit_tokens = instance.scheduler.config.limit_tokens
        self.context_tokens = min(limit_tokens, len(self.sequence.prompt) + self.sequence.params.max_tokens)
        self.begun = False
        """The other instance has it."""
        self.kept = False
        self.over = False
        self._clock = clock
        self._instance = instance
        self._paths = paths
        self._block_table = moving.block_table
        self._decoder = decoder
        self._history = history
        self._on_over = on_over
        self._reservation: Reservation | None = None
        self._flow: Flow | None = None
        self._lost = False
        self._changed = Signal()
        self._process = Process(clock, self._run())

    # --- what happens meanwhile --------------------------------------------------------------

    def ended(self) -> None:
        """Nobody wants it any more, and it has ended here."""
        self._changed.fire()

    def lost(self) -> None:
        """The other instance has died, without the request. That is noticed later."""
        self._stop()
        self._reservation = None
        self._clock.after(self._paths.notice_s, self._notice)

    def _notice(self) -> None:
        self._lost = True
        self._changed.fire()

    def kill(self) -> None:
        """This instance is gone. The other one, if it does not have the request, notices later."""
        self._process.stop()
        self._stop()
        self.over = True
        if self._reservation is not None and not self.begun:
            self._clock.after(self._paths.notice_s, self._decoder.arrivals.abandon, self._reservation)

    # --- its way -----------------------------------------------------------------------------

    def _run(self) -> Steps:
        reservations, sequence = self._instance.scheduler.reservations, self.sequence
        try:
            yield from self._hand_over()
            self._instance.left(sequence)
        except _Refused:
            self.kept = True
            self._give_up()
            self._instance.call(lambda: reservations.decode_here(sequence))
        except _Ended:
            self._give_up()
            self._instance.call(lambda: reservations.release_held(sequence))
        self.over = True
        self._on_over(self)

    def _hand_over(self) -> Steps:
        arrivals = self._decoder.arrivals
        reserved = yield from self._ask(lambda answer: arrivals.reserve(self, answer), self._hear)
        if not isinstance(reserved, Reservation):
            raise _Refused
        since_s = self._clock.now_s
        yield from self._pause(2 * self._paths.message_s)
        yield from self._send(self.num_tokens)
        reserved.window.release()
        yield from self._pause(self._paths.message_s)
        num_bytes = self.num_tokens * self._instance.compute.kv_bytes_per_token
        self._history.measured(num_bytes, self._clock.now_s - since_s)
        yield from self._hold()
        more = self.sequence.num_tokens - 1 - self.num_tokens
        if more:
            if more > MORE_TOKENS or not (yield from self._ask(lambda answer: arrivals.extend(reserved, more, answer))):
                raise _Refused
            self.num_tokens += more
            yield from self._send(more)
            reserved.window.release()
        yield from self._pause(self._paths.message_s)
        if not (yield from self._ask(lambda answer: arrivals.begin(reserved, answer))):
            raise _Refused

    def _hold(self) -> Steps:
        """Stop decoding it, for the other instance to go on behind the last token."""
        held: list[bool] = []

        def hold() -> None:
            held.append(self._lies_here and self._instance.scheduler.reservations.hold_to_move(self.sequence))
            self._changed.fire()

        self._instance.call(hold, after_step=True)
        # It goes on only once that is known: what is held must not be forgotten.
        while not held:
            yield self._changed
        self._check()
        if not held[0]:
            raise _Refused

    def _send(self, num_tokens: int) -> Steps:
        def arrived(_: Flow) -> None:
            self._flow = None
            self._changed.fire()

        num_bytes = num_tokens * self._instance.compute.kv_bytes_per_token
        path = self._paths.path(self._instance, self._decoder)
        self._flow = self._paths.network.start(path, num_bytes, on_end=arrived, purpose="kv")
        yield from self._until(lambda: self._flow is None)

    # --- questions ---------------------------------------------------------------------------

    def _ask(
        self, question: Callable[[Callable[[Any], object]], object], hear: Callable[[Any], object] = lambda _: None
    ) -> Steps:
        """The answer. ``hear``: told of it even if the request has ended meanwhile."""
        answers: list[object] = []

        def arrive(answer: object) -> None:
            answers.append(answer)
            hear(answer)
            self._changed.fire()

        after, message_s = self._clock.after, self._paths.message_s
        after(message_s, question, lambda answer: after(message_s, arrive, answer))
        yield from self._until(lambda: bool(answers))
        return answers[0]

    def _hear(self, reserved: Reservation | BlitzError) -> None:
        if isinstance(reserved, Reservation):
            self._reservation = reserved
            if self.over:
                self._give_up()

    def _pause(self, seconds: float) -> Steps:
        until_s = self._clock.now_s + seconds
        yield from self._until(lambda: self._clock.now_s >= until_s, until_s)

    def _until(self, condition: Callable[[], bool], look_at_s: float = float("inf")) -> Steps:
        self._check()
        while not condition():
            yield self._changed, min(look_at_s, self._clock.now_s + LOOK_S)
            self._check()

    def _check(self) -> None:
        if self.sequence.finished:
            raise _Ended
        if self._lost or not self._lies_here:
            raise _Refused

    @property
    def _lies_here(self) -> bool:
        """It was not preempted."""
        return self.sequence.block_table is self._block_table

    # --- the end -----------------------------------------------------------------------------

    def _give_up(self) -> None:
        """The other instance does not need room for it."""
        self._stop()
        if self._reservation is not None:
            self._clock.after(self._paths.message_s, self._decoder.arrivals.release, self._reservation)

    def _stop(self) -> None:
        if self._flow is not None:
            self._paths.network.abort(self._flow)
