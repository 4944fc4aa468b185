"""What the scheduler is told and what it says: its limits, a step's work, and the load.

What is made for each token of a step is a ``msgspec.Struct``: a frozen dataclass takes several times as long. It is
part of no circle: the garbage collector, which looked once per step, need not (``gc=False``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.common import ErrorInfo
from shared.messages.generation import TokenLogprobs
from shared.messages.load import HotPrefix


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one instance. ``context_tokens`` is the model's; the pool's size limits it further."""

    num_blocks: int
    block_size: int
    context_tokens: int = 1_000_000_000
    max_num_sequences: int = 128
    max_batch_tokens: int = 2048
    prefill_chunk_tokens: int = 512
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    prepared_blocks: int = 1_000_000_000
    """Of the pool's first blocks, those that cost nobody time when they are used for the first time."""
    prefix_cache: bool = False
    """Whether contexts that begin as an earlier one did find its KV (``prefix_cache``)."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name != "prefix_cache" and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    @cached_property
    def limit_tokens(self) -> int:
        """Longest prompt plus output of one request."""
        return min(self.context_tokens, self.num_blocks * self.block_size)


class ScheduledSlice(msgspec.Struct, frozen=True, gc=False):
    """``num_tokens`` tokens of a sequence from position ``start``; ``sample`` if they end the known ones."""

    sequence: ActiveSequence
    start: int
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work: decode slices first, then prefill slices, each in order of arrival."""

    slices: tuple[ScheduledSlice, ...]
    num_prefill_tokens: int
    num_decode_tokens: int
    preempted: tuple[ActiveSequence, ...] = ()
    num_pairs: int = 0
    """Of a prompt token and a token that it attends to."""
    is_rest: bool = False
    """Its prompt tokens are few, and some are behind a prefix whose KV was there: its time says what a step costs, and
    little of what prompts do."""
    alone: bool = False
    """Its only slice is of a request that is computed alone."""

    def touches(self, sequence: ActiveSequence) -> bool:
        """Whether it reads or writes blocks of this request."""
        return any(piece.sequence is sequence for piece in self.slices)


@dataclass(frozen=True, slots=True)
class PartialBatch:
    """Requests of which some layers are computed outside of the scheduler's steps."""

    sequences: tuple[ActiveSequence, ...]

    def touches(self, sequence: ActiveSequence) -> bool:
        """See ``ScheduledBatch``."""
        return any(one is sequence for one in self.sequences)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sampled token. With ``error`` there is none: its request ends with it, the others of the batch go on. With
    ``is_late`` neither: its mask was not there (``guidance``), and it is computed again."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: ErrorInfo | None = None
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Queued:
    """Requests accepted and not begun."""

    requests: int
    tokens: int
    oldest_arrived_s: float | None


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Gauges now, and counters over the scheduler's life, by the names that they have in load reports."""

    queued_requests: int
    queued_tokens: int
    """Context tokens accepted and not yet computed, waiting or running."""
    running_requests: int
    running_tokens: int
    """Tokens whose KV running requests hold."""
    kv_blocks_used: int
    kv_blocks_total: int
    prefill_tokens_total: int
    decode_tokens_total: int
    preemptions_total: int
    oldest_arrived_s: float | None = None
    """Arrival of the earliest request that waits, in the scheduler's clock."""
    kv_block_tokens: int = 0
    """Tokens of one block."""
    prefilling_requests: int = 0
    """Running requests whose context is not computed to its end."""
    ended_requests_total: int = 0
    """Requests that ended by themselves, and their output tokens, wherever these were computed."""
    ended_tokens_total: int = 0
    head_blocks: int = 0
    """That have to be free for the first waiting request to begin, while there are fewer; 0: none waits for blocks."""
    cached_tokens_total: int = 0
    """Prompt tokens whose KV was there."""
    counted_tokens: int = 0
    """Of the prompts that ``hot_prefixes`` are of."""
    hot_prefixes: tuple[HotPrefix, ...] = ()

    @property
    def lacking_blocks(self) -> int:
        """That have to become free for the first waiting request to begin."""
        return max(0, self.head_blocks - (self.kv_blocks_total - self.kv_blocks_used))
