"""An engine whose device costs nothing: of a step, the host's part alone is left.

It prepares each batch as the engine of a GPU does: token ids, places, rows of samplers, all as arrays. What it would
give the device is dropped, and every token that it samples is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion, Landed, Mapped, Pending, Stream
from services.worker.device.tensors import Array, HostTensors
from services.worker.engine.forward_batch import ForwardBatch, SamplingRow
from services.worker.engine.handoff import check_batch, check_tokens
from services.worker.engine.placement import places_of

VOCAB_SIZE = 128_000
TOKEN_ID = 1
"""What it samples."""

T = TypeVar("T")


class _Given(Pending[T]):
    """What the host has given the device, which has not done it."""

    def __init__(self, landed: Completion[T]) -> None:
        super().__init__()
        self._landed = landed

    def ahead(self) -> T:
        return self._landed.result()

    def land(self) -> None:
        self.settle(self._landed)


class StreamBehind:
    """``Stream`` of a device that is one operation behind its host: each is done once the next is given."""

    def __init__(self) -> None:
        self._last: _Given[Any] | None = None
        self._ended = False

    def run(self, operation: Callable[[], T]) -> Completion[T]:
        landed: Landed[T] = Landed(operation())
        self.catch_up()
        if self._ended:
            return landed
        self._last = given = _Given(landed)
        return given

    def catch_up(self, *, ends: bool = False) -> None:
        """What was given is done; if it ``ends``, all that comes is done at once."""
        self._ended = self._ended or ends
        last, self._last = self._last, None
        if last is not None:
            last.land()


@dataclass(slots=True)
class _Batch:
    batch: ForwardBatch
    is_placed: bool = False


class NullEngine:
    """``Engine``, as far as a loop alone asks."""

    hidden_bytes_per_token = 8192
    kv_bytes_per_token_layer = 4096

    def __init__(self, *, num_layers: int, num_blocks: int, block_size: int, stream: Stream) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.prepared_blocks = num_blocks
        self.block_size = block_size
        self._stream = stream
        self._tensors = HostTensors()

    rehearses = False

    def rehearse(self) -> None:
        """Nothing."""

    def prepare(self, first: int, last: int) -> None:
        del first, last

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        del prompt, output
        return None

    def embed(self, batch: ForwardBatch) -> Completion[_Batch]:
        """See ``Engine``: its tokens, those that are not known yet by their rows."""
        token_ids = batch.token_ids
        check_tokens(token_ids, VOCAB_SIZE)
        check_batch(batch, self.block_size)
        rows = [-1 if piece.token_from is None else piece.token_from.row for piece in batch.slices]
        return self._stream.run(lambda: self._embed(batch, token_ids, np.array(rows)))

    def _embed(self, batch: ForwardBatch, *arrays: Array) -> _Batch:
        lengths = [len(piece.token_ids) for piece in batch.slices]
        sampled = np.cumsum(lengths)[[piece.row is not None for piece in batch.slices]] - 1
        self._tensors.upload(*arrays, sampled)
        return _Batch(batch)

    def run_layers(self, activation: Completion[_Batch], first: int, last: int) -> Completion[None]:
        """See ``Engine``: with the first of them, where its tokens are."""
        del first, last
        return self._stream.run(lambda: self._run_layers(activation.ahead()))

    def _run_layers(self, batch: _Batch) -> None:
        if not batch.is_placed:
            places = places_of(batch.batch, self.block_size)
            self._tensors.upload(places.positions, places.slots, places.paged.pages)
            batch.is_placed = True

    def sample(self, activation: Completion[_Batch]) -> Completion[list[Sampled]]:
        """See ``Engine``: the rows as arrays, and the tokens back from one."""
        return Mapped(self._stream.run(lambda: self._sample(activation.ahead().batch.rows)), _read)

    def _sample(self, rows: Sequence[SamplingRow]) -> Array:
        params = [row.params for row in rows]
        is_adjusted = [row.masks_ends or row.counts is not None or bool(row.params.logit_bias) for row in rows]
        self._tensors.upload(
            np.array([[one.seed for one in params], [row.position for row in rows]]),
            np.array([(one.temperature, one.top_p, one.top_k) for one in params], dtype=np.float64),
            np.flatnonzero(is_adjusted),
        )
        return np.full(len(rows), TOKEN_ID)


def _read(token_ids: Array) -> list[Sampled]:
    return [Sampled(token_id) for token_id in token_ids.tolist()]
