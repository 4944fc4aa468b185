"""A batch of prompts, as both members of a pair see it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.worker.core.scheduling.reservations import Reservations
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence, submit_of
from shared.messages.generation import StreamPart, Submit


class PromptBatch:
    """One or more whole prefixes (prompt, and output of earlier attempts), computed together."""

    def __init__(self, batch_id: str, serial: int, sequences: Iterable[ActiveSequence], layer_s: float) -> None:
        """``serial``: of the pair's batches. ``layer_s``: expected seconds of one of its layers."""
        self.batch_id = batch_id
        self.serial = serial
        self.sequences = tuple(sequences)
        self.layer_s = layer_s
        self.begun = False
        """The source runs it: its sequences hold blocks there."""
        # A prefix grows only once the batch is done; the sizes of what is on its way follow from it.
        self.lengths = tuple(s.num_tokens for s in self.sequences)
        self.num_tokens = sum(self.lengths)

    @property
    def ended(self) -> bool:
        """All of its requests have ended."""
        return all(s.finished for s in self.sequences)

    @property
    def block_tables(self) -> tuple[Sequence[int], ...]:
        return tuple(s.block_table for s in self.sequences)

    def token_ids(self) -> list[int]:
        """All tokens, one prefix after another."""
        return [token for s in self.sequences for token in s.tokens]

    def part_from(self, begin: int, most_tokens: int) -> int:
        """Where the part of its tokens ends that is run next of a layer: parts are about equal, and of at most so many
        tokens."""
        left = self.num_tokens - begin
        return begin + -(-left // -(-left // most_tokens))

    def submits(self, instance_id: str, model: str, model_hash: str) -> tuple[Submit, ...]:
        """The requests, as the target has to know them."""
        return tuple(submit_of(s, instance_id, model, model_hash) for s in self.sequences)

    def adopt(
        self, reservations: Reservations, sampled: Iterable[Sampled], now_s: float, *, kv_here: bool = True
    ) -> tuple[StreamPart, ...]:
        """All layers were run and a token of each was sampled: its requests decode here from now on, or with
        ``kv_here`` false once their KV is whole. Returns the outputs."""
        outputs = [
            reservations.adopt(sequence, token, now_s, kv_here=kv_here)
            for sequence, token in zip(self.sequences, sampled, strict=True)
        ]
        return tuple(o for o in outputs if o is not None)


def packed(sequences: Iterable[ActiveSequence], most_tokens: int, most_requests: int) -> Iterator[list[ActiveSequence]]:
    """Requests in first-come order as batches of up to so many tokens and requests; a longer prefix is one by itself.

    Short prompts cost mostly the reading of the weights: together they cost it once.
    """
    pack: list[ActiveSequence] = []
    num_tokens = 0
    for sequence in sequences:
        if pack and (num_tokens + sequence.num_tokens > most_tokens or len(pack) == most_requests):
            yield pack
            pack, num_tokens = [], 0
        pack.append(sequence)
        num_tokens += sequence.num_tokens
    if pack:
        yield pack
