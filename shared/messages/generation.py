"""Requests and their tokens: gateway to worker and back.

A stream is addressed by (request_id, attempt). ``offset`` counts output tokens from
the start of the request, across attempts: an attempt that continues after *k* tokens
starts at offset *k*. The gateway accepts its current attempt and next offset only.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.messages.codec import Message
from shared.messages.common import AtWorker, ErrorInfo, LeaseSeconds
from shared.subjects import Process

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_BEFORE_BYTES = 1024
MAX_PROMPT_LOGPROBS_BYTES = 8 * 2**20
"""Of log-probabilities of prompts, for all choices of an answer together, counted by ``prompt_logprobs_bytes``."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must be. The gateway has checked it, and ``shared.grammars`` says what it means."""

    kind: Literal["json_schema", "regex", "choice", "lark", "calls"]
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]
    """At most ``MAX_GRAMMAR_BYTES`` in UTF-8. The schema (an object) or the array of strings as JSON, the expression,
    or llguidance's Lark; of ``calls``, which gateways make, too."""
    before: Annotated[str, Meta(max_length=MAX_BEFORE_BYTES)] = ""
    """What comes before it: rules of llguidance's Lark, made by gateways, in which ``@answer`` is this grammar. Empty:
    nothing."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. The gateway validates ranges and fixes the seed at admission."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Number of alternatives per token; 0 gives the sampled token's alone, None gives none."""
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """Number of alternatives per token of the prompt; 0 gives the prompt's own token alone, None gives none."""


class DecodePlace(AtWorker, frozen=True, kw_only=True):
    """A decode instance."""

    instance_id: str


class Submit(Message, frozen=True, kw_only=True, tag="submit.v1"):
    """Run this request on that instance. ``output_token_ids`` are tokens already streamed."""

    request_id: str
    attempt: int
    gateway_id: str
    gateway_incarnation: str
    """Which process of that gateway waits for it."""
    instance_id: str
    model: str
    model_hash: str
    """The weights that the prompt was tokenized for: an instance of others refuses it (``conflict``)."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    arrived_at_s: float = 0.0
    """Unix time at which the gateway accepted the request."""
    decode_at: DecodePlace | None = None
    """Who decodes it once a prefill instance has computed its prompt. None: the instance that computes the prompt."""
    may_wait: bool = True
    """Whether it may wait there for others to end. False: where all slots are taken it is refused (``overloaded``),
    because the gateway thinks that one is free, and other instances may have some."""
    alone_tokens: int = 0
    """Until this attempt has brought so many tokens, the request is computed in steps of its own, and the worker says
    before and after each that it is (``StreamPart.computing``): workers died that computed it with others."""
    cache_scope: str = ""
    """Opaque: requests of the same scope may use each other's KV. Empty: nobody's, and nobody uses this one's."""

    @property
    def gateway(self) -> Process:
        """Who waits for it."""
        return Process(self.gateway_id, self.gateway_incarnation)


class Cancel(Message, frozen=True, kw_only=True, tag="cancel.v1"):
    """Forget this attempt; its KV blocks are free within one engine step."""

    request_id: str
    attempt: int


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a sampled token and of the likeliest alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def prompt_logprobs_bytes(num_tokens: int, num_top: int) -> int:
    """About what the log-probabilities of a prompt take: 16 bytes for each token and each alternative."""
    return 16 * num_tokens * (num_top + 1)


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of some tokens of a prompt, each behind those before it, and of the likeliest alternatives.

    Arrays of little-endian numbers of 4 bytes, row after row: objects would take ten times the memory.
    """

    start: int
    """Position of the first token, at least 1: the first token of a prompt has none."""
    num_top: int
    logprobs: bytes
    """``[num_tokens]`` float32, of the prompt's own tokens."""
    ranks: bytes
    """``[num_tokens]`` int32: how many tokens are as likely or likelier, each itself among them."""
    top_ids: bytes
    """``[num_tokens, num_top]`` int32, the likeliest first."""
    top_logprobs: bytes
    """``[num_tokens, num_top]`` float32."""

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs) // 4

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.num_tokens

    @property
    def is_whole(self) -> bool:
        """Whether the arrays have these shapes. What came in a message may be anything."""
        rows = 4 * self.num_tokens
        wide = rows * self.num_top
        sizes = (len(self.logprobs), len(self.ranks), len(self.top_ids), len(self.top_logprobs))
        return self.start >= 1 and self.num_top >= 0 and sizes == (rows, rows, wide, wide)

    def part(self, start: int, end: int) -> PromptLogprobs:
        """Of positions ``start <= i < end``, which are here."""
        first, last, row = 4 * (start - self.start), 4 * (end - self.start), self.num_top
        return PromptLogprobs(
            start=start,
            num_top=row,
            logprobs=self.logprobs[first:last],
            ranks=self.ranks[first:last],
            top_ids=self.top_ids[first * row : last * row],
            top_logprobs=self.top_logprobs[first * row : last * row],
        )


class StreamPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one stream. ``finish_reason`` makes it terminal: exactly one per attempt."""

    request_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    queued_s: float | None = None
    """With the first token of an attempt: seconds between acceptance and first scheduling."""
    cached_tokens: int = 0
    """With that: tokens of the prompt whose KV was there."""
    computing: bool | None = None
    """Of a request that is computed alone: its step is about to begin (True), or has ended (False)."""
    prompt: PromptLogprobs | None = None
    """Of a request that asks for them, without tokens. All of a prompt come before the first token."""


class TokenBatch(Message, frozen=True, kw_only=True, tag="tokens.v1"):
    """All tokens of one engine step that belong to one gateway."""

    worker_id: str
    incarnation: str
    """Of the worker's process."""
    instance_id: str
    parts: tuple[StreamPart, ...]

    @property
    def worker(self) -> Process:
        """Who sends them."""
        return Process(self.worker_id, self.incarnation)


class StreamRef(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one request."""

    request_id: str
    attempt: int


class AckTerminal(Message, frozen=True, kw_only=True, tag="ack_terminal.v1"):
    """The gateway has these streams' terminal parts; the worker may forget their tokens."""

    streams: tuple[StreamRef, ...]


class Resend(Message, frozen=True, kw_only=True, tag="resend.v1"):
    """Send this stream again from ``offset``: the gateway saw a gap or a stall."""

    request_id: str
    attempt: int
    offset: int
    prompt_offset: int | None = None
    """Log-probabilities of the prompt are lacking from this position on; None: none are."""


GOODBYE_S = 0.001
"""Of a heartbeat: the lease with which a gateway ends. It has waited for its requests, or given them up."""


class GatewayHeartbeat(Message, frozen=True, kw_only=True, tag="gateway_heartbeat.v1"):
    """A gateway lives. Workers free its requests when this lapses for ``lease_s``."""

    gateway_id: str
    lease_s: LeaseSeconds
    incarnation: str
    """New at every process start: two of one id are two processes."""
