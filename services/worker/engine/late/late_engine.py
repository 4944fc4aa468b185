"""An engine that computes later: another engine on the host, each of whose calls runs on a late stream.

It makes real on a CPU what a device beside its host does, and looks whether the callers bear it. A call that finds one
of these fails with ``LateFault``, logged and counted:

- an argument changed, or a KV block was freed, before the call was done;
- a call needs what a call of another stream has still to make: its caller did not wait.

A block may be freed while it is read by an export: that harms nobody, and what is read is poison, for its caller to
throw away.

What a call gives does not exist before it has run, and a KV slot that it will write is poison (``kv_in_flight``).
Nothing here puts calls of two streams in order. A batch is used by what ``embed`` or ``resume`` returned here; what a
caller got wrong about how far it is, is the completion's error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from services.worker.core.scheduling.blocks import BlockPool
from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion, Landed, Pending
from services.worker.device.late import LateStream, LateStreams
from services.worker.engine.base import Activation, Engine
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.handoff import check_batch, check_layers, check_next_layer, host_bytes, slots_of
from services.worker.engine.kv_pool import KvCache
from services.worker.engine.late.activation import LateActivation
from services.worker.engine.late.arguments import (
    Argument,
    Tables,
    batch_argument,
    blocks_argument,
    buffer_argument,
    positions_argument,
)
from services.worker.engine.late.failures import FailingDevice, LateFailures
from services.worker.engine.late.kv_in_flight import KvInFlight, KvUse, Slots
from shared.messages.generation import PromptLogprobs
from shared.transport.base import Buffer

_log = logging.getLogger(__name__)

PendingT = TypeVar("PendingT", bound=Pending[Any])


class LateFault(RuntimeError):
    """A caller took for done what was not, or changed what was in use."""


class LateEngine:
    """``Engine`` over another one that computes on the host, on streams that run later."""

    def __init__(
        self,
        inner: Engine,
        streams: LateStreams,
        failures: LateFailures | None = None,
        *,
        cache: KvCache | None = None,
    ) -> None:
        """``cache``: where the inner engine keeps its KV, if that is in memory. ``streams`` stay the caller's."""
        self._inner, self._streams = inner, streams
        self._failing = FailingDevice(failures or LateFailures())
        self._kv = KvInFlight(cache)
        self._times_freed: Sequence[int] | None = None
        self.num_faults = 0
        """Calls that failed with ``LateFault``."""
        self.num_stale_reads = 0
        """Exports of which a block was freed before they were done."""
        self.num_layers = inner.num_layers
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self.hidden_bytes_per_token = inner.hidden_bytes_per_token
        self.kv_bytes_per_token_layer = inner.kv_bytes_per_token_layer
        self.prepared_blocks = inner.prepared_blocks

    def watch(self, pool: BlockPool) -> None:
        """The blocks that its callers name are of this pool: see whether one is freed before its call is done."""
        self._times_freed = pool.count_freed()

    def prepare(self, first: int, last: int) -> None:
        """See ``Engine``."""
        self._inner.prepare(first, last)

    rehearses = False

    def rehearse(self) -> None:
        """See ``Engine``: nothing."""

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """See ``Engine``."""
        return self._inner.counts_of(prompt, output)

    # --- batches ------------------------------------------------------------------------------

    def embed(self, batch: ForwardBatch) -> LateActivation:
        """See ``Engine``. Raises ``BadRequest`` as ``resume`` does."""
        check_batch(batch, self.block_size)
        activation = self._activation(batch, 0)
        return self._begin(activation, "embed", lambda: self._inner.embed(batch))

    def resume(self, batch: ForwardBatch, hidden: Buffer, *, next_layer: int) -> LateActivation:
        """See ``Engine``. KV that is imported for it comes behind it: until it is done, it counts as written by it."""
        check_next_layer(next_layer, self.num_layers)
        check_batch(batch, self.block_size)
        host_bytes(hidden, batch.num_tokens * self.hidden_bytes_per_token, "hidden states")
        activation = self._activation(batch, next_layer)
        return self._begin(
            activation,
            "resume",
            lambda: self._inner.resume(batch, hidden, next_layer=next_layer),
            (buffer_argument(hidden),),
            (KvUse(0, next_layer, lambda: activation.slots, writes=True),),
        )

    def _activation(self, batch: ForwardBatch, next_layer: int) -> LateActivation:
        starts = [piece.start for piece in batch.slices]
        ends = [piece.start + len(piece.token_ids) for piece in batch.slices]
        tables = [piece.block_table for piece in batch.slices]
        slots = self._slots(tables, ends, starts)
        return LateActivation(batch.slices, next_layer, slots, (batch_argument(batch), *self._blocks(tables, ends)))

    def _begin(
        self,
        activation: LateActivation,
        what: str,
        begin: Callable[[], Activation],
        given: tuple[Argument, ...] = (),
        uses: tuple[KvUse, ...] = (),
    ) -> LateActivation:
        def call() -> Activation:
            activation.inner = begin()
            return activation.inner

        return self._later(what, self._streams.compute, activation, call, (*activation.given, *given), uses)

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        """See ``Engine``."""
        batch = _late(activation)
        follows = (first, 0) == (batch.next_layer, batch.next_token) and first <= last <= self.num_layers
        if follows:
            batch.next_layer = last
        return self._layers(
            f"layers {first}..{last}",
            batch,
            lambda: self._inner.run_layers(_begun(batch), first, last),
            self._uses(batch, first, last, batch.slots) if follows else (),
        )

    def run_part(self, activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
        """See ``Engine``."""
        batch = _late(activation)
        follows = (layer, begin) == (batch.next_layer, batch.next_token) and layer < self.num_layers
        follows = follows and begin < end <= batch.num_tokens
        if follows:
            batch.next_layer, batch.next_token = (layer + 1, 0) if end == batch.num_tokens else (layer, end)
        return self._layers(
            f"tokens {begin}..{end} of layer {layer}",
            batch,
            lambda: self._inner.run_part(_begun(batch), layer, begin, end),
            self._uses(batch, layer, layer + 1, batch.slots[begin:end]) if follows else (),
        )

    def _uses(self, batch: LateActivation, first: int, last: int, own: Slots) -> tuple[KvUse, ...]:
        """Of layers of these tokens: what is before them is read, their own KV is written."""

        def context() -> Slots:
            return self._slots([piece.block_table for piece in batch.slices], [piece.start for piece in batch.slices])

        return KvUse(first, last, context, writes=False), KvUse(first, last, lambda: own, writes=True)

    def _layers(
        self,
        what: str,
        batch: LateActivation,
        call: Callable[[], Completion[None]],
        uses: tuple[KvUse, ...],
    ) -> Completion[None]:
        batch.num_asked += 1
        batch.last = pending = Pending[None]()
        return self._later(what, self._streams.compute, pending, call, batch.given, uses, batch=batch)

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        """See ``Engine``."""
        batch = _late(activation)

        def call() -> Completion[list[Sampled]]:
            return self._failing.rows(self._inner.sample(_begun(batch)))

        return self._later(
            "sample", self._streams.compute, Pending[list[Sampled]](), call, batch.given[:1], batch=batch
        )

    def score(self, activation: Activation) -> Completion[list[PromptLogprobs]]:
        """See ``Engine``."""
        batch, pending = _late(activation), Pending[list[PromptLogprobs]]()
        call = lambda: self._inner.score(_begun(batch))  # noqa: E731
        return self._later("score", self._streams.compute, pending, call, batch.given[:1], batch=batch)

    def hidden_states(self, activation: Activation) -> Completion[Buffer]:
        """See ``Engine``."""
        batch = _late(activation)
        return self._later(
            "hidden states",
            self._streams.out,
            Pending[Buffer](),
            lambda: self._inner.hidden_states(_begun(batch)),
            (*batch.given[:1], Argument("the batch has gone on", lambda: batch.num_asked)),
            batch=batch,
            fault=None if batch.at_rest else "the batch is still computed",
        )

    # --- copies -------------------------------------------------------------------------------

    def embed_tokens(self, token_ids: Sequence[int]) -> Completion[Buffer]:
        """See ``Engine``. A token outside of the vocabulary is its completion's error."""
        return self._later(
            "embed tokens",
            self._streams.out,
            Pending[Buffer](),
            lambda: self._inner.embed_tokens(token_ids),
            (Argument("the tokens have changed", lambda: tuple(token_ids)),),
        )

    def export_kv(
        self,
        block_tables: Tables,
        num_tokens: Sequence[int],
        last_layer: int,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[Buffer]:
        """See ``Engine``."""
        check_layers(first_layer, last_layer, self.num_layers)
        slots = self._slots(block_tables, num_tokens, first_tokens)
        blocks = self._blocks(block_tables, num_tokens, first_tokens)

        def call() -> Completion[Buffer]:
            if not any(argument.changed for argument in blocks):
                exported = self._inner.export_kv(
                    block_tables, num_tokens, last_layer, first_layer=first_layer, first_tokens=first_tokens
                )
                if not any(argument.changed for argument in blocks):
                    return exported
            self.num_stale_reads += 1
            return Landed(b"\xff" * ((last_layer - first_layer) * len(slots) * self.kv_bytes_per_token_layer))

        return self._later(
            "export",
            self._streams.out,
            Pending[Buffer](),
            call,
            (positions_argument(block_tables, num_tokens, first_tokens),),
            (KvUse(first_layer, last_layer, lambda: slots, writes=False),),
        )

    def import_kv(
        self,
        block_tables: Tables,
        num_tokens: Sequence[int],
        last_layer: int,
        kv: Buffer,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[None]:
        """See ``Engine``."""
        check_layers(first_layer, last_layer, self.num_layers)
        slots = self._slots(block_tables, num_tokens, first_tokens)
        host_bytes(kv, (last_layer - first_layer) * len(slots) * self.kv_bytes_per_token_layer, "KV")
        return self._later(
            "import",
            self._streams.into,
            Pending[None](),
            lambda: self._inner.import_kv(
                block_tables, num_tokens, last_layer, kv, first_layer=first_layer, first_tokens=first_tokens
            ),
            (
                positions_argument(block_tables, num_tokens, first_tokens),
                *self._blocks(block_tables, num_tokens, first_tokens),
                buffer_argument(kv),
            ),
            (KvUse(first_layer, last_layer, lambda: slots, writes=True),),
        )

    # --- all ----------------------------------------------------------------------------------

    def _later(
        self,
        what: str,
        stream: LateStream,
        pending: PendingT,
        call: Callable[[], Completion[Any]],
        given: tuple[Argument, ...],
        uses: tuple[KvUse, ...] = (),
        *,
        batch: LateActivation | None = None,
        fault: str | None = None,
    ) -> PendingT:
        """Have ``call`` made on ``stream``. ``batch``: what it is asked of, and fails with. ``fault``: what the caller
        has done wrong already."""
        if uses:
            fault = self._kv.begin(stream, pending, uses) or fault

        def run() -> Completion[Any]:
            self._failing.strike(computes=stream is self._streams.compute)
            if batch is not None and batch.error is not None:
                raise batch.error
            if fault is not None:
                raise self._fault(what, fault)
            self._check(what, given)
            came_to = call()
            self._check(what, given)
            return came_to

        return stream.later(pending, run)

    def _check(self, what: str, given: Sequence[Argument]) -> None:
        for argument in given:
            if argument.changed:
                raise self._fault(what, f"{argument.what} since the call")

    def _fault(self, what: str, why: str) -> LateFault:
        # One operation runs at a time: nobody counts beside this.
        self.num_faults += 1
        fault = LateFault(f"{what}: {why}")
        _log.error("late engine: its caller's fault: %s", fault)
        return fault

    def _slots(self, tables: Tables, ends: Sequence[int], starts: Sequence[int] = ()) -> Slots:
        return slots_of(tables, ends, starts, block_size=self.block_size, num_blocks=self.num_blocks)

    def _blocks(self, tables: Tables, ends: Sequence[int], starts: Sequence[int] = ()) -> tuple[Argument, ...]:
        """Those of these positions, if somebody said whose they are."""
        if self._times_freed is None:
            return ()
        return (blocks_argument(self._times_freed, self.block_size, tables, ends, starts),)


def _late(activation: Activation) -> LateActivation:
    if not isinstance(activation, LateActivation):
        raise TypeError(f"{type(activation).__name__} is no batch of a late engine")
    return activation


def _begun(activation: LateActivation) -> Activation:
    """The inner engine's batch."""
    if activation.inner is None:
        raise RuntimeError("a batch that is done was never begun")
    return activation.inner
