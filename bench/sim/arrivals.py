"""Requests that an instance in virtual time is to decode for others: room for them, and what becomes of it once their
KV is here. As ``services.worker.kv_transfer.receiver``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from bench.sim.clock import Clock
from bench.sim.compute import Compute
from bench.sim.engine import TOKEN
from bench.sim.streams import Key
from bench.sim.token_reporter import TokenReporter
from services.worker.core.kv_admission import room
from services.worker.core.kv_admission.staging import Staging, Window
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import BlitzError, Conflict, Overloaded
from shared.messages.common import DECODES_FOR_OTHERS, Role

LEFT_KEEP_S = 60.0
"""As ``services.worker.requests.streams``: how long a request that has left does not come back."""
MAX_BEGUN = 4096
"""As ``services.worker.kv_transfer.receiver``."""


class Leaving(Protocol):
    """A request whose KV leaves for an instance that is to decode it, as that one knows it."""

    begun: bool
    """The decode instance has it; that is not known where it comes from yet."""

    @property
    def sequence(self) -> ActiveSequence: ...
    @property
    def num_tokens(self) -> int:
        """Of its context."""

    @property
    def chunk_tokens(self) -> int:
        """0: its KV comes in one."""

    @property
    def context_tokens(self) -> int:
        """That its context may have in the end; 0: not said."""

    def lost(self) -> None:
        """The decode instance has died."""


class Reservation:
    """A slot and blocks that a decode instance keeps for a request whose KV comes in."""

    __slots__ = ("sequence", "transfer", "window")

    def __init__(self, sequence: ActiveSequence, transfer: Leaving, window: Window) -> None:
        self.sequence = sequence
        """The decode instance's own."""
        self.transfer = transfer
        self.window = window


Answer = Callable[[Reservation | BlitzError], object]
"""To the question for room."""


class Decoder(Protocol):
    """The instance (``bench.sim.instance.SimInstance``)."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def compute(self) -> Compute: ...

    def check_admits(self) -> None:
        """Raises ``Conflict`` if it takes no requests."""

    def began(self, roles: frozenset[Role]) -> None:
        """It has accepted something for these roles."""

    def changed(self) -> None: ...
    def cancel(self, key: Key) -> None: ...
    def call(self, function: Callable[[], object]) -> None: ...


class Arrivals:
    """Of one instance. Whatever is asked is answered at once, or when the engine has done it."""

    def __init__(self, clock: Clock, instance: Decoder, reporter: TokenReporter) -> None:
        self._clock = clock
        self._instance = instance
        self._reporter = reporter
        self._staging = Staging()
        self._asking: dict[Key, Leaving] = {}
        """Who waits for an answer to a question for room."""
        self._reserved: dict[Key, Reservation] = {}
        self._begun_at_s: OrderedDict[Key, float] = OrderedDict()
        self._left_at_s: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        """Requests that have room here, and are another instance's so far."""
        return len(self._reserved)

    @property
    def held(self) -> dict[str, int]:
        """What there is of any request."""
        return {"asking": len(self._asking), "bytes on their way": self._staging.used_bytes}

    def of(self, sequence: ActiveSequence) -> Reservation | None:
        return self._reserved.get(sequence.key)

    def begun_at_s(self, key: Key) -> float | None:
        """When a request was taken over; None if it was not, or that is not remembered."""
        return self._begun_at_s.get(key)

    def left(self, key: Key) -> None:
        """Another instance decodes it, and it does not come back for a while."""
        now_s, left_at_s = self._clock.now_s, self._left_at_s
        left_at_s[key] = now_s
        while now_s - next(iter(left_at_s.values())) > LEFT_KEEP_S:
            left_at_s.popitem(last=False)

    # --- from where they come ----------------------------------------------------------------

    def reserve(self, transfer: Leaving, answer: Answer) -> None:
        """Keep a slot and blocks for a request that is to be decoded here."""
        theirs = transfer.sequence
        try:
            window = self._window(transfer)
        except BlitzError as error:
            answer(error)
            return
        sequence = ActiveSequence(
            request_id=theirs.request_id,
            attempt=theirs.attempt,
            gateway_id=theirs.gateway_id,
            prompt=theirs.prompt,
            params=theirs.params,
            output=theirs.output[: transfer.num_tokens - len(theirs.prompt)],
        )
        reservation = Reservation(sequence, transfer, window)
        self._asking[sequence.key] = transfer

        def reserve() -> None:
            # A source and a target of a pair may ask for the same request.
            if self._asking.get(sequence.key) is transfer:
                del self._asking[sequence.key]
            older = self._reserved.get(sequence.key)
            if older is not None:  # another instance computes it from the beginning
                self.release(older)
            if not self._instance.scheduler.reservations.reserve([sequence], behind_waiting=True):
                window.release()
                answer(Overloaded(f"no capacity for {sequence.num_tokens} tokens of KV now"))
                return
            self._reserved[sequence.key] = reservation
            self._reporter.add(sequence)
            self._instance.began(DECODES_FOR_OTHERS)
            self._instance.changed()
            answer(reservation)

        self._instance.call(reserve)

    def _window(self, transfer: Leaving) -> Window:
        """Raises ``Conflict``, ``BadRequest``, ``Overloaded``."""
        self._instance.check_admits()
        key, compute = transfer.sequence.key, self._instance.compute
        if key in self._begun_at_s or key in self._left_at_s:
            raise Conflict(f"attempt {key[1]} of request {key[0]} was decoded here already")
        room.check_fits(transfer.num_tokens, transfer.context_tokens, self._instance.scheduler.config.limit_tokens)
        num_tokens = min(transfer.num_tokens, transfer.chunk_tokens or transfer.num_tokens)
        window = self._staging.reserve(max(1, num_tokens * self._layer_bytes), compute.num_layers)
        if window is None:
            raise Overloaded(f"{self._staging.used_bytes} bytes of KV are on their way here already")
        return window

    @property
    def _layer_bytes(self) -> int:
        """Of KV of a token."""
        return self._instance.compute.kv_bytes_per_token // self._instance.compute.num_layers

    def extend(self, reservation: Reservation, num_tokens: int, answer: Callable[[bool], object]) -> None:
        """The request was decoded where it comes from while its KV came, all of which is here: whether there is room
        for so many tokens more."""
        sequence, window = reservation.sequence, reservation.window

        def extend() -> None:
            if self._reserved.get(sequence.key) is not reservation or not window.reopen(num_tokens * self._layer_bytes):
                answer(False)
                return
            extended = self._instance.scheduler.reservations.extend(sequence, [TOKEN.token_id] * num_tokens)
            if not extended:
                window.release()
            answer(extended)

        self._instance.call(extend)

    def begin(self, reservation: Reservation, answer: Callable[[bool], object]) -> None:
        """All KV of a reserved request is here: it is decoded here from now on, if there is room for it still."""
        sequence = reservation.sequence

        def adopt() -> None:
            if self._reserved.get(sequence.key) is not reservation:
                answer(False)
                return
            del self._reserved[sequence.key]
            reservation.transfer.begun = True
            self._begun_at_s[sequence.key] = self._clock.now_s
            if len(self._begun_at_s) > MAX_BEGUN:
                self._begun_at_s.popitem(last=False)
            self._instance.scheduler.reservations.adopt(sequence, TOKEN, self._clock.now_s, computed_here=False)
            self._reporter.take_over(sequence)
            if sequence.finished:
                self._reporter.ended(sequence.key)
            answer(True)

        self._instance.call(adopt)

    def release(self, reservation: Reservation) -> None:
        """The request does not come, or is not wanted any more if it has."""
        sequence = reservation.sequence
        # What another sender has taken over stays.
        if self._reserved.get(sequence.key) is not reservation:
            if sequence in self._reporter:
                self._instance.cancel(sequence.key)
            return
        del self._reserved[sequence.key]
        reservation.window.release()
        self._reporter.remove(sequence)
        reservations = self._instance.scheduler.reservations
        self._instance.call(lambda: reservations.release([sequence]))

    def abandon(self, reservation: Reservation) -> None:
        """Who was to send the request is gone. If all of it is here, it stays."""
        if self._reserved.get(reservation.sequence.key) is reservation:
            self.release(reservation)

    def kill(self) -> None:
        """The instance is gone: requests that are not here yet stay where they come from."""
        for reservation in self._reserved.values():
            reservation.transfer.lost()
            self._reporter.remove(reservation.sequence)
        for transfer in self._asking.values():
            transfer.lost()
        self._reserved.clear()
        self._asking.clear()
