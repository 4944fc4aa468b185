"""The mock's KV pool: what a slot holds is the token, its position and the hash of the prefix it ends.

A caller that mixes up blocks, positions, layers or batches gets an error or other tokens, not luck. KV travels in
real sizes: each token's record lies in the bytes of each exported layer, and names the layer.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from services.worker.engine.forward_batch import Slice
from services.worker.engine.handoff import Bytes, host_bytes, slots_of
from shared.transport.base import Buffer

_MASK = (1 << 64) - 1
_EMPTY = 0x9E3779B97F4A7C15

_MAGIC = 0xB1FF
_RECORD = np.dtype([("magic", "<u2"), ("layer", "<u2"), ("token", "<i4"), ("position", "<i8"), ("hash", "<u8")])
_HALF_BYTES = _RECORD.itemsize // 2
"""K carries the first half of a record, V the second."""

Slots = npt.NDArray[np.int64]


def extend_hash(prefix_hash: int, token_id: int) -> int:
    """The hash of a prefix and one more token."""
    mixed = ((prefix_hash ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def hash_tokens(token_ids: Sequence[int], prefix_hash: int = _EMPTY) -> int:
    """The hash of a whole prefix."""
    for token_id in token_ids:
        prefix_hash = extend_hash(prefix_hash, token_id)
    return prefix_hash


class MockKv:
    """Slots of a block pool. Methods touch only the slots that they are given, so that threads may share it."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, bytes_per_token_layer: int, verify: bool
    ) -> None:
        if bytes_per_token_layer < _RECORD.itemsize or bytes_per_token_layer % 2:
            raise ValueError(
                f"KV of {bytes_per_token_layer} bytes per token and layer: "
                f"the mock needs an even number, at least {_RECORD.itemsize}"
            )
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_layers = num_layers
        self._bytes_per_token_layer = bytes_per_token_layer
        self._verify = verify
        slots = num_blocks * block_size
        # Arrays, for Python reads and writes them one by one as quickly as lists; numpy sees them whole.
        self._tokens = array("q", [-1]) * slots
        self._positions = array("q", [-1]) * slots
        self._hashes = array("Q", [0]) * slots
        self._all_tokens = np.frombuffer(self._tokens, dtype=np.int64)
        self._all_positions = np.frombuffer(self._positions, dtype=np.int64)
        self._all_hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        self._layers = array("h", [0]) * slots
        """How many layers of a slot have KV, from layer 0 on."""
        self._all_layers = np.frombuffer(self._layers, dtype=np.int16)
        # Of a batch that was resumed here: it runs layers from the one on, up to the other so far, and those before are
        # imported in the meantime. 0 once they are all there.
        self._resumed_at = np.zeros(slots, dtype=np.int16)
        self._ran_up_to = np.zeros(slots, dtype=np.int16)
        self._joining = threading.Lock()
        """Imports and runs that complete each other may be of different threads."""

    def slots_of(
        self, block_tables: Sequence[Sequence[int]], num_tokens: Sequence[int], first_tokens: Sequence[int] = ()
    ) -> Slots:
        """See ``handoff.slots_of``."""
        size, num_blocks = self._block_size, self._num_blocks
        return slots_of(block_tables, num_tokens, first_tokens, block_size=size, num_blocks=num_blocks)

    def resume(self, slots: Slots, next_layer: int) -> None:
        """These slots were written by a batch whose layers before ``next_layer`` ran elsewhere."""
        self._all_layers[slots] = 0
        self._resumed_at[slots] = self._ran_up_to[slots] = next_layer

    def write(self, piece: Slice, slots: list[int]) -> int:
        """Write a slice's KV; returns the hash of the prefix that it ends, and adds its slots to ``slots``.

        Raises ``RuntimeError`` for a block table that does not hold the context.
        """
        size, table, token_ids = self._block_size, piece.block_table, piece.token_ids
        end = piece.start + len(token_ids)
        if end > len(table) * size:
            raise RuntimeError(f"sequence {piece.sequence_id}: {len(table)} blocks do not hold {end} tokens")
        prefix_hash = self._prefix_hash(piece)
        if len(token_ids) == 1:  # a decode step: quicker by hand
            token_id, position = token_ids[0], piece.start
            slot = table[position // size] * size + position % size
            prefix_hash = extend_hash(prefix_hash, token_id)
            self._tokens[slot] = token_id
            self._positions[slot] = position
            self._hashes[slot] = prefix_hash
            slots.append(slot)
            return prefix_hash
        own = self.slots_of([table], [end])[piece.start :]
        hashes = list(accumulate(token_ids, extend_hash, initial=prefix_hash))
        self._all_tokens[own] = token_ids
        self._all_positions[own] = np.arange(piece.start, end)
        self._all_hashes[own] = np.array(hashes[1:], dtype=np.uint64)
        slots += own.tolist()
        return hashes[-1]

    def _prefix_hash(self, piece: Slice) -> int:
        """The hash of the KV before the slice, read through its block table; all layers of it must be there."""
        size, table, start = self._block_size, piece.block_table, piece.start
        if start == 0:
            return _EMPTY
        slot = table[(start - 1) // size] * size + (start - 1) % size
        if self._positions[slot] != start - 1:
            raise RuntimeError(f"sequence {piece.sequence_id}: no KV at position {start - 1}, slot {slot}")
        if self._layers[slot] != self._num_layers or self._resumed_at[slot]:
            raise RuntimeError(
                f"sequence {piece.sequence_id}: position {start - 1}, slot {slot}, has KV of {self._layers[slot]} "
                f"layers, not of all {self._num_layers}"
            )
        if self._verify:
            gathered = hash_tokens([self._tokens[table[p // size] * size + p % size] for p in range(start)])
            if gathered != self._hashes[slot]:
                raise RuntimeError(f"sequence {piece.sequence_id}: the KV before position {start} was overwritten")
        return self._hashes[slot]

    def begin(self, slots: Slots, first: int, *, resumed: bool) -> None:
        """Layer ``first`` of these slots begins: with layer 0, what they held is gone. ``resumed``: by a batch whose
        first layers ran elsewhere.

        Raises ``RuntimeError`` unless exactly the layers before ``first`` have run: another batch has written there.
        """
        if resumed:
            self._check_layers(slots, self._ran_up_to[slots], first, exactly=True)
        elif first > 0:
            self._check_layers(slots, self._all_layers[slots], first, exactly=True)
        else:
            self._all_layers[slots] = 0
            self._resumed_at[slots] = self._ran_up_to[slots] = 0

    def advance(self, slots: Slots, last: int, *, resumed: bool) -> None:
        """Layers before ``last`` of these slots have run now: another thread may export them from here on."""
        if not resumed:
            self._all_layers[slots] = last
            return
        with self._joining:
            self._ran_up_to[slots] = last
            self._join(slots)

    def _join(self, slots: Slots) -> None:
        """What was imported and what has run may be all."""
        whole = (self._all_layers[slots] == self._resumed_at[slots]) & (self._ran_up_to[slots] == self._num_layers)
        if whole.all():
            self._all_layers[slots] = self._num_layers
            self._resumed_at[slots] = 0

    def _check_layers(self, slots: Slots, held: npt.NDArray[np.int16], num_layers: int, *, exactly: bool) -> None:
        wrong = held != num_layers if exactly else held < num_layers
        if wrong.any():
            at = int(wrong.argmax())
            raise RuntimeError(f"slot {slots[at]} has KV of {held[at]} layers, not of {num_layers}")

    def export(self, slots: Slots, first_layer: int, last_layer: int) -> Bytes:
        """See ``Engine.export_kv``. Raises ``RuntimeError`` if the layers before ``last_layer`` have not been run.

        The batch's later layers only raise the number of layers that its slots have, in the middle of this or not.
        """
        resumed_at = self._resumed_at[slots]
        own = (resumed_at > 0) & (first_layer >= resumed_at)
        joined = own | (self._all_layers[slots] == resumed_at)
        held = np.where(joined, self._ran_up_to[slots], self._all_layers[slots])
        self._check_layers(slots, held, last_layer, exactly=False)
        kv = np.zeros((last_layer - first_layer, 2, len(slots), self._bytes_per_token_layer // 2), dtype=np.uint8)
        record = np.empty(len(slots), dtype=_RECORD)
        record["magic"] = _MAGIC
        record["token"] = self._all_tokens[slots]
        record["position"] = self._all_positions[slots]
        record["hash"] = self._all_hashes[slots]
        for index, layer in enumerate(range(first_layer, last_layer)):
            record["layer"] = layer
            halves = record.view(np.uint8).reshape(len(slots), 2, _HALF_BYTES)
            kv[index, :, :, :_HALF_BYTES] = halves.transpose(1, 0, 2)
        return kv.reshape(-1)

    def load(
        self, slots: Slots, positions: npt.NDArray[np.int64], first_layer: int, last_layer: int, kv: Buffer
    ) -> None:
        """See ``Engine.import_kv``; ``positions`` are those of ``slots``. Raises ``RuntimeError`` for bytes that are
        not the KV of these positions, or unless exactly the layers before ``first_layer`` are there, of the same tokens
        behind the same prefixes."""
        half_bytes = self._bytes_per_token_layer // 2
        num_layers = last_layer - first_layer
        flat = host_bytes(kv, num_layers * len(slots) * self._bytes_per_token_layer, "KV")
        if not num_layers or not len(slots):
            return
        layers = flat.reshape(num_layers, 2, len(slots), half_bytes)[..., :_HALF_BYTES]
        # [num_layers, tokens], one record from the two halves
        records = np.ascontiguousarray(layers.transpose(0, 2, 1, 3)).reshape(num_layers, -1).view(_RECORD)
        held = positions, records[0]["token"], records[0]["hash"]
        there = self._all_positions[slots], self._all_tokens[slots], self._all_hashes[slots]
        resumed_at = self._resumed_at[slots]
        # What a batch that is no more has left in its slots is not what comes.
        resumed = bool(resumed_at.all()) and all(map(np.array_equal, held, there))
        if first_layer > 0:
            self._check_layers(slots, self._all_layers[slots], first_layer, exactly=True)
            held = there
        if resumed and last_layer > resumed_at.min():
            raise RuntimeError(f"KV of layer {last_layer - 1} is imported where it was run, from {resumed_at.min()} on")
        for layer, record in enumerate(records, start=first_layer):
            sound = (record["magic"] == _MAGIC) & (record["layer"] == layer) & (record["position"] == positions)
            for name, expected in zip(("position", "token", "hash"), held, strict=True):
                sound &= record[name] == expected
            if not sound.all():
                at = int(sound.argmin())
                position, token_id, prefix_hash = (int(expected[at]) for expected in held)
                raise RuntimeError(
                    f"imported KV of layer {layer}, token {at} of the batch, position {positions[at]}: found that of "
                    f"layer {record['layer'][at]}, position {record['position'][at]}, token id {record['token'][at]}, "
                    f"prefix {int(record['hash'][at]):x}, where the slot's position is {position}, its token id "
                    f"{token_id}, its prefix {prefix_hash:x}"
                )
        with self._joining:
            if not resumed and first_layer == 0:
                self._all_positions[slots], self._all_tokens[slots], self._all_hashes[slots] = held
                self._resumed_at[slots] = self._ran_up_to[slots] = 0
            self._all_layers[slots] = last_layer
            self._join(slots)
