"""An engine in a small world, as one member's: blocks, layers and tokens, and that they are what they may be.

It does one thing after another. What its member's machine wants in answer is done at once; what the event loop wants of
it comes between two things, in order. Parts of layers, and first tokens, are there when it returns, or land later in
their order, two in flight.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from services.worker.core.live import source_words as s
from services.worker.core.live import target_words as t
from services.worker.core.live.machine import (
    Action,
    Detach,
    EngineStopped,
    Finish,
    HasLanded,
    PairEvent,
    PartWanted,
    RunPart,
)

if TYPE_CHECKING:
    from tests.services.worker.core.live.small_world.world import World

NUM_LAYERS = 3
Side = Literal["source", "target"]
SOURCE: Side = "source"
TARGET: Side = "target"
MOST_IN_FLIGHT = 2
_QUIET = (Detach, s.Conclude, s.ReleaseToTarget, t.Announce)
"""No event follows. Done as soon as can be: whoever touches blocks that they free is found."""


class Engine:
    """Of one member."""

    side: Side

    def __init__(self, world: World, room: int) -> None:
        """``room``: batches that have blocks at a time."""
        self.world = world
        self._room = room
        self._todo: list[Any] = []
        self._calls: deque[list[Any]] = deque()
        self._step_ends = 0
        """So many calls wait for the end of a step."""
        self._awake = self.is_stopped = self.attached = False
        self.blocks: dict[str, str] = {}
        """Of batches, and what for."""
        self._in_steps: list[str] = []
        """Batches whose requests are computed without the pair."""
        self._flight: deque[list[Any]] = deque()
        """What was begun, and what comes of it."""
        self._broken: list[str] = []
        """Batches of which a part failed."""
        self._inside: dict[str, int] = {}
        """Tokens that were begun of the layer that a batch is inside of."""
        self.layers: dict[str, list[int]] = {}
        """That were run of a batch."""

    def hears(self, event: PairEvent, *, on_engine: bool = False) -> None:
        """The machine, which says what it wants."""
        raise NotImplementedError

    def carry_out(self, action: Action) -> None:
        raise NotImplementedError

    def has_ended(self, batch_id: str) -> bool:
        """Nobody waits for its request any more, as is known here."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """There may be a layer to run."""
        raise NotImplementedError

    def put(self, what: str, *arguments: Any, side: Side | None = None) -> None:
        """Something is under way to a method of this member, or of ``side``."""
        self.world.put((side or self.side, what, *arguments))

    @property
    def is_busy(self) -> bool:
        return bool(self._todo)

    @property
    def has_calls(self) -> bool:
        return bool(self._todo or self._calls or self._step_ends)

    @property
    def runs(self) -> bool:
        """What it does next may fail."""
        if self._flight:
            return not self._todo
        return bool(self._todo) and isinstance(self._todo[0], RunPart | Finish)

    # --- what it does -----------------------------------------------------------------------------

    def call(self, actions: list[Any]) -> None:
        """Between two layers."""
        if self.is_stopped:
            self.put("hears", EngineStopped())
        else:
            self._calls.append(actions)

    def choices(self) -> list[str]:
        """What it may do next."""
        if self.is_stopped:
            return []
        if self._todo:
            return ["acts"]
        steps = self.attached and self._awake and self.is_ready() and len(self._flight) < MOST_IN_FLIGHT
        ends = self._step_ends and not self._flight
        lands = ["lands"] * bool(self._flight)
        return ["is_called"] * bool(self._calls) + ["ends_step"] * bool(ends) + lands + ["steps"] * steps

    def acts(self) -> None:
        """It does the next thing."""
        action, self._awake = self._todo.pop(0), True
        if action == "stepped":
            self.stepped()
        else:
            self.carry_out(action)

    def is_called(self) -> None:
        self._todo += self._calls.popleft()
        self.acts()

    def ends_step(self) -> None:
        self._step_ends -= 1
        self.engine_says(HasLanded(t.AwaitStepEnd()))

    def steps(self) -> None:
        self.engine_says(PartWanted())
        self._awake = bool(self._todo)

    def launch(self, action: RunPart | Finish, result: Any) -> None:
        """It lands with this, unless it fails."""
        self._flight.append([action, result])
        if not self.world.setting.is_ahead:
            self.lands()

    def lands(self) -> None:
        action, result = self._flight.popleft()
        self._awake = True
        if "stepped" not in self._todo:
            self._todo.insert(0, "stepped")
        if action.batch_id in self._broken:
            result = self._failure
        elif result == self._success:
            self.touch(action.batch_id)
            if isinstance(action, Finish):
                self.sampled(action)
            else:
                self.part_ran(action)
        self.engine_says(HasLanded(action, result))

    @property
    def _success(self) -> Any:
        return s.Ran.WELL if self.side == SOURCE else None

    @property
    def _failure(self) -> Any:
        return s.Ran.FAILED if self.side == SOURCE else "RuntimeError: out of memory"

    def settles(self) -> None:
        """What nobody hears of is done; with nothing to do it sleeps until it is called."""
        while True:
            if not self._todo and self._calls and all(isinstance(a, _QUIET) for a in self._calls[0]):
                self._todo += self._calls.popleft()
            if not self._todo or not isinstance(self._todo[0], _QUIET):
                break
            self.acts()
        if not self._todo and not self._calls and not self._step_ends:
            self._awake = self._awake and self.is_ready()

    def engine_says(self, event: PairEvent) -> None:
        self.hears(event, on_engine=True)

    def stepped(self) -> None:
        """Any step has ended."""

    def is_woken(self) -> None:
        """It looks whether there is something to run."""
        self._awake = True

    def is_called_at_once(self, actions: list[Any]) -> None:
        """By what it said itself."""
        self._todo[:0] = actions

    def stop(self) -> None:
        """It does nothing any more, and has freed everything."""
        self.is_stopped = True
        for all_of_it in (self._todo, self._calls, self._flight, self.blocks):
            all_of_it.clear()
        self._step_ends = 0

    def fail(self) -> None:
        """To run what is next."""
        action = self._flight[0][0] if self._flight else self._todo[0]
        self._broken.append(action.batch_id)
        if not self._flight:
            self._flight.append([self._todo.pop(0), None])
        self.lands()

    def detach(self, _: Detach) -> None:
        self.attached = False

    def reserve_blocks(self, batch_id: str) -> bool:
        assert batch_id not in self.blocks, f"{batch_id} has blocks at the {self.side} already"
        if len(self.blocks) >= self._room or self._in_steps:
            return False
        self.blocks[batch_id] = "reserved"
        return True

    def free_blocks(self, batch_id: str) -> None:
        assert self.blocks.pop(batch_id, ""), f"{batch_id} is freed twice at the {self.side}"

    def touch(self, batch_id: str) -> None:
        has = self.blocks.get(batch_id)
        assert self.is_stopped or has in {"reserved", "lacks kv"}, f"{batch_id} has {has} blocks at the {self.side}"

    def run_part(self, action: RunPart) -> None:
        batch_id, num_tokens = action.batch_id, self.world.batch(action.batch_id).num_tokens
        self.touch(batch_id)
        assert self._inside.get(batch_id, 0) == action.begin < action.end
        self._inside[batch_id] = action.end % num_tokens
        self.launch(action, self._success)

    def part_ran(self, action: RunPart) -> None:
        batch_id = action.batch_id
        if action.end == self.world.batch(batch_id).num_tokens:
            before, run = self._before(batch_id), self.layers.setdefault(batch_id, [])
            assert action.layer not in run, f"layer {action.layer} of {batch_id} is run twice at the {self.side}"
            assert before == list(range(action.layer)), f"layer {action.layer} of {batch_id} is run after {before}"
            run.append(action.layer)

    def _before(self, batch_id: str) -> list[int]:
        """Layers of which it has what is needed for the next one."""
        return list(self.layers.get(batch_id, []))

    def finish(self, action: Finish) -> None:
        self.touch(action.batch_id)
        self.launch(action, self._success)

    def sampled(self, action: Finish) -> None:
        batch_id = action.batch_id
        assert self._before(batch_id) == list(range(NUM_LAYERS))
        kv_here = action.kv_here
        if not self.has_ended(batch_id):
            self.first_token(batch_id)
            self.blocks[batch_id] = "lacks kv"
            if kv_here:
                self.decodes(batch_id)
        elif kv_here:
            self.free_blocks(batch_id)

    def first_token(self, batch_id: str) -> None:
        assert batch_id not in self.world.first_tokens, f"{batch_id} has two owners"
        self.world.first_tokens[batch_id] = self.side

    def decodes(self, batch_id: str) -> None:
        self.blocks[batch_id] = "decodes"
        self.put("decoded", batch_id)

    def decoded(self, batch_id: str) -> None:
        """Its request has ended."""
        if not self.is_stopped:
            self.free_blocks(batch_id)
            self.stepped()

    def computes_in_steps(self, batch_id: str) -> None:
        self._in_steps.append(batch_id)
        self.put("computed_in_steps", batch_id)

    def computed_in_steps(self, batch_id: str) -> None:
        """Without the pair."""
        if not self.is_stopped:
            self._in_steps.remove(batch_id)
            if batch_id not in self.world.first_tokens and not self.has_ended(batch_id):
                self.first_token(batch_id)
            self.stepped()
