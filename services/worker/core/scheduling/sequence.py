"""One request inside a worker: its tokens, its KV, and when it ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from services.worker.core.scheduling.guidance import Guidance
from shared.messages.common import ErrorInfo
from shared.messages.generation import (
    DecodePlace,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    StreamPart,
    Submit,
    TokenLogprobs,
)
from shared.prefixes import chained, prefix_root


def is_penalised(params: SamplingParams) -> bool:
    """Whether choosing a token needs the counts of those before it."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class ActiveSequence:
    """The state of one attempt of one request. The state of its computation is changed by the scheduler only."""

    request_id: str
    attempt: int
    gateway_id: str
    gateway_incarnation: str = ""
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    """Starts with the tokens that earlier attempts streamed: they are computed again as part of the context, but
    positions, penalties, ``min_tokens`` and ``max_tokens`` count them as output."""
    arrived_s: float | None = None
    """In the scheduler's clock; None takes the time of ``add``."""
    decode_at: DecodePlace | None = None
    """Who decodes it once its context is computed; None: the instance that computes it."""
    alone_tokens: int = 0
    """It is computed alone until so many tokens were emitted."""
    cache_scope: str = ""
    """As in ``Submit``."""
    cache_root: bytes = b""
    """What the keys of its blocks begin with (``prefix_cache``). Empty: its KV is found by nobody."""

    tokens: list[int] = field(init=False)
    """Prompt and output."""
    stop_ids: frozenset[int] = field(init=False)
    end_ids: tuple[int, ...] = field(init=False)
    """Tokens that end it, beside its own stop tokens."""
    is_penalised: bool = field(init=False)
    """See the function of this name."""
    counts: Any = field(init=False, default=None)
    """The engine's, once it samples, if the request is penalised."""
    is_guided: bool = field(init=False)
    """Its output is kept to a grammar."""
    guidance: Guidance | None = field(init=False, default=None)
    """Once it has begun here."""
    num_to_score: int = field(init=False)
    """Tokens of its prompt whose log-probabilities are asked for: none, or all."""
    num_scored: int = field(init=False, default=1)
    """The first of them have theirs, were said, and are not computed again. The very first has none."""

    id: int = field(init=False, default=-1)
    """Its place in the order of arrival."""
    num_computed: int = field(init=False, default=0)
    """Tokens whose KV is in ``block_table``."""
    num_cached: int = field(init=False, default=0)
    """Tokens of its prompt whose KV was there when it began here for the first time."""
    num_remembered: int = field(init=False, default=0)
    """Blocks of ``block_table`` that the prefix cache was told of, or gave."""
    _block_keys: list[bytes] = field(init=False, default_factory=list)
    num_emitted: int = field(init=False, default=0)
    block_table: list[int] = field(init=False, default_factory=list)
    """It grows in place; freed, it is another list."""
    _placed: tuple[list[int], array[int]] = field(init=False, default=([], array("i")))
    """``block_table`` as it was when it was copied last, and the copy."""
    first_scheduled_s: float | None = field(init=False, default=None)
    reserved: bool = field(init=False, default=False)
    """It has blocks and is in no step: they stay until it is released."""
    finished: bool = field(init=False, default=False)
    last_logprobs: TokenLogprobs | None = field(init=False, default=None)
    """Of the token that was put out last."""

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        self.output = list(self.output)
        self.tokens = [*self.prompt, *self.output]
        self.end_ids = () if self.params.ignore_eos else tuple(self.eos_token_ids)
        self.stop_ids = frozenset((*self.params.stop_token_ids, *self.end_ids))
        self.is_penalised = is_penalised(self.params)
        self.is_guided = self.params.grammar is not None
        self.num_to_score = len(self.prompt) if self.params.prompt_logprobs is not None else 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def alone(self) -> bool:
        """Whether it is in no step with others."""
        return self.num_emitted < self.alone_tokens

    @property
    def has_begun(self) -> bool:
        return self.first_scheduled_s is not None

    @property
    def stays(self) -> bool:
        """Whether it is not lent. Steps alone wait for masks and have log-probabilities of prompts, so a pair's batches
        have no such requests."""
        return self.alone or self.has_begun or self.is_guided or self.num_to_score > 0

    @property
    def is_scoring(self) -> bool:
        """Log-probabilities of its prompt are lacking: positions whose KV is there have to be computed all the same."""
        return self.num_scored < self.num_to_score

    @property
    def decodes(self) -> bool:
        """Whether it has put out tokens here, and its next one is the next thing to compute. A prompt of which one
        token is left does not decode yet."""
        return not self.finished and self.num_emitted > 0 and len(self.tokens) - self.num_computed == 1

    def placed(self) -> array[int]:
        """The block table now, as 32-bit numbers, for who must not see it grow: nobody changes it. Copied only where it
        did."""
        table, copied = self._placed
        if table is not self.block_table or len(copied) != len(table):
            copied = array("i", self.block_table)
            self._placed = self.block_table, copied
        return copied

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.tokens)

    def block_keys(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Of the first so many blocks, which its known tokens fill."""
        keys = self._block_keys
        while len(keys) < num_blocks:
            start = len(keys) * block_size
            parent = keys[-1] if keys else self.cache_root
            keys.append(chained(parent, self.tokens[start : start + block_size]))
        return keys[:num_blocks]

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.output.append(token_id)
        self.tokens.append(token_id)

    def append_all(self, token_ids: list[int]) -> None:
        """Add sampled tokens that were put out."""
        self.output += token_ids
        self.tokens += token_ids
        self.num_emitted += len(token_ids)

    def finish_reason(self, context_tokens: int) -> FinishReason | None:
        """Whether the known tokens end the request.

        An end-of-sequence or stop token ends it only after ``min_tokens`` others; before, the
        sampler does not draw one. A stop wins over a limit reached with the same token.
        """
        count = len(self.output)
        if count > self.params.min_tokens and self.output[-1] in self.stop_ids:
            return "stop"
        if count >= self.params.max_tokens or len(self.tokens) >= context_tokens:
            return "length"
        return None

    def emit(self, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None) -> StreamPart:
        """The output of the token just appended."""
        first = self.num_emitted == 0
        self.num_emitted += 1
        self.last_logprobs = logprobs
        return StreamPart(
            request_id=self.request_id,
            attempt=self.attempt,
            offset=len(self.output) - 1,
            token_ids=(token_id,),
            logprobs=None if logprobs is None else (logprobs,),
            finish_reason=finish_reason,
            queued_s=self._queued_s() if first else None,
            cached_tokens=self.num_cached if first else 0,
        )

    def scored(self, logprobs: PromptLogprobs) -> StreamPart:
        """The output of the next log-probabilities of its prompt."""
        self.num_scored = logprobs.end
        return self._part(prompt=logprobs)

    def computing(self, begins: bool) -> StreamPart:
        """Says that a step of its own begins, or has ended."""
        return self._part(computing=begins)

    def end(self, finish_reason: FinishReason, error: ErrorInfo | None = None) -> StreamPart:
        """A terminal output without tokens."""
        return self._part(finish_reason=finish_reason, error=error)

    def taken_over(self) -> StreamPart:
        """Tells the gateway that the request is this worker's now, before its first token does."""
        return self._part()

    def _part(self, **said: Any) -> StreamPart:
        """Of no tokens, behind those that are out."""
        return StreamPart(request_id=self.request_id, attempt=self.attempt, offset=len(self.output), **said)

    def _queued_s(self) -> float | None:
        if self.first_scheduled_s is None or self.arrived_s is None:
            return None
        return max(0.0, self.first_scheduled_s - self.arrived_s)


def sequence_of(request: Submit, eos_token_ids: Iterable[int], arrived_s: float | None = None) -> ActiveSequence:
    """A request as the scheduler takes it."""
    return ActiveSequence(
        request_id=request.request_id,
        attempt=request.attempt,
        gateway_id=request.gateway_id,
        prompt=request.prompt_token_ids,
        params=request.sampling,
        eos_token_ids=tuple(eos_token_ids),
        output=list(request.output_token_ids),
        arrived_s=arrived_s,
        decode_at=request.decode_at,
        alone_tokens=request.alone_tokens,
        gateway_incarnation=request.gateway_incarnation,
        cache_scope=request.cache_scope,
        cache_root=prefix_root(request.model_hash, request.cache_scope) if request.cache_scope else b"",
    )


def submit_of(sequence: ActiveSequence, instance_id: str, model: str, model_hash: str) -> Submit:
    """A request as another instance has to know it: one that decodes, or computes what is asked for of no prompt."""
    return Submit(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        gateway_id=sequence.gateway_id,
        instance_id=instance_id,
        model=model,
        model_hash=model_hash,
        prompt_token_ids=sequence.prompt,
        sampling=structs.replace(sequence.params, prompt_logprobs=None),
        output_token_ids=tuple(sequence.output),
        decode_at=sequence.decode_at,
        gateway_incarnation=sequence.gateway_incarnation,
        cache_scope=sequence.cache_scope,
    )
