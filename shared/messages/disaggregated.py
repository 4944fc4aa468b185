"""Disaggregated serving: a prefill instance computes prompts, a decode instance takes their KV and streams over
(design of the protocol: ``docs/decisions/0014-disaggregated.md``).

KV travels over the tensor transport, one message per layer, ``[2 (K, V), num_tokens, num_kv_heads, head_dim]`` in the
model's dtype, with the tags of the reservation's ``ticket``. A context that is computed in chunks may come chunk by
chunk: all layers of the first chunk, then all of the next. Where layers are counted, they are counted over the chunks.
"""

from __future__ import annotations

from shared.messages.codec import Message
from shared.messages.common import Count
from shared.messages.generation import Submit, TokenLogprobs


class ReserveDecode(Message, frozen=True, kw_only=True, tag="reserve_decode.v1"):
    """Keep a slot and KV blocks for this request's context (prompt, output of earlier attempts); receive its KV.

    Repeated, it gets the same answer. The reservation lapses after ``lease_s`` without a ``RenewDecode``.
    """

    request: Submit
    """``instance_id`` is the decode instance."""
    worker_id: str
    """Who computes the prompt, and sends."""
    host: str
    transport_address: bytes
    lease_s: float
    chunk_tokens: int = 0
    """Its KV comes in chunks of at most so many tokens, each announced by a ``RenewDecode``; 0: in one."""
    first_layer: int = 0
    """If not 0, another sender has a reservation for it and has run the layers before; this one sends those from here
    on, under a ticket of its own, and begins the request or gives it up. ``Conflict``: there is no such reservation."""
    context_tokens: int = 0
    """How long prompt and output may become where it comes from: an instance that cannot hold as much refuses. 0: not
    said."""


class DecodeReserved(Message, frozen=True, kw_only=True, tag="decode_reserved.v1"):
    """The reservation's number, unique among those of its worker's process, and where to send."""

    ticket: Count
    host: str
    transport_address: bytes
    window_layers: Count
    """So many layers may be sent beyond those that have arrived: their receives are posted."""
    held_tokens: Count = 0
    """KV of so many of the context's first tokens is there already: what is sent begins behind them."""


class RenewDecode(Message, frozen=True, kw_only=True, tag="renew_decode.v1"):
    """Keep the reservation longer, and say how much is there: at once if ``wait_layers`` are, else a moment later."""

    request_id: str
    attempt: int
    ticket: int
    wait_layers: int = 0
    chunk_start: int = 0
    chunk_end: int = 0
    """If not 0, the next chunk is of tokens ``chunk_start <= i < chunk_end``: its receives are posted as far as the
    window goes when this is answered."""
    more_token_ids: tuple[int, ...] = ()
    """With a chunk: the context has grown by these since the capacity was reserved. A request that moves while it is
    decoded says so with its last chunk."""


class DecodeRoom(Message, frozen=True, kw_only=True, tag="decode_room.v1"):
    """The KV of the first ``layers_here`` layers has arrived, counted over the chunks."""

    layers_here: int


class BeginDecode(Message, frozen=True, kw_only=True, tag="begin_decode.v1"):
    """All KV is there, and this is the first token: the request is the decode instance's once it acknowledges.

    Repeated, it is acknowledged again.
    """

    request_id: str
    attempt: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class ReleaseDecode(Message, frozen=True, kw_only=True, tag="release_decode.v1"):
    """The request will not come: it has ended, or is decoded elsewhere. Unknown ones are acknowledged."""

    request_id: str
    attempt: int
    worker_id: str = ""
    """Who says so: what another sender has taken over stays. Empty: the source of a pair, for both members."""
