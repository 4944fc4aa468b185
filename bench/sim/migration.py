"""Who leaves an instance in virtual time before the end: what waits goes back to the gateway, what is decoded moves
with its KV. As ``services.worker.kv_transfer.migration``, whose rules are ``services.worker.core``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bench.sim.arrivals import Arrivals
from bench.sim.clock import Clock
from bench.sim.kv import Departures, KvPaths, Member
from bench.sim.moves import Move
from bench.sim.processes import Process, Signal, Steps
from bench.sim.streams import Key
from services.worker.core.kv_admission.move_history import LOOK_S, MOVING_AT_ONCE, MoveHistory
from services.worker.core.scheduling.leaving import KvPath, Moving, Takers, see_off, to_make_room
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import SentBack
from shared.messages.common import ErrorInfo, InstanceState
from shared.messages.destinations import Destination, SendBack
from shared.messages.generation import DecodePlace
from shared.messages.plans import MigratePlan


class Leaver(Member, Protocol):
    """The instance (``bench.sim.instance.SimInstance``)."""

    @property
    def state(self) -> InstanceState: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def arrivals(self) -> Arrivals: ...


class Migrator:
    """Of one instance."""

    def __init__(self, clock: Clock, instance: Leaver, paths: KvPaths, departures: Departures) -> None:
        self._clock = clock
        self._instance = instance
        self._paths = paths
        self._departures = departures
        self._history = MoveHistory()
        self._moves: dict[Key, Move] = {}
        self._processes: list[Process] = []
        self._changed = Signal()

    def __len__(self) -> int:
        """Requests that are on their way."""
        return len(self._moves)

    # --- what is told ------------------------------------------------------------------------

    def leave(self, destinations: Sequence[Destination], send_back: SendBack) -> None:
        """The instance drains: see its requests off, as long as it does."""
        if destinations or send_back != "none":
            self._start(self._leave(Takers(destinations), send_back))

    def on_migrate_plan(self, plan: MigratePlan, stored_s: float) -> None:
        """Move some requests, and serve on. ``stored_s``: when it was published."""
        until_s = stored_s + plan.valid_s
        if self._instance.state == "serving" and self._clock.now_s <= until_s:
            self._start(self._move_some(Takers(plan.destinations), plan, until_s))

    def ended(self, sequence: ActiveSequence) -> None:
        """It has ended here, of itself or not."""
        move = self._moves.get(sequence.key)
        if move is not None:
            move.ended()

    def kill(self) -> list[str]:
        """The instance is gone, with all that was to leave it. Returns the requests that others have begun."""
        for process in self._processes:
            process.stop()
        for move in self._moves.values():
            move.kill()
        begun = [move.sequence.request_id for move in self._moves.values() if move.begun]
        self._moves.clear()
        return begun

    # --- who leaves --------------------------------------------------------------------------

    def _start(self, steps: Steps) -> None:
        self._processes = [process for process in self._processes if not process.over]
        self._processes.append(Process(self._clock, steps))

    def _leave(self, takers: Takers, send_back: SendBack) -> Steps:
        moves: list[Move] = []
        # With its last request it goes: none comes to it any more.
        while self._instance.state == "draining" and self._instance.num_requests:
            found = yield from self._look(send_back)
            moves = [move for move in moves if not move.over]
            for moving in found if takers else ():
                if len(moves) < MOVING_AT_ONCE and self._may_try(moving):
                    taker = takers.take(moving.num_tokens, self._clock.now_s)
                    if taker is None:
                        break
                    moves += self._move(moving, taker, takers)
            yield self._changed, self._clock.now_s + LOOK_S

    def _move_some(self, takers: Takers, plan: MigratePlan, until_s: float) -> Steps:
        moves: list[Move] = []
        found = yield from self._look("none")
        if plan.for_head:
            ready = [moving for moving in found if self._may_try(moving)]
            lacking_blocks = self._instance.scheduler.load().lacking_blocks
            found = to_make_room(ready, lacking_blocks, Takers(plan.destinations))
        for moving in found:
            if self._instance.state != "serving" or self._clock.now_s > until_s:
                break
            if not self._may_try(moving):
                continue
            taker = takers.take(moving.num_tokens, self._clock.now_s, at_most=True)
            if taker is not None:
                moves += self._move(moving, taker, takers)
            while len(moves) >= MOVING_AT_ONCE:
                yield self._changed
                moves = [move for move in moves if not move.over]

    def _look(self, send_back: SendBack) -> Steps:
        """Send back what is to go that way; what is worth moving."""
        path = KvPath(self._instance.compute.kv_bytes_per_token, self._history.bytes_per_s)
        goes = ErrorInfo.of(SentBack(f"instance {self._instance.instance_id} goes", retry_after_s=0.0))
        looks: list[list[Moving]] = []

        def look() -> None:
            transfers, moves = self._departures.transfers.values(), self._moves.values()
            sequences = [*[transfer.sequence for transfer in transfers], *[move.sequence for move in moves]]
            leaving = [sequence for sequence in sequences if not sequence.finished]
            looks.append(see_off(self._instance.scheduler, path, send_back, goes))
            for sequence in leaving:
                if sequence.finished:  # it was sent back
                    self._departures.ended(sequence)
                    self.ended(sequence)
            self._changed.fire()

        self._instance.call(look, after_step=True)
        while not looks:
            yield self._changed
        return looks[0]

    def _may_try(self, moving: Moving) -> bool:
        """Whether it is not on its way, and has neither come nor tried to leave a short while ago."""
        key = moving.sequence.key
        may_try = self._history.may_try(key, self._instance.arrivals.begun_at_s(key), self._clock.now_s)
        return may_try and key not in self._moves and key not in self._departures.transfers

    def _move(self, moving: Moving, taker: Destination, takers: Takers) -> list[Move]:
        """It is on its way, if there is anyone to take it."""
        key = moving.sequence.key
        self._history.tried(key, self._clock.now_s)
        place = DecodePlace(worker_id=taker.worker_id, incarnation=taker.incarnation, instance_id=taker.instance_id)
        decoder = self._paths.find(place)
        if decoder is None:
            takers.refused(taker, self._clock.now_s)
            takers.kept(taker, moving.num_tokens)
            return []

        def over(move: Move) -> None:
            del self._moves[key]
            if move.kept:
                takers.refused(taker, self._clock.now_s)
                takers.kept(taker, moving.num_tokens)
            self._changed.fire()

        move = Move(self._clock, self._instance, self._paths, moving, decoder, self._history, over)
        self._moves[key] = move
        return [move]
