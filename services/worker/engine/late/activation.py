"""A batch in a late engine."""

from __future__ import annotations

from typing import Any

from services.worker.device.completion import Completion, Pending
from services.worker.engine.base import Activation
from services.worker.engine.forward_batch import Slice
from services.worker.engine.late.arguments import Argument
from services.worker.engine.late.kv_in_flight import Slots


class LateActivation(Pending[Any]):
    """What ``embed`` and ``resume`` give, and how far the batch is."""

    def __init__(self, slices: tuple[Slice, ...], next_layer: int, slots: Slots, given: tuple[Argument, ...]) -> None:
        """``slots``: KV slots of its own tokens. ``given``: what it was made of; the first is what is no KV block."""
        super().__init__()
        self.slices = slices
        self.num_tokens = len(slots)
        self.slots = slots
        self.given = given
        self.inner: Activation | None = None
        """The inner engine's, once it is begun."""
        self.next_layer, self.next_token = next_layer, 0
        """Where the batch is when all that was asked of it has run."""
        self.num_asked = 0
        """Layers, or parts of some, so far."""
        self.last: Completion[Any] | None = None
        """Of these."""

    @property
    def at_rest(self) -> bool:
        """Whether all that was asked of it has run."""
        return self.done if self.last is None else self.last.done
