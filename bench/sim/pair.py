"""A live pair in virtual time: what ``services.worker.live`` does between two workers, without threads, bus, tensors.

All that is decided, the machines of ``services.worker.core.live`` decide, as in the worker. Here questions take a
message's time each way, hidden states and KV are flows between the two, and what the engines do takes their instances'
time.

Not simulated: embedding, copies to and from an engine, the pieces in which KV of a batch is asked for, and messages
that are lost.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bench.sim.clock import Clock
from bench.sim.instance import SimInstance
from bench.sim.pair_member import OnTheirWay, PairPaths
from bench.sim.pair_source import SimSource
from bench.sim.pair_target import SimTarget
from services.worker.core.live import target_words as target_core
from services.worker.core.live.batch import Batch
from services.worker.core.live.life import PairState
from services.worker.core.live.machine import Begin, Lost
from shared.messages.live import Gate, LiveBatch, LiveReport, PlanSplit, ZigzagAssignment


class SimPair:
    """From ``begin`` to ``report``."""

    def __init__(
        self,
        clock: Clock,
        assignment: ZigzagAssignment,
        source: SimInstance,
        target: SimInstance,
        paths: PairPaths,
        *,
        pull_s: float = 0.0,
        ask_split: Callable[[PlanSplit], object] = lambda _asked: None,
        on_accepted: Callable[[], object] = lambda: None,
        on_lending: Callable[[bool], object] = lambda _begun: None,
        on_end: Callable[[SimPair], object] = lambda _pair: None,
    ) -> None:
        """``pull_s``: what a pull took in the source's pair before. ``ask_split``: tells the planner what waits; it may
        answer with ``set_gates``. ``on_accepted``: the target takes part: its instance is to go live. ``on_lending``:
        the queue is two instances' from now on, or no more. ``on_end``: ``report`` is there; the target may still
        finish what it kept."""
        self.assignment = assignment
        self.report: LiveReport | None = None
        self._clock = clock
        self._on_end = on_end
        self._on_their_way = OnTheirWay(paths)
        self.source = SimSource(
            clock,
            assignment,
            source,
            paths,
            self._on_their_way,
            pull_s=pull_s,
            ask_split=ask_split,
            on_accepted=on_accepted,
            on_lending=on_lending,
            on_done=self._done,
            on_over=self._over,
        )
        self.target = self.source.target = SimTarget(
            clock,
            assignment,
            target,
            source,
            paths,
            self._on_their_way,
            tell_taken=self.source.tell_taken,
            ordered_s=clock.now_s,
        )
        self.target.on_hidden = self.source.hidden_came
        self._started_s = clock.now_s
        self._batches: list[tuple[LiveBatch, float]] = []
        """And when their first tokens came."""
        self._first_cooperative_s: float | None = None

    # --- what is told --------------------------------------------------------------------------

    def begin(self) -> None:
        """The source offers it, and the target, which loads, accepts. ``layers_ready`` is to be told."""
        self._started_s = self._clock.now_s
        self.source.handle(Begin())

    def layers_ready(self, layers_ready: int, *, complete: bool = False) -> None:
        """So many layers are loaded at the target. ``complete``: everything is."""
        self.target.handle(target_core.LayersReady(layers_ready, complete))

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split reaches the target."""
        self.target.handle(target_core.GatesCame(gates))

    def source_gone(self, reason: str, notice_s: float = 0.0) -> None:
        """The source has died: nobody reports. The target notices ``notice_s`` later."""
        self.source.die()
        self._on_their_way.abort()
        self._clock.after(notice_s, self.target.handle, Lost(reason))

    def target_gone(self, reason: str, notice_s: float = 0.0) -> None:
        """The target has died. The source goes on alone, ``notice_s`` later."""
        self.target.die()
        if self.report is None:
            self._on_their_way.abort()
            self._clock.after(notice_s, self.source.handle, Lost(reason))

    @property
    def is_over(self) -> bool:
        """Both members have left it."""
        return self.target.is_over and self.report is not None

    # --- what it says --------------------------------------------------------------------------

    def _done(self, batch: Batch, first_layer: int, at_s: float) -> None:
        num_layers = self.source.instance.compute.num_layers
        if 0 < first_layer < num_layers and self._first_cooperative_s is None:
            self._first_cooperative_s = at_s
        done = LiveBatch(
            batch_id=batch.batch_id,
            num_requests=len(batch.requests),
            num_tokens=batch.num_tokens,
            target_layers=first_layer,
            source_layers=num_layers - first_layer,
            first_token_ago_s=0.0,
        )
        self._batches.append((done, at_s))

    def _over(self) -> None:
        assignment, machine, replace = self.assignment, self.source.machine, msgspec.structs.replace
        now_s, first_s = self._clock.now_s, self._first_cooperative_s
        self.report = LiveReport(
            pair_id=assignment.pair_id,
            plan_id=assignment.plan_id,
            source=assignment.source.worker_id,
            target=assignment.target.worker_id,
            policy=assignment.policy,
            outcome="failed" if machine.life.state is PairState.FAILED else "dissolved",
            reason=machine.failure,
            started_ago_s=now_s - self._started_s,
            first_cooperative_token_ago_s=None if first_s is None else now_s - first_s,
            batches=tuple(replace(batch, first_token_ago_s=now_s - at_s) for batch, at_s in self._batches),
        )
        self._on_end(self)
