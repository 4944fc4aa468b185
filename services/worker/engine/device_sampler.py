"""The sampler of a device that computes beside its host: ``sampler``, of which nothing waits.

What the parameters mean, and in which order they act, ``sampler`` says. What the host knows, rows and their parameters,
goes to the device in one copy; what was drawn comes back in one, and is read once it is there. In between the host does
not know it: the next step's tokens and the counts of penalties are taken from the device's own memory.

Draws are those of ``HostSampler`` but where a number falls so near to the boundary of two tokens that the rounding of
their weights decides (``device_draw``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.tensors import Tensors
from services.worker.engine.categorical import Ids
from services.worker.engine.device_counts import CountTable, DeviceCounts, PenalisedRows
from services.worker.engine.device_draw import best_of
from services.worker.engine.device_rows import BiasedRows, DrawnRows, GuidedRows, LogprobRows
from services.worker.engine.forward_batch import SAMPLED_STEPS, ForwardBatch
from services.worker.engine.handoff import check_tokens
from services.worker.engine.host_pack import HostPack
from services.worker.engine.sampler import NOTHING_LEFT, not_finite
from services.worker.engine.sampling import Drawn
from shared.errors import BadRequest
from shared.messages.common import ErrorInfo
from shared.messages.generation import TokenLogprobs

_NO_TOKEN, _NOT_FINITE, _LATE = -1, -2, -3
"""In place of a token id."""
MASKS_WAIT_S = 0.002
"""For masks of grammars, while the device computes layers."""


class _Named(NamedTuple):
    """Tokens of a batch that one earlier step samples."""

    sampled: torch.Tensor
    """All of that step's."""
    places: list[int]
    """Where in the batch."""
    rows: list[int]
    """Which of the step's."""


class DeviceTokens(NamedTuple):
    """Of one batch."""

    token_ids: Ids
    """``[num_tokens]``, 0 where a row is named."""
    named: list[_Named]


class DeviceSampler:
    """``Sampler`` of a device. Its thread waits for nothing; who reads what was drawn has waited."""

    def __init__(self, vocab_size: int, tensors: Tensors) -> None:
        self._vocab_size = vocab_size
        self._tensors = tensors
        self.counts = CountTable(vocab_size, tensors.device)
        """Of the requests with penalties."""
        self._steps: dict[int, torch.Tensor] = {}
        """``[num_sampled]`` int64, of the newest, by their numbers. A row that failed has token 0: what was begun
        behind it must be computable."""

    def known(self, batch: ForwardBatch) -> DeviceTokens:
        """See ``Sampler``."""
        token_ids, place = batch.token_ids, 0
        by_step: dict[int, _Named] = {}
        for piece in batch.slices:
            if piece.token_from is not None:
                step, row = piece.token_from.step, piece.token_from.row
                sampled = self._steps.get(step)
                if sampled is None or not 0 <= row < len(sampled):
                    raise BadRequest(f"row {row} of step {step}: not sampled, or too long ago")
                named = by_step.setdefault(step, _Named(sampled, [], []))
                named.places.append(place)
                named.rows.append(row)
                token_ids[place] = 0
            place += len(piece.token_ids)
        check_tokens(token_ids, self._vocab_size)
        return DeviceTokens(token_ids, list(by_step.values()))

    @torch.inference_mode()
    def token_ids(self, known: DeviceTokens) -> torch.Tensor:
        """See ``Sampler``."""
        pack = HostPack()
        token_ids = pack.ints(known.token_ids)
        named = [(one.sampled, pack.ints([one.places, one.rows])) for one in known.named]
        pack.upload(self._tensors)
        for sampled, at in named:
            places, rows = at.tensor
            token_ids.tensor.index_copy_(0, places, sampled.index_select(0, rows))
        return token_ids.tensor

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> DeviceCounts:
        """See ``Engine``. The device gets them with the first token that is sampled."""
        return DeviceCounts(prompt, output)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: ForwardBatch) -> Drawn:
        """See ``Sampler``. Raises ``ValueError`` for a position whose counts are gone."""
        rows, vocab = batch.rows, self._vocab_size
        if logits.shape != (len(rows), vocab):
            raise ValueError(f"logits {tuple(logits.shape)} for {len(rows)} rows of a vocabulary of {vocab}")
        if not rows:
            self._keep(batch.number, torch.empty(0, dtype=torch.int64, device=logits.device))
            return list
        pack = HostPack()
        penalised = PenalisedRows(self.counts, rows, pack)
        guided = GuidedRows(rows, vocab, pack, wait_s=MASKS_WAIT_S)
        biased = BiasedRows(rows, vocab, pack)
        drawn = DrawnRows(rows, vocab, pack)
        logprobs = LogprobRows(rows, vocab, pack)
        pack.upload(self._tensors)

        best, codes = best_of(logits)
        is_number = torch.isfinite(best)
        logprobs.read(logits, best)
        if guided.change or biased.change or penalised.change:
            guided.adjust(logits)
            biased.adjust(logits)
            penalised.penalise(logits)
            best, codes = best_of(logits)
        drawn.draw(logits, best, codes)
        codes.masked_fill_(~torch.isfinite(best), _NO_TOKEN).masked_fill_(~is_number, _NOT_FINITE)
        biased.refuse(codes, _NO_TOKEN)
        guided.mark(codes, _NO_TOKEN, _LATE)
        token_ids = codes.clamp(min=0)
        self._keep(batch.number, token_ids)
        penalised.add(codes)
        there, *tables = self._tensors.download(codes, *logprobs.tables(token_ids))
        errors = biased.errors | guided.errors
        return lambda: _sampled(there.tolist(), errors, logprobs.by_row(tables))

    def _keep(self, number: int, token_ids: torch.Tensor) -> None:
        self._steps[number] = token_ids
        while len(self._steps) > SAMPLED_STEPS:
            del self._steps[next(iter(self._steps))]


def _sampled(
    codes: Sequence[int], errors: Mapping[int, ErrorInfo], logprobs: Mapping[int, TokenLogprobs]
) -> list[Sampled]:
    result: list[Sampled] = []
    for row, code in enumerate(codes):
        if code >= 0:
            result.append(Sampled(code, logprobs.get(row)))
        elif code == _NOT_FINITE:
            result.append(Sampled(-1, error=not_finite(row)))
        elif code == _LATE:
            result.append(Sampled(-1, is_late=True))
        else:
            result.append(Sampled(-1, error=errors.get(row, NOTHING_LEFT)))
    return result
