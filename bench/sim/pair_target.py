"""The target of a pair in virtual time: what ``services.worker.live.target`` does, without bus, tensors and threads."""

from __future__ import annotations

from collections.abc import Callable

from bench.sim.clock import Clock
from bench.sim.instance import SimInstance
from bench.sim.pair_member import LATER, TOKEN, Carriers, OnTheirWay, PairMember, PairPaths, Reply, later, unseen
from services.worker.core.live import target_words as core
from services.worker.core.live.batch import Batch, Key
from services.worker.core.live.machine import Begin, Cancelled, Finish, RunPart, SendHidden, TellEnded
from services.worker.core.live.target import TargetMachine
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.common import ErrorInfo
from shared.messages.live import Taken, ZigzagAssignment


class SimTarget(PairMember[TargetMachine]):
    """Questions have taken their time when they get here."""

    def __init__(
        self,
        clock: Clock,
        assignment: ZigzagAssignment,
        instance: SimInstance,
        source: SimInstance,
        paths: PairPaths,
        on_their_way: OnTheirWay,
        *,
        tell_taken: Callable[[Taken, Reply], object],
        ordered_s: float,
    ) -> None:
        """``tell_taken``: says so to the source, which replies."""
        config = instance.scheduler.config
        super().__init__(
            clock,
            instance,
            TargetMachine(
                assignment,
                instance.compute.num_layers,
                part_tokens=config.prefill_chunk_tokens,
                limit_tokens=config.limit_tokens,
                ordered_s=ordered_s,
            ),
            paths,
            decode_interval_s=assignment.slo_tbt_s / 2,
        )
        self._pair_id = assignment.pair_id
        self._source = source
        self._on_their_way = on_their_way
        self._tell_source = tell_taken
        self._batches: dict[str, Batch] = {}
        self._sequences: dict[str, list[ActiveSequence]] = {}
        """Its own, of batches that are here."""
        self._took: set[str] = set()
        """Batches that are reported from here."""
        self.hidden: dict[str, bool] = {}
        """Of batches whose hidden states were sent back: whether they are there."""
        self.on_hidden: Callable[[str], object] = lambda _batch_id: None
        """Called when some have arrived at the source."""

    def take_part(self) -> None:
        """Its instance is live."""
        self.instance.partial = self
        self.handle(Begin())

    # --- from the source ---------------------------------------------------------------------

    def hand_over(
        self, batch: Batch, serial: int, sequences: list[ActiveSequence], reply: Reply, *, behind_seal: bool
    ) -> None:
        """``sequences``: the source's."""
        self._batches[batch.batch_id] = batch
        self._sequences[batch.batch_id] = [_copy(s) for s in sequences]
        self.asked(lambda number: core.HandedOver(number, batch, serial, behind_seal), reply)

    def hidden_came(self, batch_id: str, serial: int) -> None:
        """Of a batch that was handed over."""
        self.landed(core.HostBatch(batch_id, serial), True)

    def cancel(self, keys: tuple[Key, ...]) -> None:
        """Nobody wants these any more."""
        self.handle(Cancelled(keys))

    def sequences(self, batch_id: str) -> list[ActiveSequence]:
        """Of a batch that is here."""
        return self._sequences.get(batch_id, [])

    # --- actions -----------------------------------------------------------------------------

    def _reserve(self, action: core.Reserve) -> bool:
        return self.instance.scheduler.reservations.reserve(self._sequences[action.batch_id])

    def _free(self, action: core.Free) -> None:
        for batch_id in action.batch_ids:
            self.instance.forget(self._sequences[batch_id])
            self.instance.scheduler.reservations.release(self._sequences[batch_id])

    def _end_requests(self, action: core.EndRequests) -> None:
        for sequences in self._sequences.values():
            for sequence in sequences:
                if sequence.key in action.keys and (sequence.reserved or sequence.id < 0):
                    sequence.finished = True

    def _send_hidden(self, action: SendHidden) -> None:
        batch_id = action.batch_id
        self.hidden[batch_id] = False

        def arrived() -> None:
            self.hidden[batch_id] = True
            self.on_hidden(batch_id)

        num_bytes = self._batches[batch_id].num_tokens * self._paths.hidden_bytes_per_token
        self._on_their_way.send(self.instance, self._source, num_bytes, "activations", arrived)

    def _forget(self, action: core.Forget) -> None:
        for batch_id in action.batch_ids:
            self._sequences.pop(batch_id, None)

    def _tell_taken(self, action: core.TellTaken) -> object:
        taken = Taken(pair_id=self._pair_id, batch_ids=action.batch_ids, loaded=action.loaded)
        self._tell_source(taken, lambda answer: self.landed(action, not isinstance(answer, ErrorInfo)))
        return LATER

    def _take(self, batch_id: str) -> None:
        """It is this instance's for good."""
        if batch_id not in self._took:
            self._took.add(batch_id)
            self.instance.took([s for s in self._sequences[batch_id] if not s.finished])

    def _run_part(self, action: RunPart) -> object:
        self._part = action
        return LATER

    def _finish(self, action: Finish) -> object:
        self._take(action.batch_id)
        reservations, now_s = self.instance.scheduler.reservations, self._clock.now_s
        outputs = [reservations.adopt(s, TOKEN, now_s) for s in self._sequences[action.batch_id]]
        self.landed(action)
        self.instance.tell(output for output in outputs if output is not None)
        return LATER

    def _await_step_end(self, action: core.AwaitStepEnd) -> object:
        self.instance.call(lambda: self.landed(action), after_step=True)
        return LATER

    def _carriers(self) -> Carriers:
        def took(action: core.Announce) -> None:
            for batch_id in action.batch_ids:
                self._take(batch_id)

        return {
            core.Reserve: self._reserve,
            core.Free: self._free,
            core.EndRequests: self._end_requests,
            core.Wake: unseen,
            RunPart: self._run_part,
            Finish: self._finish,
            core.AwaitStepEnd: self._await_step_end,
            core.Announce: took,
            core.HostBatch: later,
            SendHidden: self._send_hidden,
            core.SendKv: unseen,
            core.Forget: self._forget,
            core.TellTaken: self._tell_taken,
            TellEnded: unseen,
            core.Note: unseen,
        }

    # --- PartialSteps ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.machine.may_run

    @property
    def num_requests(self) -> int:  # type: ignore[override]
        return self.machine.num_requests

    @property
    def queued(self) -> tuple[int, int]:  # type: ignore[override]
        return self.machine.queued

    def begin(self) -> float | None:
        """See ``PartialSteps``."""
        part = self._next_part()
        if part is None:
            return None
        if not part.begin and not self._part.layer:
            self._tell_layers(part.batch_id, 0)
        return self._seconds(self._batches[part.batch_id], part)

    def end(self) -> None:
        """See ``PartialSteps``."""
        part = self._part
        if part.end == self._batches[part.batch_id].num_tokens:
            self._tell_layers(part.batch_id, part.layer + 1)
        self.landed(part)

    def _tell_layers(self, batch_id: str, num_layers: int) -> None:
        for sequence in self.sequences(batch_id):
            self.instance.ran_layers(sequence, 0, num_layers)


def _copy(sequence: ActiveSequence) -> ActiveSequence:
    """A request, as another instance knows it."""
    return ActiveSequence(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        gateway_id=sequence.gateway_id,
        prompt=sequence.prompt,
        params=sequence.params,
        output=list(sequence.output),
        decode_at=sequence.decode_at,
    )
