"""The tokens that penalties are computed from, of requests whose tokens only the device knows.

A request has a row of a table on the device from its first sampled token on: 4 bytes per token of the vocabulary (half
a megabyte of 128k tokens), given back when its ``DeviceCounts`` is gone. The table has twice as many rows whenever they
do not suffice, and is never made smaller; while it grows, the old one is there beside it.

The host knows positions, and the table's ``_recent`` what was drawn at the last ones of each request: where a position
is sampled again, that is taken out again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.categorical import Ids
from services.worker.engine.device_draw import ROWS_AT_ONCE
from services.worker.engine.forward_batch import SAMPLED_STEPS, SamplingRow
from services.worker.engine.host_pack import HostPack

_LEAST_SLOTS = 8
_NOTHING = -1
"""In place of a drawn token: none is to be taken out."""


class DeviceCounts:
    """Of one request. What it has is copied, and goes to the device with its first sampled token."""

    __slots__ = ("__weakref__", "is_placed", "num_last", "num_output", "output", "prompt", "slot")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.prompt = np.array(prompt, dtype=np.int64)
        self.output = np.array(output, dtype=np.int64)
        self.num_output = len(output)
        self.num_last = min(len(output), SAMPLED_STEPS)
        """So many of the output's last tokens can be taken out."""
        self.slot: int | None = None
        """Its row of the table."""
        self.is_placed = False
        """The row has what it had."""

    def check(self, position: int) -> None:
        """Raises ``ValueError`` for any other position than the next one and the last two."""
        if not self.num_output - self.num_last <= position <= self.num_output:
            raise ValueError(f"counts of {self.num_output} tokens, to sample the one at {position}")

    def taken_out(self, position: int) -> None:
        """It is as it was where the token at ``position`` was sampled."""
        self.num_last -= self.num_output - position
        self.num_output = position

    def added(self) -> None:
        """One token."""
        self.num_output += 1
        self.num_last = min(self.num_last + 1, SAMPLED_STEPS)


class CountTable:
    """Of one sampler. On its thread, and its device's compute stream."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._free: deque[int] = deque()
        """Rows that were given back, on whatever thread."""
        self._num_slots = 0
        """Ever given out, those that were given back among them."""
        self._times = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        """``[slots, vocab_size]``: twice the times in the output, and one more for what the prompt has."""
        self._recent = torch.empty(0, SAMPLED_STEPS, dtype=torch.int64, device=device)
        """``[slots, SAMPLED_STEPS]``: what was drawn at a position is in the column ``position % SAMPLED_STEPS``."""

    @property
    def num_slots(self) -> int:
        """Requests that have a row."""
        return self._num_slots - len(self._free)

    @property
    def num_bytes(self) -> int:
        """That it takes on the device."""
        return self._times.nbytes + self._recent.nbytes

    def slot_of(self, counts: DeviceCounts) -> int:
        if counts.slot is None:
            if self._free:
                counts.slot = self._free.popleft()
            else:
                counts.slot, self._num_slots = self._num_slots, self._num_slots + 1
            weakref.finalize(counts, self._free.append, counts.slot).atexit = False
        return counts.slot

    def cells(self, slots: Sequence[int], token_ids: Sequence[Ids]) -> Ids:
        """Of some requests' tokens, one request after another; tokens outside of the vocabulary have none."""
        inside = [one[(one >= 0) & (one < self.vocab_size)] for one in token_ids]
        return np.concatenate([slot * self.vocab_size + one for slot, one in zip(slots, inside, strict=True)])

    def grow(self) -> None:
        """Every row that was given out is there."""
        if self._num_slots > len(self._times):
            num_slots = max(_LEAST_SLOTS, 1 << (self._num_slots - 1).bit_length())
            self._times, self._recent = _longer(self._times, num_slots), _longer(self._recent, num_slots)

    def clear(self, slots: torch.Tensor) -> None:
        self._times.index_fill_(0, slots, 0)
        self._recent.index_fill_(0, slots, _NOTHING)

    def put_prompts(self, cells: torch.Tensor) -> None:
        """``cells``: slot * vocab_size + token id, as often as it likes, before anything is added."""
        self._times.view(-1).index_fill_(0, cells, 1)

    def put(self, cells: torch.Tensor, places: torch.Tensor, last: torch.Tensor) -> None:
        """Add output, whose ``last`` tokens [n] go to the ``places`` [n] of the recent ones."""
        self._times.view(-1).index_add_(0, cells, torch.full_like(cells, 2, dtype=torch.int32))
        self._recent.view(-1).index_copy_(0, places, last)

    def take_out(self, slots: torch.Tensor, places: torch.Tensor) -> None:
        """What was drawn at these places [n], of these slots [n]."""
        self._count(slots, self._recent.view(-1).index_select(0, places), -2)

    def add(self, slots: torch.Tensor, places: torch.Tensor, drawn: torch.Tensor) -> None:
        """``drawn`` [n]: token ids, or less than 0 for none."""
        self._count(slots, drawn, 2)
        self._recent.view(-1).index_copy_(0, places, drawn)

    def _count(self, slots: torch.Tensor, token_ids: torch.Tensor, change: int) -> None:
        cells = slots * self.vocab_size + token_ids.clamp(min=0)
        self._times.view(-1).index_add_(0, cells, (token_ids >= 0).to(torch.int32).mul_(change))

    def penalise(
        self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, how: torch.Tensor, repeats: bool
    ) -> None:
        """Change these rows [n] in place. ``how`` [3, n] float32: repetition, frequency, presence. ``repeats``: any of
        the first is not 1."""
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(begin, begin + ROWS_AT_ONCE)
            repetition, frequency, presence = how[:, some, None]
            counted = self._times.index_select(0, slots[some])
            scores = logits.index_select(0, rows[some])
            if repeats:
                penalised = torch.where(scores > 0, scores / repetition, scores * repetition)
                scores = torch.where(counted > 0, penalised, scores)
            times = (counted >> 1).to(torch.float32)
            scores -= times * frequency + (times > 0) * presence
            logits.index_copy_(0, rows[some], scores)


class PenalisedRows:
    """Those of one step: what the host says of them, and then, in this order, what the device does."""

    def __init__(self, table: CountTable, rows: Sequence[SamplingRow], pack: HostPack) -> None:
        """Raises ``ValueError`` for a position that cannot be sampled, and for a request that is there twice; then
        nothing has changed."""
        self._table = table
        ours = {index: row for index, row in enumerate(rows) if row.counts is not None}
        self._rows: list[tuple[DeviceCounts, int]] = [(row.counts, row.position) for row in ours.values()]
        for counts, position in self._rows:
            counts.check(position)
        if len({id(counts) for counts, _ in self._rows}) < len(ours):
            raise ValueError("a request is twice in a step")
        self.change = bool(ours)
        """Whether there are any."""
        if not ours:
            return
        slots = [table.slot_of(counts) for counts, _ in self._rows]
        positions = [position for _, position in self._rows]
        self._at = pack.ints([list(ours), slots, list(map(_place, slots, positions))])
        params = [row.params for row in ours.values()]
        self._repeats = any(one.repetition_penalty != 1.0 for one in params)
        figures = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in params]
        self._how = pack.floats(np.array(figures).T)
        self._fresh = _Fresh([counts for counts, _ in self._rows if not counts.is_placed], table, pack)
        again = [
            (slot, _place(slot, position))
            for slot, (counts, first) in zip(slots, self._rows, strict=True)
            for position in range(first, counts.num_output)
        ]
        self._again = pack.ints(np.array(again).T) if again else None

    def penalise(self, logits: torch.Tensor) -> None:
        """Change their rows in place, by what was before their positions."""
        if not self.change:
            return
        self._table.grow()
        self._fresh.place()
        if self._again is not None:
            slots, places = self._again.tensor
            self._table.take_out(slots, places)
        for counts, position in self._rows:
            counts.taken_out(position)
        rows, slots, _ = self._at.tensor
        self._table.penalise(logits, rows, slots, self._how.tensor.to(torch.float32), self._repeats)

    def add(self, codes: torch.Tensor) -> None:
        """``codes`` [n] of all rows of the step: what was drawn, or less than 0 for none."""
        if not self.change:
            return
        rows, slots, places = self._at.tensor
        self._table.add(slots, places, codes.index_select(0, rows))
        for counts, _ in self._rows:
            counts.added()


class _Fresh:
    """Requests that come to the table, with what they have."""

    def __init__(self, fresh: Sequence[DeviceCounts], table: CountTable, pack: HostPack) -> None:
        self._fresh, self._table = fresh, table
        if not fresh:
            return
        vocab_size = table.vocab_size
        slots = [table.slot_of(counts) for counts in fresh]
        last = [
            (_place(slot, at), token_id if 0 <= token_id < vocab_size else _NOTHING)
            for slot, counts in zip(slots, fresh, strict=True)
            for at, token_id in enumerate(counts.output.tolist())
            if at >= counts.num_output - counts.num_last
        ]
        self._slots = pack.ints(slots)
        self._prompts = pack.ints(table.cells(slots, [counts.prompt for counts in fresh]))
        self._outputs = pack.ints(table.cells(slots, [counts.output for counts in fresh]))
        self._last = pack.ints(np.array(last, dtype=np.int64).reshape(-1, 2).T)

    def place(self) -> None:
        if not self._fresh:
            return
        self._table.clear(self._slots.tensor)
        self._table.put_prompts(self._prompts.tensor)
        self._table.put(self._outputs.tensor, *self._last.tensor)
        for counts in self._fresh:
            counts.is_placed = True
            counts.prompt = counts.output = np.empty(0, dtype=np.int64)


def _place(slot: int, position: int) -> int:
    """In the recent ones."""
    return slot * SAMPLED_STEPS + position % SAMPLED_STEPS


def _longer(table: torch.Tensor, num_slots: int) -> torch.Tensor:
    longer = torch.zeros(num_slots, *table.shape[1:], dtype=table.dtype, device=table.device)
    longer[: len(table)].copy_(table)
    return longer
