"""Migration: requests that are decoded here move with their KV to other instances of the same weights; their clients
notice nothing (``docs/decisions/0021-migration.md``).

While a request's capacity is reserved and the KV of its context travels, it is decoded on. Then it is held: the KV of
the tokens made meanwhile follows, and the other instance begins with the last token. So the stream stops for about one
step and what is left to send, not for the whole transfer. It moves under the same attempt by the protocol of
disaggregated serving: whatever goes wrong before the other instance has it, it is decoded on here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from services.worker.core.kv_admission.move_history import LOOK_S, MORE_TOKENS, MOVING_AT_ONCE, Key, MoveHistory
from services.worker.core.scheduling.leaving import Moving, Takers, to_make_room
from services.worker.core.scheduling.schedule import Sampled
from services.worker.engine.loop import EngineLoop
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.decode_client import DecodeClient
from services.worker.kv_transfer.departures import Departures
from services.worker.kv_transfer.transfer import Chunk, DecodeRefused, KvTransfer, StaysHere
from shared import subjects
from shared.aio import OwnedTasks, Wakeup
from shared.bus.base import Bus
from shared.errors import BlitzError, SentBack, Unavailable
from shared.messages.common import ErrorInfo
from shared.messages.destinations import Destination, Destinations, GetDestinations, SendBack
from shared.messages.generation import DecodePlace
from shared.messages.plans import MigratePlan

log = logging.getLogger(__name__)

ASK_S = 1.0
"""How long a worker that is being stopped waits for the planner's word on its requests."""


class Move(KvTransfer):
    """A request that is decoded while its KV travels."""

    def __init__(self, moving: Moving, place: DecodePlace, instance: Instance) -> None:
        sequence, limit = moving.sequence, instance.scheduler.limit_tokens
        super().__init__(sequence, moving.num_tokens, place, instance, chunk_tokens=moving.num_tokens + MORE_TOKENS)
        self.context_tokens = min(limit, len(sequence.prompt) + sequence.params.max_tokens)
        self.ran_layers(moving.block_table, Chunk(0, moving.num_tokens), self.last_layer)

    def check(self) -> None:
        """Raises ``StaysHere``, too, once it was preempted: it has other KV then."""
        super().check()
        if not self.lies_in(self.block_table):
            raise StaysHere("it was preempted")


class Migrator:
    """Event loop only."""

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        departures: Departures,
        instance: Callable[[], Instance | None],
        arrived_at_s: Callable[[Key], float | None],
    ) -> None:
        """``arrived_at_s``: when a request was taken over from another instance, if it was."""
        self._bus = bus
        self._worker_id = worker_id
        self._departures = departures
        self._instance = instance
        self._arrived_at_s = arrived_at_s
        self._history = MoveHistory()
        self._ended = Wakeup()
        self._tasks = OwnedTasks()

    async def close(self) -> None:
        """Begin nothing more."""
        await self._tasks.close()

    # --- who leaves ----------------------------------------------------------------------------

    def leave(self, instance: Instance, destinations: Sequence[Destination], send_back: SendBack) -> None:
        """The instance drains: see its requests off, as long as it does."""
        if destinations or send_back != "none":
            self._tasks.start(self._leave(instance, Takers(destinations), send_back))

    def ask_and_leave(self, instance: Instance) -> None:
        """The worker is being stopped, and the instance drains: ask the planner where its requests may go, if it has
        any. Without an answer they end here."""
        self._tasks.start(self._ask_and_leave(instance))

    async def _ask_and_leave(self, instance: Instance) -> None:
        with contextlib.suppress(Unavailable):  # the engine has stopped: nothing is left
            if not await asyncio.wrap_future(instance.engine.count_requests()):
                return
        question = GetDestinations(worker_id=self._worker_id, instance_id=instance.instance_id)
        try:
            answer = await self._bus.request(subjects.planner("destinations"), question, Destinations, timeout_s=ASK_S)
        except BlitzError as error:
            log.info("requests of %s end where they are: %s", instance.instance_id, error)
            return
        await self._leave(instance, Takers(answer.destinations), answer.send_back)

    async def on_migrate_plan(self, plan: MigratePlan, stored_s: float) -> None:
        """Move some requests, and serve on. ``stored_s``: when the stream took the plan (monotonic)."""
        instance = self._instance()
        if instance is None or instance.instance_id != plan.instance_id or instance.state != "serving":
            return
        until_s, age_s = stored_s + plan.valid_s, time.monotonic() - stored_s
        if age_s > plan.valid_s:
            log.warning("%s came %.1f s after it was published: nothing moves", plan.plan_id, age_s)
            return
        self._tasks.start(self._move_some(instance, Takers(plan.destinations), plan, until_s))

    async def _leave(self, instance: Instance, takers: Takers, send_back: SendBack) -> None:
        moves: set[asyncio.Task[None]] = set()
        while instance.state == "draining":
            try:
                found = await self._look(instance, send_back)
            except BlitzError:
                return  # the engine has stopped
            moves = {move for move in moves if not move.done()}
            for moving in found if takers else ():
                if len(moves) < MOVING_AT_ONCE and self._may_try(moving):
                    taker = takers.take(moving.num_tokens, time.monotonic())
                    if taker is None:
                        break
                    moves.add(self._start(instance, moving, taker, takers))
            await self._ended.wait(LOOK_S)

    async def _move_some(self, instance: Instance, takers: Takers, plan: MigratePlan, until_s: float) -> None:
        moves: set[asyncio.Task[None]] = set()
        found = await self._look(instance, "none")
        if plan.for_head:
            ready = [moving for moving in found if self._may_try(moving)]
            found = to_make_room(ready, instance.engine.stats().load.lacking_blocks, Takers(plan.destinations))
        for moving in found:
            if instance.state != "serving" or time.monotonic() > until_s:
                break
            if not self._may_try(moving):
                continue
            taker = takers.take(moving.num_tokens, time.monotonic(), at_most=True)
            if taker is not None:
                moves.add(self._start(instance, moving, taker, takers))
            if len(moves) >= MOVING_AT_ONCE:
                _, moves = await asyncio.wait(moves, return_when=asyncio.FIRST_COMPLETED)

    async def _look(self, instance: Instance, send_back: SendBack) -> list[Moving]:
        """Send back what is to go that way; what is worth moving. Raises ``Unavailable`` if the engine has stopped."""
        goes = ErrorInfo.of(SentBack(f"instance {instance.instance_id} goes", retry_after_s=0.0))
        return await asyncio.wrap_future(instance.engine.see_off(self._history.bytes_per_s, send_back, goes))

    def _may_try(self, moving: Moving) -> bool:
        """Whether it is not on its way, and has neither come nor tried to leave a short while ago."""
        key = moving.sequence.key
        may_try = self._history.may_try(key, self._arrived_at_s(key), time.monotonic())
        return may_try and key not in self._departures.transfers

    @staticmethod
    def _kv_bytes_per_token(instance: Instance) -> int:
        engine = instance.layered.loop.engine
        return engine.num_layers * engine.kv_bytes_per_token_layer

    # --- one request ---------------------------------------------------------------------------

    def _start(self, instance: Instance, moving: Moving, taker: Destination, takers: Takers) -> asyncio.Task[None]:
        place = DecodePlace(worker_id=taker.worker_id, incarnation=taker.incarnation, instance_id=taker.instance_id)
        move = Move(moving, place, instance)
        self._history.tried(moving.sequence.key, time.monotonic())

        async def hand_over(_: KvTransfer, client: DecodeClient) -> str:
            try:
                return await self._hand_over(move, client)
            except StaysHere:
                raise
            except DecodeRefused:
                takers.refused(taker, time.monotonic())
                raise

        async def keep(_: KvTransfer) -> str:
            takers.kept(taker, moving.num_tokens)
            self._departures.decode_here(move)
            return "kept"

        task = self._departures.start(move, hand_over, keep)
        task.add_done_callback(lambda _: self._ended.fire())
        return task

    async def _hand_over(self, move: KvTransfer, client: DecodeClient) -> str:
        """See ``departures.HandOver``."""
        reserved = await client.reserve(waits=False)
        async with client.kept(reserved), self._departures.shipment(move, client, reserved) as shipment:
            since_s = time.monotonic()
            await shipment.send_all()
            self._measured(move, time.monotonic() - since_s)
            token = await self._hold(move)
            await shipment.send_all()
        await client.begin(token)
        await self._departures.left(move)
        return "moved"

    async def _hold(self, move: KvTransfer) -> Sampled:
        """Stop decoding it, for the other instance to go on behind the last token. Raises ``RequestEnded``,
        ``DecodeRefused``, ``StaysHere``."""
        sequence, sent = move.sequence, move.num_tokens

        def hold(loop: EngineLoop) -> bool:
            return move.lies_in(move.block_table) and loop.scheduler.reservations.hold_to_move(sequence)

        try:
            held = await asyncio.wrap_future(move.instance.layered.call(hold, after=sequence))
        except Unavailable as error:
            raise StaysHere(f"its engine has stopped: {error}") from error
        if not held:
            move.check()
            raise StaysHere("it is not decoded here now")
        token = Sampled(sequence.tokens[-1], sequence.last_logprobs)
        move.grew(tuple(sequence.tokens[sent:-1]), token)
        return token

    def _measured(self, move: KvTransfer, seconds: float) -> None:
        """So much took the KV of a whole context."""
        self._history.measured(move.num_tokens * self._kv_bytes_per_token(move.instance), seconds)
